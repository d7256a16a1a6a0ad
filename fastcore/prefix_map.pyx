"""Map from a block's prefix hash to the block's id: buckets of blocks, chained through arrays.

Owns the buckets, the hashes (as long as the algorithm's, no longer), the tree of what is indexed, and each
block's HASHED flag: a block is flagged exactly while the map leads to it. `kv_manager` inserts full blocks and takes
victims, which leave the map first. One entry per hash: a second block with an equal hash is refused by `insert` and
stays an unhashed duplicate (its request keeps it, A11). Removing a block removes all that was computed after it: no
lookup could reach it.

    heads[home of a hash] -> block -> behind[block] -> ... -> 0

Two buckets per block, so that most hold one block or none. Why not open addressing: to close the gap that a victim
leaves there takes its neighbours' homes, and eviction is half of what a full pool does.

A pool of a real size does not fit in a core's own caches. Where it is known what will be read next (the hashes of a
path, the victims in the ring), it is asked for some steps ahead: each step then waits for none of its reads. And
blocks that were taken together mostly have consecutive ids: where a path's have, no bucket is read to find them.
"""
import cython

from libc.stdint cimport uint64_t
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.string cimport memcpy, memset

from aioengine.fastcore.block_hash cimport CHECKED
from aioengine.fastcore.block_pool cimport HASHED, NULL_BLOCK, Block, boundary, join, own, prefetch, sentinel
from aioengine.fastcore.eviction cimport CostOrder
from aioengine.fastcore.prefix_tree cimport ROOT, Node, cut_leaf, hang

