# The key of a full block in the prefix map: a chained hash over everything that determines its KV.
from libc.stdint cimport int32_t, uint64_t


cdef extern from *:
    """
    #ifdef AIOENGINE_CHECK
    #define AIOENGINE_CHECKED 1
    #else
    #define AIOENGINE_CHECKED 0
    #endif
    """
    const bint CHECKED "AIOENGINE_CHECKED"  # true in a build with -Dcheck=true


cdef struct Hash:
    uint64_t word[4]  # 256 bits; a 128-bit hash leaves the upper two words zero


cdef class BlockHasher:
    cdef object digest
    cdef readonly str algo
    cdef readonly int digest_size
    cdef Hash root

    cdef int hash_block(
        self, const Hash* parent, const int32_t* tokens, int32_t num_tokens, bytes tail, Hash* out
    ) except -1
    cdef bytes as_bytes(self, const Hash* hash)
