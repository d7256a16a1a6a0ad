# What the groups behind the first one have cached: hung on the first group's blocks.
from libc.stdint cimport int32_t

from aioengine.fastcore.block_pool cimport BlockPool


cdef class Twins:
    cdef BlockPool pool
    cdef int32_t* twin_of        # num_blocks x num_columns; NULL_BLOCK = none
    cdef int32_t* primary_of     # of each block; NULL_BLOCK = it is nobody's twin
    cdef readonly int32_t num_columns
    cdef readonly int32_t num_entries

    cdef int32_t of(self, int32_t primary, int32_t group) noexcept
    cdef bint has(self, int32_t block_id) noexcept
    cdef int join(self, int32_t block_id, int32_t primary, int32_t group, bint prewarms) except -1
    cdef int32_t leave(self, int32_t block_id) except -1
    cdef int leave_all(self, int32_t primary) except -1
    cdef int clear(self) except -1
