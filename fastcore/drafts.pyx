"""Drafters: what they guess is verified in the step that they guess it for, so a bad guess costs time alone.

The scheduler asks once per step and request, after everybody has got what he needs, and packs the drafts behind the
one token that the request must compute. With steps in flight the text that the drafts continue is not known yet:
a guess begins behind what is known, and what the steps in flight are expected to bring is taken off it.
"""
import cython

from aioengine.fastcore.draft_record cimport MAX_DRAFTS, DraftRecord

cdef enum:
    MAX_LENGTH = 16
    MAX_INDEXED = 8192      # n-grams in one step: long prompts are indexed over some, one request after the other
    ALWAYS_INDEXED = MAX_DRAFTS + 1     # tokens that a step brings: who lacks no more than those does not wait


cdef class Drafter:
    """Base of drafters in Python: `propose` is to be overridden."""

    cdef int begin_step(self) noexcept:
        """Before the first request of a step."""
        return 0

    cdef int32_t draft(self, Request request, int32_t most) except -1:
        """Writes up to `most` drafts to the request's record; returns how many."""
        cdef int32_t count = 0
        for token_id in self.propose(request, most):
            if count == most:
                break
            request.drafts.ids[count] = token_id
            if request.drafts.ids[count] < 0:
                raise ValueError(f"{self!r} drafted the token id {token_id} for {request!r}")
            count += 1
        return count

    def propose(self, request, most):
        raise NotImplementedError


@cython.final
cdef class NgramDrafter(Drafter):
    def __cinit__(self, *, int32_t most_tokens, int32_t least_tokens=1):
        if not 1 <= least_tokens <= most_tokens <= MAX_LENGTH:
            raise ValueError(
                f"least_tokens={least_tokens} and most_tokens={most_tokens} must lie between 1 and {MAX_LENGTH}, "
                "the first not above the second"
            )
        self.longest, self.shortest = most_tokens, least_tokens

    cdef int begin_step(self) noexcept:
        self.most_indexed = MAX_INDEXED // (self.longest - self.shortest + 1)
        return 0

    cdef int32_t draft(self, Request request, int32_t most) except -1:
        cdef DraftRecord record = request.drafts
        cdef const int32_t* tokens = request.tokens
        cdef int32_t start, at, i, s
        if request.num_tokens - record.num_indexed <= ALWAYS_INDEXED:
            record.index(tokens, request.num_tokens, self.shortest, self.longest, ALWAYS_INDEXED)
        if record.num_indexed < request.num_tokens and self.most_indexed > 0:
            self.most_indexed -= record.index(
                tokens, request.num_tokens, self.shortest, self.longest, self.most_indexed
            )
        if record.num_indexed < request.num_tokens:
            return 0
        start = record.find(tokens, request.num_tokens, self.shortest, self.longest)
        if start == 0:
            return 0
        at = start  # what is expected behind the known tokens: those from here on, round and round
        for s in range(record.num_flying):
            for i in range(record.flying_counts[s]):
                if record.flying_ids[s][i] != tokens[at]:
                    break
                at = following(at, start, request.num_tokens)
            at = following(at, start, request.num_tokens)
        for i in range(most):
            record.ids[i] = tokens[at]
            at = following(at, start, request.num_tokens)
        return most


cdef inline int32_t following(int32_t at, int32_t start, int32_t end) noexcept:
    """The token after `at` in a text that repeats from `start` on."""
    return at + 1 if at + 1 < end else start


LIMIT = MAX_DRAFTS
