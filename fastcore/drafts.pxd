# Who drafts the tokens that a step is to verify.
from libc.stdint cimport int32_t

from aioengine.fastcore.request cimport Request


cdef class Drafter:
    cdef int begin_step(self) noexcept
    cdef int32_t draft(self, Request request, int32_t most) except -1


cdef class NgramDrafter(Drafter):
    cdef readonly int32_t longest
    cdef readonly int32_t shortest
    cdef int32_t most_indexed       # tokens, in the rest of the step

    cdef int begin_step(self) noexcept
    cdef int32_t draft(self, Request request, int32_t most) except -1
