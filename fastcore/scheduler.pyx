"""The decision of each step: who runs, with how many tokens, on which blocks; and the settling of a step.

Owns queue, running list and rows. `limits` has the numbers, `admission` the gates, `step_budget` what is left of
a step, `preemption` chooses who makes way, and `steps_in_flight` has what must wait for the
device. The engine's loop is the only caller.

There is no prefill or decode phase: each request catches up from `num_computed_tokens` to the tokens known,
those in flight included. Running requests come first, then waiting ones, unless a request was preempted.

A request is in exactly one place: held, waiting (also after a preemption), running, or finished. A finished
one that is still part of a step in flight keeps its blocks and row until that step was updated;
rows of such a step that belong to it are skipped when the step is settled.

Siblings have one prompt. While one of them computes it, the others are held (`set_aside`), whoever comes
behind them goes first; they return to their places once it is computed or nobody computes it any more.
"""
import time

import cython

from aioengine.fastcore.checks cimport check_requests
from aioengine.fastcore.draft_record cimport MAX_DRAFTS, DraftRecord
from aioengine.fastcore.groups cimport KVGroups
from aioengine.fastcore.limits cimport clip_tokens
from aioengine.fastcore.preemption cimport least_important, victims_for
from aioengine.fastcore.remote_kv cimport lost_of, readers_of
from aioengine.fastcore.request cimport FINISHED, HELD, NEW, PREEMPTED, RUNNING, WAITING, Siblings
from aioengine.fastcore.step_budget cimport give, more_tokens


