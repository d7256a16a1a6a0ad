# Which cached block continues which: parent, children and siblings of every hashed block.
from libc.stdint cimport int32_t, uint32_t


cdef enum:
    ROOT = 0          # the null block stands for the empty prefix; as a link it means "none"
    UNCACHED = -1     # parent of a block that is not in the tree


cdef struct Node:     # 16 bytes
    int32_t parent        # ROOT for a first block
    int32_t first_child   # the one cached last
    int32_t next          # the sibling cached before it
    int32_t prev          # the sibling cached after it; ROOT: it leads the list; < 0: that lane of the root


cdef class PrefixTree:
    cdef Node* nodes
    cdef int32_t* lanes          # heads of the root's children
    cdef uint32_t lane_mask
    cdef readonly int32_t num_blocks

    cdef int32_t newest(self, int32_t parent, uint32_t lane) noexcept
    cdef int attach(self, int32_t block_id, int32_t parent, uint32_t lane) except -1
    cdef int check_leaf(self, int32_t block_id) except -1
    cdef int clear(self) except -1


cdef uint32_t lane_of(bytes tail, int32_t first_token) noexcept


cdef inline void hang(Node* nodes, int32_t block_id, int32_t parent, int32_t* head) noexcept nogil:
    """Makes a block the newest child of its parent, whose children `head` leads to."""
    cdef Node* node = &nodes[block_id]
    node.parent = parent
    node.prev = ROOT
    node.next = head[0]
    if head[0] != ROOT:
        nodes[head[0]].prev = block_id
    head[0] = block_id


cdef inline void cut_leaf(Node* nodes, int32_t* lanes, int32_t block_id) noexcept nogil:
    """Takes a block without children out of the tree."""
    cdef Node* node = &nodes[block_id]
    if node.prev < 0:
        lanes[-1 - node.prev] = node.next
    elif node.prev == ROOT:
        nodes[node.parent].first_child = node.next
    else:
        nodes[node.prev].next = node.next
    if node.next != ROOT:
        nodes[node.next].prev = node.prev
    node.parent = UNCACHED
    node.next = node.prev = ROOT
