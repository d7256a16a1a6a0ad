"""Readers that leave, at any moment and in any way: blocks come back and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Awaitable, Callable

import pytest

from aioengine.engine import AsyncEngine
from aioengine.types import SamplingParams
from tests.engine.conftest import MakeEngine, assert_nothing_held, wait_idle
from tests.engine.reading import GREEDY, ask, read

SEED = 20240607
NUM_ABORTS = 200


async def cancel_the_reader(engine: AsyncEngine, prompt: str, params: SamplingParams, num_read: int) -> None:
    """The task is cancelled while it waits for its next output, or before it ran at all."""
    has_read = asyncio.Event()

    async def reader() -> None:
        count = 0
        async for _ in engine.generate(prompt, params):
            count += 1
            if count == num_read:
                has_read.set()

    task = asyncio.create_task(reader())
    if num_read:
        await has_read.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def cancel_the_reader_of_a_stream(
    engine: AsyncEngine, prompt: str, params: SamplingParams, num_read: int
) -> None:
    """As above, without the generator around the stream."""
    stream = await engine.submit(prompt, params)
    for _ in range(num_read):
        await anext(stream)
    task = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert stream.is_closed


async def abort_the_stream(engine: AsyncEngine, prompt: str, params: SamplingParams, num_read: int) -> None:
    stream = await engine.submit(prompt, params)
    for _ in range(num_read):
        await anext(stream)
    await stream.abort()
    assert [output async for output in stream] == []


async def leave_the_context(engine: AsyncEngine, prompt: str, params: SamplingParams, num_read: int) -> None:
    async with await engine.submit(prompt, params) as stream:
        for _ in range(num_read):
            await anext(stream)


async def close_the_generator(engine: AsyncEngine, prompt: str, params: SamplingParams, num_read: int) -> None:
    async with contextlib.aclosing(engine.generate(prompt, params)) as outputs:
        for _ in range(num_read):
            await anext(outputs)


async def abort_by_label(engine: AsyncEngine, prompt: str, params: SamplingParams, num_read: int) -> None:
    label = f"label of {prompt}"
    stream = await engine.submit(prompt, params, request_id=label)
    for _ in range(num_read):
        await anext(stream)
    assert await engine.abort(label) == 1
    reasons = [output.finish_reason async for output in stream if output.is_finished]
    assert reasons == ["abort"] * params.n
    assert await engine.abort(label) == 0


Leave = Callable[[AsyncEngine, str, SamplingParams, int], Awaitable[None]]
WAYS: list[Leave] = [
    cancel_the_reader,
    cancel_the_reader_of_a_stream,
    abort_the_stream,
    leave_the_context,
    close_the_generator,
    abort_by_label,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 30}],
    ids=["plain", "ahead and short of blocks"],
)
async def test_two_hundred_aborts_leave_every_block_free(make_engine: MakeEngine, options: dict[str, object]) -> None:
    rng = random.Random(SEED)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    async with make_engine(**options) as engine:
        before = await ask(engine, "a greedy question")
        async with asyncio.TaskGroup() as group:
            for n in range(NUM_ABORTS):
                leave = rng.choice(WAYS)
                prompt = f"{n} " + "shared prefix " * rng.randrange(4) + "y" * rng.randrange(30)
                its_params = dataclasses.replace(params, n=rng.choice((1, 1, 1, 2)))
                group.create_task(leave(engine, prompt, its_params, rng.choice((0, 0, 1, 2, 5))))
                if rng.random() < 0.3:
                    group.create_task(ask(engine, f"stays {n}", dataclasses.replace(params, max_tokens=6)))
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
        await wait_idle(engine)
        assert_nothing_held(engine)
        assert engine.stats().num_requests_finished["abort"] >= NUM_ABORTS / 2
        after = await ask(engine, "a greedy question")
        assert (after.token_ids, after.text) == (before.token_ids, before.text)


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("num_read", [0, 3])
async def test_each_way_to_leave_frees_the_blocks(make_engine: MakeEngine, leave: Leave, num_read: int) -> None:
    async with make_engine(async_scheduling=True) as engine:
        stays = await engine.submit("stays", dataclasses.replace(GREEDY, max_tokens=40))
        await leave(engine, "leaves", dataclasses.replace(GREEDY, max_tokens=150), num_read)
        (answer,) = await read(stays)
        assert answer.token_ids == (await ask(engine, "stays", dataclasses.replace(GREEDY, max_tokens=40))).token_ids
        await wait_idle(engine)
        assert_nothing_held(engine)
        assert engine.stats().generation_tokens < 80 + 150


async def test_one_label_aborts_all_its_requests(make_engine: MakeEngine) -> None:
    async with make_engine(max_num_seqs=1) as engine:
        params = dataclasses.replace(GREEDY, max_tokens=150)
        streams = [await engine.submit(f"x{n}", params, request_id="same") for n in range(3)]
        other = await engine.submit("other", GREEDY, request_id="other")
        assert await engine.abort("same") == 3
        for stream in streams:
            (answer,) = await read(stream)
            assert answer.last.finish_reason == "abort" and answer.usage.completion_tokens == len(answer.token_ids)
        assert len((await read(other))[0].token_ids) == 16


async def test_a_cancelled_submit_leaves_nothing(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        task = asyncio.create_task(engine.submit("long " * 200, GREEDY))
        await asyncio.sleep(0)  # now it waits for the tokenizer's thread
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().num_waiting == 0
