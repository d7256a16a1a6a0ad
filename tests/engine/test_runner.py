"""The CPU runner: order of steps, tokens that stay on the device, results, failures and the end."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from aioengine.checkpoint import load_checkpoint
from aioengine.device import CpuDevice
from aioengine.errors import EngineClosed, EngineDead
from aioengine.kv_layout import layout_of
from aioengine.layers.ops_torch import TorchOps
from aioengine.loader import load_model, make_runner
from aioengine.runner import CpuRunner, StepResult
from aioengine.types import SamplingParams
from tests.models.plans import FakePlan, FakeRequest, Planner
from tests.models.tiny import VOCAB, make_checkpoint, random_prompt, resolve_for

Family = tuple[PreTrainedModel, Path]
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 40, 128


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("llama")
    return make_checkpoint("llama3-scaling", folder), folder


class FailingOps(TorchOps):
    """Fails when told to."""

    fails = False

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("out of electrons")
        return super().silu_mul(gate_up)


def start_runner(folder: Path, ops: TorchOps | None) -> CpuRunner:
    config, resolved = resolve_for(
        str(folder), MAX_LEN, block_size=BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS, max_num_seqs=8
    )
    device = CpuDevice(resolved, ops)
    loaded = load_model(load_checkpoint(config.model), resolved, device)
    return make_runner(loaded, layout_of(loaded.spec, resolved), resolved, config.cache, device)


@pytest.fixture(params=["torch", "native"])
async def runner(request: pytest.FixtureRequest, checkpoint: Family) -> AsyncIterator[CpuRunner]:
    threads = set(threading.enumerate())
    runner = start_runner(checkpoint[1], TorchOps() if request.param == "torch" else None)
    yield runner
    await runner.close()
    assert set(threading.enumerate()) == threads


@pytest.fixture
def planner() -> Planner:
    return Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


def reference_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def reference_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def a_plan(planner: Planner) -> FakePlan:
    return planner.plan({planner.request(random_prompt(5)): 5})


async def step(runner: CpuRunner, planner: Planner, chunks: dict[FakeRequest, int]) -> StepResult:
    plan = planner.plan(chunks)
    result = await runner.launch(plan)
    planner.update(plan, result.token_ids.tolist())
    return result


async def generate(runner: CpuRunner, planner: Planner, request: FakeRequest, num_tokens: int) -> list[int]:
    while len(request.outputs) < num_tokens:
        await step(runner, planner, {request: len(request.prompt) + len(request.outputs) - request.num_computed})
    return request.outputs


async def test_mixed_steps_generate_what_each_request_would_alone(
    runner: CpuRunner, planner: Planner, checkpoint: Family
) -> None:
    requests = [planner.request(random_prompt(n, seed=n)) for n in (5, 23, 11)]
    await step(runner, planner, {requests[0]: 5})
    await step(runner, planner, {requests[0]: 1, requests[1]: 10})
    await step(runner, planner, {requests[1]: 13, requests[0]: 1, requests[2]: 11})
    for _ in range(5):
        await step(runner, planner, dict.fromkeys(requests, 1))
    for request in requests:
        assert request.outputs == reference_greedy(checkpoint[0], request.prompt, len(request.outputs))


async def test_a_chunk_inside_the_prompt_samples_nothing(runner: CpuRunner, planner: Planner) -> None:
    result = await step(runner, planner, {planner.request(random_prompt(9)): 4})
    assert result.token_ids.tolist() == [] and result.token_ids.dtype == np.int32


async def test_a_step_launched_ahead_takes_the_token_from_the_row(
    runner: CpuRunner, planner: Planner, checkpoint: Family
) -> None:
    first, second = planner.request(random_prompt(6, seed=1)), planner.request(random_prompt(7, seed=2))
    plans: list[FakePlan] = [planner.plan({first: 6, second: 7})]
    launched = [runner.launch(plans[0])]
    for i in range(1, 6):  # the next step is always launched before the last one is awaited
        plans.append(planner.plan({first: 1, second: 1} if i % 2 else {second: 1, first: 1}))
        assert -1 in plans[i].buffer[int(plans[i].buffer[6]) :][:2]
        launched.append(runner.launch(plans[i]))
        result = await launched[i - 1]
        planner.update(plans[i - 1], result.token_ids.tolist())
    planner.update(plans[-1], (await launched[-1]).token_ids.tolist())
    for request in (first, second):
        assert request.outputs == reference_greedy(checkpoint[0], request.prompt, 6)


async def test_a_row_that_is_left_and_taken_again_starts_clean(
    runner: CpuRunner, planner: Planner, checkpoint: Family
) -> None:
    """INV-37, INV-40: nothing of the request before it is left in the row."""
    first = planner.request(random_prompt(9, seed=1), SamplingParams(temperature=0.0, frequency_penalty=2.0))
    second = planner.request(random_prompt(9, seed=2))
    await generate(runner, planner, first, 6)
    row = first.row
    planner.leave(first)
    assert await generate(runner, planner, second, 8) == reference_greedy(checkpoint[0], second.prompt, 8)
    assert second.row == row
    planner.leave(second)
    resumed = await generate(runner, planner, first, 12)  # as after a preemption
    again = planner.request(first.prompt, SamplingParams(temperature=0.0, frequency_penalty=2.0))
    assert await generate(runner, planner, again, 12) == resumed


async def test_a_copied_block_continues_where_the_copy_ends(
    runner: CpuRunner, planner: Planner, checkpoint: Family
) -> None:
    first = planner.request(random_prompt(10, seed=1))
    await step(runner, planner, {first: 10})
    ahead = planner.plan({first: 1})
    launched = runner.launch(ahead)  # writes into the block that the next step copies
    others = [planner.sibling(first, num_shared) for num_shared in (9, 6)]
    plan = planner.plan({first: 1, others[0]: 1, others[1]: 1})
    second = runner.launch(plan)
    planner.update(ahead, (await launched).token_ids.tolist())
    planner.update(plan, (await second).token_ids.tolist())
    for request in (first, *others):
        expected = reference_greedy(checkpoint[0], request.prompt, 8)
        assert await generate(runner, planner, request, 8) == expected


async def test_logprobs_are_those_of_the_raw_logits(runner: CpuRunner, planner: Planner, checkpoint: Family) -> None:
    plain = planner.request(random_prompt(6, seed=1))
    scored = planner.request(random_prompt(8, seed=2), SamplingParams(temperature=0.0, logprobs=3))
    result = await step(runner, planner, {plain: 6, scored: 8})
    assert result.logprobs is not None and list(result.logprobs) == [1]
    expected = reference_logprobs(checkpoint[0], scored.prompt)[-1]
    entry = result.logprobs[1]
    assert entry.token_id == scored.outputs[0] and entry.rank == 1
    assert entry.top_ids.tolist() == expected.topk(3).indices.tolist()
    np.testing.assert_allclose(entry.top_logprobs, expected.topk(3).values.numpy(), atol=1e-4)


@pytest.mark.parametrize("chunks", [[70], [33, 37], [1, 68, 1]])
async def test_prompt_logprobs_score_every_token_but_the_first(
    runner: CpuRunner, planner: Planner, checkpoint: Family, chunks: list[int]
) -> None:
    other = planner.request(random_prompt(3, seed=5))
    prompt = random_prompt(70, seed=4)
    request = planner.request(prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))
    await step(runner, planner, {other: 3})
    entries = []
    for num_new in chunks:
        result = await step(runner, planner, {other: 1, request: num_new})
        assert result.prompt_logprobs is not None and list(result.prompt_logprobs) == [1]
        entries += result.prompt_logprobs[1]
    result = await step(runner, planner, {request: 1})
    assert result.prompt_logprobs is None
    expected = reference_logprobs(checkpoint[0], prompt)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for i, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[i, prompt[i + 1]]), abs=1e-4)
        assert entry.rank == 1 + int((expected[i] > expected[i, prompt[i + 1]]).sum())
        assert entry.top_ids.tolist() == expected[i].topk(2).indices.tolist()


async def test_a_row_with_broken_scores_fails_alone(runner: CpuRunner, planner: Planner) -> None:
    bad, good = planner.request(random_prompt(5)), planner.request(random_prompt(6))
    await step(runner, planner, {bad: 5, good: 6})
    assert runner._worker.work is not None
    runner._worker.work.kv_caches[0][bad.tables[0][0]] = float("nan")
    result = await step(runner, planner, {good: 1, bad: 1})
    assert result.failures is not None and list(result.failures) == [1]
    assert "not finite" in result.failures[1]


async def test_a_failed_step_fails_with_every_step_after_it(checkpoint: Family, planner: Planner) -> None:
    ops = FailingOps()
    runner = start_runner(checkpoint[1], ops)
    request = planner.request(random_prompt(5))
    await step(runner, planner, {request: 5})
    ops.fails = True
    first = runner.launch(planner.plan({request: 1}))
    second = runner.launch(planner.plan({request: 1}))
    for launched in (first, second):
        with pytest.raises(EngineDead, match="out of electrons"):
            await launched
    ops.fails = False
    with pytest.raises(EngineDead, match="out of electrons"):
        await runner.launch(planner.plan({request: 1}))
    await runner.close()


async def test_nothing_is_launched_after_close(runner: CpuRunner, planner: Planner) -> None:
    launched = runner.launch(a_plan(planner))
    await asyncio.gather(runner.close(), runner.close())
    assert launched.done()
    if launched.exception() is not None:  # it had not begun
        assert isinstance(launched.exception(), EngineClosed)
    with pytest.raises(EngineClosed):
        await runner.launch(a_plan(planner))


async def test_a_cancelled_future_does_not_disturb_the_steps_after_it(
    runner: CpuRunner, planner: Planner, checkpoint: Family
) -> None:
    request = planner.request(random_prompt(5))
    plan = planner.plan({request: 5})
    runner.launch(plan).cancel()
    ahead = planner.plan({request: 1})
    result = await runner.launch(ahead)
    assert result.token_ids.tolist() == reference_greedy(checkpoint[0], request.prompt, 2)[1:]


def test_a_loop_that_ended_is_not_told(checkpoint: Family, planner: Planner) -> None:
    """The runner outlives the loop that launched; its thread goes on and ends on another loop's close()."""
    runner = start_runner(checkpoint[1], TorchOps())

    async def launch_only() -> None:
        runner.launch(a_plan(planner))

    asyncio.run(launch_only())
    asyncio.run(runner.close())
    assert not runner._worker._thread.is_alive()


