"""What the groups behind the first one have cached: each block hangs on the first group's block of its hash.

The key of a block is its prefix hash and its group (B8). The block of the first group that has the hash stands
for the hash here, and every other group has a column: so no hash is stored or looked up twice, and groups
cannot collide. A coarse block hangs on the fine block that ends where it ends (B10, INV-15).

    primary (in map and tree) --> twin of group 1, twin of group 2, ...      of(primary, group)
    twin (flagged HASHED)     --> its primary

A twin is cached only while its primary is: whatever takes a primary out of the index takes its twins along, so
that no group keeps what was evicted, barred or overwritten in another. A twin alone may go at any time.
`prefix_map` calls `leave`, `leave_all` and `clear`, `group_tables` the rest.
"""
import cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.string cimport memset

from aioengine.fastcore.block_hash cimport CHECKED
from aioengine.fastcore.block_pool cimport HASHED, NULL_BLOCK, PREWARMED


@cython.final
cdef class Twins:
    def __cinit__(self, BlockPool pool not None, int32_t num_columns):
        self.pool, self.num_columns = pool, num_columns
        self.twin_of = <int32_t*> PyMem_Calloc(<size_t> pool.num_blocks * num_columns, sizeof(int32_t))
        self.primary_of = <int32_t*> PyMem_Calloc(pool.num_blocks, sizeof(int32_t))
        if self.twin_of == NULL or self.primary_of == NULL:
            raise MemoryError()

    def __dealloc__(self):
        PyMem_Free(self.twin_of)
        PyMem_Free(self.primary_of)

    cdef int32_t of(self, int32_t primary, int32_t group) noexcept:
        """The block of a group (1, 2, ...) that ends where its primary does; NULL_BLOCK if none is cached."""
        return self.twin_of[<Py_ssize_t> primary * self.num_columns + group - 1]

    cdef bint has(self, int32_t block_id) noexcept:
        """Whether a block is cached as a twin."""
        return self.primary_of[block_id] != NULL_BLOCK

    cdef int join(self, int32_t block_id, int32_t primary, int32_t group, bint prewarms) except -1:
        """Caches a full block of a group; its primary is indexed and has no twin in that group."""
        if CHECKED:
            assert not self.pool.blocks[block_id].flags & HASHED and self.pool.blocks[primary].flags & HASHED
            assert self.of(primary, group) == NULL_BLOCK and not self.has(primary)
        self.twin_of[<Py_ssize_t> primary * self.num_columns + group - 1] = block_id
        self.primary_of[block_id] = primary
        self.pool.blocks[block_id].flags = HASHED | (PREWARMED if prewarms else 0)
        self.num_entries += 1
        if self.pool.order is not None:
            self.pool.order.beside(block_id, primary)
        return 0

    cdef int32_t leave(self, int32_t block_id) except -1:
        """Forgets a twin; without owners it is the next victim from now on. Returns 1."""
        cdef int32_t* column = self.twin_of + <Py_ssize_t> self.primary_of[block_id] * self.num_columns
        while column[0] != block_id:
            column += 1
        column[0] = self.primary_of[block_id] = NULL_BLOCK
        self.pool.blocks[block_id].flags = 0
        self.num_entries -= 1
        if self.pool.order is not None:
            self.pool.order.leave(block_id)
        if self.pool.blocks[block_id].num_refs == 0:
            self.pool.relist(block_id)
        return 1

    cdef int leave_all(self, int32_t primary) except -1:
        """Forgets all twins of a block that leaves the index."""
        cdef int32_t* column = self.twin_of + <Py_ssize_t> primary * self.num_columns
        cdef int32_t i
        for i in range(self.num_columns):
            if column[i] != NULL_BLOCK:
                self.leave(column[i])
        return 0

    cdef int clear(self) except -1:
        """Forgets everything; the caller clears the flags."""
        memset(self.twin_of, 0, <size_t> self.pool.num_blocks * self.num_columns * sizeof(int32_t))
        memset(self.primary_of, 0, self.pool.num_blocks * sizeof(int32_t))
        self.num_entries = 0
        return 0

    @property
    def num_bytes(self):
        """Memory of columns and links."""
        return <size_t> self.pool.num_blocks * (self.num_columns + 1) * sizeof(int32_t)

    def twin(self, int32_t primary, int32_t group):
        """The block of a group (1, 2, ...) that hangs on an indexed block of the first group; 0 = none."""
        self.pool.check_id(primary)
        if not 1 <= group <= self.num_columns:
            raise IndexError(f"group {group} is not between 1 and {self.num_columns}")
        return self.of(primary, group)

    def check(self):
        """Both directions agree, every twin is flagged, and every primary is flagged and no twin."""
        cdef int32_t i, column
        cdef int32_t hung = 0
        cdef int32_t linked = 0
        for i in range(1, self.pool.num_blocks):
            linked += self.has(i)
            for column in range(1, self.num_columns + 1):
                if self.of(i, column) != NULL_BLOCK:
                    hung += 1
                    assert self.primary_of[self.of(i, column)] == i, f"twin {self.of(i, column)} is not {i}'s"
                    assert self.pool.blocks[self.of(i, column)].flags & HASHED, f"a twin of {i} is not flagged"
                    assert self.pool.blocks[i].flags & HASHED and not self.has(i), f"block {i} has twins"
        assert hung == linked == self.num_entries, f"{hung}, {linked}, {self.num_entries} twins"
