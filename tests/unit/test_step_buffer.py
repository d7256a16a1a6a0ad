"""The packed step: its words, its growth bounds, and the life of its slot."""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc

import numpy as np
import pytest

from aioengine.fastcore import step_buffer as layout
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan


def make_scheduler(**options: object) -> Scheduler:
    defaults: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 12,
        "max_model_len": 64,
    }
    return Scheduler(**{**defaults, **options})  # type: ignore[arg-type]


def next_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def settle(scheduler: Scheduler, plan: StepPlan, token_id: int = 9) -> None:
    scheduler.update(plan, np.full(plan.num_samples, token_id, np.int32))


def sections(plan: StepPlan) -> tuple[list[list[int]], list[int], list[list[int]]]:
    words = plan.buffer
    off_rows, off_tokens, off_blocks = words[layout.HEADER_OFF_ROWS : layout.HEADER_OFF_BLOCKS + 1]
    off_copies = words[layout.HEADER_OFF_COPIES]
    rows = words[off_rows:off_tokens].reshape(-1, layout.ROW_WORDS)
    blocks = words[off_blocks:off_copies].reshape(-1, layout.BLOCK_WORDS)
    return rows.tolist(), words[off_tokens:off_blocks].tolist(), blocks.tolist()


def test_layout_of_a_mixed_step() -> None:
    scheduler = make_scheduler(max_in_flight=2)
    scheduler.add(Request("a", [10, 11, 12, 13, 14], max_tokens=4))
    scheduler.add(Request("b", list(range(20, 30)), max_tokens=4, wants_prompt_logits=True))
    first = next_plan(scheduler)
    assert first.buffer.dtype == np.int32 and first.buffer.flags.c_contiguous
    assert first.buffer[:16].tolist() == [4, 1, 2, 12, 1, 16, 32, 44, 4, 56, 56, 0, 0, 0, 0, 0]
    rows, tokens, blocks = sections(first)
    assert rows == [[0, 0, 5, 0, 1 | 4, 0, 0, 0], [1, 5, 7, 0, 2 | 4, -1, 0, 0]]
    assert tokens == [10, 11, 12, 13, 14, *range(20, 27)]
    assert blocks == [[0, 0, 1], [0, 1, 2], [1, 0, 3], [1, 1, 4]]
    second = next_plan(scheduler)
    rows, tokens, blocks = sections(second)
    assert rows == [[0, 0, 1, 5, 1, 0, 1, 0], [1, 1, 3, 7, 1 | 2, 1, 0, 0]]
    assert tokens == [-1, 27, 28, 29]  # a's token is still on the device
    assert blocks == [[1, 2, 5]]
    settle(scheduler, first, 77)
    third = next_plan(scheduler)
    rows, tokens, blocks = sections(third)
    assert rows == [[0, 0, 1, 6, 1, 0, 2, 0], [1, 1, 1, 10, 1, 1, 1, 0]]
    assert tokens == [-1, -1] and blocks == []


def test_what_the_host_reads_of_a_mixed_step() -> None:
    scheduler = make_scheduler(max_in_flight=3)
    scheduler.add(Request("a", [10, 11, 12, 13, 14], max_tokens=4))
    scheduler.add(Request("b", list(range(20, 30)), max_tokens=4, wants_prompt_logits=True))

    def read(long_chunk: int) -> list[object]:
        return [x.tolist() if isinstance(x, np.ndarray) else x for x in layout.read_step(plan.buffer, long_chunk)]

    plan = next_plan(scheduler)
    assert read(6) == [7, [5, 7], [0], [0], [0], [(1, 5)], [(1, 5, 7, 0)]]
    plan = next_plan(scheduler)
    assert read(3) == [3, [1, 3], [0, 1], [1, 0], [0, 1], [(1, 1)], [(1, 1, 3, 7)]]
    assert read(4)[-1] == []
    plan = next_plan(scheduler)
    assert read(2) == [1, [1, 1], [0, 1], [2, 1], [0, 1], [], []]


@pytest.mark.parametrize("words", [0, 16])
def test_a_step_of_another_version_is_not_read(words: int) -> None:
    with pytest.raises(ValueError, match="step buffer of version .*, expected"):
        layout.read_step(np.zeros(words, np.int32), 1)


def test_token_known_on_the_host_is_sent() -> None:
    scheduler = make_scheduler()
    scheduler.add(Request("a", [10, 11], max_tokens=4))
    settle(scheduler, next_plan(scheduler), 77)
    assert sections(next_plan(scheduler))[1] == [77]


def test_joined_row_after_a_preemption_sends_its_whole_table() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=32)
    first = Request("a", list(range(8)), max_tokens=9)
    other = Request("b", list(range(50, 58)), max_tokens=9)
    scheduler.add(first)
    scheduler.add(other)
    settle(scheduler, next_plan(scheduler))
    preempting = next_plan(scheduler)  # both need a third block, one is left
    assert other.status == "preempted" and preempting.requests == [first]
    while other.status != "running":
        settle(scheduler, preempting)
        preempting = next_plan(scheduler)
    assert preempting.joined == [other] and preempting.left_rows == [0]
    rows, _, blocks = sections(preempting)
    assert rows[-1][layout.ROW_FLAGS] & layout.FLAG_JOINED
    assert [b[2] for b in blocks if b[0] == other.row] == other.block_ids()
    assert rows[-1][layout.ROW_NUM_COMPUTED] == 4  # its first block was still cached


