"""The rows of the persistent batch: who may get one, and when one that was left is free again.

A row holds the state of one request on the device. A step in flight writes its sampled token there, so a
row is fenced until that step was updated. The scheduler takes and leaves rows, nobody else.
"""
import cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free


@cython.final
cdef class RowPool:
    def __cinit__(self, int32_t num_rows):
        self.num_rows = self.num_free = num_rows
        self.free_rows = <int32_t*> PyMem_Calloc(num_rows, sizeof(int32_t))
        self.fenced_rows = <int32_t*> PyMem_Calloc(num_rows, sizeof(int32_t))
        self.fences = <int64_t*> PyMem_Calloc(num_rows, sizeof(int64_t))
        self.num_rejected = <int32_t*> PyMem_Calloc(num_rows, sizeof(int32_t))
        if self.free_rows == NULL or self.fenced_rows == NULL or self.fences == NULL or self.num_rejected == NULL:
            raise MemoryError()
        cdef int32_t row
        for row in range(num_rows):
            self.free_rows[row] = num_rows - 1 - row
        self.left = []

    def __dealloc__(self):
        PyMem_Free(self.free_rows)
        PyMem_Free(self.fenced_rows)
        PyMem_Free(self.fences)
        PyMem_Free(self.num_rejected)

    cdef int32_t take(self) except -1:
        """A free row; the caller saw that there is one."""
        self.num_free -= 1
        return self.free_rows[self.num_free]

    cdef int leave(self, int32_t row, int64_t fence, int64_t last_updated) except -1:
        """Frees a row, at once or after the update of step `fence`, the last one that writes to it."""
        if fence <= last_updated:
            return self.free_row(row)
        self.fences[row] = fence
        self.fenced_rows[self.num_fenced] = row
        self.num_fenced += 1
        return 0

    cdef int drain(self, int64_t last_updated) except -1:
        """Frees the rows whose last step was updated."""
        cdef int32_t i
        cdef int32_t kept = 0
        for i in range(self.num_fenced):
            if self.fences[self.fenced_rows[i]] > last_updated:
                self.fenced_rows[kept] = self.fenced_rows[i]
                kept += 1
            else:
                self.free_row(self.fenced_rows[i])
        self.num_fenced = kept
        return 0

    cdef int free_row(self, int32_t row) except -1:
        self.free_rows[self.num_free] = row
        self.num_free += 1
        self.left.append(row)
        return 0

    cdef list take_left(self):
        """The rows freed since the last call, for the runner to forget."""
        left, self.left = self.left, []
        return left

    def idle_rows(self):
        """Rows that no request has: free or fenced."""
        cdef int32_t i
        free = [self.free_rows[i] for i in range(self.num_free)]
        return free + [self.fenced_rows[i] for i in range(self.num_fenced)]
