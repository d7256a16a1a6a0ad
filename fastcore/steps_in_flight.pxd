# The steps that were launched and not updated yet, and what must wait for them.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.kv_manager cimport KVManager
from aioengine.fastcore.request cimport Request
from aioengine.fastcore.rows cimport RowPool
from aioengine.fastcore.step_buffer cimport RowRecord, StepPlan


cdef class StepsInFlight:
    cdef KVManager kv
    cdef RowPool rows
    cdef list plans                   # oldest first
    cdef list deferred                # finished or preempted, but a step in flight may still use their blocks
    cdef int64_t last_step
    cdef int64_t last_updated

    cdef const RowRecord* take_oldest(self, StepPlan plan, const int32_t[::1] token_ids) except NULL
    cdef int forget_all(self) except -1
    cdef bint may_write(self, Request request) noexcept
    cdef int give_back(self, Request request) except -1
    cdef int leave_row(self, Request request) except -1
    cdef int drain(self) except -1
    cdef int num_samples_of(self, Request request) except -1
