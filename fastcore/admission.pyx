"""The gates of admission: who may not start yet although a row and tokens are left.

Owns the limits, the ledger of promised blocks, and the survey of the running requests on which both rest; the
survey is made in steps that could admit somebody, and only if a limit needs it. The scheduler asks.

    pool   | owned | reserved: what running    | promised: what other | watermark, if | for a newcomer:
           |       | prompts still need, if the | code asked to keep   | anybody runs  | all its tokens,
           |       | full sequence must fit     |                      |               | or its chunk

Running requests pass no gate: they take any free block (A15). A request that is alone finds nothing reserved
and no watermark, so whatever fits the pool starts (INV-35).
"""
import cython


@cython.final
cdef class Admission:
    def __cinit__(
        self, KVManager kv, *, bint full_sequence_must_fit, double watermark, int32_t max_partial,
        int32_t max_long_partial, int32_t long_tokens,
    ):
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark={watermark} must be at least 0 and below 1")
        if min(max_partial, max_long_partial) < 0:
            raise ValueError(
                f"max_num_partial_prefills={max_partial} and max_long_partial_prefills={max_long_partial} "
                "must be at least 0"
            )
        if 0 < max_partial < max_long_partial:
            raise ValueError(
                f"max_long_partial_prefills={max_long_partial} is above max_num_partial_prefills={max_partial}"
            )
        if max_long_partial > 0 and long_tokens < 1:
            raise ValueError(
                f"max_long_partial_prefills={max_long_partial} needs long_prefill_token_threshold: "
                "it says what is long"
            )
        self.kv = kv
        self.full_sequence_must_fit = full_sequence_must_fit
        self.watermark_blocks = <int32_t> (watermark * kv.pool.num_blocks)
        self.max_partial, self.max_long_partial = max_partial, max_long_partial
        self.long_tokens = long_tokens
        self.needs_survey = full_sequence_must_fit or max_partial > 0 or max_long_partial > 0
        self.promises = {}

    def promise(self, object key not None, int64_t num_blocks):
        """Keeps blocks from newcomers under a key, in place of what it kept before; 0 keeps nothing."""
        cdef int64_t before = self.promises.get(key, 0)
        cdef int64_t total = self.num_promised - before + num_blocks
        if num_blocks < 0 or total > self.kv.pool.num_blocks - 1:
            raise ValueError(
                f"num_blocks={num_blocks} cannot be kept: {self.num_promised - before} are promised to others, "
                f"the pool has {self.kv.pool.num_blocks - 1}"
            )
        if num_blocks:
            self.promises[key] = num_blocks
        else:
            self.promises.pop(key, None)
        self.num_promised = total

    cdef int survey(self, list running) except -1:
        """Counts what the running requests still need behind the tokens they have in this step."""
        self.any_running = len(running) > 0
        self.num_partial = self.num_long = 0
        self.num_reserved = 0
        if self.needs_survey:
            for request in running:
                self.count(<Request> request)
        return 0

    cdef int count(self, Request request) noexcept:
        """Adds a running request to the survey."""
        cdef int32_t left = request.num_tokens - request.num_computed_tokens
        self.any_running = True
        if left > request.step_tokens:
            self.num_partial += 1
            if left > self.long_tokens:
                self.num_long += 1
            self.num_reserved += self.reserved_for(request)
        return 0

    cdef int64_t reserved_for(self, Request request) noexcept:
        """Blocks that a running request will need for the tokens known and does not have."""
        if not self.full_sequence_must_fit or (
            request.num_tokens - request.num_computed_tokens <= request.step_tokens
        ):
            return 0
        return self.kv.num_left(request)

    cdef bint is_partial_blocked(self, int32_t num_left, int32_t num_new) noexcept:
        """Whether a newcomer would be one prompt too many that is not finished in this step (C12)."""
        if num_new >= num_left:
            return False
        if self.max_partial > 0 and self.num_partial >= self.max_partial:
            return True
        return 0 < self.max_long_partial <= self.num_long and num_left > self.long_tokens

    cdef int64_t num_lacking(self, Request request, int32_t num_hits, int32_t num_tokens) noexcept:
        """Blocks missing before a newcomer may take those of `num_tokens` positions; <= 0: none (A14-A16)."""
        cdef int64_t keep = self.num_reserved + self.num_promised
        if self.any_running:
            keep += self.watermark_blocks
        if self.full_sequence_must_fit and num_tokens < request.num_tokens:
            num_tokens = request.num_tokens
        return keep + self.kv.num_lacking(request, num_hits, num_tokens)
