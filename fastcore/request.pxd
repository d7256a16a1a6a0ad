# One request: its tokens, its block table, its counters. Written by the KV manager and the scheduler.
from libc.stdint cimport int32_t, int64_t, uint64_t

from aioengine.fastcore.draft_record cimport DraftRecord
from aioengine.fastcore.key_tails cimport KeyTails


cdef enum Status:
    NEW         # made, not given to a scheduler yet
    HELD        # cannot be scheduled yet (e.g. its grammar compiles); blocks nobody
    WAITING     # in the queue, never ran
    RUNNING     # has a row and blocks
    PREEMPTED   # in the queue again, will be recomputed
    FINISHED


cdef enum:
    NO_LIMIT = 0x7FFFFFFF


cdef struct GroupTable:         # block table of a group behind the first one (group_tables)
    int32_t* blocks
    int32_t capacity
    int32_t num_blocks          # entries, null ones included
    int32_t num_out             # leading entries that are null
    int32_t num_published       # leading entries that were offered, or fell out
    int32_t num_sent            # entries the device has


cdef class Request


cdef class Siblings:
    cdef readonly int32_t num_prompt_tokens
    cdef object prompt          # int32 array
    cdef KeyTails tails
    cdef list running           # members with blocks, in order of admission
    cdef list aside             # members that wait until one that runs has computed the prompt

    cdef int join(self, Request request, prompt) except -1
    cdef Request source(self)
    cdef bint is_computing(self)


cdef class Request:
    # What is read of every waiting or running request lies together, so that few cache lines hold it.
    # Tokens known on the host: prompt, then output. Append-only.
    cdef int32_t* tokens
    cdef int32_t tokens_capacity
    cdef readonly int32_t num_tokens

    # Blocks (KV manager). The first num_published ones are offered to the prefix map: full once the steps
    # that were made are over.
    cdef int32_t* blocks
    cdef int32_t blocks_capacity
    cdef int32_t num_blocks
    cdef int32_t num_published
    cdef int32_t publish_until                  # blocks from here on hold, or saw, what was evicted by name
    cdef int32_t num_proven                     # tokens with which one was sampled since, or that were hits
    cdef int32_t num_found                      # blocks that the last match found in the prefix map
    cdef readonly int32_t num_matched           # tokens found by the last match
    cdef readonly int32_t copy_source           # block that begins like the next one, 0 = none; and where its
    cdef readonly int32_t copy_target           # content goes in the step being made, 0 = not admitted
    cdef int32_t num_loads                      # blocks behind the hits that a connector is to load, or did
    cdef int32_t hashes_capacity
    cdef uint64_t* hashes                       # of full blocks, computed on demand, kept over preemption
    cdef int32_t num_hashes
    cdef int32_t hash_words                     # of 64 bits in a hash
    cdef readonly bint skip_prefix_cache
    cdef readonly bint wants_prompt_logits
    cdef readonly bint prewarms                 # computes for the cache alone
    cdef readonly bint takes_drafts
    cdef DraftRecord drafts                     # from its first admission on, if it may have any
    cdef readonly Siblings siblings   # requests with the same prompt; None = none
    cdef KeyTails tails               # what follows the tokens in the hash of each block (INV-13)
    cdef GroupTable* more                       # of the groups behind the first, once it was matched
    cdef readonly int32_t num_more

    # Fixed when made (intake).
    cdef readonly str request_id
    cdef readonly int32_t num_prompt_tokens
    cdef readonly int32_t max_tokens
    cdef readonly int32_t min_tokens
    cdef readonly bint ignore_eos
    cdef readonly int64_t priority
    cdef readonly double arrival_s
    cdef readonly object sampling
    cdef readonly object stream
    cdef int32_t* stop_ids            # eos ids, then the other stop ids
    cdef int32_t num_eos_ids
    cdef int32_t num_stop_ids         # both kinds

    # Counters (scheduler).
    cdef Status state
    cdef readonly int32_t row                   # -1 = none
    cdef readonly int32_t num_computed_tokens   # positions computed or in flight; 0 after preemption
    cdef readonly int32_t num_in_flight         # sampled on the device, not known here yet
    cdef readonly int32_t num_preemptions       # also the epoch that tells stale rows of a step
    cdef int32_t first_valid_epoch              # what rows of earlier epochs sample is dropped
    cdef readonly int32_t num_cached_tokens     # prefix hit of the first admission
    cdef int32_t prompt_logits_until            # positions whose prompt logits were asked for
    cdef int32_t step_tokens                    # scheduled in the step being made
    cdef int32_t num_sent_blocks                # table entries the device has
    cdef int64_t last_step                      # newest step it is in
    cdef int64_t arrival                        # order of add(); never changes
    cdef double rank                            # smaller goes first, ties by arrival; never changes after add()
    cdef int32_t queue_at                       # index in its heap of the waiting queue, -1 = not in it
    cdef bint queued_long                       # which heap that is
    cdef readonly object finish_reason
    cdef int32_t stop_token
    cdef double first_scheduled_s               # -1 = never
    cdef bint is_fenced                         # left, but a step in flight may still use its blocks

    # What a connector loads (KV manager).
    cdef int32_t load_start                     # the first of num_loads once it is admitted,
    cdef int64_t load_step                      # and the step that loads them
    cdef int32_t num_remote                     # blocks that the connector has, local hits included, as it said
    cdef int64_t asked_in                       # the call of schedule() in which it was asked last,
    cdef int32_t asked_from                     # from which block on
    cdef bint loads_nothing                     # a load of its failed

    cdef object set_prompt(self, prompt)
    cdef int set_stop_ids(self, tuple eos_ids, tuple other_ids) except -1
    cdef int append_token(self, int32_t token_id) except -1
    cdef int drop_samples(self) noexcept
    cdef int32_t num_drafts(self) noexcept
    cdef int32_t num_certain(self) noexcept
    cdef int reserve_blocks(self, int32_t count) except -1
    cdef int reserve_groups(self, int32_t count) except -1
    cdef int reserve_hashes(self, int32_t count, int words) except -1
    cdef uint64_t* hash_of(self, int32_t at) noexcept
    cdef int ends_with(self, int64_t max_total) except -1


cdef int reserve_table(GroupTable* table, int32_t count) except -1
