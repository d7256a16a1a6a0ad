"""The priority policy: who makes way for an urgent request, who does not, and that age counts."""

from __future__ import annotations

import random

import pytest

from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from tests.unit.test_scheduler import make_request, make_scheduler, run_to_end, scheduled, settle


def priority_scheduler(**options: object) -> Scheduler:
    return make_scheduler(policy="priority", **options)


def started(scheduler: Scheduler, *requests: Request) -> None:
    """Adds requests and runs one step, in which all of them start."""
    for request in requests:
        scheduler.add(request)
    settle(scheduler, scheduler.schedule())
    assert {r.status for r in requests} == {"running"}


# ---- making way (C25) ----


def test_an_urgent_request_takes_the_row_of_the_least_important() -> None:
    scheduler = priority_scheduler(max_num_seqs=3)
    a, b, c = (make_request(n, start=100 * i, priority=p) for i, (n, p) in enumerate([("a", 5), ("b", 7), ("c", 6)]))
    started(scheduler, a, b, c)
    scheduler.add(make_request("later", start=400, priority=6))
    scheduler.add(make_request("urgent", start=500, priority=0))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"c": 1, "a": 1, "urgent": 6} or scheduled(plan) == {"a": 1, "c": 1, "urgent": 6}
    assert b.status == "preempted" and plan is not None and plan.num_tokens == 8  # its token went back
    assert [r.request_id for r in scheduler.waiting_requests()] == ["later", "b"]
    assert scheduler.num_urgent_preemptions_total == scheduler.num_preemptions_total == 1
    settle(scheduler, plan)
    run_to_end(scheduler)
    assert b.output_ids_from(0) == [9] * 8


def test_an_urgent_request_takes_as_many_blocks_as_it_needs_and_no_more() -> None:
    scheduler = priority_scheduler(num_blocks=13)  # 12 blocks
    low = [make_request(str(i), 11, start=100 * i, priority=9 - i) for i in range(4)]  # 3 blocks each
    started(scheduler, *low)
    scheduler.add(make_request("urgent", 20, start=900, priority=0))  # 5 blocks: two have to go
    plan = scheduler.schedule()
    assert plan is not None and [r.request_id for r in plan.joined] == ["urgent"]
    assert [r.status for r in low] == ["preempted", "preempted", "running", "running"]


def test_nobody_makes_way_in_vain() -> None:
    scheduler = priority_scheduler(num_blocks=13)
    important = make_request("important", 23, priority=0)  # 6 of 12 blocks
    low = make_request("low", 11, start=500, priority=9)  # 3 more
    started(scheduler, important, low)
    scheduler.add(make_request("urgent", 28, start=900, priority=1))  # 7: even without low there are only 6
    assert set(scheduled(scheduler.schedule())) == {"important", "low"}
    assert low.status == "running" and scheduler.num_preemptions_total == 0


def test_shared_blocks_do_not_count_as_freed() -> None:
    scheduler = priority_scheduler(num_blocks=9)  # 8 blocks
    first = make_request("first", 13, priority=0)
    started(scheduler, first)  # 4 blocks, 3 of them full
    second = make_request("second", 13, priority=9)
    started(scheduler, second)
    assert second.block_ids()[:3] == first.block_ids()[:3]  # one block of its own; 3 are free
    scheduler.add(make_request("urgent", 17, start=900, priority=1))  # 5 blocks; 3 + 1 is not enough
    assert "urgent" not in scheduled(scheduler.schedule()) and second.status == "running"


def test_prefix_hits_of_the_urgent_request_are_not_freed_for_it_twice() -> None:
    scheduler = priority_scheduler(num_blocks=8)  # 7 blocks
    victim = make_request("victim", 13, priority=9)
    started(scheduler, victim)  # 4 blocks
    other = make_request("other", 6, start=500, priority=0, max_tokens=2)
    started(scheduler, other)  # 2 blocks, 1 free
    # Hits 3 blocks of the victim and needs 3 more: 1 free + 1 of the victim's own is not enough.
    scheduler.add(Request("urgent", [*range(100, 112), *range(900, 910)], max_tokens=1, priority=1))
    plan = scheduler.schedule()
    assert victim.status == "running" and "urgent" not in scheduled(plan)
    scheduler.check_invariants()


@pytest.mark.parametrize("priority", [5, 6])
def test_equal_or_greater_numbers_preempt_nobody(priority: int) -> None:
    scheduler = priority_scheduler(max_num_seqs=1)
    running = make_request("running", priority=5)
    started(scheduler, running)
    scheduler.add(make_request("other", start=300, priority=priority))
    assert scheduled(scheduler.schedule()) == {"running": 1}