async def test_torch_threads_of_the_caller_stay_as_they_were(
    checkpoint: Family,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner = start_runner(checkpoint[1], TorchOps())
        assert torch.get_num_threads() == 2
        await runner.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


async def test_closing_leaves_no_thread_of_the_system_behind(checkpoint: Family, planner: Planner) -> None:
    async def run_and_close() -> set[int]:
        runner = start_runner(checkpoint[1], None)
        await step(runner, planner, {planner.request(random_prompt(9)): 9})
        during = {thread.id for thread in psutil.Process().threads()}
        await runner.close()
        return during

    for _ in range(3):  # what torch and numpy start on first use stays; torch's team may come with a later one
        await run_and_close()
    before = {thread.id for thread in psutil.Process().threads()}
    during = await run_and_close()
    assert len(during) > len(before)
    for _ in range(10_000):  # the system lists a joined thread until it has quite left, in `before` too
        if {thread.id for thread in psutil.Process().threads()} <= before:
            return
        os.sched_yield()
    pytest.fail("a thread stayed behind")


@pytest.mark.parametrize("end", ["close", "close after a failure", "let go"])
async def test_the_end_gives_the_memory_back(checkpoint: Family, planner: Planner, end: str) -> None:
    ops = FailingOps()
    runner = start_runner(checkpoint[1], ops if "failure" in end else None)
    work = runner._worker.work
    assert work is not None
    cache, model, thread = weakref.ref(work.kv_caches[0]), weakref.ref(work.model), runner._worker._thread
    del work
    error: BaseException | None = None
    if "failure" in end:
        ops.fails = True
        error = (await asyncio.gather(runner.launch(a_plan(planner)), return_exceptions=True))[0]
        assert isinstance(error, EngineDead)
    if end != "let go":
        await runner.close()
    del runner
    gc.collect()
    assert not thread.is_alive()
    assert cache() is None and model() is None
