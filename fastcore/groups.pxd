# The groups of a KV cache: sizes of their blocks, and which blocks a query still reads.
from libc.stdint cimport int32_t, int64_t


cdef enum Kind:
    FULL
    SLIDING
    CHUNKED


cdef enum:
    MOST_GROUPS = 8
    MOST_ALIGNMENT = 65536    # of the common multiple of all scales


cdef struct Group:
    Kind kind
    int32_t size          # window or chunk in tokens
    int32_t scale         # fine blocks per block
    int32_t block_size    # tokens per block
    int32_t most_held     # blocks that one request can have at a time, whatever its length


cdef class KVGroups:
    cdef Group groups[MOST_GROUPS]
    cdef readonly int32_t count
    cdef readonly int32_t block_size    # of the first group
    cdef readonly int32_t alignment     # tokens that fill whole blocks of every group

    cdef int add(self, str kind, int64_t size, int64_t scale, int64_t max_step_tokens) except -1
    cdef int32_t num_out(self, int32_t group, int32_t num_computed) noexcept
    cdef int32_t last_fine(self, int32_t group, int32_t at) noexcept
    cdef int32_t blocks_for(self, int32_t group, int64_t num_tokens) noexcept
    cdef int64_t entries_for(self, int64_t num_tokens) noexcept
    cdef int64_t most_blocks(self, int64_t num_tokens) noexcept