def test_fcfs_preempts_nobody_for_a_newcomer() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    started(scheduler, make_request("running", priority=5))
    scheduler.add(make_request("other", start=300, priority=0))
    assert scheduled(scheduler.schedule()) == {"running": 1}


def test_a_step_that_preempted_for_blocks_admits_nobody_however_urgent() -> None:
    scheduler = priority_scheduler(num_blocks=5)
    a, b = make_request("a", 7, priority=1), make_request("b", 7, start=300, priority=2)
    started(scheduler, a, b)
    settle(scheduler, scheduler.schedule())
    scheduler.add(make_request("urgent", 1, start=900, priority=0))
    plan = scheduler.schedule()
    assert b.status == "preempted" and scheduled(plan) == {"a": 1}
    settle(scheduler, plan)
    assert "urgent" in scheduled(scheduler.schedule())


def test_a_step_that_made_way_admits_only_the_one_it_made_way_for() -> None:
    scheduler = priority_scheduler(max_num_seqs=4, max_num_active_seqs=2)
    started(scheduler, *(make_request(n, start=100 * i, priority=9) for i, n in enumerate("ab")))
    for i, name in enumerate(["u1", "u2"]):
        scheduler.add(make_request(name, start=500 + 100 * i, priority=0))
    first = scheduler.schedule()
    assert first is not None and [r.request_id for r in first.joined] == ["u1"]
    settle(scheduler, first)
    second = scheduler.schedule()
    assert second is not None and [r.request_id for r in second.joined] == ["u2"]
    assert scheduler.num_preemptions_total == 2


def test_a_full_budget_does_not_keep_an_urgent_request_out() -> None:
    scheduler = priority_scheduler(max_num_seqs=2, max_num_batched_tokens=2)
    low = [make_request(n, 1, start=100 * i, priority=9) for i, n in enumerate("ab")]
    started(scheduler, *low)
    scheduler.add(make_request("urgent", 1, start=900, priority=0))
    assert set(scheduled(scheduler.schedule())) == {"a", "urgent"}


def test_with_steps_in_flight_one_victim_is_enough_and_its_row_is_waited_for() -> None:
    scheduler = priority_scheduler(max_num_seqs=2, max_in_flight=2)
    for i, name in enumerate("ab"):
        scheduler.add(make_request(name, start=100 * i, priority=9, max_tokens=30))
    plans = [scheduler.schedule(), scheduler.schedule()]
    urgent = make_request("urgent", start=900, priority=0)
    scheduler.add(urgent)
    joined_after = 0
    while urgent.status != "running":
        settle(scheduler, plans.pop(0))
        plans.append(scheduler.schedule())
        joined_after += 1
        assert scheduler.num_preemptions_total <= 1 and joined_after < 4
    assert scheduler.num_preemptions_total == 1


def test_no_way_is_made_for_a_prompt_that_another_limit_keeps_out() -> None:
    scheduler = priority_scheduler(
        max_num_seqs=2, long_prefill_token_threshold=4, max_num_partial_prefills=2, max_long_partial_prefills=1
    )
    low = make_request("low", 3, start=500, priority=9)
    started(scheduler, make_request("long", 40, priority=0), low)
    scheduler.add(make_request("urgent", 40, start=900, priority=1))
    assert set(scheduled(scheduler.schedule())) == {"long", "low"} and low.status == "running"
    whole = priority_scheduler(
        max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False
    )
    low = make_request("low", 3, start=500, priority=9)
    started(whole, make_request("other", 3, priority=0), low)
    whole.add(make_request("urgent", 31, start=900, priority=1))  # one token too many beside "other"
    assert set(scheduled(whole.schedule())) == {"other", "low"} and low.status == "running"


def test_an_urgent_request_passes_the_gates_before_others_make_way() -> None:
    for gate, starts in ((False, True), (True, False)):
        scheduler = priority_scheduler(num_blocks=13, long_prefill_token_threshold=8, full_sequence_must_fit=gate)
        low = make_request("low", 11, start=500, priority=9)
        started(scheduler, make_request("important", 27, priority=0), low)  # 27 tokens: 7 blocks
        settle(scheduler, scheduler.schedule())
        scheduler.add(make_request("urgent", 27, start=900, priority=1))
        assert ("urgent" in scheduled(scheduler.schedule())) == starts


