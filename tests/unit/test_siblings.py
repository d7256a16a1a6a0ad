"""Requests with one prompt: it is computed once, full blocks are shared, the last one is copied, nothing mixes."""

from __future__ import annotations

import pytest

from aioengine.fastcore.request import Request, Siblings
from tests.unit.test_scheduler import make_scheduler, scheduled, settle
from tests.unit.test_scheduler_async import SMALL, World, delays


def family(count: int, prompt_len: int, **options: object) -> list[Request]:
    siblings = Siblings()
    options.setdefault("max_tokens", 8)
    prompt = list(range(100, 100 + prompt_len))
    return [Request(f"r{i}", prompt, siblings=siblings, **options) for i in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("prompt_len", "num_shared", "num_copies"),
    [(1, 0, 0), (4, 0, 2), (5, 1, 0), (6, 1, 2), (8, 1, 2), (11, 2, 2)],
)
def test_full_blocks_are_shared_and_the_last_is_copied(
    prompt_len: int, num_shared: int, num_copies: int, caching: bool
) -> None:
    """A10, INV-25: nobody writes into a block of two owners."""
    scheduler = make_scheduler(enable_prefix_caching=caching)
    first, *others = family(3, prompt_len)
    for request in (first, *others):
        scheduler.add(request)
    assert scheduled(plan := scheduler.schedule()) == {"r0": prompt_len}
    assert [r.status for r in others] == ["held", "held"] and scheduler.num_waiting == 2
    settle(scheduler, plan)
    plan = scheduler.schedule()
    # Each computes the last prompt token again, for logits of its own.
    assert scheduled(plan) == {"r0": 1, "r1": 1, "r2": 1}
    assert plan is not None and plan.num_copies == num_copies
    for other in others:
        assert other.block_ids()[:num_shared] == first.block_ids()[:num_shared]
        assert not set(other.block_ids()[num_shared:]) & set(first.block_ids())
        assert other.num_cached_tokens == prompt_len - 1
    blocks = {block for request in (first, *others) for block in request.block_ids()}
    assert scheduler.num_free_blocks == 63 - len(blocks)
    settle(scheduler, plan)
    while scheduler.has_work():
        settle(scheduler, scheduler.schedule())
    assert scheduler.num_free_blocks == 63


def test_those_behind_waiting_siblings_go_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for request in family(3, 20):
        scheduler.add(request)
    scheduler.add(Request("other", [1, 2], max_tokens=4))
    assert scheduled(plan := scheduler.schedule()) == {"r0": 8}
    settle(scheduler, plan)
    settle(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert scheduled(plan) == {"r0": 4, "other": 2}
    settle(scheduler, plan)
    assert scheduled(scheduler.schedule()) == {"r0": 1, "other": 1, "r1": 1, "r2": 1}


def test_a_step_ahead_shares_what_the_step_in_flight_computes() -> None:
    scheduler = make_scheduler(max_in_flight=2)
    for request in family(2, 6):
        scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second is not None and second.num_copies == 1
    assert (scheduled(first), scheduled(second)) == ({"r0": 6}, {"r0": 1, "r1": 1})


@pytest.mark.parametrize("how", ["abort", "ends at once"])
def test_next_sibling_takes_over_from_one_that_left(how: str) -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    requests = family(3, 6, max_tokens=1 if how == "ends at once" else 8)
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    if how == "abort":
        scheduler.abort(requests[0])
        assert scheduler.has_work()
    settle(scheduler, plan)
    assert requests[0].status == "finished" and requests[1].status == "held"
    assert scheduled(plan := scheduler.schedule()) == {"r1": 6}  # r2 waits for it in turn
    settle(scheduler, plan)
    assert scheduled(scheduler.schedule())["r2"] == (6 if how == "ends at once" else 1)


def test_leader_preempted_in_its_prompt_keeps_nobody_waiting() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8, enable_prefix_caching=False)
    old = Request("old", range(8), max_tokens=9)
    requests = family(2, 12, max_tokens=2)
    scheduler.add(old)
    settle(scheduler, scheduler.schedule())
    for request in requests:
        scheduler.add(request)
    while requests[0].num_preemptions == 0:
        settle(scheduler, scheduler.schedule())
    while scheduler.has_work():
        settle(scheduler, scheduler.schedule())
    assert [r.num_output_tokens for r in (old, *requests)] == [9, 2, 2]


def test_nothing_is_expected_of_siblings_that_are_gone() -> None:
    scheduler = make_scheduler()
    requests = family(3, 6)
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    for request in reversed(requests):
        scheduler.abort(request)
        scheduler.check_invariants()
    settle(scheduler, plan)
    assert not scheduler.has_work() and scheduler.num_waiting == 0


def test_fail_all_ends_those_set_aside() -> None:
    scheduler = make_scheduler()
    requests = family(3, 6)
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    assert set(scheduler.fail_all()) == set(requests)
    assert not scheduler.has_work() and scheduler.num_free_blocks == 63


def test_siblings_must_be_alike() -> None:
    siblings = Siblings()
    Request("a", [1, 2, 3], max_tokens=1, siblings=siblings)
    for options in ({"prompt_token_ids": [1, 2, 4]}, {"cache_salt": b"x"}, {"extra_keys": b"x"}):
        keywords: dict[str, object] = {"prompt_token_ids": [1, 2, 3], "max_tokens": 1, **options}
        with pytest.raises(ValueError, match="equal prompts and keys"):
            Request("b", siblings=siblings, **keywords)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt logits"):
        Request("b", [1, 2, 3], max_tokens=1, siblings=siblings, wants_prompt_logits=True)


@delays
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(6, 4), (9, 4), (100, 20)])
def test_choices_together_say_what_each_says_alone(
    num_blocks: int, max_num_seqs: int, caching: bool, delay: int
) -> None:
    """A10, INV-25: siblings part without cross-talk."""
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "enable_prefix_caching": caching}
    world = World({**SMALL, **options}, delay)
    for prompt_len in (1, 7, 8, 10):
        world.add_choices(5, [prompt_len] * prompt_len, 6, ignore_eos=True, min_tokens=6)
    world.run()
    assert world.ended == {"length": 20}
    assert world.device.num_copies > 0
    if num_blocks == 100:
        # Once for each prompt that is so long, and as an output of the five choices of the shortest.
        assert sum(position == 2 for _, position in world.device.computed) == 3 + 5
