# Who runs in the next step, with how many tokens; what happens when a step is over.
from libc.stdint cimport int32_t, int64_t

from aioengine.fastcore.admission cimport Admission
from aioengine.fastcore.drafts cimport Drafter
from aioengine.fastcore.kv_manager cimport KVManager
from aioengine.fastcore.limits cimport Limits
from aioengine.fastcore.queues cimport WaitQueue
from aioengine.fastcore.request cimport Request
from aioengine.fastcore.rows cimport RowPool
from aioengine.fastcore.step_budget cimport StepBudget
from aioengine.fastcore.step_buffer cimport RowRecord, StepBuffer, StepPlan
from aioengine.fastcore.steps_in_flight cimport StepsInFlight


cdef enum RoomOutcome:
    ROOM_FOUND      # the request has its blocks
    ROOM_LATER      # blocks come back when a step in flight is over: skip this step
    ROOM_GONE       # the request itself was the victim


cdef enum AdmitOutcome:
    ADMITTED
    NO_ROOM         # all rows that may run are taken, or blocks are missing
    TOO_MANY_PARTIAL    # a shorter prompt may pass a long one
    NOT_NOW         # something else is missing, and nobody may pass


cdef class Scheduler:
    cdef readonly KVManager kv
    cdef readonly Admission admission
    cdef readonly StepBuffer step_buffer
    cdef WaitQueue waiting
    cdef RowPool rows
    cdef list running                 # in order of admission
    cdef list held
    cdef list expecting               # Siblings of whom some were set aside
    cdef StepsInFlight in_flight

    cdef readonly Limits limits
    cdef bint by_priority
    cdef bint drops_stale_output          # else what is in flight at a preemption is delivered (C19)
    cdef double ageing_s
    cdef Drafter drafter                  # None: no speculation
    cdef int32_t most_drafts              # of a row in a step
    cdef Py_ssize_t draft_batch_limit     # running requests up to which anybody has drafts, 0 = any number
    cdef object clock

    # The step being made.
    cdef list scheduled
    cdef StepBudget budget
    cdef int64_t join_blocks              # table entries that joining rows may still send
    cdef int32_t num_victims
    cdef bint is_surveyed                 # by `admission`

    cdef int64_t num_arrivals
    cdef readonly int64_t prefix_queries_tokens
    cdef readonly int64_t prefix_hit_tokens
    cdef readonly int64_t num_preemptions_total
    cdef readonly int64_t num_reset_preemptions_total   # of these, those by a forced reset of the cache
    cdef readonly int64_t num_urgent_preemptions_total
    cdef readonly int64_t num_drafts_total              # rows with drafts that were verified
    cdef readonly int64_t num_draft_tokens_total
    cdef readonly int64_t num_accepted_tokens_total
    cdef readonly int64_t num_load_preemptions_total    # and those of requests on blocks that could not be loaded

    cdef bint schedule_running(self) except -1
    cdef int32_t widen(self, Request request, int32_t num_new) except -1
    cdef int give_rest(self) except -1
    cdef int publish_chunks(self) except -1
    cdef int add_drafts(self) except -1
    cdef int32_t most_drafts_of(self, Request request, int32_t left) except -1
    cdef int schedule_waiting(self) except -1
    cdef double rank_of(self, Request request) except *
    cdef int survey(self) except -1
    cdef bint make_way(self, Request request) except -1
    cdef AdmitOutcome try_admit(self, Request request) except *
    cdef AdmitOutcome try_matched(self, Request request, int32_t num_hits) except *
    cdef int admit(self, Request request, int32_t num_new) except -1
    cdef int set_aside(self, Request request) except -1
    cdef int call_back(self) except -1
    cdef int leave_aside(self, Request request) except -1
    cdef RoomOutcome make_room(self, Request request, int32_t target, Py_ssize_t* at) except *
    cdef int preempt(self, Request victim) except -1
    cdef int give_up(self, StepPlan plan, set lost) except -1
    cdef bint settle_row(
        self, Request request, const RowRecord* record, int32_t reached, const int32_t* token_ids
    ) except -1
    cdef int32_t count_rejected(self, const RowRecord* record, const int32_t* token_ids, int32_t* reached) noexcept
    cdef bint settle_drafts(
        self, Request request, const RowRecord* record, int32_t reached, int32_t num_rejected, const int32_t* token_ids
    ) except -1
    cdef int end(self, Request request, object reason) except -1