def test_prompt_logits_are_asked_for_once_per_position() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(Request("a", list(range(9)), max_tokens=3, wants_prompt_logits=True))
    flags = []
    while scheduler.has_work():
        plan = next_plan(scheduler)
        flags.append(sections(plan)[0][0][layout.ROW_FLAGS] & layout.FLAG_PROMPT_LOGITS)
        settle(scheduler, plan)
    # The chunk [8] has no next prompt token to predict.
    assert flags == [2, 2, 0, 0, 0]


def test_recomputed_prompt_does_not_ask_for_its_logits_again() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=32)
    first = Request("a", list(range(8)), max_tokens=9)
    other = Request("b", list(range(50, 58)), max_tokens=9, wants_prompt_logits=True)
    scheduler.add(first)
    scheduler.add(other)
    asked = 0
    while scheduler.has_work():
        plan = next_plan(scheduler)
        for request, row in zip(plan.requests, sections(plan)[0], strict=True):
            asked += request is other and row[layout.ROW_FLAGS] & layout.FLAG_PROMPT_LOGITS > 0
        settle(scheduler, plan)
    assert other.num_preemptions == 1 and asked == 1


def test_slot_is_not_reused_before_its_update() -> None:
    scheduler = make_scheduler(max_in_flight=3)
    scheduler.add(Request("a", [1, 2], max_tokens=40))
    plans = [next_plan(scheduler) for _ in range(3)]
    copies = [plan.buffer.copy() for plan in plans]
    for _ in range(20):
        assert all((plan.buffer == copy).all() for plan, copy in zip(plans, copies, strict=True))
        assert all(np.shares_memory(plan.buffer, scheduler.step_buffer.ring) for plan in plans)
        settle(scheduler, plans.pop(0))
        copies.pop(0)
        plans.append(next_plan(scheduler))
        copies.append(plans[-1].buffer.copy())


def test_plan_knows_its_rows_only_until_the_update() -> None:
    scheduler = make_scheduler()
    scheduler.add(Request("a", [1, 2], max_tokens=4))
    plan = next_plan(scheduler)
    assert (plan.num_computed(0), plan.num_new(0)) == (0, 2)
    with pytest.raises(IndexError, match="row 1 of a step with 1 rows"):
        plan.num_new(1)
    settle(scheduler, plan)
    with pytest.raises(RuntimeError, match="step 1 has been updated"):
        plan.num_computed(0)


def test_worst_case_fits_the_ring() -> None:
    # Every row joins in one step with a whole cached table and one token of its own.
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=64)
    scheduler.add(Request("seed", list(range(62)), max_tokens=1))
    settle(scheduler, next_plan(scheduler))
    for i in range(6):
        scheduler.add(Request(str(i), list(range(62)), max_tokens=2))
    plan = next_plan(scheduler)
    assert plan.num_rows == 6 and len(sections(plan)[2]) == 6 * 16
    assert len(plan.buffer) <= scheduler.step_buffer.ring.shape[1]


def test_long_shared_prefixes_join_over_several_steps() -> None:
    # 40 rows with tables of 2,000 shared blocks exceed what one step may send.
    scheduler = Scheduler(
        num_blocks=2200, block_size=1, max_num_seqs=40, max_num_batched_tokens=2010, max_model_len=2010
    )
    assert scheduler.step_buffer.max_join_blocks == 65536
    scheduler.add(Request("seed", list(range(2000)), max_tokens=1))
    settle(scheduler, next_plan(scheduler))
    for i in range(40):
        scheduler.add(Request(str(i), list(range(2000)), max_tokens=3))
    plan = next_plan(scheduler)
    assert plan.num_rows == 65536 // 2000
    settle(scheduler, plan)
    plan = next_plan(scheduler)
    assert plan.num_rows == 40 and len(plan.joined) == 40 - 65536 // 2000


@pytest.mark.slow
def test_steps_leave_no_objects_behind() -> None:
    scheduler = make_scheduler(num_blocks=2000, max_num_batched_tokens=64, max_model_len=600, max_in_flight=2)
    token_ids, firsts = np.full(8, 9, np.int32), itertools.count()

    def run(num_steps: int) -> None:
        plans: list[StepPlan] = []
        for _ in range(num_steps):
            while scheduler.num_running + scheduler.num_waiting < 8:
                first = next(firsts)  # they share nothing, so that they start and end in different steps
                scheduler.add(Request("r", [first, *range(19)], max_tokens=500))
            plans.append(next_plan(scheduler))
            if len(plans) == 2:
                plan = plans.pop(0)
                scheduler.update(plan, token_ids[: plan.num_samples])
        for plan in plans:
            scheduler.update(plan, token_ids[: plan.num_samples])
        gc.collect()

    run(1200)
    before = sys.getallocatedblocks()
    run(10_000)
    assert sys.getallocatedblocks() - before < 50


def test_a_dropped_scheduler_leaves_no_memory_behind() -> None:
    # C arrays come from Python's allocator, so that tracemalloc sees them.
    def live_and_die() -> None:
        scheduler = make_scheduler(max_in_flight=2)
        requests = [Request(str(i), list(range(30)), max_tokens=90, stop_token_ids=[1]) for i in range(6)]
        for request in requests:
            scheduler.add(request)
        for _ in range(12):
            plan, ahead = next_plan(scheduler), scheduler.schedule()
            settle(scheduler, plan)
            if ahead is not None:
                settle(scheduler, ahead)
        scheduler.abort(requests[0])
        next_plan(scheduler)

    tracemalloc.start()
    try:
        live_and_die()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            live_and_die()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()
