"""Decisions of the scheduler on small cases, one behaviour per test."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aioengine.fastcore.limits import clip_tokens
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan

EOS = 2


def make_scheduler(**options: object) -> Scheduler:
    defaults: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
    }
    return Scheduler(**{**defaults, **options})  # type: ignore[arg-type]


def make_request(name: str, prompt_len: int = 6, *, start: int = 100, **options: object) -> Request:
    options.setdefault("max_tokens", 8)
    return Request(name, list(range(start, start + prompt_len)), **options)  # type: ignore[arg-type]


def settle(scheduler: Scheduler, plan: StepPlan | None, *token_ids: int) -> list[Request]:
    """Updates a plan with the given samples, or with token 9 for each."""
    assert plan is not None
    ids = token_ids or (9,) * plan.num_samples
    changed = scheduler.update(plan, np.array(ids, dtype=np.int32))
    scheduler.check_invariants()
    return changed


def scheduled(plan: StepPlan | None) -> dict[str, int]:
    """Request id -> number of tokens."""
    if plan is None:
        return {}
    return {r.request_id: plan.num_new(i) for i, r in enumerate(plan.requests)}


def run_to_end(scheduler: Scheduler, token_id: int = 9) -> None:
    while scheduler.has_work():
        settle(scheduler, (plan := scheduler.schedule()), *[token_id] * (plan.num_samples if plan else 0))


def test_prompt_is_computed_then_one_token_per_step() -> None:
    scheduler = make_scheduler()
    request = make_request("a", max_tokens=3)
    scheduler.add(request)
    sizes = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        sizes.append(scheduled(plan)["a"])
        assert settle(scheduler, plan) == [request]
    assert sizes == [6, 1, 1]
    assert request.output_ids_from(0) == [9, 9, 9]
    assert request.finish_reason == "length" and request.stop_token_id is None
    assert scheduler.num_free_blocks == 63


def test_prompt_only_request_finishes_without_a_sample() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make_request("a", max_tokens=0)
    scheduler.add(request)
    first, second = scheduler.schedule(), None
    assert settle(scheduler, first) == []
    second = scheduler.schedule()
    assert second is not None and second.num_samples == 0
    assert settle(scheduler, second) == [request]
    assert request.finish_reason == "length" and request.num_output_tokens == 0
    assert not scheduler.has_work()


@pytest.mark.parametrize(
    ("options", "token_id", "reason", "stop_token_id"),
    [
        ({"eos_token_ids": [EOS]}, EOS, "stop", None),
        ({"eos_token_ids": [EOS], "ignore_eos": True}, EOS, None, None),
        ({"eos_token_ids": [EOS], "stop_token_ids": [EOS], "ignore_eos": True}, EOS, "stop", EOS),
        ({"stop_token_ids": [5, 7]}, 7, "stop", 7),
        ({"eos_token_ids": [EOS], "stop_token_ids": [7], "min_tokens": 2}, 7, None, None),
        ({"eos_token_ids": [EOS], "min_tokens": 2}, EOS, None, None),
        ({"eos_token_ids": [EOS], "min_tokens": 1}, EOS, "stop", None),
        ({"max_tokens": 1}, 9, "length", None),
        ({"max_tokens": 1, "stop_token_ids": [9]}, 9, "stop", 9),
    ],
)
def test_first_token_ends_the_request_or_not(
    options: dict[str, object], token_id: int, reason: str | None, stop_token_id: int | None
) -> None:
    scheduler = make_scheduler()
    request = make_request("a", **options)
    scheduler.add(request)
    settle(scheduler, scheduler.schedule(), token_id)
    assert request.finish_reason == reason
    assert request.stop_token_id == stop_token_id
    assert request.output_ids_from(0) == [token_id]


def test_context_window_ends_a_request() -> None:
    scheduler = make_scheduler(max_model_len=8)
    request = make_request("a", 6, max_tokens=100)
    scheduler.add(request)
    run_to_end(scheduler)
    assert request.num_tokens == 8 and request.finish_reason == "length"


def test_pool_ends_a_request_that_outgrows_it() -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=100)
    request = make_request("a", 6, max_tokens=50)
    scheduler.add(request)
    run_to_end(scheduler)
    assert request.num_tokens == 9  # 8 slots, and the last token needs none
    assert request.finish_reason == "length" and request.num_preemptions == 0


def test_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=3)
    with pytest.raises(ValueError, match=r"8 tokens \+ 1 needs 3 blocks of 4 tokens, the pool has 2"):
        scheduler.add(make_request("a", 8))
    with pytest.raises(ValueError, match=r"128 tokens and at least 1 of output > max_model_len 128"):
        make_scheduler().add(make_request("a", 128))
    make_scheduler().add(make_request("a", 128, max_tokens=0))


def test_prefix_is_hit_from_the_step_on_that_computes_it() -> None:
    scheduler = make_scheduler(max_in_flight=2)
    for name in "ab":
        scheduler.add(make_request(name, 9))
    first = scheduler.schedule()
    assert scheduled(first) == {"a": 9, "b": 1}
    scheduler.add(make_request("c", 9))
    second = scheduler.schedule()  # the first step is not over
    assert scheduled(second) == {"a": 1, "b": 1, "c": 1}
    a, b, c = second.requests
    assert a.block_ids()[:2] == b.block_ids()[:2] == c.block_ids()[:2]
    assert len({request.block_ids()[2] for request in (a, b, c)}) == 3
    assert b.num_cached_tokens == c.num_cached_tokens == 8


def test_what_a_running_request_computes_of_its_prompt_is_hit_in_the_same_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a", 25))
    settle(scheduler, scheduler.schedule())
    scheduler.add(make_request("b", 25))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 9, "b": 1}
    a, b = plan.requests
    assert a.block_ids()[:6] == b.block_ids()[:6]


def test_a_block_that_is_full_with_a_token_in_flight_waits_until_it_is_known() -> None:
    scheduler = make_scheduler(max_in_flight=2)
    scheduler.add(make_request("a", 7))
    first, second = scheduler.schedule(), scheduler.schedule()  # the second computes position 7
    assert scheduler.kv.prefix_map.num_entries == 1
    settle(scheduler, first)
    assert scheduler.kv.prefix_map.num_entries == 1
    settle(scheduler, second)
    assert scheduler.kv.prefix_map.num_entries == 2


def test_hit_leaves_one_token_to_compute() -> None:
    """INV-16: there would be no logits without it."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 8, max_tokens=1))
    run_to_end(scheduler)
    again = make_request("b", 8, max_tokens=1)
    scheduler.add(again)
    assert scheduled(scheduler.schedule()) == {"b": 4}
    assert again.num_cached_tokens == 4
    assert (scheduler.prefix_queries_tokens, scheduler.prefix_hit_tokens) == (16, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"skip_prefix_cache": True},
        {"wants_prompt_logits": True},
        {"extra_keys": b"adapter"},
        {"cache_salt": b"tenant"},
    ],
)
def test_no_hit_for_requests_that_must_not_share(options: dict[str, object]) -> None:
    """INV-17, B17: who opts out or is another tenant finds nothing."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 9, max_tokens=1))
    run_to_end(scheduler)
    scheduler.add(make_request("b", 9, **options))
    assert scheduled(scheduler.schedule()) == {"b": 9}


def test_abort_in_the_same_tick_returns_everything() -> None:
    scheduler = make_scheduler()
    request = make_request("a")
    scheduler.add(request)
    settle(scheduler, scheduler.schedule())
    scheduler.abort(request)
    assert scheduler.num_free_blocks == 63 and request.finish_reason == "abort" and request.row == -1
    scheduler.abort(request)
    scheduler.finish(request, "stop")
    assert request.finish_reason == "abort"
    scheduler.check_invariants()


def test_abort_with_a_step_in_flight_keeps_blocks_and_row_until_its_update() -> None:
    """C21: the step may still write them."""
    scheduler = make_scheduler(max_num_seqs=1)
    request = make_request("a")
    scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.abort(request)
    scheduler.check_invariants()
    assert scheduler.num_free_blocks == 61
    newcomer = make_request("b", start=300)
    scheduler.add(newcomer)
    assert settle(scheduler, plan) == []
    assert scheduler.num_free_blocks == 63 and request.num_output_tokens == 0
    plan = scheduler.schedule()
    assert plan is not None and plan.left_rows == [0] and plan.joined == [newcomer] and newcomer.row == 0


def test_fail_all_ends_everything_and_empties_the_pool() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_in_flight=2)
    requests = [make_request(name) for name in "abcd"]
    for request in requests[:3]:
        scheduler.add(request)
    scheduler.add(requests[3], ready=False)
    plan = scheduler.schedule()
    assert scheduler.fail_all() == requests
    assert {r.finish_reason for r in requests} == {"error"}
    assert scheduler.num_free_blocks == 63 and not scheduler.has_work()
    scheduler.check_invariants()
    with pytest.raises(RuntimeError, match="not the oldest step in flight"):
        settle(scheduler, plan)


def test_steps_are_limited_and_settled_in_order() -> None:
    scheduler = make_scheduler(max_in_flight=2)
    scheduler.add(make_request("a"))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the oldest"):
        settle(scheduler, second)
    with pytest.raises(ValueError, match="got 2 token ids"):
        settle(scheduler, first, 1, 2)
    with pytest.raises(ValueError, match="token id -5"):
        settle(scheduler, first, -5)
    settle(scheduler, first)
    settle(scheduler, second)
    with pytest.raises(RuntimeError, match="not the oldest"):
        settle(scheduler, second)


@pytest.mark.parametrize(
    ("num_tokens", "threshold", "budget", "num_computed", "max_model_len", "expected"),
    [
        (10, 0, 64, 0, 128, 10),
        (10, 4, 64, 0, 128, 4),  # exactly the threshold
        (4, 4, 64, 0, 128, 4),
        (3, 4, 64, 0, 128, 3),
        (10, 0, 6, 0, 128, 6),
        (10, 8, 6, 0, 128, 6),
        (10, 4, 6, 0, 128, 4),
        (10, 0, 64, 120, 128, 8),
        (10, 4, 64, 126, 128, 2),
        (10, 4, 1, 126, 128, 1),
        (10, 0, 64, 128, 128, 0),
    ],
)
def test_clipping(
    num_tokens: int, threshold: int, budget: int, num_computed: int, max_model_len: int, expected: int
) -> None:
    assert clip_tokens(num_tokens, threshold, budget, num_computed, max_model_len) == expected


def test_long_prompt_is_chunked_and_decodes_come_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", 20, start=300))
    steps = []
    for _ in range(4):
        plan = scheduler.schedule()
        steps.append(scheduled(plan))
        settle(scheduler, plan)
    assert steps == [{"a": 4, "b": 6}, {"a": 1, "b": 9}, {"a": 1, "b": 5}, {"a": 1, "b": 1}]


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False)
    scheduler.add(make_request("a", 10))
    scheduler.add(make_request("b", 10, start=300))
    first = scheduler.schedule()
    assert scheduled(first) == {"a": 10}
    settle(scheduler, first)
    assert scheduled(scheduler.schedule()) == {"a": 1, "b": 10}


def test_long_prefill_threshold_spares_a_lone_request() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=4)
    scheduler.add(make_request("a", 20))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 20}
    settle(scheduler, plan)
    scheduler.add(make_request("b", 20, start=300))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 1, "b": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "lifo"}, "policy='lifo' must be fcfs or priority"),
        ({"max_in_flight": 5}, "max_in_flight=5 must lie between 1 and 4"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 1}, "num_blocks=1"),
        ({"hash_algo": "md5"}, "hash_algo='md5'"),
        ({"enable_chunked_prefill": False}, "max_num_scheduled_tokens=64 must reach max_model_len=128"),
    ],
)
def test_limits_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**options)


def test_fcfs_preempts_the_newest_and_admits_nobody_in_that_step() -> None:
    """INV-30, INV-32: the victim keeps its tokens and waits in front."""
    scheduler = make_scheduler(num_blocks=7)
    starts = {"a": 100, "b": 200, "c": 300}
    requests = [make_request(name, 7, start=start, max_tokens=9) for name, start in starts.items()]
    for request in requests:
        scheduler.add(request)
    settle(scheduler, scheduler.schedule())  # two blocks each: the pool is full
    settle(scheduler, scheduler.schedule())
    scheduler.add(make_request("d", 1, start=400))
    plan = scheduler.schedule()  # all three need a third block; one block of c is left over
    assert scheduled(plan) == {"a": 1, "b": 1}
    assert [r.request_id for r in scheduler.waiting_requests()] == ["c", "d"]  # in front
    c = requests[2]
    assert (c.status, c.num_computed_tokens, c.row, c.block_ids()) == ("preempted", 0, -1, [])
    assert c.output_ids_from(0) == [9, 9]
    settle(scheduler, plan)
    run_to_end(scheduler)
    assert all(r.output_ids_from(0) == [9] * 9 for r in requests)


def test_priority_preempts_the_least_important_though_it_was_scheduled() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=17, policy="priority")
    low = make_request("low", 7, start=100, priority=5, max_tokens=20)
    high = make_request("high", 8, start=200, priority=1, max_tokens=20)
    scheduler.add(low)
    settle(scheduler, scheduler.schedule())
    scheduler.add(high)
    settle(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    while high.status == low.status == "running":
        settle(scheduler, plan)
        plan = scheduler.schedule()
    # low comes first in the running list, so it had been given a token when high found no room.
    assert low.status == "preempted" and scheduled(plan) == {"high": 1}
    assert plan is not None and plan.num_tokens == plan.num_rows == 1
    settle(scheduler, plan)
    run_to_end(scheduler)
    assert low.num_preemptions == 1 and high.num_preemptions == 0


def test_victim_gives_its_tokens_back_to_those_behind_it() -> None:
    """C17: the step spends its whole budget all the same."""
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=4, policy="priority", block_size=2)
    low = make_request("low", 2, start=100, priority=9, max_tokens=30)
    high = make_request("high", 2, start=200, priority=0, max_tokens=30)
    long = make_request("long", 20, start=300, priority=0, max_tokens=1)
    for request in (low, high, long):  # one after the other, so that low is first in the running list
        scheduler.add(request)
        settle(scheduler, scheduler.schedule())
    while scheduled(plan := scheduler.schedule()) == {"low": 1, "high": 1, "long": 2}:
        settle(scheduler, plan)
    # low had its token of this step when high found no room: it goes to long.
    assert low.status == "preempted" and scheduled(plan) == {"high": 1, "long": 3}


def test_priority_admits_smaller_numbers_first_and_ties_by_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=2, policy="priority")
    for name, priority in [("a", 3), ("b", 1), ("c", 1), ("d", -2)]:
        scheduler.add(make_request(name, priority=priority))
    assert list(scheduled(scheduler.schedule())) == ["d", "b"]
    assert [r.request_id for r in scheduler.waiting_requests()] == ["c", "a"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_waiting_order_survives_aborts_from_the_middle(policy: str) -> None:
    rng = random.Random(3)
    scheduler = make_scheduler(policy=policy)
    waiting: list[Request] = []
    for step in range(600):
        if len(waiting) < 40 or rng.random() < 0.5:
            request = make_request(str(step), priority=rng.randint(-5, 5))
            scheduler.add(request)
            waiting.append(request)
        else:
            scheduler.abort(waiting.pop(rng.randrange(len(waiting))))
        scheduler.check_invariants()
    if policy == "priority":
        waiting.sort(key=lambda request: request.priority)  # stable: ties keep the order of arrival
    assert scheduler.waiting_requests() == waiting
    admitted = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        admitted += plan.joined
        settle(scheduler, plan)
    assert admitted == waiting


def test_held_request_blocks_nobody_and_keeps_its_place() -> None:
    """C23: others start meanwhile, and its turn is where it was."""
    scheduler = make_scheduler(max_num_seqs=2)
    held = make_request("held")
    scheduler.add(held, ready=False)
    for name in "abcd":
        scheduler.add(make_request(name))
    assert (held.status, scheduler.num_waiting) == ("held", 5)
    plan = scheduler.schedule()
    assert list(scheduled(plan)) == ["a", "b"]
    scheduler.set_ready(held)
    assert [r.request_id for r in scheduler.waiting_requests()] == ["held", "c", "d"]
    other = make_request("other")
    scheduler.add(other, ready=False)
    assert scheduler.num_waiting == 4
    scheduler.abort(other)
    scheduler.set_ready(other)
    assert other.status == "finished" and scheduler.num_waiting == 3


def test_only_held_requests_are_no_work() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"), ready=False)
    assert not scheduler.has_work() and scheduler.schedule() is None


def test_same_id_aborted_and_sent_again_is_two_requests() -> None:
    """INV-37: the old one leaves before the new one enters."""
    scheduler = make_scheduler()
    old = make_request("a", 6)
    scheduler.add(old)
    settle(scheduler, scheduler.schedule())
    scheduler.abort(old)
    new = make_request("a", 6, start=500)
    scheduler.add(new)
    plan = scheduler.schedule()
    assert plan is not None and plan.left_rows == [0] and plan.joined == plan.requests == [new]
    assert plan.num_computed(0) == 0 and old.num_output_tokens == 1
    with pytest.raises(ValueError, match="was added before"):
        scheduler.add(old)


def test_blocks_about_to_come_back_spare_a_victim() -> None:
    """C21: they come back with the step that may write them."""
    scheduler = make_scheduler(num_blocks=5, max_in_flight=2, max_model_len=16)
    leaving, staying = make_request("a", 7), make_request("b", 7, start=200)
    scheduler.add(leaving)
    scheduler.add(staying)
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.abort(leaving)
    settle(scheduler, first)  # leaving's blocks wait for the second step
    assert scheduler.num_free_blocks == 0
    assert scheduler.schedule() is None  # staying needs a third block, and waits for it
    assert staying.status == "running"
    settle(scheduler, second)
    assert scheduled(scheduler.schedule()) == {"b": 1} and staying.num_preemptions == 0


def test_scheduled_time_is_that_of_the_first_admission() -> None:
    times = iter([10.0, 20.0])
    scheduler = make_scheduler(max_num_seqs=1, clock=lambda: next(times))
    first, second = make_request("a", max_tokens=1), make_request("b", max_tokens=1)
    scheduler.add(first)
    scheduler.add(second)
    run_to_end(scheduler)
    assert (first.scheduled_s, second.scheduled_s) == (10.0, 20.0)


def test_reset_of_the_prefix_cache() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 9, max_tokens=2))
    settle(scheduler, scheduler.schedule())
    assert not scheduler.reset_prefix_cache()
    run_to_end(scheduler)
    assert scheduler.reset_prefix_cache()
    scheduler.add(make_request("b", 9))
    assert scheduled(scheduler.schedule()) == {"b": 9}
