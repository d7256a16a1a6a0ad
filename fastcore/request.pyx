"""The record of one request, shared by queue, KV manager, scheduler and step buffer.

Owns the memory of its token ids, block table and block hashes, and the rule by which a token ends it. Takes
no decision: the scheduler moves the counters, the KV manager fills the table. The engine reads attributes.

    tokens    | prompt ............ | output known here ... | in flight (on the device) |
              0            num_prompt_tokens          num_tokens          num_tokens + num_in_flight
    computed  | ------------------------------------------> num_computed_tokens

`Siblings` ties requests with one prompt (the n choices of a call), so that it is computed once: one computes,
the others wait aside, then take its full blocks by reference and a copy of the last, partly filled one.
"""
import cython
import numpy as np

from cpython.mem cimport PyMem_Free, PyMem_RawFree, PyMem_RawRealloc, PyMem_Realloc
from libc.string cimport memcpy, memset

cdef tuple STATUS_NAMES = ("new", "held", "waiting", "running", "preempted", "finished")


@cython.final
cdef class Siblings:
    def __cinit__(self):
        self.running, self.aside = [], []

    cdef int join(self, Request request, prompt) except -1:
        if self.prompt is None:
            self.prompt, self.num_prompt_tokens = prompt, request.num_prompt_tokens
            self.tails = request.tails
        elif request.tails != self.tails or not np.array_equal(prompt, self.prompt):
            raise ValueError(f"request {request.request_id}: siblings must have equal prompts and keys")
        if request.wants_prompt_logits:
            raise ValueError(f"request {request.request_id}: prompt logits need the prompt computed by itself")
        return 0

    cdef Request source(self):
        """A running member whose prompt is computed, or will be by the steps in flight; None if there is none."""
        cdef Request member
        for member in self.running:
            if member.num_computed_tokens >= self.num_prompt_tokens:
                return member
        return None

    cdef bint is_computing(self):
        """Whether a member is computing the prompt and none has it yet."""
        return bool(self.running) and self.source() is None


