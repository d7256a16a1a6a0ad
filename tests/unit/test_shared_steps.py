"""Blocks that are hit in the step that computes them, with the device 0 to 3 steps behind."""

from __future__ import annotations

import pytest

from tests.unit.test_scheduler import make_request, make_scheduler, scheduled
from tests.unit.test_scheduler_async import World, delays

ROOMY: dict[str, object] = {
    "num_blocks": 200,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 96,
}
PREFIX = list(range(100, 142))


@delays
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("budget", [16, 64, 300], ids=["some steps", "two steps", "one step"])
def test_a_prefix_of_requests_that_come_together_is_computed_once(delay: int, partial: bool, budget: int) -> None:
    world = World({**ROOMY, "enable_partial_block_reuse": partial, "max_num_batched_tokens": budget}, delay)
    requests = [world.add([*PREFIX, i, i + 1], 6, ignore_eos=True) for i in range(7)]
    world.run()
    in_prefix = [position for _, position in world.device.computed if position < 40]  # its full blocks
    assert in_prefix == list(range(40))
    assert [request.num_cached_tokens >= 40 for request in requests] == [False] + [True] * 6
    assert world.ended == {"length": 7}


@delays
def test_nothing_is_shared_without_the_cache_and_the_answers_are_the_same(delay: int) -> None:
    world = World({**ROOMY, "enable_prefix_caching": False}, delay)
    for i in range(7):
        world.add([*PREFIX, i, i + 1], 6, ignore_eos=True)
    world.run()
    assert sum(position < 40 for _, position in world.device.computed) == 7 * 40
    assert world.ended == {"length": 7}


@delays
def test_a_block_is_no_source_of_a_copy_before_its_step_is_over(delay: int) -> None:
    world = World({**ROOMY, "enable_partial_block_reuse": True, "max_num_batched_tokens": 64}, delay)
    first = [world.add([1, 2, 3, 4, 5, 6, 7, 8, i], 8, ignore_eos=True) for i in (10, 11)]
    other = world.add([1, 2, 3, 4, 5, 6, 9, 9, 9], 8, ignore_eos=True)
    world.step()
    assert [request.num_cached_tokens for request in (*first, other)] == [0, 8, 4]
    last = world.add([1, 2, 3, 4, 5, 6, 7, 9, 9], 8, ignore_eos=True)  # of two sources in the next step
    world.run()
    assert last.num_cached_tokens == 7 and world.device.num_copies == 1
    assert world.ended == {"length": 4}


@delays
def test_an_urgent_request_does_not_count_on_what_its_victim_was_to_compute(delay: int) -> None:
    options = {
        **ROOMY,
        "num_blocks": 13,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 16,
        "policy": "priority",
    }
    world = World(options, delay)
    world.add(list(range(50, 59)), 3, ignore_eos=True)  # 3 blocks of 12
    victim = world.add(PREFIX[:40], 3, priority=9, ignore_eos=True)
    plan = world.scheduler.schedule()
    assert plan is not None
    world.device.launch(plan)
    world.scheduler.update(*world.device.finish())
    assert world.scheduler.kv.prefix_map.num_entries == 2 + 4
    # The victim, running, is given 16 tokens more, and with them four blocks that the urgent one could hit.
    urgent = world.add(PREFIX[:40], 3, ignore_eos=True)
    journal = world.scheduler.kv.start_journal()
    plan = world.scheduler.schedule()
    assert plan is not None
    assert victim.num_preemptions == 1 and urgent.num_cached_tokens == 16
    kinds = [entry[0] for entry in journal.take()]
    assert kinds == ["stored"] * 4 + ["removed"] * 4 + ["stored"] * 4
    world.device.launch(plan)
    world.run()
    assert world.ended == {"length": 3}


def test_a_device_failure_forgets_what_its_steps_were_to_compute() -> None:
    scheduler = make_scheduler(max_in_flight=2)
    scheduler.add(make_request("a", 20))
    scheduler.schedule()
    assert scheduler.kv.prefix_map.num_entries == 5
    scheduler.fail_all()
    scheduler.check_invariants()
    assert scheduler.kv.prefix_map.num_entries == 0
    scheduler.add(make_request("b", 20))
    assert scheduled(scheduler.schedule()) == {"b": 20}
