"""The scheduler against its plain-Python twin, under any order of calls and with steps in flight.

After every call the two agree on every request, table and queue, and on the order of the free list. Two
drivers share the pair: Hypothesis, which shrinks a failure, and seeded random load, which goes deep.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from aioengine.fastcore.request import Request, Siblings
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan
from tests.oracle.kv import NaiveTable
from tests.oracle.scheduler import NaiveRequest, NaiveRow, NaiveScheduler

EOS, STOP = 0, 1
FULL = ("full", 0, 1)

OPTIONS: Mapping[str, list[object]] = {
    "num_blocks": [4, 5, 7, 10, 16],
    "block_size": [1, 2, 4],
    "max_num_seqs": [1, 2, 3, 4, 6],
    "max_num_batched_tokens": [2, 4, 8, 24],
    "max_model_len": [10, 20, 40],
    "max_num_active_seqs": [0, 0, 1, 2],
    "max_num_scheduled_tokens": [0, 0, 2, 5],
    "policy": ["fcfs", "priority"],
    "enable_prefix_caching": [True, True, False],
    "enable_partial_block_reuse": [True, False],
    "enable_chunked_prefill": [True, True, False],
    "long_prefill_token_threshold": [0, 0, 2, 5],
    "adaptive_long_prefill_threshold": [False, True],
    "max_num_partial_prefills": [0, 0, 1, 2, 3],
    "max_long_partial_prefills": [0, 0, 1, 2],
    "full_sequence_must_fit": [False, True, True],
    "watermark": [0.0, 0.0, 0.2, 0.5],
    "priority_ageing_s": [0.0, 0.0, 1.0, 10.0],
    "max_in_flight": [1, 2, 3, 4],
    "kv_groups": [
        (FULL,),
        (FULL,),
        (FULL, ("sliding", 3, 1)),
        (FULL, ("sliding", 1, 1), ("sliding", 6, 2)),
        (FULL, ("chunked", 5, 1)),
        (FULL, FULL, ("sliding", 4, 1)),
        (FULL, ("chunked", 4, 4), ("sliding", 2, 1)),
    ],
}


def valid(options: dict[str, object]) -> dict[str, object]:
    """Options that may stand together: without chunks a step must hold any prompt."""
    if not options["enable_chunked_prefill"]:
        options |= {
            "max_num_batched_tokens": 40, "max_num_scheduled_tokens": 0, "long_prefill_token_threshold": 0
        }  # fmt: skip
    for name, most in (
        ("max_num_active_seqs", "max_num_seqs"),
        ("max_num_scheduled_tokens", "max_num_batched_tokens"),
        ("max_long_partial_prefills", "max_num_partial_prefills"),
    ):
        if options[most]:
            options[name] = min(int(str(options[name])), int(str(options[most])))
    if options["kv_groups"] != (FULL,):
        options["enable_partial_block_reuse"] = False
    if options["policy"] == "fcfs":
        options["priority_ageing_s"] = 0.0
    if options["long_prefill_token_threshold"] == 0:
        options["max_long_partial_prefills"] = 0
    return options


class Pair:
    """Both schedulers get the same calls and are compared after each."""

    def __init__(self, options: dict[str, object]) -> None:
        self.twin = NaiveScheduler(**options)  # type: ignore[arg-type]
        self.real = Scheduler(clock=lambda: self.twin.now_s, **options)  # type: ignore[arg-type]
        self.requests: list[tuple[Request, NaiveRequest]] = []
        self.plans: list[tuple[StepPlan, list[NaiveRow]]] = []
        self.no_tables: list[list[int]] = [[] for _ in self.twin.kv.others]

    def add(
        self, length: int, stem: int, max_tokens: int, min_tokens: int, priority: int, reads_cache: bool,
        ready: bool, num_choices: int = 1,
    ) -> None:  # fmt: skip
        siblings, twins = (Siblings() if num_choices > 1 else None), list[NaiveRequest]()
        for _ in range(num_choices):
            self.add_one(length, stem, max_tokens, min_tokens, priority, reads_cache, ready, siblings, twins)

    def add_one(
        self, length: int, stem: int, max_tokens: int, min_tokens: int, priority: int, reads_cache: bool,
        ready: bool, siblings: Siblings | None, twins: list[NaiveRequest],
    ) -> None:  # fmt: skip
        name = str(len(self.requests))
        # Prompts share prefixes and part at places that depend on the stem.
        ids = [2 + (stem > 0 and i >= 4 * stem - 3) for i in range(length)]
        request = Request(
            name, ids, max_tokens=max_tokens, min_tokens=min_tokens, priority=priority, eos_token_ids=[EOS],
            stop_token_ids=[STOP], skip_prefix_cache=not reads_cache, siblings=siblings,
        )  # fmt: skip
        table = NaiveTable(list(ids), reads_cache=reads_cache)
        twin = NaiveRequest(name, table, max_tokens, min_tokens, (EOS,), (STOP,), priority)
        fits = (
            length + (max_tokens > 0) <= self.twin.max_model_len
            and self.twin.kv.most_blocks(length + 1) < self.twin.num_blocks
        )
        try:
            self.real.add(request, ready=ready)
        except ValueError:
            assert not fits
            return
        assert fits
        if siblings is not None:
            twins.append(twin)
            twin.siblings = twins
        self.twin.add(twin, ready)
        self.requests.append((request, twin))
        self.compare()

    def schedule(self) -> bool:
        """One more step, if any; False if none can be made."""
        if len(self.plans) == self.twin.max_in_flight:
            return False
        num_running = self.real.num_running
        self.twin.now_s += 0.25
        plan, rows = self.real.schedule(), self.twin.schedule()
        self.compare()
        if plan is None or rows is None:
            assert plan is rows is None
            # Nothing scheduled and nothing in flight must mean that nothing is there to run.
            is_idle = not (self.twin.running or self.twin.waiting or self.twin.aside)
            assert self.plans or self.twin.promised or is_idle
            return False
        assert [r.request_id for r in plan.requests] == [row.request.name for row in rows]
        got = [(plan.num_computed(i), plan.num_new(i)) for i in range(plan.num_rows)]
        assert got == [(row.num_computed, row.num_new) for row in rows]
        sampling = [row.request.name for row in rows if row.samples]
        assert [r.request_id for r in plan.sample_requests] == sampling
        # Both budgets and the active cap hold (INV-27).
        assert plan.num_tokens == sum(row.num_new for row in rows) <= self.twin.max_num_scheduled_tokens
        assert self.real.num_running <= max(num_running, self.twin.max_num_active_seqs)
        self.plans.append((plan, rows))
        return True

    def update(self, rng: random.Random) -> None:
        """Settles the oldest step, if any, with mostly ordinary tokens."""
        if self.plans:
            plan, _ = self.plans.pop(0)
            ids = [rng.choice([2, 3, 3, rng.randrange(12)]) for _ in range(plan.num_samples)]
            changed = self.real.update(plan, np.array(ids, dtype=np.int32))
            assert [r.request_id for r in changed] == [r.name for r in self.twin.update(ids)]
            self.compare()

    def finish(self, index: int, reason: str) -> None:
        request, twin = self.requests[index]
        self.real.finish(request, reason)
        self.twin.finish(twin, reason)
        self.compare()

    def set_ready(self) -> None:
        for request, twin in self.requests:
            self.real.set_ready(request)
            self.twin.set_ready(twin)
        self.compare()

    def fail_all(self) -> None:
        ended = self.real.fail_all()
        assert [r.request_id for r in ended] == [r.name for r in self.twin.fail_all()]
        assert self.real.num_free_blocks == self.twin.num_blocks - 1
        self.plans.clear()
        self.compare()

    def set_active(self, count: int) -> None:
        count = min(count, self.twin.max_num_seqs)
        self.real.max_num_active_seqs = self.twin.max_num_active_seqs = count

    def promise(self, num_blocks: int) -> None:
        """Keeps blocks from newcomers, as for a load of KV."""
        num_blocks = min(num_blocks, self.twin.num_blocks - 1)
        self.real.admission.promise("load", num_blocks)
        self.twin.promised = num_blocks

    def reset_prefix_cache(self) -> None:
        assert self.real.reset_prefix_cache() == self.twin.kv.reset()
        self.compare()

    def compare(self) -> None:
        self.real.check_invariants()
        assert [r.request_id for r in self.real.running_requests()] == [r.name for r in self.twin.running]
        assert [r.request_id for r in self.real.waiting_requests()] == [r.name for r in self.twin.in_order()]
        assert self.real.num_waiting == len(self.twin.waiting) + len(self.twin.held)
        assert self.real.kv.pool.free_ids() == self.twin.kv.pool.free
        assert self.real.prefix_queries_tokens == self.twin.query_tokens
        assert self.real.prefix_hit_tokens == self.twin.hit_tokens
        assert self.real.num_preemptions_total == sum(twin.num_preemptions for _, twin in self.requests)
        for request, twin in self.requests:
            assert request.token_ids().tolist() == twin.table.tokens
            assert request.block_ids() == twin.table.blocks
            assert [request.block_ids(g) for g in self.twin.kv.others] == (twin.table.more or self.no_tables)
            assert (
                request.status, request.num_computed_tokens, request.num_in_flight, request.num_preemptions,
                request.num_cached_tokens, request.finish_reason, request.stop_token_id,
            ) == (
                twin.status, twin.num_computed, twin.in_flight, twin.num_preemptions,
                twin.num_cached, twin.finish_reason, twin.stop_token_id,
            )  # fmt: skip


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of calls."""

    @initialize(options=st.fixed_dictionaries({name: st.sampled_from(v) for name, v in OPTIONS.items()}))
    def start(self, options: dict[str, object]) -> None:
        self.pair = Pair(valid(options))

    @rule(
        length=st.integers(1, 14), stem=st.integers(0, 3), max_tokens=st.sampled_from([12, 30, 5, 2, 1, 0]),
        min_tokens=st.sampled_from([0, 0, 2]), priority=st.integers(-1, 1), reads_cache=st.booleans(),
        ready=st.sampled_from([True, True, True, False]), num_choices=st.sampled_from([1, 1, 2, 4]),
    )  # fmt: skip
    def add(self, **options: object) -> None:
        self.pair.add(**options)  # type: ignore[arg-type]

    @rule(count=st.integers(1, 4))
    def schedule(self, count: int) -> None:
        while count and self.pair.schedule():
            count -= 1

    @rule(count=st.integers(1, 4), rng=st.randoms(use_true_random=False))
    def update(self, count: int, rng: random.Random) -> None:
        for _ in range(count):
            self.pair.update(rng)

    @rule(rounds=st.integers(1, 8), rng=st.randoms(use_true_random=False))
    def pump(self, rounds: int, rng: random.Random) -> None:
        for _ in range(rounds):
            while self.pair.schedule():
                pass
            self.pair.update(rng)

    @precondition(lambda self: self.pair.requests)
    @rule(back=st.integers(0, 5), reason=st.sampled_from(["abort", "stop"]))
    def finish(self, back: int, reason: str) -> None:
        self.pair.finish(max(0, len(self.pair.requests) - 1 - back), reason)

    @rule()
    def set_ready(self) -> None:
        self.pair.set_ready()

    @rule(count=st.integers(1, 6))
    def set_active(self, count: int) -> None:
        self.pair.set_active(count)

    @rule(num_blocks=st.integers(0, 5))
    def promise(self, num_blocks: int) -> None:
        self.pair.promise(num_blocks)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.pair.reset_prefix_cache()

    @precondition(lambda self: len(self.pair.requests) > 3)
    @rule()
    def fail_all(self) -> None:
        self.pair.fail_all()