@cython.final
cdef class PrefixMap:
    def __cinit__(self, BlockPool pool not None, int32_t digest_size=32):
        if digest_size not in (16, 32):
            raise ValueError(f"digest_size={digest_size} must be 16 or 32")
        self.pool = pool
        self.num_heads = 2 * <uint32_t> pool.num_blocks
        self.heads = <int32_t*> PyMem_Calloc(self.num_heads, sizeof(int32_t))
        self.behind = <int32_t*> PyMem_Calloc(pool.num_blocks, sizeof(int32_t))
        self.hash_words = digest_size // 8
        self.hashes = <uint64_t*> PyMem_Calloc(<size_t> pool.num_blocks * self.hash_words, sizeof(uint64_t))
        if self.heads == NULL or self.behind == NULL or self.hashes == NULL:
            raise MemoryError()
        self.tree = PrefixTree(pool.num_blocks)

    def __dealloc__(self):
        PyMem_Free(self.heads)
        PyMem_Free(self.behind)
        PyMem_Free(self.hashes)

    cdef int32_t find(self, const uint64_t* hash) noexcept:
        """The block with this hash, or NULL_BLOCK."""
        cdef int32_t at = self.heads[home(hash[0], self.num_heads)]
        while at != NULL_BLOCK and not self.has_hash(at, hash):
            at = self.behind[at]
        return at

    cdef int32_t find_path(
        self, const uint64_t* hashes, int32_t count, int32_t* found, int32_t num_guessed=0
    ) noexcept:
        """Finds the blocks of a path of hashes up to the first gap (INV-17); returns their number.

        The first `num_guessed` of `found` are blocks that had these hashes some time ago: where they still have them
        no bucket is read. What is behind the number returned in `found` is of no meaning.
        """
        cdef int32_t start = self.confirm(hashes, min(num_guessed, count), found)
        cdef int32_t end, i
        if start == 0 and count > 0:
            found[0] = self.find(hashes)
            start = found[0] != NULL_BLOCK
        if start == 0:
            return 0
        while True:
            start = self.follow(hashes, start, count, found)
            if start == count:
                return count
            end = min(count, start + LOOKED_UP)
            i = self.find_each(hashes, start, end, found)
            if i < end:
                return i
            start = end

    cdef int32_t confirm(self, const uint64_t* hashes, int32_t count, const int32_t* found) noexcept:
        """So many of the first blocks still have their hashes."""
        cdef int32_t i
        for i in range(-FAR, count):
            if i + FAR < count:
                prefetch(self.row(found[i + FAR]))
                prefetch(&self.pool.blocks[found[i + FAR]])  # for who admits the request
            if i >= 0 and not self.is_at(found[i], hashes + <Py_ssize_t> i * self.hash_words):
                return i
        return max(count, 0)

    cdef int32_t find_each(self, const uint64_t* hashes, int32_t start, int32_t end, int32_t* found) noexcept:
        """Finds part of a path through the buckets; returns where its first gap is, or `end`."""
        cdef int32_t* heads = self.heads
        cdef uint32_t num_heads = self.num_heads
        cdef Py_ssize_t words = self.hash_words
        cdef int32_t i, at
        for i in range(start - FAR, end):
            if i + FAR < end:
                prefetch(&heads[home(hashes[(i + FAR) * words], num_heads)])
            if start <= i + NEAR < end:
                found[i + NEAR] = heads[home(hashes[(i + NEAR) * words], num_heads)]
                prefetch(self.row(found[i + NEAR]))
            if i < start:
                continue
            at = found[i]
            while at != NULL_BLOCK and not self.has_hash(at, hashes + i * words):
                at = self.behind[at]
            if at == NULL_BLOCK:
                return i
            found[i] = at
        return end

    cdef int32_t follow(self, const uint64_t* hashes, int32_t start, int32_t end, int32_t* found) noexcept:
        """Goes on where a path was found up to `start`, as long as its blocks have consecutive ids."""
        cdef Py_ssize_t words = self.hash_words
        cdef int32_t at = found[start - 1]
        cdef int32_t step, i
        if start == end:
            return start
        step = 1 if self.is_at(at + 1, hashes + start * words) else -1
        for i in range(start, end):
            at += step
            if not self.is_at(at, hashes + i * words):
                return i
            prefetch(&self.pool.blocks[at])
            found[i] = at
        return end

    cdef inline bint is_at(self, int32_t block_id, const uint64_t* hash) noexcept:
        """Whether a block, if there is such a one, is indexed under a hash.

        No, if the hash's first word is 0, as in the rows of blocks that are not indexed: its bucket has to tell.
        """
        return block_id < self.pool.num_blocks and hash[0] != 0 and self.has_hash(block_id, hash)

    cdef inline int32_t* end_of(self, int32_t* link, const uint64_t* hash) noexcept:
        """The end of the bucket that begins at `link`, or NULL if a block in it has the hash.

        Blocks join at the end, so that the victim, mostly the oldest of its bucket, is found first.
        """
        while link[0] != NULL_BLOCK:
            if self.has_hash(link[0], hash):
                return NULL
            link = &self.behind[link[0]]
        return link

    cdef bint has_hash(self, int32_t block_id, const uint64_t* hash) noexcept:
        """Whether this is the hash of an indexed block."""
        cdef const uint64_t* own = self.row(block_id)
        return own[0] == hash[0] and own[1] == hash[1] and (
            self.hash_words == 2 or (own[2] == hash[2] and own[3] == hash[3])
        )

    cdef Hash hash_of(self, int32_t block_id) noexcept:
        cdef Hash hash
        memset(&hash, 0, sizeof(Hash))
        memcpy(&hash, self.row(block_id), self.hash_words * sizeof(uint64_t))
        return hash

    cdef bytes bytes_of(self, int32_t block_id):
        """The hash of an indexed block, as long as the hasher makes them."""
        return (<const char*> self.row(block_id))[: 8 * self.hash_words]

    cdef uint64_t* row(self, int32_t block_id) noexcept:
        """Where the hash of a block is kept."""
        return self.hashes + <size_t> block_id * self.hash_words

    cdef int32_t* head_of(self, int32_t block_id) noexcept:
        """The bucket that a block is in."""
        return &self.heads[home(self.row(block_id)[0], self.num_heads)]

    cdef int insert(self, int32_t block_id, const uint64_t* hash, int32_t parent, uint32_t lane) except -1:
        """Gives the block its hash and indexes it. Returns 1, or 0 if another block has this hash (A11).

        `parent` is the indexed block before it, or ROOT; then `lane` says which children of the root it joins.
        """
        cdef Block* block = &self.pool.blocks[block_id]
        if CHECKED and (block.flags & HASHED or block_id == NULL_BLOCK):
            raise AssertionError(f"block {block_id} must not be hashed now")
        cdef int32_t* end = self.end_of(&self.heads[home(hash[0], self.num_heads)], hash)
        if end == NULL:
            return 0
        end[0] = block_id
        self.behind[block_id] = NULL_BLOCK
        self.tree.attach(block_id, parent, lane)
        memcpy(self.row(block_id), hash, self.hash_words * sizeof(uint64_t))
        block.flags |= HASHED
        self.num_entries += 1
        if self.pool.order is not None:
            self.pool.order.cached(block_id, parent)
        return 1

    cdef int expect(self, const uint64_t* hashes, const int32_t* ids, int32_t count) noexcept:
        """Asks for the buckets of some hashes and the records of the blocks that are to be indexed under them."""
        cdef int32_t i
        for i in range(count):
            prefetch(&self.heads[home(hashes[<Py_ssize_t> i * self.hash_words], self.num_heads)])
            prefetch(self.row(ids[i]))
            prefetch(&self.tree.nodes[ids[i]])
            prefetch(&self.pool.blocks[ids[i]])
        return 0

    cdef int32_t insert_path(
        self, const uint64_t* hashes, const int32_t* ids, int32_t count, int32_t parent, uint16_t step
    ) except -1:
        """Indexes blocks of a path, each as the child of the one before; `step` computes them.

        Stops at the first that is indexed, or whose hash is another block's (A11); returns how many were indexed.
        """
        cdef Block* blocks = self.pool.blocks
        cdef Node* nodes = self.tree.nodes
        cdef int32_t* heads = self.heads
        cdef Py_ssize_t words = self.hash_words
        cdef const uint64_t* hash = hashes
        cdef uint64_t* own
        cdef int32_t* end
        cdef int32_t i, at, block_id
        for i in range(count):
            block_id = ids[i]
            if blocks[block_id].flags & HASHED:
                return i
            if i + SOON < count:  # what is in that bucket, which was asked for before
                at = heads[home(hash[SOON * words], self.num_heads)]
                prefetch(self.row(at))
                prefetch(&self.behind[at])
            end = self.end_of(&heads[home(hash[0], self.num_heads)], hash)
            if end == NULL:
                return i
            if CHECKED:
                self.tree.attach(block_id, parent, 0)
            else:
                hang(nodes, block_id, parent, &nodes[parent].first_child)
            end[0] = block_id
            self.behind[block_id] = NULL_BLOCK
            own = self.row(block_id)
            own[0], own[1] = hash[0], hash[1]
            if words == 4:
                own[2], own[3] = hash[2], hash[3]
            blocks[block_id].flags |= HASHED
            blocks[block_id].step = step
            self.num_entries += 1
            if self.pool.order is not None:
                self.pool.order.cached(block_id, parent)
            parent = block_id
            hash += words
        return count

    cdef int32_t take(self, int32_t count, int32_t* taken) except -1:
        """Takes so many victims, of which there must be enough, out of pool and map (INV-22).

        Returns how many blocks lost their prefix: victims, and what was computed after them.
        """
        cdef int32_t num_evicted = 0
        cdef int32_t i
        if not CHECKED and self.pool.order is None and self.twins is None and self.journal is None:
            return self.take_in_order(count, taken)
        for i in range(count):
            taken[i] = self.pool.take()
            if self.pool.blocks[taken[i]].flags & HASHED:
                num_evicted += self.remove(taken[i])
        return num_evicted

    cdef int32_t take_in_order(self, int32_t count, int32_t* taken) except -1:
        """As `take`, where the ring tells who is next and nobody has to be told who went."""
        cdef BlockPool pool = self.pool
        cdef Block* blocks = pool.blocks
        cdef Node* nodes = self.tree.nodes
        cdef int32_t* behind = self.behind
        cdef int32_t* lanes = self.tree.lanes
        cdef int32_t* buckets[AHEAD]
        cdef int32_t num_removed = 0
        cdef int32_t num_leaves = 0
        # Blocks are cut out of the ring behind `front`, which is joined with what is left when it has to be whole.
        cdef int32_t front = sentinel(pool)
        cdef int32_t at, rest, num_listed, i
        while count > 0:
            at = blocks[front].next
            if at == boundary(pool):
                front, at = at, blocks[at].next
            num_listed = self.approach(at, min(count, AHEAD), taken, buckets)
            for i in range(num_listed):
                at = taken[i]
                rest = blocks[at].next
                own(&blocks[at])
                if not blocks[at].flags & HASHED:
                    continue
                if nodes[at].first_child != ROOT:
                    join(blocks, front, rest)
                    num_removed += self.remove(at)
                    front = sentinel(pool)  # what was below is next
                    rest = blocks[front].next
                    num_listed = i + 1
                    break
                unchain(buckets[i], behind, at)
                self.row(at)[0] = 0
                cut_leaf(nodes, lanes, at)
                blocks[at].flags = 0
                num_leaves += 1
            join(blocks, front, rest)
            pool.num_free -= num_listed
            pool.num_taken += num_listed
            taken += num_listed
            count -= num_listed
        self.num_entries -= num_leaves
        return num_leaves + num_removed

    cdef int32_t approach(self, int32_t at, int32_t most, int32_t* ids, int32_t** buckets) noexcept:
        """Lists blocks of the ring from `at` on, up to `most` or a marker, and the buckets of those that are indexed.

        Asks for all that is read when they are cut out, and for the blocks that will probably be next.
        """
        cdef int32_t num_blocks = self.pool.num_blocks
        cdef int32_t step = 0
        cdef int32_t count = 0
        cdef int32_t then
        while count < most and at < num_blocks:
            ids[count] = at
            buckets[count] = self.head_of(at)
            prefetch(buckets[count])
            count += 1
            then = self.pool.blocks[at].next
            if then - at != step:
                step = then - at
                self.expect_run(then, step, 4)
            if (step == 1 or step == -1) and not count & 3:
                self.expect_run(then + FAR * step, step, 1)
            at = then
        self.expect_run(at, step, AHEAD // 4)
        return count

    cdef inline int expect_run(self, int32_t at, int32_t step, int32_t count) noexcept:
        """Asks for the records of so many times four blocks with consecutive ids, if they are consecutive."""
        cdef int32_t i
        if step != 1 and step != -1:
            return 0
        for i in range(count):
            if 0 <= at < self.pool.num_blocks:
                prefetch(&self.pool.blocks[at])
                prefetch(&self.tree.nodes[at])
                prefetch(self.row(at))
                prefetch(&self.behind[at])
            at += 4 * step
        return 0

    cdef int32_t remove(self, int32_t block_id) except -1:
        """Takes a block, before it gets other content (INV-22), and all below it out; returns their number.

        Leaves first, the newest first, each with its twins; what has no owner is the next victim from now on.
        """
        if self.twins is not None and self.twins.has(block_id):
            return self.twins.leave(block_id)
        cdef Node* nodes = self.tree.nodes
        cdef int32_t at = block_id
        cdef int32_t parent
        cdef int32_t count = 0
        cdef Block* block
        while True:
            while nodes[at].first_child != ROOT:
                at = nodes[at].first_child
            parent = nodes[at].parent
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
        """Takes a leaf out of its bucket and the tree, and clears its flag."""
        if CHECKED:
            self.tree.check_leaf(block_id)
            if self.find(self.row(block_id)) != block_id:
                raise AssertionError(f"block {block_id} is not in the map")
        unchain(self.head_of(block_id), self.behind, block_id)
        cut_leaf(self.tree.nodes, self.tree.lanes, block_id)
        self.pool.blocks[block_id].flags = 0
        self.num_entries -= 1
        if self.twins is not None:
            self.twins.leave_all(block_id)
        if self.journal is not None:
            self.journal.removed(self.bytes_of(block_id))
        if self.pool.order is not None:
            self.pool.order.leave(block_id)
        if CHECKED:
            memset(self.row(block_id), 0xDD, self.hash_words * sizeof(uint64_t))
        self.row(block_id)[0] = 0
        return 0

    def clear(self):
        """Forgets every entry; the blocks stay where they are."""
        self.pool.unhash_all()
        memset(self.heads, 0, self.num_heads * sizeof(int32_t))
        memset(self.hashes, 0, <size_t> self.pool.num_blocks * self.hash_words * sizeof(uint64_t))
        self.tree.clear()
        if self.twins is not None:
            self.twins.clear()
        self.num_entries = 0
        if self.journal is not None:
            self.journal.cleared()

    def rank_by_cost(self, int32_t block_size, double context_cost=0.0):
        """Makes the pool choose victims by what their loss costs; for a map that is still empty."""
        if self.num_entries:
            raise ValueError(f"{self.num_entries} blocks are cached already")
        self.pool.order = CostOrder(self.tree, block_size, context_cost)

    @property
    def num_buckets(self):
        """Buckets that the blocks are spread over."""
        return self.num_heads

    @property
    def num_bytes(self):
        """Memory of buckets, hashes, tree and twins."""
        cdef size_t per_block = sizeof(int32_t) + self.hash_words * sizeof(uint64_t)
        cdef size_t others = 0 if self.twins is None else self.twins.num_bytes
        return self.num_heads * sizeof(int32_t) + self.pool.num_blocks * per_block + self.tree.num_bytes + others

    def find_bytes(self, bytes digest not None):
        """The block with this hash, or 0."""
        cdef Hash hash = from_bytes(digest)
        return self.find(hash.word)

    def insert_bytes(self, int32_t block_id, bytes digest not None, int32_t parent=ROOT, uint32_t lane=0):
        """Indexes a block as a child of another or of the root; False if another block has this hash."""
        cdef Hash hash = from_bytes(digest)
        if not 0 < block_id < self.pool.num_blocks or self.pool.blocks[block_id].flags & HASHED:
            raise ValueError(f"block {block_id} cannot be indexed")
        if parent != ROOT and self.tree.parent_of(parent) is None:
            raise ValueError(f"block {parent} is not indexed and can have no child")
        return bool(self.insert(block_id, hash.word, parent, lane))

    def find_path_bytes(self, digests):
        """The blocks of the hashes up to the first that is not indexed."""
        cdef int32_t count = len(digests)
        cdef uint64_t* hashes = <uint64_t*> PyMem_Calloc(count + 1, self.hash_words * sizeof(uint64_t))
        cdef int32_t* found = <int32_t*> PyMem_Calloc(count + 1, sizeof(int32_t))
        cdef Hash digest
        cdef int32_t i
        try:
            if hashes == NULL or found == NULL:
                raise MemoryError()
            for i in range(count):
                digest = from_bytes(digests[i])
                memcpy(hashes + <size_t> i * self.hash_words, &digest, self.hash_words * sizeof(uint64_t))
            count = self.find_path(hashes, count, found)
            return [found[i] for i in range(count)]
        finally:
            PyMem_Free(hashes)
            PyMem_Free(found)

    def take_ids(self, int32_t count):
        """Takes victims out of pool and map; returns their ids and how many blocks lost their prefix."""
        if not 0 <= count <= self.pool.num_free:
            raise ValueError(f"count={count} must lie between 0 and {self.pool.num_free}, the free blocks")
        cdef int32_t* taken = <int32_t*> PyMem_Calloc(count + 1, sizeof(int32_t))
        cdef int32_t i, num_evicted
        try:
            if taken == NULL:
                raise MemoryError()
            num_evicted = self.take(count, taken)
            return [taken[i] for i in range(count)], num_evicted
        finally:
            PyMem_Free(taken)

    def remove_id(self, int32_t block_id):
        """Takes a block and all below it out of the index; returns how many those were."""
        if not 0 < block_id < self.pool.num_blocks or not self.pool.blocks[block_id].flags & HASHED:
            raise ValueError(f"block {block_id} is not indexed")
        return self.remove(block_id)

    def check(self):
        """Every entry leads to a flagged block that a lookup finds, and every flag has an entry."""
        cdef uint32_t bucket
        cdef int32_t at
        cdef int32_t entries = 0
        cdef int32_t flagged = 0
        cdef Hash hash
        for bucket in range(self.num_heads):
            at = self.heads[bucket]
            while at != NULL_BLOCK:
                entries += 1
                assert entries <= self.num_entries, f"more than {self.num_entries} entries, or bucket {bucket} is a circle"
                hash = self.hash_of(at)
                assert self.pool.blocks[at].flags & HASHED, f"block {at} is indexed but not flagged"
                assert home(hash.word[0], self.num_heads) == bucket, f"block {at} is in the wrong bucket"
                assert self.find(hash.word) == at, f"lookup misses block {at}"
                at = self.behind[at]
        self.tree.check()
        if self.twins is not None:
            self.twins.check()
        for at in range(1, self.pool.num_blocks):
            assert self.row(at)[0] == 0 or self.tree.parent_of(at) is not None, f"block {at} has a stale hash"
            if self.twins is not None and self.twins.has(at):
                assert self.tree.parent_of(at) is None, f"twin {at} is in the tree"
                continue
            flagged += self.pool.blocks[at].flags & HASHED
            assert bool(self.pool.blocks[at].flags & HASHED) == (self.tree.parent_of(at) is not None), (
                f"block {at} is in one of map and tree only"
            )
        assert entries == self.num_entries == flagged, f"{entries}, {self.num_entries}, {flagged} entries"


cdef inline uint32_t home(uint64_t first_word, uint32_t num_heads) noexcept nogil:
    """The bucket of a hash: 32 of its bits as a fraction of all buckets."""
    return <uint32_t> ((<uint64_t> <uint32_t> first_word * num_heads) >> 32)


cdef inline void unchain(int32_t* link, int32_t* behind, int32_t block_id) noexcept nogil:
    """Takes a block out of the bucket that begins at `link`."""
    while link[0] != block_id:
        link = &behind[link[0]]
    link[0] = behind[block_id]


cdef Hash from_bytes(bytes digest) except *:
    cdef Hash hash
    if len(digest) not in (16, 32):
        raise ValueError(f"a hash has 16 or 32 bytes, not {len(digest)}")
    memset(&hash, 0, sizeof(Hash))
    memcpy(&hash, <const char*> digest, len(digest))
    return hash
