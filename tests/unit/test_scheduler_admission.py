"""Who may start: caps, budgets, limits on unfinished prompts, and the gates on blocks."""

from __future__ import annotations

import random

import pytest

from tests.unit.test_scheduler import make_request, make_scheduler, run_to_end, scheduled, settle

# ---- caps and budgets (C6, C7) ----


def test_fewer_may_run_than_there_are_rows_and_the_number_changes_while_they_run() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_active_seqs=2)
    for i in range(6):
        scheduler.add(make_request(str(i), start=100 * i))
    plan = scheduler.schedule()
    assert list(scheduled(plan)) == ["0", "1"]
    settle(scheduler, plan)
    scheduler.max_num_active_seqs = 4
    plan = scheduler.schedule()
    assert list(scheduled(plan)) == ["0", "1", "2", "3"]
    settle(scheduler, plan)
    scheduler.max_num_active_seqs = 1
    running = scheduler.running_requests()
    plan = scheduler.schedule()
    assert list(scheduled(plan)) == ["0", "1", "2", "3"]  # nobody is interrupted
    settle(scheduler, plan)
    for request in running[:3]:
        scheduler.abort(request)
    plan = scheduler.schedule()
    assert list(scheduled(plan)) == ["3"]
    settle(scheduler, plan)
    scheduler.abort(running[3])
    assert list(scheduled(scheduler.schedule())) == ["4"]


@pytest.mark.parametrize("value", [0, -1, 9])
def test_an_active_cap_outside_the_rows_is_refused(value: int) -> None:
    scheduler = make_scheduler(max_num_seqs=8)
    with pytest.raises(ValueError, match=f"max_num_active_seqs={value} must lie between 1 and max_num_seqs=8"):
        scheduler.max_num_active_seqs = value
    assert scheduler.max_num_active_seqs == 8


def test_the_token_budget_binds_below_the_input_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_scheduled_tokens=10)
    scheduler.add(make_request("a", 8))
    scheduler.add(make_request("b", 8, start=300))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 8, "b": 2}
    settle(scheduler, plan)
    assert scheduled(scheduler.schedule()) == {"a": 1, "b": 6}


# ---- long prompts (C11, C12) ----


@pytest.mark.parametrize(("num_requests", "expected"), [(1, 40), (2, 32), (4, 16), (8, 8), (16, 6)])
def test_adaptive_threshold_is_at_least_a_fair_share(num_requests: int, expected: int) -> None:
    scheduler = make_scheduler(
        max_num_seqs=16, num_blocks=300, long_prefill_token_threshold=6, adaptive_long_prefill_threshold=True
    )
    for i in range(num_requests):
        scheduler.add(make_request(str(i), 40, start=1000 * i))
    assert scheduled(scheduler.schedule())["0"] == expected  # 64 tokens // requests, but at least 6


def test_the_fair_share_is_one_of_the_input_budget() -> None:
    """C11: not of the tokens that a step may have, of which there can be fewer."""
    scheduler = make_scheduler(
        max_num_scheduled_tokens=40, long_prefill_token_threshold=6, adaptive_long_prefill_threshold=True
    )
    for i in range(4):
        scheduler.add(make_request(str(i), 40, start=1000 * i))
    assert scheduled(scheduler.schedule()) == {"0": 16, "1": 16, "2": 8}


def test_short_prompts_pass_long_ones_that_wait_for_another_long_one() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8, max_num_partial_prefills=3, max_long_partial_prefills=1)
    lengths = {"long1": 30, "long2": 30, "short1": 5, "long3": 30, "short2": 8}
    for i, (name, length) in enumerate(lengths.items()):
        scheduler.add(make_request(name, length, start=1000 * i, max_tokens=30))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"long1": 8, "short1": 5, "short2": 8}
    assert [r.request_id for r in scheduler.waiting_requests()] == ["long2", "long3"]
    settle(scheduler, plan)
    order = ["long1"]
    for _ in range(12):
        plan = scheduler.schedule()
        order += [r.request_id for r in (plan.joined if plan else [])]
        settle(scheduler, plan)
    assert order == ["long1", "long2", "long3"]  # in their order, each when the one before is nearly done


def test_a_short_prompt_that_the_step_cuts_is_no_long_one() -> None:
    """C12: it is unfinished, but counts only against the unfinished of any length."""
    for max_partial, expected in ((2, {"long": 8, "short": 3}), (1, {"long": 8})):
        scheduler = make_scheduler(
            max_num_batched_tokens=11, long_prefill_token_threshold=8, max_num_partial_prefills=max_partial,
            max_long_partial_prefills=1,
        )  # fmt: skip
        scheduler.add(make_request("long", 30))
        scheduler.add(make_request("short", 5, start=500))
        assert scheduled(scheduler.schedule()) == expected


