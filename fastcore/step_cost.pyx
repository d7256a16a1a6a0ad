"""How long a step takes, learned from the steps that ran; and how many prompt tokens fit beside its decodes.

Owns the model and the budget of the step being made (`--target-itl-ms`). The scheduler asks for every chunk of
a prompt, and the step loop reports each step's time: from the settlement before to its own, which is what a
reader waits between two tokens.

    seconds = base + a * decodes + b * context of the decodes        learned from steps without prompts
              + c * prompt tokens + d * pairs (token, token before)  learned from what prompts add to that

Both parts are least squares over the past with exponential forgetting, without negative coefficients, each
step weighted by its own length, so that relative errors count. Why two fits and not one: in a step of decodes
alone the tokens equal the rows, and a common fit would forget what a prompt token costs while only decodes
run. Each part forgets only as it sees new steps of its kind. A curve that is not linear (weights read once,
whatever the number of tokens) is followed where the engine works: a step that took longer than predicted makes
the next chunk smaller.

A chunk is as large as the time left allows, by the root of c*n + d*(n*context + n*n/2) = time left, with a
margin of one standard error; at most twice as many prompt tokens as in any step seen, so that a model that
knows little cannot promise much; at least `min_prompt_tokens` in a step, so that prompts move on even if the
decodes alone take longer than the target. Decodes are never held back. Where nobody decodes, nobody waits for
a next token, and prompts take the whole step.
"""
import cython

from libc.math cimport sqrt
from libc.string cimport memset

from aioengine.fastcore.request cimport Request


cdef enum:
    NUM_SWEEPS = 24         # of coordinate descent, from the last solution: a fraction of a microsecond

cdef double KEEP_DECODES = 0.99     # of the past per step: the last 100 steps of decodes count most
cdef double KEEP_PROMPTS = 0.95
cdef double KEEP_ERROR = 0.98
cdef double MAX_MARGIN = 0.3
cdef double MAX_SURPRISE = 4.0      # times the prediction: what takes longer is a hiccup and counts as this
cdef int64_t NUM_TRUSTED = 16       # steps after which errors count and hiccups are told from news


@cython.final
cdef class DecayedFit:
    """Non-negative least squares with exponential forgetting, for at most three features."""

    def __cinit__(self, int num_features, double keep):
        if not 1 <= num_features <= MAX_FEATURES or not 0 < keep <= 1:
            raise ValueError(
                f"num_features={num_features} must lie between 1 and 3, keep={keep} between 0 and 1"
            )
        self.num_features, self.keep = num_features, keep

    cdef double predict(self, const double* features) noexcept:
        cdef double total = 0.0
        cdef int i
        for i in range(self.num_features):
            total += self.weights[i] * features[i]
        return total

    cdef int learn(self, const double* features, double value, double scale) except -1:
        """Adds one observation, whose error counts relative to `scale`, and solves again."""
        cdef double importance = 1.0 / (scale * scale)
        cdef double gradient
        cdef int i, k, sweep
        for i in range(self.num_features):
            for k in range(self.num_features):
                self.products[i][k] = self.keep * self.products[i][k] + importance * features[i] * features[k]
            self.targets[i] = self.keep * self.targets[i] + importance * features[i] * value
        for sweep in range(NUM_SWEEPS):
            for i in range(self.num_features):
                if self.products[i][i] > 0:
                    gradient = self.targets[i]
                    for k in range(self.num_features):
                        gradient -= self.products[i][k] * self.weights[k]
                    self.weights[i] = max(0.0, self.weights[i] + gradient / self.products[i][i])
        return 0

    def observe(self, features, double value):
        """Adds one observation."""
        cdef double[MAX_FEATURES] row
        cdef int i
        for i in range(self.num_features):
            row[i] = features[i]
        self.learn(row, value, value)

    def coefficients(self):
        """One per feature."""
        return [self.weights[i] for i in range(self.num_features)]


