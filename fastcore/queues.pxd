# The waiting requests in the order in which they are to be admitted.
from aioengine.fastcore.request cimport Request


cdef class WaitQueue:
    cdef list heap
    cdef readonly bint by_priority

    cdef Request peek(self)
    cdef int push(self, Request request) except -1
    cdef int remove(self, Request request) except -1
    cdef bint before(self, Request a, Request b) noexcept
    cdef int sift_up(self, Py_ssize_t at) except -1
    cdef int sift_down(self, Py_ssize_t at) except -1
