# The waiting requests in the order in which they are to be admitted.
from libc.stdint cimport int32_t

from aioengine.fastcore.request cimport Request


cdef class RequestHeap:
    cdef list items

    cdef int push(self, Request request) except -1
    cdef int remove(self, Request request) except -1
    cdef int sift_up(self, Py_ssize_t at) except -1
    cdef int sift_down(self, Py_ssize_t at) except -1


cdef class WaitQueue:
    cdef RequestHeap heap
    cdef RequestHeap long_heap        # prompts of more than long_tokens tokens; empty if that is 0
    cdef int32_t long_tokens

    cdef Request peek(self, bint skip_long)
    cdef int push(self, Request request) except -1
    cdef int remove(self, Request request) except -1


cdef bint before(Request a, Request b) noexcept
