# How long steps take, learned from those that ran; how many prompt tokens fit beside the decodes of a step.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.request cimport Request


cdef enum:
    MAX_FEATURES = 3
    NUM_FACTS = 8         # more than steps can be in flight


cdef struct StepFacts:    # what a step's time is explained by
    int64_t step_id
    double num_decodes
    double context        # tokens whose KV the decodes read
    double num_prompt     # tokens of prompt chunks
    double num_pairs      # of a prompt token and one that it attends to


cdef class DecayedFit:
    cdef int num_features
    cdef double keep
    cdef double products[MAX_FEATURES][MAX_FEATURES]
    cdef double targets[MAX_FEATURES]
    cdef double weights[MAX_FEATURES]

    cdef double predict(self, const double* features) noexcept
    cdef int learn(self, const double* features, double value, double scale) except -1


cdef class StepCost:
    cdef readonly double target_s
    cdef readonly int32_t min_prompt_tokens
    cdef DecayedFit decodes           # seconds = base + a * num_decodes + b * context
    cdef DecayedFit prompts           # seconds beyond that = c * num_prompt + d * num_pairs
    cdef double squared_error         # relative, decayed
    cdef double largest_prompt        # tokens of prompts in the largest step seen
    cdef readonly int64_t num_observed
    cdef StepFacts facts[NUM_FACTS]

    # The step being made.
    cdef bint is_paced                # somebody waits for a token
    cdef double left_s                # for prompt tokens
    cdef int64_t floor_left           # prompt tokens that go whatever they cost
    cdef int64_t tokens_left          # prompt tokens at most

    cdef int begin(self, int64_t num_decodes, int64_t context, int64_t max_tokens) except -1
    cdef int32_t fit(self, int32_t num_computed, int32_t num_tokens) noexcept
    cdef int spend(self, int32_t num_computed, int32_t num_tokens) noexcept
    cdef int note(self, int64_t step_id, list requests) except -1
    cdef double margin(self) noexcept
    cdef double predict_s(self, StepFacts* facts) noexcept


cdef inline bint is_decode(Request request, int64_t num_tokens) noexcept:
    """Whether these tokens are the next one of an answer, rather than a prompt's or recomputed ones."""
    return num_tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens
