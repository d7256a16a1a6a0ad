# The key of a full block in the prefix map: a chained hash over everything that determines its KV.
from libc.stdint cimport int32_t, uint64_t

from aioengine.fastcore.key_tails cimport KeyTails


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
    uint64_t word[4]  # 256 bits; a 128-bit hash has the first two words only


cdef struct Digest128:  # how libxxhash returns a 128-bit hash
    uint64_t low
    uint64_t high


ctypedef Digest128 (*Digest128Of)(const void* data, size_t num_bytes) noexcept nogil


cdef class BlockHasher:
    cdef object digest              # bytes -> digest, through Python
    cdef Digest128Of compiled       # the same function in C, NULL if there is none
    cdef readonly str algo
    cdef readonly int digest_size
    cdef int words                  # of 64 bits in a hash
    cdef Hash root
    cdef char* payload              # what is hashed, put together here
    cdef size_t payload_size

    cdef int hash_path(
        self, const int32_t* tokens, int32_t block_size, KeyTails tails, uint64_t* hashes, int32_t start, int32_t end
    ) except -1
    cdef int hash_plain_path(
        self, const int32_t* tokens, int32_t block_size, KeyTails tails, uint64_t* own, int32_t start, int32_t end
    ) except -1
    cdef int hash_block(
        self, const uint64_t* parent, const int32_t* tokens, int32_t num_tokens, bytes tail, uint64_t* out
    ) except -1
    cdef int compile(self) except -1
    cdef int reserve(self, size_t size) except -1
    cdef bytes as_bytes(self, const uint64_t* hash)
