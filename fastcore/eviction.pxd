# The order in which cached blocks are given up under `--eviction-policy cost`.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.prefix_tree cimport PrefixTree


cdef enum:
    MOST_HITS = 15    # more do not raise a block's value, or what was hot for a day would stay for weeks
    NOT_HEAPED = -1


cdef struct Worth:    # 32 bytes
    double rank         # clock + value at its last use
    int64_t last_use    # order of last uses
    int32_t num_hits
    int32_t depth       # its index in the block table
    int32_t heap_at     # NOT_HEAPED: not to be chosen now
    int32_t was_continued  # a child of it was cached at some time


cdef class CostOrder:
    cdef PrefixTree tree
    cdef Worth* worth
    cdef int32_t* heap
    cdef readonly int32_t num_heaped
    cdef readonly double context_cost
    cdef int32_t block_size
    cdef double clock
    cdef int64_t num_uses

    cdef int32_t best(self) noexcept
    cdef int cached(self, int32_t block_id, int32_t parent) except -1
    cdef int hit_path(self, const int32_t* blocks, int32_t count, bint is_whole) except -1
    cdef int beside(self, int32_t block_id, int32_t primary) except -1
    cdef int used(self, int32_t block_id) except -1
    cdef int enter(self, int32_t block_id) except -1
    cdef int leave(self, int32_t block_id) except -1
    cdef int chosen(self, int32_t block_id) except -1
    cdef int clear(self) except -1
    cdef bint before(self, int32_t a, int32_t b) noexcept
    cdef int place(self, int32_t block_id, int32_t at) noexcept
    cdef int sift_up(self, int32_t at) noexcept
    cdef int sift_down(self, int32_t at) noexcept
