# What a step and the requests in it may have: the numbers of the configuration, checked.
from libc.stdint cimport int32_t, int64_t


cdef class Limits:
    cdef readonly int32_t max_num_seqs
    cdef readonly int32_t max_num_batched_tokens
    cdef readonly int32_t max_num_scheduled_tokens
    cdef readonly int32_t max_model_len
    cdef readonly int32_t max_in_flight
    cdef readonly int64_t max_total       # tokens at which a request ends: context window or pool
    cdef int32_t max_active
    cdef int32_t long_prefill_threshold
    cdef bint adaptive_threshold
    cdef bint chunked_prefill

    cdef int check(self) except -1
    cdef int32_t threshold_for(self, Py_ssize_t num_requests) noexcept


cpdef int32_t clip_tokens(
    int64_t num_tokens, int32_t threshold, int32_t token_budget, int32_t num_computed, int32_t max_model_len
) noexcept
