"""Open-addressing map from a block's prefix hash to the block's id.

Owns the slots, the hashes (as long as the algorithm's, no longer), the tree of what is indexed, and each
block's HASHED flag: a block is flagged exactly while the map leads to it. `kv_manager` inserts full blocks and removes victims. One entry
per hash: a second block with an equal hash is refused by `insert` and stays an unhashed duplicate (its
request keeps it, A11). Removing a block removes all that was computed after it: no lookup could reach it.

Linear probing in a table of fixed size, at most two thirds full; deletion shifts the following entries back, so
there are no tombstones and a lookup never gets slower with churn.
"""
import cython

from libc.stdint cimport uint64_t
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.string cimport memcpy, memset

from aioengine.fastcore.block_hash cimport CHECKED
from aioengine.fastcore.block_pool cimport HASHED, NULL_BLOCK, Block
from aioengine.fastcore.eviction cimport CostOrder
from aioengine.fastcore.prefix_tree cimport ROOT, Node


@cython.final
cdef class PrefixMap:
    def __cinit__(self, BlockPool pool not None, int32_t digest_size=32):
        if digest_size not in (16, 32):
            raise ValueError(f"digest_size={digest_size} must be 16 or 32")
        self.pool = pool
        self.num_slots = max(4, <uint32_t> pool.num_blocks + <uint32_t> pool.num_blocks // 2)
        self.slots = <Slot*> PyMem_Calloc(self.num_slots, sizeof(Slot))
        self.hash_words = digest_size // 8
        self.hashes = <uint64_t*> PyMem_Calloc(<size_t> pool.num_blocks * self.hash_words, sizeof(uint64_t))
        if self.slots == NULL or self.hashes == NULL:
            raise MemoryError()
        self.tree = PrefixTree(pool.num_blocks)

    def __dealloc__(self):
        PyMem_Free(self.slots)
        PyMem_Free(self.hashes)

    cdef int32_t find(self, const Hash* hash) noexcept:
        """The block with this hash, or NULL_BLOCK."""
        cdef uint32_t at = home(hash.word[0], self.num_slots)
        cdef uint32_t tag = tag_of(hash.word[0])
        while self.slots[at].block_id != NULL_BLOCK:
            if self.slots[at].tag == tag and self.has_hash(self.slots[at].block_id, hash):
                return self.slots[at].block_id
            at = self.behind(at)
        return NULL_BLOCK

    cdef bint has_hash(self, int32_t block_id, const Hash* hash) noexcept:
        """Whether this is the hash of a flagged block."""
        cdef const uint64_t* own = self.hashes + <size_t> block_id * self.hash_words
        return own[0] == hash.word[0] and own[1] == hash.word[1] and (
            self.hash_words == 2 or (own[2] == hash.word[2] and own[3] == hash.word[3])
        )

    cdef Hash hash_of(self, int32_t block_id) noexcept:
        cdef Hash hash
        memset(&hash, 0, sizeof(Hash))
        memcpy(&hash, self.hashes + <size_t> block_id * self.hash_words, self.hash_words * sizeof(uint64_t))
        return hash

    cdef bytes bytes_of(self, int32_t block_id):
        """The hash of an indexed block, as long as the hasher makes them."""
        return (<const char*> (self.hashes + <size_t> block_id * self.hash_words))[: 8 * self.hash_words]

    cdef uint32_t home_of(self, int32_t block_id) noexcept:
        return home(self.hashes[<size_t> block_id * self.hash_words], self.num_slots)

    cdef uint32_t behind(self, uint32_t at) noexcept:
        """The slot after this one."""
        return at + 1 if at + 1 < self.num_slots else 0

    cdef uint32_t distance(self, uint32_t start, uint32_t end) noexcept:
        """Steps from one slot to another."""
        return end - start if end >= start else end + (self.num_slots - start)

    cdef int insert(self, int32_t block_id, const Hash* hash, int32_t parent, uint32_t lane) except -1:
        """Gives the block its hash and indexes it. Returns 1, or 0 if another block has this hash (A11).

        `parent` is the indexed block before it, or ROOT; then `lane` says which children of the root it joins.
        """
        cdef Block* block = &self.pool.blocks[block_id]
        if CHECKED and (block.flags & HASHED or block_id == NULL_BLOCK):
            raise AssertionError(f"block {block_id} must not be hashed now")
        cdef uint32_t at = home(hash.word[0], self.num_slots)
        cdef uint32_t tag = tag_of(hash.word[0])
        while self.slots[at].block_id != NULL_BLOCK:
            if self.slots[at].tag == tag and self.has_hash(self.slots[at].block_id, hash):
                return 0
            at = self.behind(at)
        self.slots[at].block_id = block_id
        self.slots[at].tag = tag
        self.tree.attach(block_id, parent, lane)
        memcpy(self.hashes + <size_t> block_id * self.hash_words, hash, self.hash_words * sizeof(uint64_t))
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
        cdef uint32_t hole = self.home_of(block_id)
        while self.slots[hole].block_id != block_id:
            if CHECKED and self.slots[hole].block_id == NULL_BLOCK:
                raise AssertionError(f"block {block_id} is not in the map")
            hole = self.behind(hole)
        block.flags = 0
        self.num_entries -= 1
        if self.journal is not None:
            self.journal.removed(self.bytes_of(block_id))
        if self.pool.order is not None:
            self.pool.order.leave(block_id)
        # Back-shift: an entry may fill the hole if its home does not lie behind the hole on the way to it.
        cdef uint32_t at = hole
        cdef uint32_t wanted
        while True:
            at = self.behind(at)
            if self.slots[at].block_id == NULL_BLOCK:
                break
            wanted = self.home_of(self.slots[at].block_id)
            if self.distance(wanted, at) >= self.distance(hole, at):
                self.slots[hole] = self.slots[at]
                hole = at
        self.slots[hole].block_id = NULL_BLOCK
        if CHECKED:
            memset(self.hashes + <size_t> block_id * self.hash_words, 0xDD, self.hash_words * sizeof(uint64_t))
        return 0

    def clear(self):
        """Forgets every entry; the blocks stay where they are."""
        self.pool.unhash_all()
        memset(self.slots, 0, self.num_slots * sizeof(Slot))
        self.tree.clear()
        self.num_entries = 0
        if self.journal is not None:
            self.journal.cleared()

    def rank_by_cost(self, int32_t block_size, double context_cost=0.0):
        """Makes the pool choose victims by what their loss costs; for a map that is still empty."""
        if self.num_entries:
            raise ValueError(f"{self.num_entries} blocks are cached already")
        self.pool.order = CostOrder(self.tree, block_size, context_cost)

    @property
    def capacity(self):
        """Slots of the table."""
        return self.num_slots

    @property
    def num_bytes(self):
        """Memory of slots, hashes and tree."""
        return (
            self.num_slots * sizeof(Slot)
            + <size_t> self.pool.num_blocks * self.hash_words * sizeof(uint64_t) + self.tree.num_bytes
        )

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
        cdef Hash hash
        for at in range(self.num_slots):
            if self.slots[at].block_id == NULL_BLOCK:
                continue
            entries += 1
            block = &self.pool.blocks[self.slots[at].block_id]
            hash = self.hash_of(self.slots[at].block_id)
            assert block.flags & HASHED, f"block {self.slots[at].block_id} is indexed but not flagged"
            assert self.slots[at].tag == tag_of(hash.word[0]), f"slot {at} has the wrong tag"
            assert self.find(&hash) == self.slots[at].block_id, f"lookup misses slot {at}"
        self.tree.check()
        for at in range(1, <size_t> self.pool.num_blocks):
            flagged += self.pool.blocks[at].flags & HASHED
            assert bool(self.pool.blocks[at].flags & HASHED) == (self.tree.parent_of(at) is not None), (
                f"block {at} is in one of map and tree only"
            )
        assert entries == self.num_entries == flagged, f"{entries}, {self.num_entries}, {flagged} entries"


cdef inline uint32_t home(uint64_t first_word, uint32_t num_slots) noexcept nogil:
    return <uint32_t> first_word % num_slots


cdef inline uint32_t tag_of(uint64_t first_word) noexcept nogil:
    return <uint32_t> (first_word >> 32)


cdef Hash from_bytes(bytes digest) except *:
    cdef Hash hash
    if len(digest) not in (16, 32):
        raise ValueError(f"a hash has 16 or 32 bytes, not {len(digest)}")
    memset(&hash, 0, sizeof(Hash))
    memcpy(&hash, <const char*> digest, len(digest))
    return hash
