"""Plain-Python twin of the scheduler: the same decisions, recomputed from lists each time.

Compared with the real one after every operation by `tests/unit/test_scheduler_twin.py`. Rows are not
modelled: which row a request gets is free, `check_invariants` sees that rows are unique.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.oracle.kv import ONE_GROUP, Group, NaiveKV, NaiveTable


@dataclass(eq=False)
class NaiveRequest:
    """The twin of `Request`; `table.tokens` are the tokens known."""

    name: str
    table: NaiveTable
    max_tokens: int
    min_tokens: int = 0
    eos: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    priority: int = 0
    arrival: int = 0
    arrived_s: float = 0.0
    num_prompt: int = 0
    status: str = "new"
    num_computed: int = 0
    in_flight: int = 0
    num_preemptions: int = 0
    num_cached: int = 0
    last_step: int = 0
    siblings: list[NaiveRequest] = field(default_factory=list)
    """All requests of its call, itself included; empty if it is the only one."""
    finish_reason: str | None = None
    stop_token_id: int | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.table.tokens)

    @property
    def known(self) -> int:
        return len(self.table.tokens) + self.in_flight

    @property
    def shared(self) -> int:
        """Tokens that a sibling can spare it; the last one known is always its own to compute."""
        return min(self.num_prompt, len(self.table.tokens) - 1)

    def newest_token_ends_it(self, max_total: int) -> bool:
        outputs = self.table.tokens[self.num_prompt :]
        if len(outputs) >= self.min_tokens and outputs[-1] in self.eos + self.stop:
            self.finish_reason = "stop"
            self.stop_token_id = None if outputs[-1] in self.eos else outputs[-1]
        elif len(outputs) >= self.max_tokens or len(self.table.tokens) >= max_total:
            self.finish_reason = "length"
        return self.finish_reason is not None


@dataclass
class NaiveRow:
    """One row of a step."""

    request: NaiveRequest
    num_computed: int
    num_new: int
    samples: bool
    epoch: int


@dataclass
class NaiveScheduler:
    """The twin of `Scheduler`."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_active_seqs: int = 0
    max_num_scheduled_tokens: int = 0
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_partial_block_reuse: bool = False
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    adaptive_long_prefill_threshold: bool = False
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    full_sequence_must_fit: bool = False
    watermark: float = 0.0
    priority_ageing_s: float = 0.0
    kv_groups: tuple[Group, ...] = ONE_GROUP
    promised: int = 0
    now_s: float = 0.0
    max_in_flight: int = 1
    running: list[NaiveRequest] = field(default_factory=list)
    waiting: list[NaiveRequest] = field(default_factory=list)
    held: list[NaiveRequest] = field(default_factory=list)
    aside: list[NaiveRequest] = field(default_factory=list)
    """Those of the held ones whose prompt a sibling computes."""
    deferred: list[NaiveRequest] = field(default_factory=list)
    in_flight: list[tuple[int, list[NaiveRow]]] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    last_step: int = 0
    updated: int = 0
    arrivals: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0

    def __post_init__(self) -> None:
        self.max_num_active_seqs = self.max_num_active_seqs or self.max_num_seqs
        self.max_num_scheduled_tokens = self.max_num_scheduled_tokens or self.max_num_batched_tokens
        self.kv = NaiveKV(
            self.num_blocks,
            self.block_size,
            self.enable_prefix_caching,
            enable_partial_block_reuse=self.enable_partial_block_reuse,
            kv_groups=self.kv_groups,
            max_step_tokens=self.max_num_scheduled_tokens,
        )
        self.max_total = 1
        while self.max_total < self.max_model_len and self.kv.most_blocks(self.max_total) < self.num_blocks:
            self.max_total += 1

    def add(self, request: NaiveRequest, ready: bool = True) -> None:
        self.arrivals += 1
        request.arrival, request.status = self.arrivals, "waiting" if ready else "held"
        request.arrived_s = self.now_s
        (self.waiting if ready else self.held).append(request)

    def set_ready(self, request: NaiveRequest) -> None:
        if request.status == "held":
            self.held.remove(request)
            self.aside = [r for r in self.aside if r is not request]
            self.waiting.append(request)
            request.status = "preempted" if request.num_preemptions else "waiting"

    def rank(self, request: NaiveRequest) -> tuple[float, int]:
        if self.policy == "fcfs":
            return (0, request.arrival)
        if self.priority_ageing_s == 0:
            return (request.priority, request.arrival)
        levels_gained = (self.now_s - request.arrived_s) / self.priority_ageing_s
        return (round(request.priority - levels_gained, 6), request.arrival)

    def in_order(self) -> list[NaiveRequest]:
        return sorted(self.waiting, key=self.rank)

    def finish(self, request: NaiveRequest, reason: str) -> None:
        if request.status == "finished":
            return
        for place in (self.running, self.waiting, self.held, self.aside):
            if request in place:
                place.remove(request)
        if request.status == "running":
            self.leave_row(request)
        request.status, request.finish_reason, request.in_flight = "finished", reason, 0
        if request.table.blocks and request.last_step > self.updated:
            self.deferred.append(request)
        else:
            self.kv.release(request.table)

    def leave_row(self, request: NaiveRequest) -> None:
        if request.last_step > self.updated:
            self.fences.append(request.last_step)

    def fail_all(self) -> list[NaiveRequest]:
        ended = [*self.running, *self.in_order(), *self.held]
        self.in_flight, self.updated = [], self.last_step
        self.kv.settled = self.updated
        for request in ended:
            self.finish(request, "error")
        self.drain()
        self.kv.pool.clear()
        return ended

    def threshold(self) -> int:
        num_eligible = len(self.running) + len(self.waiting) + len(self.held)
        if num_eligible <= 1:
            return 0
        if self.adaptive_long_prefill_threshold and self.long_prefill_token_threshold:
            return max(self.long_prefill_token_threshold, self.max_num_batched_tokens // num_eligible)
        return self.long_prefill_token_threshold

    def schedule(self) -> list[NaiveRow] | None:
        threshold = self.threshold()
        given: dict[NaiveRequest, int] = {}
        self.kv.step, self.kv.hides_fresh = self.last_step + 1, False

        def clip(num_new: int, num_computed: int) -> int:
            left = self.max_num_scheduled_tokens - sum(given.values())
            return min(num_new, threshold or num_new, left, self.max_model_len - num_computed)

        may_admit = True
        order = list(self.running)
        for request in order:
            if sum(given.values()) == self.max_num_scheduled_tokens:
                break
            limit = min(request.num_prompt + request.max_tokens, self.max_total)
            if request.status != "running" or (request.in_flight and request.known >= limit):
                continue
            num_new = clip(request.known - request.num_computed, request.num_computed)
            if num_new == 0:
                continue
            has_victims = False
            while not self.kv.extend(request.table, request.num_computed + num_new, request.num_computed):
                may_admit = False
                if self.deferred:
                    break
                has_victims = True
                worst = max(self.running, key=self.rank) if self.policy == "priority" else self.running[-1]
                given.pop(worst, None)
                self.preempt(worst)
                if worst is request:
                    break
            else:
                given[request] = num_new
                if has_victims:
                    self.widen(request, given, threshold)
        if any(request.status == "preempted" for request in order):
            for request in self.running:
                self.widen(request, given, threshold)
        for request in given:
            if given[request] > 1:
                self.publish_ahead(request, given)
        if may_admit:
            for request in [r for r in self.aside if not self.is_computing(r)]:
                self.set_ready(request)
            self.admit_waiting(given, clip, threshold)
        return self.pack(given)

    def widen(self, request: NaiveRequest, given: dict[NaiveRequest, int], threshold: int) -> None:
        """Gives a running request as many more tokens as the budget and free blocks allow, now that victims left."""
        limit = min(request.num_prompt + request.max_tokens, self.max_total)
        if request.in_flight and request.known >= limit:
            return
        had = given.get(request, 0)
        left = request.known - request.num_computed
        budget = self.max_num_scheduled_tokens - sum(given.values()) + had
        most = min(left, threshold or left, budget, self.max_model_len - request.num_computed)
        for num_new in range(most, had, -1):
            if self.kv.extend(request.table, request.num_computed + num_new, request.num_computed):
                given[request] = num_new
                return

    def admit_waiting(self, given: dict[NaiveRequest, int], clip: Callable[[int, int], int], threshold: int) -> None:
        passed_over: list[NaiveRequest] = []
        is_first = True
        while candidates := [r for r in self.in_order() if r not in passed_over]:
            request = candidates[0]
            if request.in_flight:
                return
            if self.is_computing(request):
                self.waiting.remove(request)
                self.held.append(request)
                self.aside.append(request)
                request.status = "held"
                continue
            why_not = self.try_admit(request, given, clip)
            if why_not == "partial" and not passed_over and self.is_long(request.known):
                # All long ones are passed over, once; a short one is never passed.
                passed_over = [r for r in self.waiting if self.is_long(r.known)]
            elif why_not == "room" and is_first and self.make_way(request, given, clip):
                if not self.try_admit(request, given, clip):
                    for other in self.running:
                        self.widen(other, given, threshold)
                return
            elif why_not:
                return
            is_first = False

    def try_admit(self, request: NaiveRequest, given: dict[NaiveRequest, int], clip: Callable[[int, int], int]) -> str:
        """Why it cannot be admitted, or nothing."""
        if len(self.running) >= self.max_num_active_seqs:
            return "room"
        no_row = len(self.running) + len(self.fences) == self.max_num_seqs
        if no_row or sum(given.values()) == self.max_num_scheduled_tokens:
            return "later"
        hits, tails = self.match(request)
        for source, num_copied in tails:
            start = len(hits) * self.block_size + num_copied
            num_left = request.known - start
            num_new = clip(num_left, start)
            if num_new < num_left and not self.enable_chunked_prefill:
                return "later"
            if num_new < num_left and self.too_many_partial(num_left, given):
                return "partial"
            if self.needed_to_admit(request, hits, start + num_new, given, source) <= len(self.kv.pool.free):
                break
        else:
            return "room"
        assert self.kv.admit(request.table, hits, start + num_new, source)
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed = start
        if request.status == "waiting":
            request.num_cached = start
            if self.enable_prefix_caching and request.table.reads_cache:
                self.query_tokens += request.known
                self.hit_tokens += start
        request.status = "running"
        given[request] = num_new
        self.publish_ahead(request, given)
        return ""

    def publish_ahead(self, request: NaiveRequest, given: dict[NaiveRequest, int]) -> None:
        self.kv.publish(request.table, request.num_computed + given[request], self.kv.step)

    def make_way(self, request: NaiveRequest, given: dict[NaiveRequest, int], clip: Callable[[int, int], int]) -> bool:
        """Preempts the fewest less important requests that would be enough, or nobody."""
        self.kv.hides_fresh = True  # nobody can hit what a victim does not compute any more
        hits, _ = self.match(request)
        start = len(hits) * self.block_size
        num_left = request.known - start
        num_new = clip(num_left, start)
        is_cut = num_new < num_left
        if self.deferred or self.policy == "fcfs":
            return False
        if is_cut and (not self.enable_chunked_prefill or self.too_many_partial(num_left, given)):
            return False
        most = min(num_left, self.threshold() or num_left, self.max_num_scheduled_tokens, self.max_model_len - start)
        missing = self.needed_to_admit(request, hits, start + most, given, 0) - len(self.kv.pool.free)
        missing_rows = len(self.running) - self.max_num_active_seqs + 1
        victims: list[NaiveRequest] = []
        for other in sorted(self.running, key=self.rank, reverse=True):
            if missing <= 0 and missing_rows <= 0:
                break
            if other.priority > request.priority and self.rank(other) > self.rank(request):
                victims.append(other)
                missing_rows -= 1
                missing -= self.freed(other, [*hits, *self.twin_hits(request, hits)])
                missing -= self.still_needed(other, given)
        if missing > 0 or missing_rows > 0:
            return False
        for victim in victims:
            given.pop(victim, None)
            self.preempt(victim)
        return True

    def twin_hits(self, request: NaiveRequest, hits: list[int]) -> list[int]:
        """Blocks of the other groups that belong to a hit."""
        kv = self.kv
        return [b or 0 for g in kv.others for b in kv.twin_hits(request.table, g, len(hits))]

    def freed(self, owner: NaiveRequest, hits: list[int]) -> int:
        """Blocks that the one with these hits could take if the owner gave all back."""
        held = [b for blocks in (owner.table.blocks, *owner.table.more) for b in blocks if b]
        return sum(self.kv.pool.num_refs[b] == 1 and b not in hits for b in held)

    def still_needed(self, running: NaiveRequest, given: dict[NaiveRequest, int]) -> int:
        """Blocks that a running request needs later for tokens that are known now, if they are kept for it."""
        if not self.full_sequence_must_fit or running not in self.unfinished(given):
            return 0
        tables = [running.table.blocks, *running.table.more]
        return sum(
            min(max(0, self.kv.blocks_for(len(running.table.tokens), g) - len(blocks)), self.kv.most_held(g))
            for g, blocks in enumerate(tables)
        )

    def is_long(self, num_tokens: int) -> bool:
        return num_tokens > self.long_prefill_token_threshold

    def unfinished(self, given: dict[NaiveRequest, int]) -> list[NaiveRequest]:
        """Running requests that know more tokens than they will have computed after this step."""
        return [r for r in self.running if r.num_computed + given.get(r, 0) < len(r.table.tokens)]

    def too_many_partial(self, num_left: int, given: dict[NaiveRequest, int]) -> bool:
        """Whether one more unfinished prompt, of which `num_left` tokens are to compute, is too many."""
        unfinished = self.unfinished(given)
        if self.max_num_partial_prefills and len(unfinished) >= self.max_num_partial_prefills:
            return True
        num_long = sum(self.is_long(len(r.table.tokens) - r.num_computed) for r in unfinished)
        return 0 < self.max_long_partial_prefills <= num_long and self.is_long(num_left)

    def needed_to_admit(
        self, request: NaiveRequest, hits: list[int], num_tokens: int, given: dict[NaiveRequest, int], source: int
    ) -> int:
        """Blocks that must be free: its own, those of hits that are free, and all that is kept from it."""
        keep = self.promised
        if self.running:
            keep += int(self.watermark * self.num_blocks)
        if self.full_sequence_must_fit:
            num_tokens = max(num_tokens, request.known)
            keep += sum(self.still_needed(other, given) for other in self.running)
        kv = self.kv
        tables = [hits, *(kv.twin_hits(request.table, g, len(hits)) for g in kv.others)]
        for g, found in enumerate(tables):
            own = kv.blocks_for(num_tokens, g) - len(hits) // kv.groups[g][2]
            keep += min(own + sum(block_id in kv.pool.free for block_id in found), kv.most_held(g))
        return keep + (source in kv.pool.free)

    def source(self, request: NaiveRequest) -> NaiveRequest | None:
        """A running sibling that has the prompt."""
        if len(self.kv_groups) > 1:
            return None
        able = (r for r in self.running if r in request.siblings and r.num_computed >= r.num_prompt)
        return next(able, None)

    def is_computing(self, request: NaiveRequest) -> bool:
        siblings = [r for r in self.running if r in request.siblings]
        if len(self.kv_groups) > 1 and not (self.enable_prefix_caching and request.table.reads_cache):
            return False  # they find nothing of each other
        return bool(siblings) and not any(r.num_computed >= r.num_prompt for r in siblings)

    def match(self, request: NaiveRequest) -> tuple[list[int], list[tuple[int, int]]]:
        """Full blocks, and (block to copy, tokens it saves), best first; the last choice is none."""
        hits, source = self.kv.match(request.table), self.source(request)
        tail = self.kv.match_tail(request.table, len(hits))
        shared, begun = request.shared, request.shared % self.block_size
        if source is not None and begun and self.is_being_written(source, shared // self.block_size):
            shared -= begun
        if source is not None and shared > len(hits) * self.block_size + tail[1]:
            full, rest = divmod(shared, self.block_size)
            if full > len(hits):
                hits = source.table.blocks[:full]
            tail = (source.table.blocks[full], rest) if rest else (0, 0)
        return hits, [tail, (0, 0)] if tail[0] else [(0, 0)]

    def is_being_written(self, source: NaiveRequest, index: int) -> bool:
        """Whether a block changes in the step being made, too late to be copied at its beginning."""
        if source.table.copy_source and source.num_computed // self.block_size == index:
            return True
        block_id = source.table.blocks[index]
        return block_id in self.kv.pool.key_of and self.kv.step_of[block_id] == self.kv.step

    def preempt(self, request: NaiveRequest) -> None:
        self.running.remove(request)
        self.kv.take_back(request.table, request.num_computed)
        self.kv.release(request.table)
        self.leave_row(request)
        request.num_computed, request.status = 0, "preempted"
        request.num_preemptions += 1
        self.waiting.append(request)

    def pack(self, given: dict[NaiveRequest, int]) -> list[NaiveRow] | None:
        if not given:
            return None
        self.last_step += 1
        rows = []
        for request in given:
            self.kv.end_copy(request.table)
        for request, num_new in given.items():
            samples = request.num_computed + num_new == request.known and request.max_tokens > 0
            rows.append(NaiveRow(request, request.num_computed, num_new, samples, request.num_preemptions))
            request.num_computed += num_new
            request.in_flight += samples
            request.last_step = self.last_step
        self.in_flight.append((self.last_step, rows))
        return rows

    def update(self, token_ids: list[int]) -> list[NaiveRequest]:
        self.updated, rows = self.in_flight.pop(0)
        self.kv.settled = self.updated
        tokens = iter(token_ids)
        changed = []
        for row in rows:
            request = row.request
            token = next(tokens) if row.samples else None
            if request.status == "finished":
                continue
            if row.epoch == request.num_preemptions:
                self.kv.publish(request.table, row.num_computed + row.num_new)
            if token is not None:
                request.in_flight -= 1
                request.table.tokens.append(token)
                changed.append(request)
                if request.newest_token_ends_it(self.max_total):
                    self.finish(request, str(request.finish_reason))
            elif request.max_tokens == 0 and row.num_computed + row.num_new == request.num_prompt:
                changed.append(request)
                self.finish(request, "length")
        self.drain()
        return changed

    def drain(self) -> None:
        self.fences = [fence for fence in self.fences if fence > self.updated]
        for request in [r for r in self.deferred if r.last_step <= self.updated]:
            self.deferred.remove(request)
            self.kv.release(request.table)
