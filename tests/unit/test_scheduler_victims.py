"""What victims leave: whoever was cut short for them is counted anew, and nobody else goes for that (INV-31)."""

from __future__ import annotations

import pytest

from aioengine.fastcore.scheduler import Scheduler
from tests.unit.test_scheduler import make_request, make_scheduler, scheduled, settle
from tests.unit.test_step_cost import paced, run_step


@pytest.mark.parametrize(("threshold", "num_tokens"), [(0, 8), (7, 7)])
def test_a_request_that_preempts_gets_its_victims_tokens(threshold: int, num_tokens: int) -> None:
    scheduler = make_scheduler(
        num_blocks=6, max_num_batched_tokens=8, policy="priority", long_prefill_token_threshold=threshold
    )
    low, high = make_request("low", 11, priority=9), make_request("high", 19, start=300)
    scheduler.add(low)
    settle(scheduler, scheduler.schedule())
    scheduler.add(high)
    plan = scheduler.schedule()
    assert scheduled(plan) == {"low": 3, "high": 5}  # three blocks and two: the pool is full
    settle(scheduler, plan)
    plan = scheduler.schedule()  # one token for low leaves seven, for which high lacks a block
    assert low.status == "preempted" and scheduled(plan) == {"high": num_tokens}
    settle(scheduler, plan)


def test_a_request_that_preempts_comes_before_those_behind_it_as_if_its_victim_had_never_been_there() -> None:
    scheduler = make_scheduler(
        num_blocks=5, policy="priority", max_num_batched_tokens=24, max_num_scheduled_tokens=7,
        long_prefill_token_threshold=1, adaptive_long_prefill_threshold=True,
    )  # fmt: skip
    low, crowd = make_request("low", 5, priority=9), [make_request(str(i), start=900) for i in range(9)]
    for request in crowd:
        scheduler.add(request, ready=False)
    scheduler.add(low)
    settle(scheduler, scheduler.schedule())
    for request in (make_request("high", 14, start=300), make_request("behind", 1, start=600)):
        scheduler.add(request)
    plan = scheduler.schedule()
    assert scheduled(plan) == {"low": 2, "high": 2, "behind": 1}  # a twelfth of 24 each
    settle(scheduler, plan)
    for request in crowd:
        scheduler.abort(request)
    plan = scheduler.schedule()  # a third of 24 each, and 7 in all; high lacks a block for what low leaves of them
    assert low.status == "preempted" and scheduled(plan) == {"high": 7}
    settle(scheduler, plan)


def urgent_over_two() -> Scheduler:
    """Two prompts have both rows and the whole budget, and an urgent request comes."""
    scheduler = make_scheduler(
        max_num_seqs=2, max_num_batched_tokens=8, policy="priority", long_prefill_token_threshold=6, max_in_flight=2
    )
    scheduler.add(make_request("low", 60, priority=9))
    settle(scheduler, scheduler.schedule())
    scheduler.add(make_request("cut", 60, start=300, priority=1))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"low": 6, "cut": 2}
    settle(scheduler, plan)
    return scheduler


def test_running_requests_get_what_an_urgent_one_leaves_of_its_victims_tokens() -> None:
    scheduler = urgent_over_two()
    scheduler.add(make_request("urgent", 1, start=900))
    plan = scheduler.schedule()  # 6 of low come back; one is enough for urgent, the threshold ends cut at 6
    assert scheduled(plan) == {"cut": 6, "urgent": 1}
    settle(scheduler, plan)


def test_what_was_freed_for_an_urgent_request_that_waits_for_its_row_is_kept_for_it() -> None:
    scheduler = urgent_over_two()
    in_flight = scheduler.schedule()
    scheduler.add(make_request("urgent", 1, start=900))
    plan = scheduler.schedule()
    assert scheduler.num_urgent_preemptions_total == 1 and scheduled(plan) == {"cut": 2}
    settle(scheduler, in_flight)
    settle(scheduler, plan)


def test_time_that_a_victim_leaves_is_spent_on_free_blocks_and_on_no_other_victim() -> None:
    scheduler = paced(
        target_itl_s=0.001, num_blocks=10, block_size=2, max_num_batched_tokens=12, policy="priority",
        long_prefill_token_threshold=5,
    )  # fmt: skip
    low, other = make_request("low", 1, priority=9), make_request("other", 6, start=600, priority=5)
    for request in (low, make_request("high", 16, start=300), other):
        scheduler.add(request)
    assert run_step(scheduler) == {"high": 5, "other": 5, "low": 1}
    assert [run_step(scheduler) for _ in range(3)] == [{"high": 1, "low": 1}] * 3  # low waits for each next token
    # high takes a block of low's for one token. Nobody decodes any more: it may have five, but there is only one
    # block more, for three. One of other's would do for the fifth, but high was content with one token a moment ago.
    assert run_step(scheduler) == {"high": 4, "other": 1}
    assert low.status == "preempted" and other.num_preemptions == 0


def test_a_prompt_ahead_gets_the_token_that_was_kept_for_a_decode_which_became_a_victim() -> None:
    scheduler = paced(
        target_itl_s=1e5, num_blocks=11, max_num_batched_tokens=24, max_num_scheduled_tokens=8,
        long_prefill_token_threshold=1, adaptive_long_prefill_threshold=True,
    )  # fmt: skip
    held, last = make_request("held"), make_request("last", 1, start=900, max_tokens=30)
    scheduler.add(held, ready=False)
    for request in (make_request("long", 36), make_request("first", 1, start=600, max_tokens=30), last):
        scheduler.add(request)
    assert run_step(scheduler) == {"long": 6, "first": 1, "last": 1}  # a fourth of 24 at most
    scheduler.abort(held)
    assert [run_step(scheduler) for _ in range(3)] == [{"long": 6, "first": 1, "last": 1}] * 3  # a third; two are kept
    assert run_step(scheduler) == {"long": 7, "first": 1}  # first needs a second block
    assert last.status == "preempted"


def test_an_urgent_prompt_has_the_step_to_itself_once_nobody_decodes_any_more() -> None:
    scheduler = paced(target_itl_s=0.001, max_num_seqs=1, policy="priority")
    scheduler.add(make_request("low", 4, priority=9))
    assert [run_step(scheduler) for _ in range(2)] == [{"low": 4}, {"low": 1}]
    scheduler.add(make_request("urgent", 40, start=300))
    assert run_step(scheduler) == {"urgent": 40}
