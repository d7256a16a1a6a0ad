# What is left of the step being made: tokens for everybody, and time for prompts.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.limits cimport Limits, clip_tokens
from aioengine.fastcore.request cimport Request
from aioengine.fastcore.step_cost cimport StepCost, is_decode


cdef class StepBudget:
    cdef Limits limits
    cdef StepCost cost                # None: no target
    cdef int32_t left                 # tokens
    cdef int32_t threshold            # most tokens of one request, 0 = all
    cdef int32_t num_chunks           # running requests with more than one token

    cdef int begin(self, list running, Py_ssize_t num_requests) except -1
    cdef int pace(self, list running) except -1
    cdef int32_t newcomer_tokens(self, int32_t num_left, int32_t start) noexcept


cdef inline int64_t tokens_left(StepBudget self, Request request) noexcept:
    """Tokens that a running request could compute now: known + in flight - computed (C9)."""
    cdef int64_t known = <int64_t> request.num_tokens + request.num_in_flight
    # The tokens in flight end it: another one would be one too many (C13, INV-29). If drafts among them are rejected,
    # it goes on when that is known.
    if request.num_in_flight > 0 and (
        known - request.num_prompt_tokens >= request.max_tokens or known >= self.limits.max_total
    ):
        return 0
    return known - request.num_computed_tokens


cdef inline int32_t more_tokens(StepBudget self, Request request, int32_t had) noexcept:
    """Tokens that a running request gets beside those that it has in this step, by what is left of it."""
    cdef int32_t num_new = clip_tokens(
        tokens_left(self, request), self.threshold, self.left + had, request.num_computed_tokens,
        self.limits.max_model_len,
    )
    if self.cost is None or is_decode(request, num_new):
        return num_new - had
    return self.cost.fit(request.num_computed_tokens + had, num_new - had)


cdef inline int give(StepBudget self, Request request, int32_t had, int32_t num_new) noexcept:
    """Books tokens of this step for a running request that has the blocks for them."""
    if self.cost is not None and not is_decode(request, had + num_new):
        self.cost.spend(request.num_computed_tokens + had, num_new)
    request.step_tokens = had + num_new
    self.left -= num_new
    self.num_chunks += had + num_new > 1
    return 0