@cython.final
cdef class StepCost:
    def __cinit__(self, double target_s, int32_t min_prompt_tokens):
        if not target_s > 0 or min_prompt_tokens < 1:
            raise ValueError(
                f"target_s={target_s} must be above 0, min_prompt_tokens={min_prompt_tokens} at least 1"
            )
        self.target_s, self.min_prompt_tokens = target_s, min_prompt_tokens
        self.decodes, self.prompts = DecayedFit(3, KEEP_DECODES), DecayedFit(2, KEEP_PROMPTS)
        memset(self.facts, 0, sizeof(self.facts))

    # ---- the budget of a step ----

    cdef int begin(self, int64_t num_decodes, int64_t context, int64_t max_tokens) except -1:
        """Starts a step of so many decodes; `max_tokens` are left in it for prompts."""
        cdef double[MAX_FEATURES] features
        features[0], features[1], features[2] = 1.0, <double> num_decodes, <double> context
        self.is_paced = num_decodes > 0
        self.left_s = self.target_s * (1.0 - self.margin()) - self.decodes.predict(features)
        self.floor_left = self.min_prompt_tokens
        self.tokens_left = max_tokens
        if self.num_observed:
            self.tokens_left = min(max_tokens, <int64_t> max(2 * self.largest_prompt, self.min_prompt_tokens))
        elif self.is_paced:
            self.tokens_left = min(max_tokens, self.min_prompt_tokens)
        return 0

    cdef int32_t fit(self, int32_t num_computed, int32_t num_tokens) noexcept:
        """How many of a prompt's next tokens go into this step."""
        cdef double per_token, curve, root
        cdef int64_t most = 0
        if not self.is_paced:
            return num_tokens
        per_token = self.prompts.weights[0] + self.prompts.weights[1] * num_computed
        curve = self.prompts.weights[1]
        if self.left_s > 0:
            # The positive root of curve / 2 * n * n + per_token * n = left_s, in a form that allows curve = 0.
            root = per_token + sqrt(per_token * per_token + 2 * curve * self.left_s)
            most = num_tokens if 2 * self.left_s >= root * num_tokens else <int64_t> (2 * self.left_s / root)
        return <int32_t> min(<int64_t> num_tokens, max(most, self.floor_left), self.tokens_left)

    cdef int spend(self, int32_t num_computed, int32_t num_tokens) noexcept:
        """Books a chunk of a prompt."""
        cdef double[MAX_FEATURES] features
        features[0], features[1] = num_tokens, pairs_of(num_computed, num_tokens)
        self.left_s -= self.prompts.predict(features)
        self.floor_left -= num_tokens
        self.tokens_left -= num_tokens
        return 0

    cdef double margin(self) noexcept:
        return min(MAX_MARGIN, sqrt(self.squared_error))

    # ---- learning ----

    cdef int note(self, int64_t step_id, list requests) except -1:
        """Remembers what a step consists of, until its time is known."""
        cdef StepFacts* facts = &self.facts[step_id % NUM_FACTS]
        cdef Request request
        memset(facts, 0, sizeof(StepFacts))
        facts.step_id = step_id
        for request in requests:
            if is_decode(request, request.step_tokens):
                facts.num_decodes += 1
                facts.context += request.num_computed_tokens + 1
            else:
                facts.num_prompt += request.step_tokens
                facts.num_pairs += pairs_of(request.num_computed_tokens, request.step_tokens)
        return 0

    cdef double predict_s(self, StepFacts* facts) noexcept:
        cdef double[MAX_FEATURES] steady
        cdef double[MAX_FEATURES] added
        steady[0], steady[1], steady[2] = 1.0, facts.num_decodes, facts.context
        added[0], added[1] = facts.num_prompt, facts.num_pairs
        return self.decodes.predict(steady) + self.prompts.predict(added)

    def observe(self, int64_t step_id, double seconds):
        """Learns how long a step took; ignores one that is unknown or took no time."""
        cdef StepFacts* facts = &self.facts[step_id % NUM_FACTS]
        cdef double[MAX_FEATURES] steady
        cdef double[MAX_FEATURES] added
        cdef double predicted, error, rest
        if facts.step_id != step_id or not 0 < seconds < 1e6:
            return
        facts.step_id = 0
        predicted = self.predict_s(facts)
        if self.num_observed >= NUM_TRUSTED:
            if seconds > MAX_SURPRISE * predicted > 0:
                seconds = MAX_SURPRISE * predicted
            error = (seconds - predicted) / seconds
            self.squared_error = KEEP_ERROR * self.squared_error + (1 - KEEP_ERROR) * min(error * error, 1.0)
        self.num_observed += 1
        steady[0], steady[1], steady[2] = 1.0, facts.num_decodes, facts.context
        # A step that was shorter in all than its decodes should have been says that these are overrated.
        if facts.num_prompt == 0 or (facts.num_decodes > 0 and seconds < self.decodes.predict(steady)):
            self.decodes.learn(steady, seconds, seconds)
        if facts.num_prompt > 0:
            added[0], added[1] = facts.num_prompt, facts.num_pairs
            rest = max(0.0, seconds - self.decodes.predict(steady))
            self.prompts.learn(added, rest, seconds)
            self.largest_prompt = max(self.largest_prompt, facts.num_prompt)

    def stats(self):
        """What was learned, in seconds per unit."""
        return {
            "target_s": self.target_s,
            "base_s": self.decodes.weights[0],
            "per_decode_s": self.decodes.weights[1],
            "per_context_token_s": self.decodes.weights[2],
            "per_prompt_token_s": self.prompts.weights[0],
            "per_pair_s": self.prompts.weights[1],
            "relative_error": sqrt(self.squared_error),
            "num_observed": float(self.num_observed),
        }


cdef inline double pairs_of(double num_computed, double num_tokens) noexcept:
    """How many tokens those of a chunk attend to, all together."""
    return num_tokens * (num_computed + 0.5 * (num_tokens + 1))