def test_a_long_prompt_that_is_mostly_cached_is_not_long() -> None:
    options = {"long_prefill_token_threshold": 8, "max_num_partial_prefills": 2, "max_long_partial_prefills": 1}
    scheduler = make_scheduler(**options)
    scheduler.add(make_request("before", 30, start=500, max_tokens=1))
    run_to_end(scheduler)
    scheduler.add(make_request("long", 60))
    scheduler.add(make_request("cached", 30, start=500))
    assert scheduled(scheduler.schedule()) == {"long": 8, "cached": 2}


def test_at_most_so_many_prompts_are_unfinished_at_once() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=4, max_num_partial_prefills=2)
    for i in range(4):
        scheduler.add(make_request(str(i), 10, start=1000 * i, max_tokens=4))
    steps = []
    for _ in range(4):
        plan = scheduler.schedule()
        steps.append(scheduled(plan))
        settle(scheduler, plan)
    assert steps[:3] == [{"0": 4, "1": 4}, {"0": 4, "1": 4}, {"0": 2, "1": 2, "2": 4, "3": 4}]


def test_no_long_prompt_starves_behind_a_stream_of_short_ones() -> None:
    scheduler = make_scheduler(
        max_num_seqs=3, long_prefill_token_threshold=4, max_num_partial_prefills=2, max_long_partial_prefills=1
    )
    longs = [make_request(f"long{i}", 20, start=1000 * i, max_tokens=2) for i in range(3)]
    for request in longs:
        scheduler.add(request)
    for step in range(60):
        scheduler.add(make_request(f"short{step}", 3, start=5000 + 10 * step, max_tokens=3))
        settle(scheduler, scheduler.schedule())
    assert {r.status for r in longs} == {"finished"}


# ---- gates on blocks (A14-A16, INV-35) ----


def test_two_that_fit_only_by_their_first_chunk_run_one_after_the_other() -> None:
    preemptions = {}
    for gate in (False, True):
        scheduler = make_scheduler(num_blocks=11, long_prefill_token_threshold=4, full_sequence_must_fit=gate)
        first, second = make_request("a", 23, max_tokens=2), make_request("b", 23, start=900, max_tokens=2)
        scheduler.add(first)
        scheduler.add(second)
        started = []
        while scheduler.has_work():
            plan = scheduler.schedule()
            assert plan is not None
            started += [(r.request_id, first.status) for r in plan.joined]
            settle(scheduler, plan)
        preemptions[gate] = scheduler.num_preemptions_total
        if gate:
            assert started == [("a", "running"), ("b", "finished")]
    assert preemptions == {False: 1, True: 0}


def test_the_full_sequence_counts_what_running_prompts_still_need() -> None:
    scheduler = make_scheduler(num_blocks=17, long_prefill_token_threshold=8, full_sequence_must_fit=True)
    scheduler.add(make_request("a", 40))  # 10 of 16 blocks, 2 in the first step
    scheduler.add(make_request("b", 25, start=900))  # 7 blocks: free now, but promised to a
    assert scheduled(scheduler.schedule()) == {"a": 8}
    scheduler = make_scheduler(num_blocks=17, long_prefill_token_threshold=8, full_sequence_must_fit=True)
    scheduler.add(make_request("a", 40))
    scheduler.add(make_request("b", 24, start=900))  # 6 blocks fit beside a
    assert scheduled(scheduler.schedule()) == {"a": 8, "b": 8}


def test_cached_blocks_count_for_the_full_sequence() -> None:
    scheduler = make_scheduler(num_blocks=11, full_sequence_must_fit=True)
    scheduler.add(make_request("before", 20, max_tokens=1))
    run_to_end(scheduler)
    holder = make_request("holder", 21, max_tokens=30)
    scheduler.add(holder)  # 6 of 10 blocks, 5 of them cached
    settle(scheduler, scheduler.schedule())
    assert holder.num_cached_tokens == 20
    scheduler.add(make_request("same", 21, max_tokens=2))  # 5 shared and 1 of the 4 that are free
    assert "same" in scheduled(scheduler.schedule())


