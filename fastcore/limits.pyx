"""What a step and the requests in it may have: the numbers of the configuration, checked.

Owns caps (C6), budgets (C7), the long-prefill threshold (C11) and the order in which they cut a request's
tokens (C10). The scheduler asks; only the active cap changes while it runs.
"""
import cython


cpdef int32_t clip_tokens(
    int64_t num_tokens, int32_t threshold, int32_t token_budget, int32_t num_computed, int32_t max_model_len
) noexcept:
    """How many of `num_tokens` new tokens a request gets; the order of the limits is that of checklist C10.

    As long as no drafts are appended to a step, a scheduled token is a token of input, and the smaller of the
    two budgets (C7) is the only one that can bind: it is `token_budget`.
    """
    if 0 < threshold < num_tokens:
        num_tokens = threshold
    if num_tokens > token_budget:
        num_tokens = token_budget
    if num_tokens > max_model_len - num_computed:
        num_tokens = max_model_len - num_computed
    return <int32_t> num_tokens


@cython.final
cdef class Limits:
    def __cinit__(
        self, *, int32_t max_num_seqs, int32_t max_num_batched_tokens, int32_t max_model_len,
        int32_t max_num_active_seqs, int32_t max_num_scheduled_tokens, bint enable_chunked_prefill,
        int32_t long_prefill_token_threshold, bint adaptive_long_prefill_threshold, int32_t max_in_flight,
        int64_t pool_tokens,
    ):
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_num_scheduled_tokens = max_num_scheduled_tokens or max_num_batched_tokens
        self.max_model_len, self.max_in_flight = max_model_len, max_in_flight
        self.long_prefill_threshold = long_prefill_token_threshold
        self.adaptive_threshold = adaptive_long_prefill_threshold
        self.chunked_prefill = enable_chunked_prefill
        # A token needs no KV before the next step reads it, so one more fits than the pool has slots. With
        # this limit a request alone always has room for its next token.
        self.max_total = min(<int64_t> max_model_len, pool_tokens + 1)
        self.check()
        self.max_num_active_seqs = max_num_active_seqs or max_num_seqs

    cdef int check(self) except -1:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len) < 1 or (
            self.long_prefill_threshold < 0
        ):
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs}, max_num_batched_tokens={self.max_num_batched_tokens} and "
                f"max_model_len={self.max_model_len} must be at least 1, "
                f"long_prefill_token_threshold={self.long_prefill_threshold} at least 0"
            )
        if not 1 <= self.max_num_scheduled_tokens <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_scheduled_tokens={self.max_num_scheduled_tokens} must lie between 1 and "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )
        if not 1 <= self.max_in_flight <= 4:
            raise ValueError(f"max_in_flight={self.max_in_flight} must lie between 1 and 4")
        if not self.chunked_prefill and (
            self.max_num_scheduled_tokens < self.max_model_len or self.long_prefill_threshold > 0
        ):
            raise ValueError(
                f"without chunked prefill, max_num_scheduled_tokens={self.max_num_scheduled_tokens} must reach "
                f"max_model_len={self.max_model_len} and long_prefill_token_threshold must be 0"
            )
        return 0

    @property
    def max_num_active_seqs(self):
        return self.max_active

    @max_num_active_seqs.setter
    def max_num_active_seqs(self, int32_t value):
        if not 1 <= value <= self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs={value} must lie between 1 and max_num_seqs={self.max_num_seqs}"
            )
        self.max_active = value

    cdef int32_t threshold_for(self, Py_ssize_t num_requests) noexcept:
        """Most tokens of one request in a step, 0 = all; if adaptive, never less than a fair share (C11)."""
        if num_requests <= 1:
            return 0  # a request alone has nobody to make way for (INV-28)
        if self.adaptive_threshold and self.long_prefill_threshold > 0:
            return max(self.long_prefill_threshold, <int32_t> (self.max_num_batched_tokens // num_requests))
        return self.long_prefill_threshold
