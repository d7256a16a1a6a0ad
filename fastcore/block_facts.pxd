# What tells a cached block apart wherever its KV is kept.
from libc.stdint cimport int32_t, int64_t, uint64_t

from aioengine.fastcore.block_hash cimport BlockHasher


cdef class BlockFacts:
    cdef readonly bytes block_hash
    cdef readonly bytes parent_hash   # None: a first block
    cdef bytes tokens                 # int32; None: they are not kept
    cdef int64_t tail_hash            # of a first block's salt and keys
    cdef bint has_tail_hash

    cdef const int32_t* token_ids(self) noexcept
    cdef bint has_tail(self, BlockHasher hasher, const uint64_t* parent, bytes tail) except -1
    cdef bint is_under(self, BlockHasher hasher, bytes first_tail) except -1