@cython.final
cdef class Scheduler:
    def __cinit__(
        self, *, int32_t num_blocks, int32_t block_size, int32_t max_num_seqs, int32_t max_num_batched_tokens,
        int32_t max_model_len, int32_t max_num_active_seqs=0, int32_t max_num_scheduled_tokens=0,
        str policy="fcfs", bint enable_prefix_caching=True, str hash_algo="xxh3_128",
        str eviction_policy="lru", double context_cost=0.0,
        bint enable_partial_block_reuse=False,
        bint enable_chunked_prefill=True, int32_t long_prefill_token_threshold=0,
        bint adaptive_long_prefill_threshold=False, int32_t max_num_partial_prefills=0,
        int32_t max_long_partial_prefills=0, bint full_sequence_must_fit=False, double watermark=0.0,
        double priority_ageing_s=0.0, double target_itl_s=0.0, int32_t max_in_flight=1,
        object clock=time.monotonic, root_seed=None, kv_groups=(("full", 0, 1),), str stale_output="deliver",
        kv_connector=None, Drafter drafter=None, int32_t num_speculative_tokens=0, Py_ssize_t draft_batch_limit=0,
    ):
        if not 0 <= num_speculative_tokens <= MAX_DRAFTS or (num_speculative_tokens > 0) != (drafter is not None):
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens} must lie between 1 and {MAX_DRAFTS} with a drafter, "
                "and be 0 without one"
            )
        if draft_batch_limit < 0:
            raise ValueError(f"draft_batch_limit={draft_batch_limit} must not be negative")
        self.drafter, self.most_drafts, self.draft_batch_limit = drafter, num_speculative_tokens, draft_batch_limit
        # A step's first query may come as many positions earlier as drafts are in flight.
        cdef KVGroups groups = KVGroups(
            kv_groups, block_size, max(
                1, max_num_scheduled_tokens or max_num_batched_tokens,
                1 + num_speculative_tokens * max_in_flight if drafter is not None else 1,
            )
        )
        cdef int64_t pool_tokens = groups.capacity(num_blocks - 1)
        self.limits = Limits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len, max_num_active_seqs=max_num_active_seqs,
            max_num_scheduled_tokens=max_num_scheduled_tokens, enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            adaptive_long_prefill_threshold=adaptive_long_prefill_threshold, max_in_flight=max_in_flight,
            pool_tokens=pool_tokens,
        )
        self.budget = StepBudget(self.limits, target_itl_s)
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"policy={policy!r} must be fcfs or priority")
        if not 0 <= priority_ageing_s < 1e9 or (priority_ageing_s > 0 and policy != "priority"):
            raise ValueError(
                f"priority_ageing_s={priority_ageing_s} must lie between 0 and 1e9, and be 0 without the "
                "priority policy"
            )
        if stale_output not in ("deliver", "drop"):
            raise ValueError(f"stale_output={stale_output!r} must be deliver or drop")
        self.drops_stale_output = stale_output == "drop"
        self.kv = KVManager(
            num_blocks, block_size, enable_prefix_caching, hash_algo, root_seed, eviction_policy, context_cost,
            enable_partial_block_reuse, kv_groups, max(
                self.limits.max_num_scheduled_tokens, 1 + num_speculative_tokens * max_in_flight
            ), kv_connector,
        )
        self.admission = Admission(
            self.kv, full_sequence_must_fit=full_sequence_must_fit, watermark=watermark,
            max_partial=max_num_partial_prefills, max_long_partial=max_long_partial_prefills,
            long_tokens=long_prefill_token_threshold,
        )
        limits_partial = max_num_partial_prefills > 0 or max_long_partial_prefills > 0
        self.waiting = WaitQueue(long_prefill_token_threshold if limits_partial else 0)
        self.by_priority = policy == "priority"
        self.ageing_s = priority_ageing_s
        self.rows = RowPool(max_num_seqs)
        self.in_flight = StepsInFlight(self.kv, self.rows)
        self.running, self.held, self.expecting = [], [], []
        self.clock = clock
        self.step_buffer = StepBuffer(
            max_in_flight + 1, min(max_num_seqs, max_num_batched_tokens), max_num_batched_tokens, block_size,
            groups.entries_for(min(<int64_t> max_model_len, pool_tokens)), groups.count, max_num_seqs,
        )

    # ---- requests come and go ----

    def add(self, Request request not None, *, bint ready=True):
        """Queues a new request; with `ready=False` it is held back until `set_ready`."""
        cdef int64_t tokens = request.num_tokens
        cdef int64_t blocks = self.kv.groups.most_blocks(tokens + 1)
        if request.state != NEW:
            raise ValueError(f"request {request.request_id} was added before")
        if tokens + (request.max_tokens > 0) > self.limits.max_model_len:
            raise ValueError(
                f"request {request.request_id} does not fit: prompt of {tokens} tokens and at least "
                f"{int(request.max_tokens > 0)} of output > max_model_len {self.limits.max_model_len}"
            )
        if blocks > self.kv.pool.num_blocks - 1:
            raise ValueError(
                f"request {request.request_id} can never run: prompt of {tokens} tokens + 1 needs "
                f"{blocks} blocks of {self.kv.block_size} tokens{self.in_groups()}, the pool has "
                f"{self.kv.pool.num_blocks - 1}"
            )
        self.num_arrivals += 1
        request.arrival = self.num_arrivals
        request.rank = self.rank_of(request)
        request.state = WAITING if ready else HELD
        if ready:
            self.waiting.push(request)
        else:
            self.held.append(request)

    def in_groups(self):
        """Where blocks are counted, in an error's words."""
        return "" if self.kv.more is None else f" at most, in {self.kv.groups.count} groups"

    cdef double rank_of(self, Request request) except *:
        """The place of a new request in the order of importance; smaller goes first, ties by arrival (C24).

        With ageing, a request gains one level of priority for every `ageing_s` seconds that it waits. Everybody
        waits equally fast, so the order of two requests never changes: the levels turned into seconds and the
        time of arrival are enough, and nothing has to be sorted again as time passes.
        """
        if not self.by_priority:
            return 0.0
        if self.ageing_s > 0:
            return request.priority * self.ageing_s + <double> self.clock()
        return <double> request.priority

    def set_ready(self, Request request not None):
        """Moves a held request to its place in the queue, as if it had never been held (INV-34)."""
        if request.state == HELD:
            discard(self.held, request)
            self.leave_aside(request)
            request.state = PREEMPTED if request.num_preemptions else WAITING
            self.waiting.push(request)

    def finish(self, Request request not None, str reason not None):
        """Ends a request in whatever state it is; does nothing if it has ended."""
        if reason not in ("stop", "length", "abort", "error"):
            raise ValueError(f"reason={reason!r} must be stop, length, abort or error")
        if request.state == RUNNING:
            discard(self.running, request)
        self.end(request, reason)

    def abort(self, Request request not None):
        """Ends a request with "abort"."""
        self.finish(request, "abort")

    def fail_all(self):
        """Ends everything live with "error", forgets steps in flight and cache; returns the requests ended."""
        cdef list ended = [*self.running, *self.waiting.in_order(), *self.held]
        self.in_flight.forget_all()
        self.kv.settled_step = self.in_flight.last_updated
        self.running.clear()
        for request in ended:
            self.end(request, "error")
        self.in_flight.drain()
        self.kv.forget(())  # what those steps were to compute was offered
        return ended

    # ---- a step is made ----

    def schedule(self):
        """Decides the next step; None if nothing can run now."""
        if len(self.in_flight.plans) >= self.limits.max_in_flight:
            raise RuntimeError(
                f"{len(self.in_flight)} steps are in flight, max_in_flight={self.limits.max_in_flight}"
            )
        self.scheduled = []
        self.num_victims = 0
        self.kv.step, self.kv.hides_fresh = self.in_flight.last_step + 1, False
        if self.kv.remote is not None:
            self.kv.remote.num_calls += 1  # between two calls it may lose or get anything, though no step was made
        self.budget.begin(self.running, len(self.running) + len(self.waiting) + len(self.held))
        cdef bint may_admit = self.schedule_running()
        if self.budget.num_chunks > 0:
            self.publish_chunks()
        if may_admit and (len(self.waiting) > 0 or self.expecting):
            self.call_back()
            self.schedule_waiting()
        if self.num_victims:
            self.scheduled = [request for request in self.scheduled if is_scheduled(request)]
        if not self.scheduled:
            return None
        cdef int64_t step_id = self.in_flight.last_step + 1
        if self.budget.cost is not None:
            self.budget.cost.note(step_id, self.scheduled)
        if self.drafter is not None:
            self.add_drafts()
        cdef StepPlan plan = self.step_buffer.pack(
            step_id, self.scheduled, self.rows.take_left(), NULL if self.drafter is None else self.rows.num_rejected
        )
        cdef Request request
        if plan.num_copies:
            for request in plan.joined:
                self.kv.end_copy(request)
        if self.kv.remote is not None:
            self.kv.remote.end_step(plan)
        self.in_flight.last_step = step_id
        self.in_flight.plans.append(plan)
        return plan

    cdef bint schedule_running(self) except -1:
        """Gives tokens to running requests in order; returns whether others may be admitted (INV-30)."""
        cdef Py_ssize_t at = 0
        cdef bint waits = False
        cdef Request request
        cdef RoomOutcome outcome
        cdef int32_t num_new, target, num_victims
        cdef StepBudget budget = self.budget
        while at < len(self.running) and budget.left > 0:
            request = <Request> self.running[at]
            num_new = more_tokens(budget, request, 0)
            if num_new == 0:
                at += 1
                continue
            target = request.num_computed_tokens + num_new
            if target > request.num_blocks * self.kv.block_size:
                num_victims = self.num_victims
                outcome = self.make_room(request, target, &at)
                if budget.cost is not None and self.num_victims > num_victims:
                    budget.pace(self.running)
                if outcome == ROOM_GONE:
                    continue
                if outcome == ROOM_LATER:
                    waits = True
                    at += 1
                    continue
                if self.num_victims > num_victims:
                    num_new = self.widen(request, num_new)
            give(budget, request, 0, num_new)
            self.scheduled.append(request)
            at += 1
        if self.num_victims:
            self.give_rest()
        return self.num_victims == 0 and not waits

    cdef int32_t widen(self, Request request, int32_t num_new) except -1:
        """Counts a running request's tokens anew once victims gave theirs back; it has blocks for `num_new`.

        It gets what it would have got if they had not been in this step (INV-31), as far as free blocks reach:
        it was content with less a moment ago, and a victim has to compute everything again.
        """
        cdef int32_t first = request.num_computed_tokens + request.step_tokens
        cdef int32_t most = max(num_new, more_tokens(self.budget, request, request.step_tokens))
        while most > num_new and not self.kv.extend(request, first + most, request.num_certain()):
            # One block less of the finest group; the others' blocks are multiples of it.
            most = max(num_new, (first + most - 1) // self.kv.block_size * self.kv.block_size - first)
        return most

    cdef int give_rest(self) except -1:
        """Gives what victims left of the budget to running requests that were cut short before they left."""
        cdef int32_t num_new
        cdef Request request
        for request in self.running:
            if self.budget.left == 0:
                break
            num_new = self.widen(request, 0)
            if num_new > 0:
                if request.step_tokens == 0:
                    self.scheduled.append(request)
                give(self.budget, request, request.step_tokens, num_new)
        return 0

    cdef int publish_chunks(self) except -1:
        """Offers what running requests compute of their prompts, once no other of them can take their blocks.

        A waiting one still can (`make_way`), before any has been admitted and could have hit them. Single tokens
        are left to `settle_row`: most of them are not known yet, those of a chunk always are.
        """
        cdef Request request
        for request in self.scheduled:
            if request.step_tokens > 1:
                self.kv.publish_ahead(request)
        return 0

    cdef int add_drafts(self) except -1:
        """Appends drafts to rows that compute their newest token, from what nobody else needs (J5).

        They take neither the token budget, only what the input budget has beyond it, nor anybody's blocks: free ones
        alone, while everybody who runs has one left for his next token: what drafts took that are rejected stays taken,
        and would have others preempted. Whatever they come to, the rest of the step is as it would have been.
        """
        cdef int32_t left = self.limits.max_num_batched_tokens
        cdef int32_t most, known
        cdef Request request
        if 0 < self.draft_batch_limit < len(self.running):
            return 0
        for request in self.scheduled:
            left -= request.step_tokens
        self.drafter.begin_step()
        for request in self.scheduled:
            most = self.most_drafts_of(request, left)
            if most <= 0:
                continue
            most = self.drafter.draft(request, most)
            known = request.num_computed_tokens + 1
            if known + most > request.num_blocks * self.kv.block_size and not (
                self.kv.blocks_for(known + most) - request.num_blocks + len(self.running) <= self.kv.pool.num_free
                and self.kv.extend(request, known + most, request.num_certain())
            ):
                most = min(most, request.num_blocks * self.kv.block_size - known)
            request.drafts.count = most
            request.step_tokens += most
            left -= most
        return 0

    cdef int32_t most_drafts_of(self, Request request, int32_t left) except -1:
        """Most drafts of a request that is in the step being made."""
        cdef int32_t known = request.num_tokens + request.num_in_flight
        if request.step_tokens != 1 or request.num_computed_tokens + 1 != known or not request.takes_drafts:
            return 0
        if known < request.num_prompt_tokens + 1:
            return 0  # its prompt's last token: of what follows nothing is known yet
        if request.num_tokens < request.drafts.resume_at:
            return 0
        # The token that it samples anyway comes behind them.
        return <int32_t> min(
            min(left, request.drafts.most),
            min(<int64_t> request.num_prompt_tokens + request.max_tokens, self.limits.max_total) - known - 1,
        )

    cdef RoomOutcome make_room(self, Request request, int32_t target, Py_ssize_t* at) except *:
        """Gets blocks for a running request, from victims if need be; `at` is its index in `running`."""
        cdef Py_ssize_t victim_at
        cdef Request victim
        while not self.kv.extend(request, target, request.num_certain()):
            if self.in_flight.deferred:
                # Blocks of those that left are on their way: waiting a step beats recomputing a victim.
                return ROOM_LATER
            victim_at = least_important(self.running, self.by_priority)
            victim = <Request> self.running.pop(victim_at)
            self.preempt(victim)
            if victim is request:
                return ROOM_GONE
            if victim_at < at[0]:
                at[0] -= 1
        return ROOM_FOUND

    cdef int preempt(self, Request victim) except -1:
        """Takes blocks and row from a running request and queues it again (C17, C18, INV-31, INV-32).

        Its blocks are free at once even with steps in flight: the device runs steps in order, so their late
        writes come before anything that a new owner writes, or that somebody reads who hits them. With a connector
        they are fenced: who has read a block that could not be loaded is told by the tables of those in flight (C21).
        """
        self.num_victims += 1
        self.num_preemptions_total += 1
        self.budget.left += victim.step_tokens
        victim.step_tokens = 0
        self.kv.take_back(victim)
        if self.kv.remote is None:
            self.kv.release(victim)
        else:
            self.in_flight.give_back(victim)
        self.in_flight.leave_row(victim)
        victim.num_computed_tokens = 0
        victim.num_sent_blocks = 0
        victim.num_preemptions += 1
        if self.drops_stale_output:
            victim.drop_samples()
        if victim.siblings is not None:
            discard(victim.siblings.running, victim)
        victim.state = PREEMPTED
        self.waiting.push(victim)
        return 0

    cdef int schedule_waiting(self) except -1:
        """Admits waiting requests in order until one cannot start (C22); only long prompts are passed over.

        A step that preempted anyone for blocks does not come here (INV-30). If the first in the queue finds no
        row or too few blocks, less important requests may make way for it (C25). What they give back would be
        up for grabs, which INV-30 forbids: so such a step admits that one request and nobody before or after
        it. If its row is still fenced by a step in flight, it comes in a later one; it stays first until then.
        """
        cdef bint skip_long = False
        cdef bint is_first = True
        cdef Request request
        cdef AdmitOutcome outcome
        self.join_blocks = self.step_buffer.max_join_blocks
        self.is_surveyed = False
        while True:
            request = self.waiting.peek(skip_long)
            # A preempted request whose samples are in flight waits for them. Those behind it wait too, or they
            # would take the row and the blocks it gave back and be preempted for it in turn; as the wait is
            # over when the steps in flight are, nobody has to overtake (INV-33, INV-34). The same holds for one whose
            # blocks are fenced.
            if request is None or request.num_in_flight > 0 or request.is_fenced:
                break
            if (
                request.siblings is not None and request.siblings.is_computing()
                and self.kv.shares_prompts(request)
            ):
                self.set_aside(request)
                continue
            outcome = self.try_admit(request)
            if outcome == TOO_MANY_PARTIAL and request.queued_long and not skip_long:
                skip_long = True
            elif outcome == NO_ROOM and is_first and self.by_priority and self.make_way(request):
                if self.try_admit(request) == ADMITTED:
                    self.give_rest()
                break
            elif outcome != ADMITTED:
                break
            is_first = False
        return 0

    cdef bint make_way(self, Request request) except -1:
        """Preempts less important running requests for a waiting one; False if in vain: nothing changed."""
        cdef int32_t num_hits, start, num_left, num_new
        if self.in_flight.deferred:
            return False  # blocks and rows of those that left are on their way
        self.survey()
        self.kv.hides_fresh = True  # a victim takes back what it was to compute in this step
        num_hits = self.kv.match(request)
        self.kv.forget_tail(request, num_hits)  # only whole blocks are counted here
        start = request.num_matched
        num_left = request.num_tokens - start
        # What else could keep it out must not do so once the victims are gone: it has the tokens left now, and
        # perhaps some of theirs.
        num_new = self.budget.newcomer_tokens(num_left, start)
        if num_new < num_left and not self.limits.chunked_prefill or (num_new == 0 and self.budget.left > 0):
            return False
        if self.admission.is_partial_blocked(num_left, num_new):
            return False
        num_new = clip_tokens(
            num_left, self.budget.threshold, self.limits.max_num_scheduled_tokens, start, self.limits.max_model_len
        )
        cdef list victims = victims_for(
            request, num_hits, self.running, self.admission, len(self.running) - self.limits.max_active + 1,
            self.admission.num_lacking(request, num_hits, start + num_new),
        )
        if not victims:
            return False
        for victim in victims:
            discard(self.running, victim)
            self.preempt(<Request> victim)
        if self.budget.cost is not None:
            self.budget.pace(self.running)
        self.num_urgent_preemptions_total += len(victims)
        self.is_surveyed = False
        return True

    cdef int survey(self) except -1:
        """Looks at the running requests as they are now, once per step unless some were preempted."""
        if not self.is_surveyed:
            self.admission.survey(self.running)
            self.is_surveyed = True
        return 0

    cdef AdmitOutcome try_admit(self, Request request) except *:
        """Admits a request if rows, tokens, blocks and all gates allow it; else nothing changes."""
        cdef int32_t num_hits
        cdef AdmitOutcome outcome
        if len(self.running) >= self.limits.max_active:
            return NO_ROOM
        if self.budget.left == 0 or self.rows.num_free == 0:
            return NOT_NOW  # a row that was left is fenced by a step in flight
        self.survey()
        num_hits = self.kv.match(request)
        outcome = self.try_matched(request, num_hits)
        if outcome == NO_ROOM and request.copy_source:
            self.kv.forget_tail(request, num_hits)  # the block to copy may be the very one that it needs
            outcome = self.try_matched(request, num_hits)
        return outcome

    cdef AdmitOutcome try_matched(self, Request request, int32_t num_hits) except *:
        cdef int32_t start = request.num_matched
        cdef int32_t num_left = request.num_tokens - start
        cdef int32_t num_new = self.budget.newcomer_tokens(num_left, start)
        cdef int64_t join_blocks = self.kv.groups.entries_for(start + num_new)
        if num_new == 0 or (num_new < num_left and not self.limits.chunked_prefill):
            return NOT_NOW
        if self.admission.is_partial_blocked(num_left, num_new):
            return TOO_MANY_PARTIAL
        if join_blocks > self.join_blocks:
            return NOT_NOW
        if self.admission.num_lacking(request, num_hits, start + num_new) > 0:
            return NO_ROOM
        if not self.kv.admit(request, num_hits, start + num_new):
            raise AssertionError(f"{request!r} passed the gates, but there are too few blocks")
        self.join_blocks -= join_blocks
        if self.budget.cost is not None:
            self.budget.cost.spend(start, num_new)
        self.admit(request, num_new)
        self.admission.count(request)
        return ADMITTED

    cdef int admit(self, Request request, int32_t num_new) except -1:
        cdef int32_t num_loaded
        self.waiting.remove(request)
        request.row = self.rows.take()
        request.num_computed_tokens = request.num_matched
        if request.siblings is not None:
            request.siblings.running.append(request)
        if request.state == WAITING:
            request.first_scheduled_s = self.clock()
            request.num_cached_tokens = request.num_computed_tokens
            if self.kv.reads_cache(request):
                num_loaded = request.num_loads * self.kv.block_size
                self.prefix_queries_tokens += request.num_tokens
                self.prefix_hit_tokens += request.num_computed_tokens - num_loaded
                if self.kv.remote is not None and self.kv.asks_remote(request):
                    self.kv.remote.count(request, request.num_computed_tokens - num_loaded, num_loaded)
        if self.drafter is not None and request.takes_drafts and request.drafts is None:
            request.drafts = DraftRecord(self.most_drafts)
        request.state = RUNNING
        request.step_tokens = num_new
        self.budget.left -= num_new
        self.running.append(request)
        self.scheduled.append(request)
        self.kv.publish_ahead(request)  # from now on this step preempts nobody
        return 0

    cdef int set_aside(self, Request request) except -1:
        """Holds a waiting request whose prompt a sibling computes; blocks nobody."""
        cdef Siblings siblings = request.siblings
        self.waiting.remove(request)
        request.state = HELD
        self.held.append(request)
        if not siblings.aside:
            self.expecting.append(siblings)
        siblings.aside.append(request)
        return 0

    cdef int call_back(self) except -1:
        """Requeues those set aside whose prompt is computed now, or is computed by nobody."""
        cdef Siblings siblings
        for siblings in self.expecting.copy():
            if not siblings.is_computing():
                for request in siblings.aside.copy():
                    self.set_ready(request)
        return 0

    cdef int leave_aside(self, Request request) except -1:
        cdef Siblings siblings = request.siblings
        if siblings is not None and drop(siblings.aside, request) and not siblings.aside:
            drop(self.expecting, siblings)
        return 0

    # ---- a step is over ----

    def update(self, StepPlan plan not None, const int32_t[::1] token_ids not None, lost_blocks=()):
        """Settles the oldest step in flight; returns those that gained a token or ended, in plan order."""
        cdef Py_ssize_t i
        cdef Request request
        cdef set lost = lost_of(plan, lost_blocks) if lost_blocks else None
        cdef const RowRecord* records = self.in_flight.take_oldest(plan, token_ids)
        cdef const int32_t* tokens = &token_ids[0] if token_ids.shape[0] else NULL
        cdef bint any_ended = False
        cdef list changed = []
        cdef int32_t reached, num_rejected
        self.kv.settled_step = plan.step_id
        if lost:
            self.give_up(plan, lost)
        for i in range(plan.num_rows):
            request = <Request> plan.requests[i]
            reached = records[i].num_computed + records[i].num_new
            num_rejected = 0
            if self.drafter is not None:
                num_rejected = self.count_rejected(&records[i], tokens, &reached)
            if request.state == FINISHED:
                continue  # ended while the step was in flight: its token is one too many
            if records[i].epoch < request.first_valid_epoch:
                plan.dropped_rows.append(i)
                continue
            if self.drafter is not None and records[i].sample_index >= 0 and request.drafts is not None:
                self.settle_drafts(request, &records[i], reached, num_rejected, tokens)
                changed.append(request)
                any_ended = any_ended or request.state == FINISHED
            elif self.settle_row(request, &records[i], reached, tokens):
                changed.append(request)
                any_ended = any_ended or request.state == FINISHED
        if any_ended:
            self.running = [request for request in self.running if is_running(request)]
        self.in_flight.drain()
        return changed

    cdef int give_up(self, StepPlan plan, set lost) except -1:
        """Has whatever was computed on blocks that could not be loaded computed anew; nobody is told of it (I16)."""
        cdef Request request
        self.kv.remote.give_up(plan, lost)
        for request, first in readers_of(lost, [*self.running, *self.in_flight.deferred]).items():
            self.kv.forget_from(request, first)
            request.num_cached_tokens = min(request.num_cached_tokens, <int32_t> first * self.kv.block_size)
            if request.state == RUNNING:
                discard(self.running, request)
                self.num_load_preemptions_total += 1
                self.preempt(request)
            request.drop_samples()
        return 0

    def take_stores(self):
        """What a connector may keep: (hash, block id) of blocks computed and indexed since the last call."""
        return self.kv.take_stores()

    def observe_step(self, StepPlan plan not None, double seconds):
        """Says how long a step took, from the settlement before it to its own."""
        if self.budget.cost is not None:
            self.budget.cost.observe(plan.step_id, seconds)

    cdef int32_t count_rejected(self, const RowRecord* record, const int32_t* token_ids, int32_t* reached) noexcept:
        """Drafts of a row that were rejected; sets what it really computed (E14, INV-43).

        When the step was made, all drafts in flight counted as accepted. The device has taken off those rejected
        since (`rejected` in `kernels/step.py`), and so is it done here, in the order of the steps, whether or not
        anybody still wants to know: the count is the row's, and its next owner goes on with it.
        """
        cdef int32_t num_rejected = 0
        cdef int32_t last = record.sample_index + record.num_drafts
        reached[0] -= self.rows.num_rejected[record.row] - record.num_rejected
        if record.num_drafts == 0:
            return 0
        while token_ids[last - num_rejected] < 0:  # never the first
            num_rejected += 1
        reached[0] -= num_rejected
        self.rows.num_rejected[record.row] += num_rejected
        self.num_drafts_total += 1
        self.num_draft_tokens_total += record.num_drafts
        self.num_accepted_tokens_total += record.num_drafts - num_rejected
        return num_rejected

    cdef bint settle_drafts(
        self, Request request, const RowRecord* record, int32_t reached, int32_t num_rejected, const int32_t* token_ids
    ) except -1:
        """`settle_row` for a row that had drafts, or may have come behind some; counts are rolled back (INV-60)."""
        cdef bint is_current = record.epoch == request.num_preemptions
        cdef bint has_ended = False
        cdef int32_t i
        request.num_in_flight -= 1 + record.num_drafts
        if is_current:
            request.num_computed_tokens -= num_rejected
        for i in range(record.num_drafts - num_rejected + 1):
            request.append_token(token_ids[record.sample_index + i])
            if request.ends_with(self.limits.max_total):
                has_ended = True
                break
        request.drafts.settle(num_rejected, request.num_tokens, self.most_drafts)
        if is_current:
            # Accepted drafts are computed; those behind the end are nobody's text.
            reached = min(reached, request.num_tokens)
            self.kv.publish(request, reached)
            request.num_proven = reached
        if has_ended:
            self.end(request, request.finish_reason)
        return True

    cdef bint settle_row(
        self, Request request, const RowRecord* record, int32_t reached, const int32_t* token_ids
    ) except -1:
        """Publishes what a row computed and appends what it sampled; returns whether there is news."""
        # Preempted since: the blocks are gone, but a sampled token that was not dropped is as valid as before and is
        # delivered; to drop it means to compute it again with the same result (C19, INV-33).
        if record.epoch == request.num_preemptions:
            self.kv.publish(request, reached)
            if record.sample_index >= 0:
                request.num_proven = reached
        if record.sample_index >= 0:
            request.num_in_flight -= 1
            request.append_token(token_ids[record.sample_index])
            if request.ends_with(self.limits.max_total):
                self.end(request, request.finish_reason)
            return True
        if request.max_tokens == 0 and reached == request.num_prompt_tokens:
            self.end(request, "length")
            return True
        return False

    # ---- leaving ----

    cdef int end(self, Request request, object reason) except -1:
        """Ends a request; a running one is taken off the running list by the caller."""
        if request.state == FINISHED:
            return 0
        if request.state == WAITING or request.state == PREEMPTED:
            self.waiting.remove(request)
        elif request.state == HELD:
            discard(self.held, request)
        if request.siblings is not None:
            drop(request.siblings.running, request)
            self.leave_aside(request)
        request.state = FINISHED
        request.finish_reason = reason
        request.num_in_flight = 0
        self.in_flight.leave_row(request)
        return self.in_flight.give_back(request)

    # ---- figures and checks ----

    def has_work(self):
        """Whether anything runs, waits (not held by the caller) or is in flight."""
        return bool(self.running) or len(self.waiting) > 0 or bool(self.in_flight.plans) or bool(self.expecting)

    def reset_prefix_cache(self, *, bint force=False):
        """Forgets all cached prefixes; False, and nothing changes, while any block has an owner.

        With `force` running requests are preempted first and compute everything again. Those that ended and
        whose blocks a step in flight may still write keep them till then, but not for the cache (B18, INV-38).
        """
        if not force:
            return self.kv.reset()
        self.num_reset_preemptions_total += len(self.running)
        while self.running:
            self.preempt(<Request> self.running.pop())
        self.kv.forget(self.in_flight.deferred)
        return True

    def step_cost_stats(self):
        """What was learned about the time of steps; None without a target."""
        return None if self.budget.cost is None else self.budget.cost.stats()

    @property
    def num_external_query_tokens(self):
        return 0 if self.kv.remote is None else self.kv.remote.num_query_tokens

    @property
    def num_external_hit_tokens(self):
        return 0 if self.kv.remote is None else self.kv.remote.num_hit_tokens

    @property
    def num_lost_blocks(self):
        return 0 if self.kv.remote is None else self.kv.remote.num_lost_blocks

    @property
    def max_num_seqs(self):
        return self.limits.max_num_seqs

    @property
    def max_num_active_seqs(self):
        return self.limits.max_active

    @max_num_active_seqs.setter
    def max_num_active_seqs(self, value):
        self.limits.max_num_active_seqs = value

    @property
    def max_num_batched_tokens(self):
        return self.limits.max_num_batched_tokens

    @property
    def max_num_scheduled_tokens(self):
        return self.limits.max_num_scheduled_tokens

    @property
    def max_model_len(self):
        return self.limits.max_model_len

    @property
    def max_in_flight(self):
        return self.limits.max_in_flight

    @property
    def max_total(self):
        return self.limits.max_total

    @property
    def last_step(self):
        return self.in_flight.last_step

    @property
    def num_running(self):
        return len(self.running)

    @property
    def num_waiting(self):
        return len(self.waiting) + len(self.held)

    @property
    def num_in_flight_steps(self):
        return len(self.in_flight)

    @property
    def num_free_blocks(self):
        return self.kv.pool.num_free

    @property
    def num_blocks(self):
        return self.kv.pool.num_blocks

    def running_requests(self):
        """In order of admission."""
        return list(self.running)

    def waiting_requests(self):
        """In order of admission to come; held ones are left out."""
        return self.waiting.in_order()

    def check_invariants(self):
        """Raises AssertionError if any two records of the state contradict each other."""
        cdef Request request
        self.waiting.check()
        check_requests(
            self.running, self.waiting.in_order(), self.held, self.in_flight, self.limits, self.kv
        )
        for siblings in self.expecting:
            assert (<Siblings> siblings).aside, "siblings are expected of whom none was set aside"
            for request in (<Siblings> siblings).aside:
                assert request.state == HELD and request.siblings is siblings, repr(request)


cdef inline bint is_scheduled(object request) noexcept:
    return (<Request> request).step_tokens > 0


cdef inline bint is_running(object request) noexcept:
    return (<Request> request).state == RUNNING


cdef int discard(list items, object item) except -1:
    """Removes an item by identity."""
    if not drop(items, item):
        raise AssertionError(f"{item!r} is not where its state says")
    return 0


cdef bint drop(list items, object item) except -1:
    """Removes an item by identity, if it is there."""
    cdef Py_ssize_t i
    for i in range(len(items)):
        if items[i] is item:
            del items[i]
            return True
    return False
