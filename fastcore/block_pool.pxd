# The records of all KV blocks and the free list threaded through them.
from libc.stdint cimport int32_t, int64_t, uint16_t

from aioengine.fastcore.eviction cimport CostOrder


cdef extern from *:
    """
    /* The empty asm is a side effect: without one, gcc takes a function that does nothing but prefetch for one that
       does nothing, and drops the calls of it. */
    static inline void aio_prefetch(const void* address) {
        __asm__ volatile("" : : "r"(address));
        __builtin_prefetch(address);
    }
    """
    void prefetch "aio_prefetch" (const void* address) noexcept nogil


cdef enum:
    NULL_BLOCK = 0    # padding and "no storage needed"; never allocated, hashed or freed (INV-24)
    UNLISTED = -1     # links of a block that is not in the free list

cdef enum:
    HASHED = 1        # flag: the prefix map knows the block's hash and leads to it
    PREWARMED = 2     # flag: cached ahead of need, and nobody has asked for it yet


cdef struct Block:    # 16 bytes, no Python object
    int32_t num_refs
    int32_t prev
    int32_t next
    uint16_t flags
    uint16_t step       # low bits of the step that computes the content that was offered to the map last


cdef class BlockPool:
    cdef Block* blocks        # num_blocks records and, behind them, the ring's two markers
    cdef CostOrder order      # None under the policy lru
    cdef readonly int32_t num_blocks
    cdef readonly int32_t num_free
    cdef readonly int64_t num_taken
    cdef readonly int64_t num_returned

    cdef int32_t take(self) except -1
    cdef int32_t first_in_ring(self) noexcept
    cdef int acquire(self, int32_t block_id) except -1
    cdef int acquire_all(self, const int32_t* ids, int32_t count, bint are_hits) except -1
    cdef int release(self, int32_t block_id) except -1
    cdef int release_all(self, const int32_t* ids, int32_t count) except -1
    cdef int hit(self, int32_t block_id) except -1
    cdef int touch(self, int32_t block_id) except -1
    cdef int relist(self, int32_t block_id) except -1
    cdef int unhash_all(self) except -1
    cdef int enlist(self, int32_t block_id) except -1
    cdef int check_id(self, int32_t block_id) except -1


cdef inline int32_t boundary(BlockPool pool) noexcept:
    """Marker between what goes first (unhashed, prewarmed) and what is cached."""
    return pool.num_blocks


cdef inline int32_t sentinel(BlockPool pool) noexcept:
    """Marker between the end of the ring and its start."""
    return pool.num_blocks + 1


cdef inline void join(Block* blocks, int32_t before, int32_t after) noexcept nogil:
    """Makes two neighbours in the ring."""
    blocks[before].next = after
    blocks[after].prev = before


cdef inline void unlink(Block* blocks, int32_t block_id) noexcept nogil:
    """Takes a block out of the ring."""
    cdef Block* block = &blocks[block_id]
    join(blocks, block.prev, block.next)
    block.prev = block.next = UNLISTED


cdef inline void own(Block* block) noexcept nogil:
    """Gives a block, whose neighbours are joined later, its first owner."""
    block.prev = block.next = UNLISTED
    block.num_refs = 1
