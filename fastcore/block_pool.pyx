"""The pool of KV blocks: one record per block in a C array, and an intrusive free list in eviction order.

Owns reference counts and the free list. Does not know hashes' meaning or the prefix map: whoever takes a
block that still carries a hash must drop the map's entry first (`PrefixMap.take` does).

    sentinel <-> unhashed <-> prewarmed <-> boundary <-> hashed, used last at the end <-> sentinel
             ^ released or unhashed: here  ^ here                                     ^ here

The next victim is the first of that ring. Under the policy cost, `order` chooses among the hashed ones behind
the boundary instead; they stay in the ring, where it falls back to if none of them may be chosen.

Why not a deque: a block that is hit leaves from the middle, in O(1). Why ids, not pointers: a table of
ids is what the device needs, and 32 bits are enough.
"""
import cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free

from aioengine.fastcore.block_hash cimport CHECKED


@cython.final
cdef class BlockPool:
    def __cinit__(self, int32_t num_blocks):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: block 0 is the null block")
        self.blocks = <Block*> PyMem_Calloc(<size_t> num_blocks + 2, sizeof(Block))
        if self.blocks == NULL:
            raise MemoryError()
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        # One closed ring 1, 2, ..., boundary, sentinel: insertion and removal need no special case.
        cdef int32_t i
        for i in range(1, num_blocks + 2):
            self.blocks[i].prev = i - 1
            self.blocks[i].next = i + 1
        self.blocks[1].prev = num_blocks + 1
        self.blocks[num_blocks + 1].next = 1
        self.blocks[NULL_BLOCK].prev = self.blocks[NULL_BLOCK].next = UNLISTED

    def __dealloc__(self):
        PyMem_Free(self.blocks)

    cdef int32_t take(self) except -1:
        """Removes the next victim and gives it one owner; NULL_BLOCK if none is free."""
        cdef int32_t block_id = self.blocks[sentinel(self)].next
        if block_id == boundary(self):
            if self.order is not None and self.order.num_heaped:
                block_id = self.order.best()
                self.order.chosen(block_id)
                self.order.leave(block_id)
            else:
                block_id = self.blocks[block_id].next
                if block_id == sentinel(self):
                    return NULL_BLOCK
        unlink(self.blocks, block_id)
        self.num_free -= 1
        self.num_taken += 1
        self.blocks[block_id].num_refs = 1
        return block_id

    cdef int32_t first_in_ring(self) noexcept:
        """Block or marker at the beginning; follow `blocks[id].next`."""
        return self.blocks[sentinel(self)].next

    cdef int acquire(self, int32_t block_id) except -1:
        """One owner more; a free block leaves the list first, so that nobody can take it (INV-18)."""
        return self.acquire_all(&block_id, 1, False)

    cdef int hit(self, int32_t block_id) except -1:
        """One owner more, who found the block by its hash."""
        return self.acquire_all(&block_id, 1, True)

    cdef int acquire_all(self, const int32_t* ids, int32_t count, bint are_hits) except -1:
        """One owner more of each; `are_hits`: who found them by their hashes."""
        cdef Block* blocks = self.blocks
        cdef uint16_t kept = <uint16_t> ~PREWARMED if are_hits else <uint16_t> ~0
        cdef int32_t num_taken = 0
        cdef int32_t i
        cdef Block* block
        for i in range(count):
            if CHECKED:
                self.check_id(ids[i])
            block = &blocks[ids[i]]
            block.flags &= kept
            if block.num_refs == 0:
                unlink(blocks, ids[i])
                if self.order is not None:
                    self.order.leave(ids[i])
                num_taken += 1
            block.num_refs += 1
        self.num_free -= num_taken
        self.num_taken += num_taken
        return 0

    cdef int release(self, int32_t block_id) except -1:
        """One owner less; without any, it becomes a free block."""
        return self.release_all(&block_id, 1)

    cdef int release_all(self, const int32_t* ids, int32_t count) except -1:
        """One owner less of each, the last one first."""
        cdef Block* blocks = self.blocks
        cdef int32_t num_returned = 0
        cdef int32_t last = blocks[sentinel(self)].prev
        cdef int32_t i
        cdef Block* block
        for i in range(count - 1, -1, -1):
            block = &blocks[ids[i]]
            if CHECKED:
                self.check_id(ids[i])
                if block.num_refs < 1:
                    raise AssertionError(f"block {ids[i]} is released more often than it was taken")
            block.num_refs -= 1
            if block.num_refs == 0:
                num_returned += 1
                if block.flags == HASHED and self.order is None:  # as `enlist` does; the ring is closed at the end
                    join(blocks, last, ids[i])
                    last = ids[i]
                else:
                    join(blocks, last, sentinel(self))
                    self.enlist(ids[i])
                    last = blocks[sentinel(self)].prev
        join(blocks, last, sentinel(self))
        self.num_free += num_returned
        self.num_returned += num_returned
        return 0

    cdef int enlist(self, int32_t block_id) except -1:
        """Puts a block without owners where it belongs: hashed at the tail (LRU), unhashed first (INV-23)."""
        cdef Block* block = &self.blocks[block_id]
        if not block.flags & HASHED:
            link(self.blocks, block_id, sentinel(self), self.blocks[sentinel(self)].next)
        elif block.flags & PREWARMED:
            link(self.blocks, block_id, self.blocks[boundary(self)].prev, boundary(self))
        else:
            link(self.blocks, block_id, self.blocks[sentinel(self)].prev, sentinel(self))
            if self.order is not None:
                self.order.used(block_id)
        return 0

    cdef int touch(self, int32_t block_id) except -1:
        """A free hashed block was used without being owned: nothing is younger."""
        self.blocks[block_id].flags &= ~<uint16_t> PREWARMED
        return self.relist(block_id)

    cdef int relist(self, int32_t block_id) except -1:
        """Moves a free block whose flags or last use changed to where it belongs now."""
        unlink(self.blocks, block_id)
        return self.enlist(block_id)

    cdef int unhash_all(self) except -1:
        """No block is hashed any more: all free ones keep their order and are in front of the boundary."""
        cdef int32_t i
        for i in range(1, self.num_blocks):
            self.blocks[i].flags = 0
        unlink(self.blocks, boundary(self))
        link(self.blocks, boundary(self), self.blocks[sentinel(self)].prev, sentinel(self))
        if self.order is not None:
            self.order.clear()
        return 0

    cdef int check_id(self, int32_t block_id) except -1:
        if not 0 < block_id < self.num_blocks:
            raise IndexError(f"block id {block_id} is not between 1 and {self.num_blocks - 1}")
        return 0

    def free_ids(self):
        """The free blocks in the ring's order: under the policy lru the next victim first."""
        cdef list ids = []
        cdef int32_t at = self.blocks[sentinel(self)].next
        while at != sentinel(self):
            if at != boundary(self):
                ids.append(at)
            at = self.blocks[at].next
        return ids

    @property
    def num_bytes(self):
        """Memory of the records."""
        return (<size_t> self.num_blocks + 2) * sizeof(Block)

    def num_refs(self, int32_t block_id):
        """Owners of a block."""
        self.check_id(block_id)
        return self.blocks[block_id].num_refs

    def is_hashed(self, int32_t block_id):
        """Whether the block is in the prefix map."""
        self.check_id(block_id)
        return bool(self.blocks[block_id].flags & HASHED)

    def candidates(self):
        """Under the policy cost the blocks to choose from once nothing unhashed or prewarmed is free."""
        return None if self.order is None else self.order.candidates()

    def set_prewarmed(self, int32_t block_id):
        """Marks a hashed block that has an owner as cached ahead of need."""
        self.check_id(block_id)
        if self.blocks[block_id].num_refs < 1 or not self.blocks[block_id].flags & HASHED:
            raise ValueError(f"block {block_id} must be hashed and owned")
        self.blocks[block_id].flags |= PREWARMED

    def take_id(self):
        """Takes the next victim; 0 if none is free."""
        return self.take()

    def acquire_id(self, int32_t block_id):
        """Adds an owner."""
        self.check_id(block_id)
        self.acquire(block_id)

    def hit_id(self, int32_t block_id):
        """Adds an owner who found the block by its hash."""
        self.check_id(block_id)
        self.hit(block_id)

    def release_id(self, int32_t block_id):
        """Removes an owner."""
        self.check_id(block_id)
        if self.blocks[block_id].num_refs < 1:
            raise ValueError(f"block {block_id} has no owner")
        self.release(block_id)

    def check(self):
        """Walks every record: free + referenced + null = total, and no block is both (INV-21, INV-24)."""
        cdef Block* null = &self.blocks[NULL_BLOCK]
        assert null.num_refs == 0 and null.flags == 0, "the null block was counted or hashed"
        assert null.prev == UNLISTED and null.next == UNLISTED, "the null block is in the free list"
        assert self.num_taken - self.num_returned == self.num_blocks - 1 - self.num_free, "taken - returned"
        cdef int32_t before = sentinel(self)
        cdef int32_t at = self.blocks[before].next
        cdef int32_t count = 0
        cdef bint is_behind = False
        while at != sentinel(self):
            assert self.blocks[at].prev == before, f"block {at} does not point back to {before}"
            if at == boundary(self):
                assert not is_behind, "the boundary comes twice"
                is_behind = True
            else:
                assert 0 < at < self.num_blocks and count < self.num_blocks, f"the free list is broken at {at}"
                assert self.blocks[at].num_refs == 0, f"block {at} is free and owned"
                assert is_behind == (self.blocks[at].flags == HASHED), f"block {at} is in the wrong section"
                count += 1
            before, at = at, self.blocks[at].next
        assert self.blocks[at].prev == before and is_behind, "the sentinel does not close the ring"
        assert count == self.num_free, f"{count} blocks in the free list, {self.num_free} counted"
        cdef int32_t referenced = 0
        for at in range(1, self.num_blocks):
            if self.blocks[at].num_refs > 0:
                referenced += 1
                assert self.blocks[at].next == self.blocks[at].prev == UNLISTED, f"block {at} is also free"
        if self.order is not None:
            self.order.check()
        assert count + referenced + 1 == self.num_blocks, f"{count} + {referenced} + 1 != {self.num_blocks}"


cdef inline void link(Block* blocks, int32_t block_id, int32_t before, int32_t after) noexcept nogil:
    join(blocks, before, block_id)
    join(blocks, block_id, after)