TestSchedulerMachine = SchedulerMachine.TestCase


def soak(seed: int, num_operations: int) -> Pair:
    """Random load that keeps the queue full, so that tiny pools preempt and deep pipelines fill."""
    rng = random.Random(seed)
    pair = Pair(valid({name: rng.choice(values) for name, values in OPTIONS.items()}))
    for _ in range(num_operations):
        dice = rng.random()
        if pair.real.num_waiting < 3 and dice < 0.3:
            pair.add(
                length=rng.randint(1, 14),
                stem=rng.randrange(4),
                max_tokens=rng.choice([0, 1, 2, 5, 12, 30, 30]),
                min_tokens=rng.choice([0, 0, 2, 20]),
                priority=rng.randint(-1, 1),
                reads_cache=rng.random() < 0.8,
                ready=rng.random() < 0.9,
                num_choices=rng.choice([1, 1, 1, 2, 4]),
            )
        elif dice < 0.63:
            pair.schedule()
        elif dice < 0.95:
            pair.update(rng)
        elif dice < 0.98 and pair.requests:
            pair.finish(-rng.randint(1, min(6, len(pair.requests))), rng.choice(["abort", "stop"]))
        elif dice < 0.99:
            pair.set_ready()
            pair.reset_prefix_cache()
        elif dice < 0.995:
            pair.set_active(rng.randint(1, 6))
            pair.promise(rng.choice([0, 0, 1, 3]))
        elif rng.random() < 0.2:
            pair.fail_all()
    pair.set_ready()
    pair.promise(0)
    while pair.real.has_work():
        while pair.schedule():
            pass
        pair.update(rng)
    assert {request.status for request, _ in pair.requests} <= {"finished"}
    assert pair.real.num_free_blocks == pair.twin.num_blocks - 1
    return pair


def test_random_load_agrees_with_the_twin() -> None:
    preempted = made_way = 0
    for seed in range(settings().max_examples):
        print(f"seed {seed}")  # shown if it fails; soak(seed, 300) replays it
        scheduler = soak(seed, 300).real
        made_way += scheduler.num_urgent_preemptions_total
        preempted += scheduler.num_preemptions_total - scheduler.num_urgent_preemptions_total
    assert preempted > 10 and made_way > 10, "the load no longer reaches preemption"


@pytest.mark.slow
def test_long_random_load_agrees_with_the_twin() -> None:
    for seed in range(1000, 1006):
        print(f"seed {seed}")
        soak(seed, 3000)