def test_what_was_kept_for_a_victim_is_free_without_it() -> None:
    """C25, A14: the gate holds back what a running prompt still needs, until that makes way."""
    scheduler = priority_scheduler(num_blocks=13, long_prefill_token_threshold=4, full_sequence_must_fit=True)
    low = make_request("low", 23, start=500, priority=9)  # 6 of 12 blocks, one more in each step
    started(scheduler, make_request("important", 3, priority=0), low)
    # 9 blocks: 9 are free, 4 of them kept for low, which has 2.
    scheduler.add(make_request("urgent", 35, start=900, priority=1))
    assert set(scheduled(scheduler.schedule())) == {"important", "urgent"} and low.status == "preempted"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_requests_never_take_turns_in_preempting_each_other(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    scheduler = priority_scheduler(num_blocks=14, max_num_seqs=3, max_in_flight=depth)
    requests = [
        make_request(str(i), rng.randint(1, 20), start=100 * i, priority=rng.randint(0, 3), max_tokens=12)
        for i in range(30)
    ]
    unborn, plans = list(requests), []
    while unborn or scheduler.has_work():
        if unborn and rng.random() < 0.3:
            scheduler.add(unborn.pop())
        while len(plans) < depth and (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        if plans:
            settle(scheduler, plans.pop(0))
    assert {len(r.output_ids_from(0)) for r in requests} == {12}
    # Each arrival makes way for itself at most once, with at most all rows as victims.
    assert 0 < scheduler.num_urgent_preemptions_total <= 3 * len(requests)


# ---- ageing ----


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_old_unimportant_request_goes_before_a_new_important_one() -> None:
    clock = Clock()
    scheduler = priority_scheduler(max_num_seqs=1, priority_ageing_s=10.0, clock=clock)
    scheduler.add(make_request("first", priority=0))
    plan = scheduler.schedule()
    scheduler.add(make_request("old", start=300, priority=3))
    for now_s, name, priority in [(29.0, "a", 0), (31.0, "b", 0), (31.0, "c", -1), (31.0, "d", 3)]:
        clock.now_s = now_s
        scheduler.add(make_request(name, start=400, priority=priority))
    # old is worth priority 0 at 30 s: it passes what comes later with 0, not what came before or is below.
    assert [r.request_id for r in scheduler.waiting_requests()] == ["c", "a", "old", "b", "d"]
    settle(scheduler, plan)
    scheduler.check_invariants()


@pytest.mark.parametrize(("ageing_s", "ends"), [(0.0, False), (5.0, True)])
def test_ageing_ends_starvation(ageing_s: float, ends: bool) -> None:
    clock = Clock()
    scheduler = priority_scheduler(max_num_seqs=2, priority_ageing_s=ageing_s, clock=clock)
    starving = make_request("starving", priority=8)
    scheduler.add(starving)
    for step in range(150):
        clock.now_s += 1.0
        scheduler.add(make_request(str(step), 2, start=1000 + 10 * step, priority=0, max_tokens=2))
        settle(scheduler, scheduler.schedule())
    assert (starving.status == "finished") == ends
    if ends:
        assert starving.scheduled_s is not None and starving.scheduled_s <= 8 * ageing_s + 10


def test_age_alone_preempts_nobody_and_protects_from_preemption() -> None:
    clock = Clock()
    scheduler = priority_scheduler(max_num_seqs=1, priority_ageing_s=10.0, clock=clock)
    started(scheduler, make_request("running", priority=2, max_tokens=20))
    clock.now_s = 100.0
    scheduler.add(make_request("urgent", start=300, priority=0))  # 2 levels are worth 20 s, not 100
    assert scheduled(scheduler.schedule()) == {"running": 1}
    aged = priority_scheduler(max_num_seqs=1, priority_ageing_s=10.0, clock=clock)
    held = make_request("held", start=300, priority=2)
    aged.add(held, ready=False)
    clock.now_s = 200.0
    started(aged, make_request("running", priority=1, max_tokens=20))
    aged.set_ready(held)  # older by 100 s, but not more important by number
    assert scheduled(aged.schedule()) == {"running": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"priority_ageing_s": -1.0, "policy": "priority"},
        {"priority_ageing_s": float("nan"), "policy": "priority"},
        {"priority_ageing_s": float("inf"), "policy": "priority"},
        {"priority_ageing_s": 5.0},
    ],
)
def test_ageing_that_cannot_work_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="priority_ageing_s="):
        make_scheduler(**options)


def test_nobody_makes_way_while_blocks_of_a_finished_request_are_coming_back() -> None:
    scheduler = priority_scheduler(num_blocks=13, max_in_flight=2)
    ended, low = make_request("ended", 23, priority=9), make_request("low", 11, start=500, priority=9)
    started(scheduler, ended, low)  # 6 and 3 of 12 blocks
    first = scheduler.schedule()
    scheduler.abort(ended)
    scheduler.add(make_request("urgent", 18, start=900, priority=0))  # 5 blocks: 3 are free, low has 3
    second = scheduler.schedule()
    assert set(scheduled(second)) == {"low"} and low.status == "running"
    settle(scheduler, first)
    third = scheduler.schedule()
    assert set(scheduled(third)) == {"low", "urgent"} and scheduler.num_preemptions_total == 0
