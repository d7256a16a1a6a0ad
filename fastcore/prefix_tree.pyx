"""The tree of cached blocks: the parent of a block is the cached block whose hash it was chained from.

Owns the links, nothing else; `prefix_map` attaches what it indexes and detaches what it forgets, so that a
block is in the tree exactly while it is in the map. There are no orphans: a block whose parent is forgotten
can never be hit (a lookup ends at the first gap, INV-17), so the map forgets it together with its parent.

    root -- lane 0 --> newest first block <-> ... <-> oldest      newest(ROOT, lane)
         -- lane 1 --> ...                                        lane = f(extra keys and salt, first token)
    block ----------> newest child <-> ... <-> oldest             newest(block, anything)

First blocks are many and of many tenants, so the root's children are kept in lanes. All candidates that could
share a first token with a prompt are in one lane, and in it are others too: blocks of other tenants whose
lane happens to be the same. Whoever wants to read a candidate by its tokens must therefore prove that the
tail is equal as well: hashed with the own tail, the candidate's tokens must give the candidate's hash.
"""
import cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.string cimport memset

from aioengine.fastcore.block_hash cimport CHECKED


@cython.final
cdef class PrefixTree:
    def __cinit__(self, int32_t num_blocks):
        cdef uint32_t num_lanes = 4
        while num_lanes < <uint32_t> num_blocks // 4:
            num_lanes *= 2
        self.num_blocks = num_blocks
        self.lane_mask = num_lanes - 1
        self.nodes = <Node*> PyMem_Calloc(num_blocks, sizeof(Node))
        self.lanes = <int32_t*> PyMem_Calloc(num_lanes, sizeof(int32_t))
        if self.nodes == NULL or self.lanes == NULL:
            raise MemoryError()
        self.clear()

    def __dealloc__(self):
        PyMem_Free(self.nodes)
        PyMem_Free(self.lanes)

    cdef int32_t newest(self, int32_t parent, uint32_t lane) noexcept:
        """Head of a list of children, ROOT if it is empty; follow `nodes[id].next` to the older ones."""
        return self.lanes[lane & self.lane_mask] if parent == ROOT else self.nodes[parent].first_child

    cdef int attach(self, int32_t block_id, int32_t parent, uint32_t lane) except -1:
        """Makes a block the newest child of its parent."""
        cdef Node* node = &self.nodes[block_id]
        if CHECKED and (node.parent != UNCACHED or (parent != ROOT and self.nodes[parent].parent == UNCACHED)):
            raise AssertionError(f"block {block_id} cannot become a child of {parent}")
        if parent == ROOT:
            hang(self.nodes, block_id, ROOT, &self.lanes[lane & self.lane_mask])
            node.prev = -1 - <int32_t> (lane & self.lane_mask)
        else:
            hang(self.nodes, block_id, parent, &self.nodes[parent].first_child)
        return 0

    cdef int check_leaf(self, int32_t block_id) except -1:
        """Only a block without children may leave."""
        if self.nodes[block_id].parent == UNCACHED or self.nodes[block_id].first_child != ROOT:
            raise AssertionError(f"block {block_id} cannot leave the tree")
        return 0

    cdef int clear(self) except -1:
        """Takes every block out."""
        cdef int32_t i
        memset(self.nodes, 0, <size_t> self.num_blocks * sizeof(Node))
        memset(self.lanes, 0, (<size_t> self.lane_mask + 1) * sizeof(int32_t))
        for i in range(1, self.num_blocks):
            self.nodes[i].parent = UNCACHED
        return 0

    @property
    def num_bytes(self):
        """Memory of links and lanes."""
        return self.num_blocks * sizeof(Node) + (<size_t> self.lane_mask + 1) * sizeof(int32_t)

    @property
    def num_lanes(self):
        """Lists that the root's children are spread over."""
        return self.lane_mask + 1

    def parent_of(self, int32_t block_id):
        """The parent, 0 for a first block, None for a block that is not in the tree."""
        if not 0 < block_id < self.num_blocks:
            raise IndexError(f"block id {block_id} is not between 1 and {self.num_blocks - 1}")
        return None if self.nodes[block_id].parent == UNCACHED else self.nodes[block_id].parent

    def children_of(self, int32_t block_id, uint32_t lane=0):
        """Cached children of a block, or of the root (0) in one lane; the newest first."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block id {block_id} is not between 0 and {self.num_blocks - 1}")
        cdef list found = []
        cdef int32_t at = self.newest(block_id, lane)
        while at != ROOT:
            found.append(at)
            at = self.nodes[at].next
        return found

    def check(self):
        """Every list closes, names its parent, and holds each cached block once."""
        cdef int32_t cached = 0
        cdef int32_t linked = 0
        cdef int32_t i
        for i in range(1, self.num_blocks):
            if self.nodes[i].parent != UNCACHED:
                cached += 1
                linked += self.check_list(self.nodes[i].first_child, i, ROOT)
            else:
                assert self.nodes[i].first_child == ROOT, f"block {i} has children and is not cached"
        for i in range(<int32_t> self.lane_mask + 1):
            linked += self.check_list(self.lanes[i], ROOT, -1 - i)
        assert cached == linked, f"{cached} blocks are in the tree, {linked} in its lists"

    def check_list(self, int32_t at, int32_t parent, int32_t before):
        """Length of a list of children whose head points back to `before`."""
        cdef int32_t length = 0
        while at != ROOT:
            assert length < self.num_blocks, f"the children of {parent} form a circle"
            assert self.nodes[at].parent == parent, f"block {at} is no child of {parent}"
            assert self.nodes[at].prev == before, f"block {at} does not point back to {before}"
            before, at = at, self.nodes[at].next
            length += 1
        return length


cdef uint32_t lane_of(bytes tail, int32_t first_token) noexcept:
    """The root's lane of a first block, from what follows its tokens in the hash and its first token."""
    # Python keeps the hash in the bytes object; a new secret per process keeps lanes from being chosen.
    return (<uint32_t> hash(tail) ^ <uint32_t> first_token) * <uint32_t> 2654435761 >> 7
