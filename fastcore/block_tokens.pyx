"""The token ids of cached blocks, so that a block can be found that only begins like the one looked for.

A hash tells whole blocks apart and nothing else; how much of a block is equal takes its tokens. Owns an array of
them, valid while a block is in the prefix map; `kv_manager` fills it when it indexes a block, and compares.
"""
import cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.string cimport memcpy


@cython.final
cdef class BlockTokens:
    def __cinit__(self, int32_t num_blocks, int32_t block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ids = <int32_t*> PyMem_Calloc(<size_t> num_blocks * block_size, sizeof(int32_t))
        if self.ids == NULL:
            raise MemoryError()

    def __dealloc__(self):
        PyMem_Free(self.ids)

    @property
    def num_bytes(self):
        """Memory of the ids."""
        return <size_t> self.num_blocks * self.block_size * sizeof(int32_t)

    cdef const int32_t* of(self, int32_t block_id) noexcept:
        return self.ids + <Py_ssize_t> block_id * self.block_size

    cdef int keep(self, int32_t block_id, const int32_t* tokens) noexcept:
        """Stores the tokens of a full block."""
        memcpy(self.ids + <Py_ssize_t> block_id * self.block_size, tokens, self.block_size * sizeof(int32_t))
        return 0

    cdef int32_t num_common(self, int32_t block_id, const int32_t* tokens, int32_t most) noexcept:
        """How many tokens a block and a sequence have in common from the start, up to `most` of them."""
        cdef const int32_t* own = self.of(block_id)
        cdef int32_t count = 0
        while count < most and own[count] == tokens[count]:
            count += 1
        return count