@cython.final
cdef class Request:
    def __cinit__(
        self, str request_id not None, prompt_token_ids, *, int32_t max_tokens, int32_t min_tokens=0,
        eos_token_ids=(), stop_token_ids=(), bint ignore_eos=False, int64_t priority=0, double arrival_s=0.0,
        bytes extra_keys not None=b"", bytes cache_salt not None=b"", media=(), bint skip_prefix_cache=False,
        bint wants_prompt_logits=False, bint prewarms=False, bint takes_drafts=True, object sampling=None,
        object stream=None, Siblings siblings=None,
    ):
        if max_tokens < 0 or min_tokens < 0:
            raise ValueError(f"max_tokens={max_tokens} and min_tokens={min_tokens} must not be negative")
        self.request_id = request_id
        self.max_tokens, self.min_tokens, self.ignore_eos = max_tokens, min_tokens, ignore_eos
        self.priority, self.arrival_s = priority, arrival_s
        self.skip_prefix_cache, self.wants_prompt_logits = skip_prefix_cache, wants_prompt_logits
        self.prewarms, self.takes_drafts = prewarms, takes_drafts
        self.publish_until, self.num_proven = NO_LIMIT, NO_LIMIT
        self.sampling, self.stream = sampling, stream
        self.state, self.row, self.queue_at, self.stop_token = NEW, -1, -1, -1
        self.first_scheduled_s, self.asked_in = -1.0, -1
        array = self.set_prompt(np.asarray(prompt_token_ids))
        self.tails = KeyTails(extra_keys, cache_salt, media, self.num_prompt_tokens)
        if siblings is not None:
            siblings.join(self, array)
            self.siblings = siblings
        self.set_stop_ids(tuple(eos_token_ids), tuple(stop_token_ids))

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.num_more):
            PyMem_Free(self.more[i].blocks)
        PyMem_Free(self.more)
        PyMem_Free(self.tokens)
        PyMem_Free(self.blocks)
        PyMem_RawFree(self.hashes)
        PyMem_Free(self.stop_ids)

    cdef object set_prompt(self, prompt):
        """Copies the prompt; returns it as an int32 array."""
        if prompt.ndim != 1 or prompt.shape[0] == 0:
            raise ValueError(f"request {self.request_id}: the prompt must be a non-empty list of token ids")
        if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() > 0x7FFFFFFF:
            raise ValueError(f"request {self.request_id}: token ids must be integers from 0 to 2147483647")
        array = np.ascontiguousarray(prompt, dtype=np.int32)
        cdef const int32_t[::1] ids = array
        self.num_prompt_tokens = self.num_tokens = <int32_t> ids.shape[0]
        self.tokens_capacity = self.num_tokens + 1 + min(self.max_tokens, 64)
        self.tokens = <int32_t*> grown(NULL, self.tokens_capacity * sizeof(int32_t))
        memcpy(self.tokens, &ids[0], self.num_tokens * sizeof(int32_t))
        return array

    cdef int set_stop_ids(self, tuple eos_ids, tuple other_ids) except -1:
        cdef int32_t i
        self.num_eos_ids = <int32_t> len(eos_ids)
        self.num_stop_ids = self.num_eos_ids + <int32_t> len(other_ids)
        self.stop_ids = <int32_t*> grown(NULL, (self.num_stop_ids + 1) * sizeof(int32_t))
        for i in range(self.num_stop_ids):
            self.stop_ids[i] = eos_ids[i] if i < self.num_eos_ids else other_ids[i - self.num_eos_ids]
        return 0

    cdef int append_token(self, int32_t token_id) except -1:
        if self.num_tokens == self.tokens_capacity:
            self.tokens = <int32_t*> grown(self.tokens, 2 * <size_t> self.tokens_capacity * sizeof(int32_t))
            self.tokens_capacity *= 2
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        return 0

    cdef int drop_samples(self) noexcept:
        """Forgets what is sampled in steps in flight: they are settled as if the request was not in them."""
        self.num_in_flight = 0
        self.first_valid_epoch = self.num_preemptions
        if self.drafts is not None:
            self.drafts.forget_flying()
        return 0

    cdef int32_t num_drafts(self) noexcept:
        """Drafts in the step being made."""
        return 0 if self.drafts is None else self.drafts.count

    cdef int32_t num_certain(self) noexcept:
        """Positions computed or in flight whatever becomes of the drafts in flight."""
        return self.num_computed_tokens if self.drafts is None else self.num_computed_tokens - self.drafts.num_unsure

    def drafts_in_flight(self):
        """The drafts of each step in flight that samples for the request."""
        cdef int32_t i, k
        if self.drafts is None:
            return []
        return [
            [self.drafts.flying_ids[i][k] for k in range(self.drafts.flying_counts[i])]
            for i in range(self.drafts.num_flying)
        ]

    cdef int reserve_blocks(self, int32_t count) except -1:
        if count > self.blocks_capacity:
            count = max(count, 2 * self.blocks_capacity, 8)
            self.blocks = <int32_t*> grown(self.blocks, count * sizeof(int32_t))
            self.blocks_capacity = count
        return 0

    cdef int reserve_groups(self, int32_t count) except -1:
        """Makes empty tables for so many groups behind the first one, if there are none yet."""
        if self.num_more == 0:
            self.more = <GroupTable*> grown(NULL, count * sizeof(GroupTable))
            memset(self.more, 0, count * sizeof(GroupTable))
            self.num_more = count
        return 0

    cdef int reserve_hashes(self, int32_t count, int words) except -1:
        """Makes room for the hashes of so many full blocks, each of so many words."""
        cdef uint64_t* hashes
        self.hash_words = words
        if count > self.hashes_capacity:
            count = max(count, 2 * self.hashes_capacity, 8)
            # Of malloc, which keeps them for the next requests when many end together; Python's arenas go back to the
            # system, and come back page by page.
            hashes = <uint64_t*> PyMem_RawRealloc(self.hashes, <size_t> count * words * sizeof(uint64_t))
            if hashes == NULL:
                raise MemoryError()
            self.hashes = hashes
            self.hashes_capacity = count
        return 0

    cdef uint64_t* hash_of(self, int32_t at) noexcept:
        """The hash of a full block."""
        return self.hashes + <Py_ssize_t> at * self.hash_words

    cdef int ends_with(self, int64_t max_total) except -1:
        """Whether the newest token ends the request; sets finish_reason and stop_token.

        Stop ids do not count before min_tokens outputs; the length limits always do.
        """
        cdef int32_t token_id = self.tokens[self.num_tokens - 1]
        cdef int32_t num_outputs = self.num_tokens - self.num_prompt_tokens
        cdef int32_t i
        if num_outputs >= self.min_tokens:
            for i in range(self.num_eos_ids if self.ignore_eos else 0, self.num_stop_ids):
                if self.stop_ids[i] == token_id:
                    self.finish_reason = "stop"
                    self.stop_token = token_id if i >= self.num_eos_ids else -1
                    return 1
        if num_outputs >= self.max_tokens or self.num_tokens >= max_total:
            self.finish_reason = "length"
            return 1
        return 0

    @property
    def num_output_tokens(self):
        return self.num_tokens - self.num_prompt_tokens

    @property
    def status(self):
        return STATUS_NAMES[<int> self.state]

    @property
    def stop_token_id(self):
        return None if self.stop_token < 0 else self.stop_token

    @property
    def scheduled_s(self):
        return None if self.first_scheduled_s < 0 else self.first_scheduled_s

    def token_ids(self):
        """Prompt and output known so far."""
        ids = np.empty(self.num_tokens, dtype=np.int32)
        cdef int32_t[::1] view = ids
        memcpy(&view[0], self.tokens, self.num_tokens * sizeof(int32_t))
        return ids

    def output_ids_from(self, Py_ssize_t start):
        """Output tokens from the given one on."""
        cdef Py_ssize_t i
        if start < 0:
            raise ValueError(f"start={start} must not be negative")
        return [self.tokens[i] for i in range(self.num_prompt_tokens + start, self.num_tokens)]

    def block_ids(self, int32_t group=0):
        """The block table of a group; 0 where a block fell out of the window."""
        cdef int32_t i
        if group == 0:
            return [self.blocks[i] for i in range(self.num_blocks)]
        if not 0 < group <= self.num_more:
            return []
        return [self.more[group - 1].blocks[i] for i in range(self.more[group - 1].num_blocks)]

    def __repr__(self):
        return (
            f"<Request {self.request_id} {self.status}: {self.num_prompt_tokens}+{self.num_output_tokens} "
            f"tokens, {self.num_computed_tokens} computed, {self.num_in_flight} in flight, "
            f"{self.num_blocks} blocks>"
        )


cdef int reserve_table(GroupTable* table, int32_t count) except -1:
    """Makes room for so many entries."""
    if count > table.capacity:
        count = max(count, 2 * table.capacity, 8)
        table.blocks = <int32_t*> grown(table.blocks, count * sizeof(int32_t))
        table.capacity = count
    return 0


cdef void* grown(void* memory, size_t size) except NULL:
    cdef void* result = PyMem_Realloc(memory, size)
    if result == NULL:
        raise MemoryError()
    return result
