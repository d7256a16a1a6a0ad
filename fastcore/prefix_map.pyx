"""Open-addressing map from a block's prefix hash to the block's id.

Owns the slots, the tree of what is indexed, and through them each block's `hash` and its HASHED flag: a block
is flagged exactly while the map leads to it. `kv_manager` inserts full blocks and removes victims. One entry
per hash: a second block with an equal hash is refused by `insert` and stays an unhashed duplicate (its
request keeps it, A11). Removing a block removes all that was computed after it: no lookup could reach it.

Linear probing in a table of fixed size, at most half full; deletion shifts the following entries back, so
there are no tombstones and a lookup never gets slower with churn.
"""
import cython

from libc.stdint cimport uint64_t
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.string cimport memcpy, memset

from aioengine.fastcore.block_hash cimport CHECKED, same_hash
from aioengine.fastcore.block_pool cimport HASHED, NULL_BLOCK, Block
from aioengine.fastcore.eviction cimport CostOrder
from aioengine.fastcore.prefix_tree cimport ROOT, Node


@cython.final
cdef class PrefixMap:
    def __cinit__(self, BlockPool pool not None):
        self.pool = pool
        cdef uint64_t capacity = 4
        while capacity < 2 * <uint64_t> pool.num_blocks:
            capacity *= 2
        self.slots = <Slot*> PyMem_Calloc(capacity, sizeof(Slot))
        if self.slots == NULL:
            raise MemoryError()
        self.mask = <uint32_t> (capacity - 1)
        self.tree = PrefixTree(pool.num_blocks)

    def __dealloc__(self):
        PyMem_Free(self.slots)

    cdef int32_t find(self, const Hash* hash) noexcept:
        """The block with this hash, or NULL_BLOCK."""
        cdef uint32_t at = home(hash, self.mask)
        cdef uint32_t tag = tag_of(hash)
        while self.slots[at].block_id != NULL_BLOCK:
            if self.slots[at].tag == tag and same_hash(&self.pool.blocks[self.slots[at].block_id].hash, hash):
                return self.slots[at].block_id
            at = (at + 1) & self.mask
        return NULL_BLOCK

    cdef int insert(self, int32_t block_id, const Hash* hash, int32_t parent, uint32_t lane) except -1:
        """Gives the block its hash and indexes it. Returns 1, or 0 if another block has this hash (A11).

        `parent` is the indexed block before it, or ROOT; then `lane` says which children of the root it joins.
        """
        cdef Block* block = &self.pool.blocks[block_id]
        if CHECKED and (block.flags & HASHED or block_id == NULL_BLOCK):
            raise AssertionError(f"block {block_id} must not be hashed now")
        cdef uint32_t at = home(hash, self.mask)
        cdef uint32_t tag = tag_of(hash)
        while self.slots[at].block_id != NULL_BLOCK:
            if self.slots[at].tag == tag and same_hash(&self.pool.blocks[self.slots[at].block_id].hash, hash):
                return 0
            at = (at + 1) & self.mask
        self.slots[at].block_id = block_id
        self.slots[at].tag = tag
        self.tree.attach(block_id, parent, lane)
        block.hash = hash[0]
        block.flags |= HASHED
        self.num_entries += 1
        if self.pool.order is not None:
            self.pool.order.cached(block_id, parent)
        return 1

    cdef int32_t remove(self, int32_t block_id) except -1:
        """Takes a block, before it gets other content (INV-22), and all below it out; returns their number.

        Leaves first, the newest first; what has no owner is the next victim from now on.
        """
        cdef Node* nodes = self.tree.nodes
        cdef int32_t at = block_id
        cdef int32_t parent
        cdef int32_t count = 0
        cdef Block* block
        while True:
            while nodes[at].first_child != ROOT:
                at = nodes[at].first_child
            parent = nodes[at].parent
            self.tree.detach(at)
            self.erase(at)
            count += 1
            if self.pool.blocks[at].num_refs == 0:
                self.pool.relist(at)
            if at == block_id:
                break
            at = parent
        if self.pool.order is not None and parent != ROOT:
            block = &self.pool.blocks[parent]
            if block.num_refs == 0 and block.flags == HASHED:
                self.pool.order.enter(parent)  # does so if it has no other child
        return count

    cdef int erase(self, int32_t block_id) except -1:
        """Frees a block's slot and clears its flag."""
        cdef Block* block = &self.pool.blocks[block_id]
        cdef uint32_t hole = home(&block.hash, self.mask)
        while self.slots[hole].block_id != block_id:
            if CHECKED and self.slots[hole].block_id == NULL_BLOCK:
                raise AssertionError(f"block {block_id} is not in the map")
            hole = (hole + 1) & self.mask
        block.flags = 0
        self.num_entries -= 1
        if self.pool.order is not None:
            self.pool.order.leave(block_id)
        # Back-shift: an entry may fill the hole if its home does not lie behind the hole on the way to it.
        cdef uint32_t at = hole
        cdef uint32_t wanted
        while True:
            at = (at + 1) & self.mask
            if self.slots[at].block_id == NULL_BLOCK:
                break
            wanted = home(&self.pool.blocks[self.slots[at].block_id].hash, self.mask)
            if ((at - wanted) & self.mask) >= ((at - hole) & self.mask):
                self.slots[hole] = self.slots[at]
                hole = at
        self.slots[hole].block_id = NULL_BLOCK
        return 0

    def clear(self):
        """Forgets every entry; the blocks stay where they are."""
        self.pool.unhash_all()
        memset(self.slots, 0, (<size_t> self.mask + 1) * sizeof(Slot))
        self.tree.clear()
        self.num_entries = 0

    def rank_by_cost(self, int32_t block_size, double context_cost=0.0):
        """Makes the pool choose victims by what their loss costs; for a map that is still empty."""
        if self.num_entries:
            raise ValueError(f"{self.num_entries} blocks are cached already")
        self.pool.order = CostOrder(self.tree, block_size, context_cost)

    @property
    def capacity(self):
        """Slots of the table."""
        return <size_t> self.mask + 1

    def find_bytes(self, bytes digest not None):
        """The block with this hash, or 0."""
        cdef Hash hash = from_bytes(digest)
        return self.find(&hash)

    def insert_bytes(self, int32_t block_id, bytes digest not None, int32_t parent=ROOT, uint32_t lane=0):
        """Indexes a block as a child of another or of the root; False if another block has this hash."""
        cdef Hash hash = from_bytes(digest)
        if not 0 < block_id < self.pool.num_blocks or self.pool.blocks[block_id].flags & HASHED:
            raise ValueError(f"block {block_id} cannot be indexed")
        if parent != ROOT and self.tree.parent_of(parent) is None:
            raise ValueError(f"block {parent} is not indexed and can have no child")
        return bool(self.insert(block_id, &hash, parent, lane))

    def remove_id(self, int32_t block_id):
        """Takes a block and all below it out of the index; returns how many those were."""
        if not 0 < block_id < self.pool.num_blocks or not self.pool.blocks[block_id].flags & HASHED:
            raise ValueError(f"block {block_id} is not indexed")
        return self.remove(block_id)

    def check(self):
        """Every entry leads to a flagged block that a lookup finds, and every flag has an entry."""
        cdef size_t at
        cdef int32_t entries = 0
        cdef int32_t flagged = 0
        cdef Block* block
        for at in range(<size_t> self.mask + 1):
            if self.slots[at].block_id == NULL_BLOCK:
                continue
            entries += 1
            block = &self.pool.blocks[self.slots[at].block_id]
            assert block.flags & HASHED, f"block {self.slots[at].block_id} is indexed but not flagged"
            assert self.slots[at].tag == tag_of(&block.hash), f"slot {at} has the wrong tag"
            assert self.find(&block.hash) == self.slots[at].block_id, f"lookup misses slot {at}"
        self.tree.check()
        for at in range(1, <size_t> self.pool.num_blocks):
            flagged += self.pool.blocks[at].flags & HASHED
            assert bool(self.pool.blocks[at].flags & HASHED) == (self.tree.parent_of(at) is not None), (
                f"block {at} is in one of map and tree only"
            )
        assert entries == self.num_entries == flagged, f"{entries}, {self.num_entries}, {flagged} entries"


cdef inline uint32_t home(const Hash* hash, uint32_t mask) noexcept nogil:
    return <uint32_t> hash.word[0] & mask


cdef inline uint32_t tag_of(const Hash* hash) noexcept nogil:
    return <uint32_t> (hash.word[0] >> 32)


cdef Hash from_bytes(bytes digest) except *:
    cdef Hash hash
    if len(digest) not in (16, 32):
        raise ValueError(f"a hash has 16 or 32 bytes, not {len(digest)}")
    memset(&hash, 0, sizeof(Hash))
    memcpy(&hash, <const char*> digest, len(digest))
    return hash