def test_watermark_holds_back_newcomers_only_while_somebody_runs() -> None:
    """A15: whoever is alone starts, and whoever runs goes on."""
    scheduler = make_scheduler(num_blocks=21, watermark=0.5)
    scheduler.add(make_request("big", 70, max_tokens=4))  # 18 of 20 blocks, alone: starts
    plan = scheduler.schedule()
    assert scheduled(plan) == {"big": 64}
    settle(scheduler, plan)
    scheduler.add(make_request("small", 3, start=900))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"big": 6}  # a running request ignores the watermark, a newcomer does not
    settle(scheduler, plan)
    while scheduler.num_running == 1 and scheduler.running_requests()[0].request_id == "big":
        settle(scheduler, scheduler.schedule())
    assert list(scheduled(scheduler.schedule())) == ["small"]


def test_watermark_holds_back_whom_a_reset_has_preempted() -> None:
    """A15: a preempted request is a newcomer again, and only the first to come back finds nobody running."""
    scheduler = make_scheduler(num_blocks=13, watermark=0.5)  # 12 blocks, of which 6 stay free
    a, b = make_request("a", 12), make_request("b", 12, start=500)
    for request in (a, b):
        scheduler.add(request)
    settle(scheduler, scheduler.schedule())  # 3 blocks each
    settle(scheduler, scheduler.schedule())  # and a fourth, which no watermark keeps from them
    assert scheduler.num_free_blocks == 4
    assert scheduler.reset_prefix_cache(force=True)
    while a.status != "finished":
        assert b.status == "preempted"
        plan = scheduler.schedule()
        assert set(scheduled(plan)) == {"a"}
        settle(scheduler, plan)
    assert set(scheduled(scheduler.schedule())) == {"b"}


def test_watermark_is_counted_behind_the_allocation() -> None:
    for prompt_len, expected in ((24, True), (25, False)):
        scheduler = make_scheduler(num_blocks=20, watermark=0.5)  # 19 usable, 10 stay free
        scheduler.add(make_request("first", 12, start=900))  # 3 blocks
        settle(scheduler, scheduler.schedule())
        settle(scheduler, scheduler.schedule())  # and a fourth one
        assert scheduler.num_free_blocks == 15
        scheduler.add(make_request("next", prompt_len - 4))
        assert ("next" in scheduled(scheduler.schedule())) == expected


def test_promised_blocks_are_not_given_to_newcomers() -> None:
    scheduler = make_scheduler(num_blocks=11)
    scheduler.admission.promise("load", 9)
    request = make_request("a", 8, max_tokens=4)
    scheduler.add(request)
    assert scheduler.schedule() is None and request.status == "waiting"
    scheduler.admission.promise("load", 8)
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 8}
    settle(scheduler, plan)
    plan = scheduler.schedule()  # a running request may take any block
    assert scheduled(plan) == {"a": 1} and scheduler.num_free_blocks == 7
    settle(scheduler, plan)
    scheduler.admission.promise("load", 0)
    assert scheduler.admission.num_promised == 0


def test_promises_are_added_up_and_bounded() -> None:
    admission = make_scheduler(num_blocks=11).admission
    admission.promise("a", 4)
    admission.promise("b", 5)
    admission.promise("a", 2)
    assert admission.num_promised == 7
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=f"num_blocks={wrong} cannot be kept: 5 are promised to others"):
            admission.promise("a", wrong)
    assert admission.num_promised == 7


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fits_the_pool_alone_ends_with_every_gate_closed_as_far_as_it_goes(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=9, max_num_batched_tokens=rng.choice([4, 16]), full_sequence_must_fit=True, watermark=0.9,
        long_prefill_token_threshold=3, max_num_partial_prefills=1, max_long_partial_prefills=1,
    )  # fmt: skip
    requests = [make_request(str(i), rng.randint(1, 31), start=100 * i, max_tokens=20) for i in range(12)]
    for request in requests:
        scheduler.add(request)
    run_to_end(scheduler)
    assert {r.finish_reason for r in requests} == {"length"} and scheduler.num_free_blocks == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_active_seqs": 9}, "max_num_active_seqs=9 must lie between 1 and max_num_seqs=8"),
        ({"max_num_scheduled_tokens": 65}, "max_num_scheduled_tokens=65 must lie between 1 and"),
        ({"watermark": 1.0}, "watermark=1.0 must be at least 0 and below 1"),
        ({"watermark": float("nan")}, "watermark=nan"),
        ({"max_num_partial_prefills": -1}, "max_num_partial_prefills=-1"),
        (
            {"long_prefill_token_threshold": 4, "max_num_partial_prefills": 2, "max_long_partial_prefills": 3},
            "max_long_partial_prefills=3 is above max_num_partial_prefills=2",
        ),
        ({"max_long_partial_prefills": 1}, "max_long_partial_prefills=1 needs long_prefill_token_threshold"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**options)
