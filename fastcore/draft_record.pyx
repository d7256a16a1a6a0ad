"""What a request's drafts need to have remembered: the step buffer packs them, the scheduler settles them.

Owns the drafts of steps in flight, how many the request may have next, and an index of its n-grams. Adaptation
(checklist J8): a step whose drafts were all accepted doubles what the next one may have, one whose drafts were cut
halves it, and after drafts that were all in vain at that the request does without for a while, longer each time.

The index has every n-gram of the lengths asked for, with the place where it occurred last. Finding is exact: tokens
are compared, and of the n-grams that a text ends with the longest one that occurred before is taken, where it occurred
last (prompt lookup decoding, Saxena 2023).
"""
import cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.string cimport memcpy

cdef enum:
    FIRST_SLOTS = 64
    LENGTH_SHIFT = 28
    PLACE_MASK = 0x0FFFFFFF
    FIRST_PAUSE = 8
    LAST_PAUSE = 128


@cython.final
cdef class DraftRecord:
    def __cinit__(self, int32_t most):
        self.most, self.pause = most, FIRST_PAUSE

    def __dealloc__(self):
        PyMem_Free(self.slots)

    # ---- drafts in flight ----

    cdef int launch(self) except -1:
        """The step being made is on its way, with `count` drafts; 0 if it only samples."""
        cdef int32_t at = self.num_flying
        if at == MAX_FLYING:
            raise AssertionError("more steps in flight than there may be")
        memcpy(self.flying_ids[at], self.ids, self.count * sizeof(int32_t))
        self.flying_counts[at] = self.count
        self.num_flying += 1
        self.num_unsure += self.count
        self.count = 0
        return 0

    cdef int settle(self, int32_t num_rejected, int32_t num_tokens, int32_t most) noexcept:
        """The oldest step is over; `num_tokens` are known since, `most` drafts the most ever."""
        cdef int32_t count = self.flying_counts[0]
        cdef int32_t i
        self.num_flying -= 1
        self.num_unsure -= count
        for i in range(self.num_flying):
            self.flying_counts[i] = self.flying_counts[i + 1]
            memcpy(self.flying_ids[i], self.flying_ids[i + 1], self.flying_counts[i] * sizeof(int32_t))
        if count == 0:
            return 0
        if num_rejected == 0:
            self.most, self.pause = min(most, 2 * max(self.most, count)), FIRST_PAUSE
        elif num_rejected < count or count > 1:
            self.most = max(1, min(self.most, max(count - num_rejected, count // 2)))
        else:
            self.most, self.resume_at = 1, num_tokens + self.pause
            self.pause = min(LAST_PAUSE, 2 * self.pause)
        return 0

    cdef int forget_flying(self) noexcept:
        """What is in flight comes to nothing."""
        self.num_flying = self.num_unsure = 0
        return 0

    # ---- n-grams ----

    cdef int32_t index(
        self, const int32_t* tokens, int32_t num_tokens, int32_t shortest, int32_t longest, int32_t most
    ) except -1:
        """Adds n-grams that end before token `num_tokens`, each with what follows it, so that none is the text's own
        end; as far as `most` more tokens reach. Returns for how many tokens it did.

        A table that is too small is begun anew and filled like the first one: to move all of it at once would keep
        everybody waiting.
        """
        cdef int32_t num_lengths = longest - shortest + 1
        cdef int32_t i, length, end
        cdef uint64_t hashed
        if 2 * (self.num_used + <int64_t> num_lengths * min(most, num_tokens - self.num_indexed)) > self.num_slots:
            self.begin_index(<int64_t> num_lengths * num_tokens)
        end = min(num_tokens, self.num_indexed + most)
        most = max(0, end - self.num_indexed)
        for i in range(self.num_indexed, end):
            hashed = 0
            for length in range(1, min(longest, i) + 1):
                hashed = mixed(hashed, tokens[i - length])
                if length >= shortest:
                    self.put(tokens, hashed, length, i)
        self.num_indexed = max(self.num_indexed, end)
        return most

    cdef int begin_index(self, int64_t num_ngrams) except -1:
        """Replaces the table by an empty one, in which so many n-grams and half as many again fill half."""
        cdef int64_t num_slots = max(FIRST_SLOTS, 2 * <int64_t> self.num_slots)
        while num_slots < 3 * num_ngrams:
            num_slots *= 2
        cdef uint32_t* slots = <uint32_t*> PyMem_Calloc(num_slots, sizeof(uint32_t))
        if slots == NULL:
            raise MemoryError()
        PyMem_Free(self.slots)
        self.slots, self.num_slots, self.num_used, self.num_indexed = slots, <uint32_t> num_slots, 0, 0
        return 0

    cdef int32_t find(self, const int32_t* tokens, int32_t num_tokens, int32_t shortest, int32_t longest) noexcept:
        """Index of the token behind the last occurrence of the longest n-gram that the text ends with; 0 = none."""
        cdef uint64_t hashed = 0
        cdef uint32_t* slot
        cdef int32_t found = 0
        cdef int32_t length
        if self.num_slots == 0:
            return 0
        for length in range(1, min(longest, num_tokens) + 1):
            hashed = mixed(hashed, tokens[num_tokens - length])
            if length >= shortest:
                slot = self.slot_of(tokens, hashed, length, num_tokens)
                if slot[0] == 0:
                    break  # what a longer one ends with occurred with it
                found = <int32_t> (slot[0] & PLACE_MASK)
        return found

    cdef int put(self, const int32_t* tokens, uint64_t hashed, int32_t length, int32_t end) noexcept:
        cdef uint32_t* slot = self.slot_of(tokens, hashed, length, end)
        self.num_used += slot[0] == 0
        slot[0] = (<uint32_t> (length - 1) << LENGTH_SHIFT) | <uint32_t> end
        return 0

    cdef uint32_t* slot_of(self, const int32_t* tokens, uint64_t hashed, int32_t length, int32_t end) noexcept:
        """Where the n-gram before token `end` is, or belongs."""
        cdef uint32_t at = <uint32_t> hashed & (self.num_slots - 1)
        cdef const int32_t* wanted = tokens + end - length
        cdef const int32_t* other
        cdef int32_t i
        while self.slots[at] != 0:
            if self.slots[at] >> LENGTH_SHIFT == <uint32_t> (length - 1):
                other = tokens + (self.slots[at] & PLACE_MASK) - length
                for i in range(length):
                    if other[i] != wanted[i]:
                        break
                else:
                    break
            at = (at + 1) & (self.num_slots - 1)
        return &self.slots[at]


cdef inline uint64_t mixed(uint64_t hashed, int32_t token_id) noexcept:
    hashed = (hashed + <uint64_t> token_id + 1) * <uint64_t> 0x9E3779B97F4A7C15
    return hashed ^ (hashed >> 29)
