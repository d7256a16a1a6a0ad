# The token ids of cached blocks.
from libc.stdint cimport int32_t


cdef class BlockTokens:
    cdef int32_t* ids                 # num_blocks x block_size
    cdef readonly int32_t num_blocks
    cdef readonly int32_t block_size

    cdef const int32_t* of(self, int32_t block_id) noexcept
    cdef int keep(self, int32_t block_id, const int32_t* tokens) noexcept
    cdef int32_t num_common(self, int32_t block_id, const int32_t* tokens, int32_t most) noexcept
