"""Which cached block goes first under `--eviction-policy cost`: the one whose loss costs least.

    value = cost of computing the block again x probability that it is asked for / bytes
          = block_size x (1 + context_cost x tokens before it) x (hits + 1), hits counted up to MOST_HITS
    rank  = clock at its last use + value;  clock = rank of the last victim

Bytes are the same for all blocks of a pool and drop out. Hits + 1 is Laplace's estimate from what was seen:
a block nobody asked for yet may still be. A conversation that goes on where it ended says nothing about
others who might ask: only hits that part from what followed before, or that find a whole prompt, count. The clock (greedy dual) lets values fade: after enough victims even
the most valuable block ranks below a new one. Where all values are equal, ranks follow the order of last uses
and ties go to the oldest use, so the order is exactly that of LRU. (But for one case: LRU may give up a block
whose child is in use by a request that computed a duplicate of the block.)

Owns ranks, hits and a binary heap over the blocks that may be chosen: free, hashed, not prewarmed, and without
cached children, because a parent must outlive what was computed after it. The pool and the prefix map report
what happens; with the policy lru this object does not exist.
"""
import cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free

from aioengine.fastcore.block_hash cimport CHECKED
from aioengine.fastcore.prefix_tree cimport ROOT


@cython.final
cdef class CostOrder:
    def __cinit__(self, PrefixTree tree not None, int32_t block_size, double context_cost=0.0):
        if not 0 <= context_cost < 1e6:
            raise ValueError(f"context_cost={context_cost} must lie between 0 and 1000000")
        self.tree = tree
        self.block_size, self.context_cost = block_size, context_cost
        self.worth = <Worth*> PyMem_Calloc(tree.num_blocks, sizeof(Worth))
        self.heap = <int32_t*> PyMem_Calloc(tree.num_blocks, sizeof(int32_t))
        if self.worth == NULL or self.heap == NULL:
            raise MemoryError()
        self.clear()

    def __dealloc__(self):
        PyMem_Free(self.worth)
        PyMem_Free(self.heap)

    cdef int32_t best(self) noexcept:
        """The block to give up first; ROOT if there is none."""
        return self.heap[0] if self.num_heaped else ROOT

    cdef int cached(self, int32_t block_id, int32_t parent) except -1:
        """A block was indexed; its parent cannot be chosen any more."""
        cdef Worth* worth = &self.worth[block_id]
        worth.num_hits = worth.was_continued = 0
        worth.depth = 0 if parent == ROOT else self.worth[parent].depth + 1
        if parent != ROOT:
            self.worth[parent].was_continued = 1
            self.leave(parent)
        return 0

    cdef int hit_path(self, const int32_t* blocks, int32_t count, bint is_whole) except -1:
        """A request found these blocks, from the first one on; `is_whole`: all that it could find."""
        cdef int32_t i
        if not is_whole and not self.worth[blocks[count - 1]].was_continued:
            return 0
        for i in range(count):
            if self.worth[blocks[i]].num_hits < MOST_HITS:
                self.worth[blocks[i]].num_hits += 1
        return 0

    cdef int beside(self, int32_t block_id, int32_t primary) except -1:
        """Another group's block for the same tokens as `primary` is worth as much, and no block's parent."""
        self.worth[block_id].depth = self.worth[primary].depth
        self.worth[block_id].num_hits = self.worth[primary].num_hits
        return 0

    cdef int used(self, int32_t block_id) except -1:
        """A block's last owner is gone: its rank from now on."""
        cdef Worth* worth = &self.worth[block_id]
        cdef double context = <double> worth.depth * self.block_size
        cdef double value = self.block_size * (1.0 + self.context_cost * context) * (worth.num_hits + 1)
        self.leave(block_id)
        self.num_uses += 1
        worth.last_use = self.num_uses
        worth.rank = self.clock + value
        return self.enter(block_id)

    cdef int enter(self, int32_t block_id) except -1:
        """A free, hashed block that is not prewarmed may be chosen, if it has no children."""
        if self.tree.nodes[block_id].first_child != ROOT or self.worth[block_id].heap_at != NOT_HEAPED:
            return 0
        self.place(block_id, self.num_heaped)
        self.num_heaped += 1
        self.sift_up(self.num_heaped - 1)
        return 0

    cdef int leave(self, int32_t block_id) except -1:
        """A block may not be chosen now."""
        cdef int32_t at = self.worth[block_id].heap_at
        if at == NOT_HEAPED:
            return 0
        self.worth[block_id].heap_at = NOT_HEAPED
        self.num_heaped -= 1
        if at < self.num_heaped:
            self.place(self.heap[self.num_heaped], at)
            self.sift_up(at)
            self.sift_down(at)
        return 0

    cdef int chosen(self, int32_t block_id) except -1:
        """A block was given up for its rank: the clock goes on to it."""
        self.clock = max(self.clock, self.worth[block_id].rank)
        return 0

    cdef int clear(self) except -1:
        """Nothing is cached any more."""
        cdef int32_t i
        for i in range(self.tree.num_blocks):
            self.worth[i].heap_at = NOT_HEAPED
        self.num_heaped = 0
        return 0

    cdef bint before(self, int32_t a, int32_t b) noexcept:
        if self.worth[a].rank != self.worth[b].rank:
            return self.worth[a].rank < self.worth[b].rank
        return self.worth[a].last_use < self.worth[b].last_use

    cdef int place(self, int32_t block_id, int32_t at) noexcept:
        self.heap[at] = block_id
        self.worth[block_id].heap_at = at
        return 0

    cdef int sift_up(self, int32_t at) noexcept:
        cdef int32_t moving = self.heap[at]
        while at > 0 and self.before(moving, self.heap[(at - 1) >> 1]):
            self.place(self.heap[(at - 1) >> 1], at)
            at = (at - 1) >> 1
        return self.place(moving, at)

    cdef int sift_down(self, int32_t at) noexcept:
        cdef int32_t moving = self.heap[at]
        cdef int32_t below
        while True:
            below = 2 * at + 1
            if below >= self.num_heaped:
                break
            if below + 1 < self.num_heaped and self.before(self.heap[below + 1], self.heap[below]):
                below += 1
            if not self.before(self.heap[below], moving):
                break
            self.place(self.heap[below], at)
            at = below
        return self.place(moving, at)

    @property
    def num_bytes(self):
        """Memory of values and heap."""
        return self.tree.num_blocks * (sizeof(Worth) + sizeof(int32_t))

    def candidates(self):
        """The blocks that may be chosen, first victim first."""
        cdef int32_t i
        return sorted((self.heap[i] for i in range(self.num_heaped)), key=self.key_of)

    def key_of(self, int32_t block_id):
        """What blocks are ordered by."""
        return self.worth[block_id].rank, self.worth[block_id].last_use

    def check(self):
        """Every heaped block knows its place, has no children, and comes after its parent in the heap."""
        cdef int32_t i
        cdef int32_t count = 0
        for i in range(self.num_heaped):
            assert self.worth[self.heap[i]].heap_at == i, f"block {self.heap[i]} is not at {i} in the heap"
            assert self.tree.nodes[self.heap[i]].first_child == ROOT, f"block {self.heap[i]} has children"
            assert i == 0 or not self.before(self.heap[i], self.heap[(i - 1) >> 1]), f"the heap is broken at {i}"
        for i in range(self.tree.num_blocks):
            count += self.worth[i].heap_at != NOT_HEAPED
        assert count == self.num_heaped, f"{count} blocks think they are in the heap of {self.num_heaped}"
