"""The GPU's runner on a device that is late: rings, late stops and freed blocks under every delay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from aioengine.errors import EngineDead
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.loop import StepLoop
from aioengine.runner import StepResult
from aioengine.sampler import PendingLogprobs, compile_sampling
from aioengine.types import SamplingParams
from tests.oracle.device import next_token
from tests.oracle.late_gpu import LateGpu

VOCAB, BLOCK_SIZE, MAX_SEQS = 40, 4, 6
GREEDY = SamplingParams(temperature=0.0)


@contextlib.asynccontextmanager
async def driven(gpu: LateGpu) -> AsyncIterator[None]:
    """The device works while this is entered."""
    task = asyncio.create_task(gpu.drive())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def request_of(
    name: str, prompt: list[int], max_tokens: int, params: SamplingParams = GREEDY, **options: Any
) -> Request:
    plan = compile_sampling(params, None, VOCAB, (), 0, 0)
    return Request(name, prompt, max_tokens=max_tokens, sampling=plan, **options)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


class Served:
    """A scheduler and a step loop over the real runner; requests are aborted once they have a number of tokens."""

    def __init__(self, gpu: LateGpu, num_blocks: int, depth: int, **options: Any) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=16,
            max_model_len=96,
            max_in_flight=depth,
        )
        self.runner = gpu.runner(vocab_size=VOCAB, max_num_seqs=MAX_SEQS, max_in_flight=depth, **options)
        self.loop = StepLoop(self.scheduler, self.runner, self.settle, max_in_flight=depth)
        self.abort_at: dict[Request, int] = {}
        self.ended = asyncio.Event()

    def settle(self, plan: Any, result: StepResult) -> None:
        wanted = [request.sampling.params.temperature for request in plan.sample_requests]
        assert self.runner._forward.temperatures.popleft() == wanted
        self.scheduler.update(plan, result.token_ids)
        self.scheduler.check_invariants()
        for request, count in list(self.abort_at.items()):
            if len(request.output_ids_from(0)) >= count:
                del self.abort_at[request]
                self.scheduler.finish(request, "abort")
        if not self.scheduler.has_work():
            self.ended.set()

    async def run(self, requests: list[Request]) -> None:
        """Until all are done, the runner closed."""
        for request in requests:
            self.scheduler.add(request)
        steps = asyncio.create_task(self.loop.run())
        async with asyncio.timeout(60):
            await asyncio.wait([asyncio.create_task(self.ended.wait()), steps], return_when="FIRST_COMPLETED")
            self.loop.stop()
            await steps
            await self.runner.close()


@pytest.mark.parametrize("poll_us", [0, 20_000], ids=["told", "asked"])
@pytest.mark.parametrize("num_blocks", [100, 26], ids=["roomy", "tight"])
@pytest.mark.parametrize(("depth", "delay"), [(1, 0), (2, 0), (2, 1), (3, 2), (4, 3), (4, 1)])
async def test_tokens_are_the_same_under_every_delay(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, depth: int, delay: int, poll_us: int
) -> None:
    """INV-45: no buffer is written again before its copy is done."""
    gpu = LateGpu(monkeypatch, num_blocks, BLOCK_SIZE, delay=delay)
    served = Served(gpu, num_blocks, depth, poll_us=poll_us)
    shared = [7] * 9
    prompts = [[3, 1, 4], shared + [5], shared + [2, 6], list(range(20)), [9], list(range(30, 39)), shared + [8] * 7]
    requests = [request_of(str(i), prompt, 11 + i) for i, prompt in enumerate(prompts)]
    async with driven(gpu):
        await served.run(requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids_from(0) == expected_tokens(prompt, request.max_tokens)
    assert served.scheduler.num_free_blocks == num_blocks - 1
    assert (served.runner.polled_s > 0) == (poll_us > 0)
    if num_blocks == 100:  # the second and the third have the prefix of the first, all in flight together
        assert served.scheduler.prefix_hit_tokens == 2 * 8
    if num_blocks == 26:
        assert served.scheduler.num_preemptions_total > 0


@pytest.mark.parametrize(("depth", "delay"), [(1, 0), (2, 1), (4, 3)])
async def test_rows_choose_as_their_requests_want_whoever_had_them_before(
    monkeypatch: pytest.MonkeyPatch, depth: int, delay: int
) -> None:
    """INV-37, INV-40: nothing of the request before it is left in the row."""
    gpu = LateGpu(monkeypatch, 60, BLOCK_SIZE, delay=delay)
    served = Served(gpu, 60, depth)
    wanted = [0.5, 0.0, 1.5, 0.5, 0.0, 0.0, 0.0, 0.0, 2.5, 0.0, 0.0, 0.0, 0.5, 0.0]
    requests = [
        request_of(str(i), [i, 2 * i + 1], 3 + i % 5, SamplingParams(temperature=temperature, seed=i))
        for i, temperature in enumerate(wanted)
    ]
    async with driven(gpu):
        await served.run(requests)  # `settle` compares
    assert served.loop.num_steps > 8


@pytest.mark.parametrize(("depth", "delay"), [(2, 1), (3, 2), (4, 3)])
async def test_stops_learned_late_and_aborts_disturb_nobody(
    monkeypatch: pytest.MonkeyPatch, depth: int, delay: int
) -> None:
    gpu = LateGpu(monkeypatch, 60, BLOCK_SIZE, delay=delay)
    served = Served(gpu, 60, depth)
    prompts = [[i, 2 * i + 1] for i in range(10)]
    stop = expected_tokens(prompts[0], 9)[4]
    requests = [request_of(str(i), p, 24, stop_token_ids=[stop] if i == 0 else []) for i, p in enumerate(prompts)]
    served.abort_at = {requests[1]: 3, requests[2]: 8}
    async with driven(gpu):
        await served.run(requests)
    stopped = expected_tokens(prompts[0], 24)
    assert requests[0].output_ids_from(0) == stopped[: stopped.index(stop) + 1]
    for request, prompt in zip(requests[3:], prompts[3:], strict=True):
        assert request.output_ids_from(0) == expected_tokens(prompt, 24)
    assert served.scheduler.num_free_blocks == 59


async def test_a_row_is_left_before_the_next_request_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """INV-37, INV-40: the step in which both happens is sampled by the settings of the one that came."""
    gpu = LateGpu(monkeypatch, 60, BLOCK_SIZE)
    scheduler = Scheduler(
        num_blocks=60, block_size=BLOCK_SIZE, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=96
    )
    runner = gpu.runner(vocab_size=VOCAB, max_num_seqs=1, max_in_flight=1)
    left, came = request_of("left", [1, 2, 3], 8), request_of("came", [4, 5], 8)
    async with driven(gpu):
        for request in (left, came):
            scheduler.add(request)
            plan = scheduler.schedule()
            assert plan is not None and (plan.left_rows, plan.joined) == ([0] if request is came else [], [request])
            scheduler.update(plan, (await runner.launch(plan)).token_ids)
            assert runner._sampler._plans == {0: request.sampling}
            scheduler.abort(left)
        await runner.close()
    assert came.output_ids_from(0) == expected_tokens([4, 5], 1)


async def test_a_device_that_fails_fails_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(monkeypatch, 60, BLOCK_SIZE, delay=2)
    served = Served(gpu, 60, 2)
    served.scheduler.add(request_of("0", [1, 2, 3], 8))
    plan = served.scheduler.schedule()
    done = served.runner.launch(plan)
    served.runner._pending[0].slot.reached.query = lambda: (_ for _ in ()).throw(RuntimeError("launch failure"))
    served.runner._on_check()
    with pytest.raises(EngineDead, match="launch failure"):
        await done
    with pytest.raises(EngineDead):
        await served.runner.launch(plan)
    await served.runner.close()


BUCKETS = ["largest", "decode", "mixed", "edited"]


async def test_what_is_missing_is_prepared_piece_by_piece_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(monkeypatch, 60, BLOCK_SIZE)
    served = Served(gpu, 60, 2, capture="idle")
    forward = served.runner._forward
    forward.sizes, forward.num_decode = BUCKETS, 1
    served.runner.warm_up()
    assert forward.prepared == ["largest", "decode"] and served.runner.has_idle_work
    forward.prepared.append("mixed")  # a step needed it meanwhile
    served.scheduler.add(request_of("0", [1, 2], 2))
    done = served.runner.launch(served.scheduler.schedule())
    assert not served.runner.use_idle_time()  # it is not idle
    gpu.run_all()
    await done
    assert served.runner.use_idle_time() and forward.prepared[-1] == "long chunks"
    assert served.runner.use_idle_time() and forward.prepared[-1] == "edited"
    assert not served.runner.use_idle_time() and not served.runner.has_idle_work
    assert len(forward.prepared) == len(set(forward.prepared)) == 5
    await served.runner.close()


@pytest.mark.parametrize(("capture", "at_start"), [("start", 5), ("idle", 2), ("first use", 0)])
async def test_the_level_says_what_is_prepared_at_start(
    monkeypatch: pytest.MonkeyPatch, capture: str, at_start: int
) -> None:
    served = Served(LateGpu(monkeypatch, 60, BLOCK_SIZE), 60, 2, capture=capture)
    served.runner._forward.sizes, served.runner._forward.num_decode = BUCKETS, 1
    served.runner.warm_up()
    assert len(served.runner._forward.prepared) == at_start
    assert served.runner.use_idle_time() == (capture == "idle")
    await served.runner.close()


async def test_a_device_that_fails_in_idle_time_fails_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(LateGpu(monkeypatch, 60, BLOCK_SIZE), 60, 2, capture="idle")
    forward = served.runner._forward

    def fail(max_chunk: int) -> None:
        raise RuntimeError("out of memory")

    forward.sizes, forward.warm_long_chunks = BUCKETS, fail
    served.runner.warm_up()
    assert not served.runner.use_idle_time() and not served.runner.has_idle_work
    served.scheduler.add(request_of("0", [1, 2], 2))
    with pytest.raises(EngineDead, match="out of memory"):
        await served.runner.launch(served.scheduler.schedule())
    await served.runner.close()


async def test_too_little_memory_ends_idle_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(monkeypatch, 60, BLOCK_SIZE)
    served = Served(gpu, 60, 2, capture="idle")
    forward = served.runner._forward

    def fail(max_chunk: int) -> None:
        raise torch.OutOfMemoryError("no room")

    forward.sizes, forward.warm_long_chunks = BUCKETS, fail
    served.runner.warm_up()
    assert not served.runner.use_idle_time() and not served.runner.has_idle_work
    request = request_of("0", [1, 2], 5)
    async with driven(gpu):
        await served.run([request])
    assert request.output_ids_from(0) == expected_tokens([1, 2], 5)


async def test_an_idle_loop_does_what_can_wait_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.loop.IDLE_PAUSE_S", 0.001)
    served = Served(LateGpu(monkeypatch, 60, BLOCK_SIZE), 60, 2)
    left, done = [3], asyncio.Event()

    def work() -> bool:
        left[0] -= 1
        if left[0] == 0:
            done.set()
        return left[0] > 0

    loop = StepLoop(served.scheduler, served.runner, served.settle, use_idle_time=work)
    steps = asyncio.create_task(loop.run())
    await done.wait()
    await asyncio.sleep(0.01)
    assert left == [0]
    loop.stop()
    await steps
    await served.runner.close()


def test_logprobs_arrive_with_a_copy_that_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is what the device had made when it came to the copy, not what was there at launch."""
    gpu = LateGpu(monkeypatch, 8, BLOCK_SIZE)
    words = torch.zeros((2, 5), dtype=torch.int32)
    with torch.cuda.stream(gpu.stream):
        host = PendingLogprobs([3, 8], [1, 0], words).to_host()
    assert len(gpu.queue) == 1  # one copy for all rows
    words[:] = torch.tensor([[7, 0, 2, 9, 0], [6, 0, 0, 0, 0]], dtype=torch.int32)
    gpu.run_all()
    words.zero_()
    found = host.resolve()
    entry = found[3]
    assert entry is not None and found[8] is None  # of rank 0
    assert (entry.token_id, entry.rank, entry.top_ids.tolist(), entry.top_logprobs.tolist()) == (7, 2, [9], [0.0])
