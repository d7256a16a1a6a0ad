# One step packed into int32 words: the plan that the runner gets and the ring of buffers it lives in.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.request cimport Request


cdef struct RowRecord:      # what update() needs to know about a row of a step in flight
    int32_t num_computed    # before the step
    int32_t num_new
    int32_t sample_index    # of the first sample, -1 = none
    int32_t num_drafts      # as many samples more
    int32_t row
    int32_t num_rejected    # in that row, as far as was known
    int32_t epoch           # the request's num_preemptions when the step was made


cdef class StepPlan:
    cdef readonly int64_t step_id
    cdef readonly int32_t num_rows
    cdef readonly int32_t num_tokens
    cdef readonly int32_t num_samples
    cdef readonly int32_t num_copies
    cdef readonly int32_t num_drafts
    cdef readonly list requests
    cdef readonly list sample_requests
    cdef readonly list joined
    cdef readonly list left_rows
    cdef readonly list dropped_rows
    cdef readonly list loads
    cdef list loaders                # whose they are
    cdef readonly object buffer
    cdef const RowRecord* records    # in the ring, valid until the plan is updated

    cdef const RowRecord* record(self, Py_ssize_t index) except NULL


cdef class StepBuffer:
    cdef readonly object ring            # int32 [num_slots, slot_words]
    cdef int32_t[:, ::1] words
    cdef RowRecord* records
    cdef readonly int32_t num_slots
    cdef readonly int32_t max_rows
    cdef readonly int32_t row_stride      # rows of the device's block table per group
    cdef readonly int32_t max_tokens
    cdef readonly int32_t max_join_blocks
    cdef readonly int32_t max_block_updates

    cdef StepPlan pack(self, int64_t step_id, list requests, list left_rows, const int32_t* num_rejected)
