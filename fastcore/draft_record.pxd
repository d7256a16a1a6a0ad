# What is to be remembered of a request's drafts: those of steps in flight, what came of them, and where its n-grams are.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef enum:
    MAX_DRAFTS = 16         # of a row in one step
    MAX_FLYING = 4          # as many steps may be in flight


cdef class DraftRecord:
    # Of the step being made.
    cdef int32_t count
    cdef int32_t[MAX_DRAFTS] ids

    # Of the steps in flight that sample for the request, oldest first.
    cdef int32_t num_flying
    cdef int32_t[MAX_FLYING] flying_counts
    cdef int32_t[MAX_FLYING][MAX_DRAFTS] flying_ids
    cdef int32_t num_unsure         # drafts among them

    # What they were worth lately.
    cdef int32_t most               # drafts of the next step at most
    cdef int32_t pause              # outputs to wait after all were in vain, the next time
    cdef int32_t resume_at          # tokens from which on it may have drafts again

    # Where the n-grams of its tokens end (open addressing): length - 1 in the top four bits, then the index of the
    # token behind it; 0 = empty.
    cdef uint32_t* slots
    cdef uint32_t num_slots
    cdef uint32_t num_used
    cdef int32_t num_indexed        # n-grams that end before this token are in it

    cdef int launch(self) except -1
    cdef int settle(self, int32_t num_rejected, int32_t num_tokens, int32_t most) noexcept
    cdef int forget_flying(self) noexcept
    cdef int32_t index(
        self, const int32_t* tokens, int32_t num_tokens, int32_t shortest, int32_t longest, int32_t most
    ) except -1
    cdef int32_t find(self, const int32_t* tokens, int32_t num_tokens, int32_t shortest, int32_t longest) noexcept
    cdef int begin_index(self, int64_t num_ngrams) except -1
    cdef int put(self, const int32_t* tokens, uint64_t hashed, int32_t length, int32_t end) noexcept
    cdef uint32_t* slot_of(self, const int32_t* tokens, uint64_t hashed, int32_t length, int32_t end) noexcept
