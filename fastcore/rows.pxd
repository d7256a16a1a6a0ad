# Which rows of the persistent batch are free.
from libc.stdint cimport int32_t, int64_t


cdef class RowPool:
    cdef readonly int32_t num_rows
    cdef readonly int32_t num_free
    cdef readonly int32_t num_fenced
    cdef int32_t* free_rows     # a stack: the row given back last is taken first
    cdef int32_t* fenced_rows
    cdef int64_t* fences        # by row: the step after whose update it is free
    cdef int32_t* num_rejected  # by row: drafts rejected since the beginning (wraps)
    cdef list left              # given back since the last plan

    cdef int32_t take(self) except -1
    cdef int leave(self, int32_t row, int64_t fence, int64_t last_updated) except -1
    cdef int drain(self, int64_t last_updated) except -1
    cdef int free_row(self, int32_t row) except -1
    cdef list take_left(self)
