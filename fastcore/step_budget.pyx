"""What is left of the step being made: tokens for everybody, and time for prompts.

Owns the token budget, the threshold of one request and, if there is a target, the time (`step_cost`); the
scheduler asks how many tokens a request may have and says how many it got. `limits` has the numbers.
"""
import cython


@cython.final
cdef class StepBudget:
    def __cinit__(self, Limits limits not None, double target_itl_s):
        if not 0 <= target_itl_s < 1e6 or (target_itl_s > 0 and not limits.chunked_prefill):
            raise ValueError(
                f"target_itl_s={target_itl_s} must lie between 0 and 1e6, and be 0 without chunked prefill"
            )
        self.limits = limits
        if target_itl_s > 0:
            self.cost = StepCost(target_itl_s, max(1, limits.max_num_scheduled_tokens // 64))

    cdef int begin(self, list running, Py_ssize_t num_requests) except -1:
        """Starts a step in which so many requests run or would like to."""
        self.left = self.limits.max_num_scheduled_tokens
        self.threshold = self.limits.threshold_for(num_requests)
        self.num_chunks = 0
        return 0 if self.cost is None else self.pace(running)

    cdef int pace(self, list running) except -1:
        """Starts the time budget of a step: what the decodes leave of the target is for prompts.

        Again once victims have left, as if they had never been there: without them, less is spent (INV-31).
        """
        cdef int64_t num_decodes = 0
        cdef int64_t context = 0
        cdef Request request
        for request in running:
            if is_decode(request, tokens_left(self, request)):
                num_decodes += 1
                context += request.num_computed_tokens + 1
        self.cost.begin(num_decodes, context, max(0, self.limits.max_num_scheduled_tokens - num_decodes))
        for request in running:
            if request.step_tokens > 0 and not is_decode(request, request.step_tokens):
                self.cost.spend(request.num_computed_tokens, request.step_tokens)
        return 0

    cdef int32_t newcomer_tokens(self, int32_t num_left, int32_t start) noexcept:
        """Tokens of a request's first chunk, by what is left of this step."""
        cdef int32_t num_new = clip_tokens(
            num_left, self.threshold, self.left, start, self.limits.max_model_len
        )
        return num_new if self.cost is None else self.cost.fit(start, num_new)
