"""Start, drain, close and failure of engines: who is told what, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import uvloop

from aioengine import startup
from aioengine.engine import AsyncEngine
from aioengine.errors import (
    EngineClosed,
    EngineDead,
    EngineError,
    InvalidConfig,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
)
from aioengine.types import SamplingParams
from tests.engine.conftest import MakeEngine, assert_nothing_held, engine_config, wait_idle
from tests.engine.reading import GREEDY, ask, ask_all, read

LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.mark.parametrize("loop", LOOPS)
def test_an_engine_lives_and_ends_on_any_loop_again_and_again(tiny_folder: Path, loop: str) -> None:
    async def once() -> list[int]:
        async with AsyncEngine(engine_config(tiny_folder)) as engine:
            answers = await ask_all(engine, ["one", "two", "three"])
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return [token_id for answer in answers for token_id in answer.token_ids]

    results = []
    for _ in range(2):
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            results.append(runner.run(once()))
    assert results[0] == results[1] and len(results[0]) == 48


async def test_two_engines_share_a_process(make_engine: MakeEngine) -> None:
    async with make_engine() as first, make_engine(async_scheduling=True, max_num_seqs=2) as second:
        prompts = [f"both {n}" for n in range(6)]
        ours, theirs = await asyncio.gather(ask_all(first, prompts), ask_all(second, prompts))
        assert [a.token_ids for a in ours] == [a.token_ids for a in theirs]


async def test_close_ends_every_reader_task_and_thread(make_engine: MakeEngine) -> None:
    threads = set(threading.enumerate())
    async with make_engine(max_num_seqs=2, async_scheduling=True) as engine:
        waiting = [asyncio.create_task(ask(engine, f"w{n}", LONG)) for n in range(6)]
        unread = await engine.submit("unread", LONG)
        await anext(aiter(await engine.submit("first token", LONG)))
        await asyncio.gather(engine.close(), engine.close())
        await engine.close()
        assert engine.health() == "closed"
        for task in waiting:
            with pytest.raises(EngineClosed):
                await task
        with pytest.raises(EngineClosed):
            await read(unread)
        with pytest.raises(EngineClosed):
            await engine.submit("late", GREEDY)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert set(threading.enumerate()) == threads
        assert_nothing_held(engine)


async def test_a_cancelled_close_still_closes(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        await engine.submit("x", LONG)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await engine.close()
        assert engine.health() == "closed"


async def test_an_engine_starts_once(make_engine: MakeEngine, tiny_folder: Path) -> None:
    async with make_engine() as engine:
        with pytest.raises(EngineClosed, match="it is ready"):
            await engine.start()
        assert (await ask(engine, "x")).last.is_finished
    with pytest.raises(EngineClosed, match="it is closed"):
        await engine.start()
    never_started = AsyncEngine(engine_config(tiny_folder))
    await never_started.close()
    with pytest.raises(EngineClosed, match="it is closed"):
        await never_started.start()


async def test_before_the_start_everything_says_so(tiny_folder: Path) -> None:
    engine = AsyncEngine(engine_config(tiny_folder))
    assert engine.health() == "starting"
    for call in (engine.stats, engine.metrics_text, lambda: engine.memory_report, engine.sampling_params):
        with pytest.raises(EngineClosed, match="not started"):
            call()
    with pytest.raises(EngineClosed):
        await engine.submit("x", GREEDY)
    assert await engine.abort("nobody") == 0
    assert await engine.drain(0)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"model": "/no/such/folder"}, ModelNotFound), ({"max_model_len": 10**6}, InvalidConfig)],
)
async def test_a_failed_start_leaves_nothing(tiny_folder: Path, options: dict[str, object], error: type) -> None:
    engine = AsyncEngine(engine_config(Path(str(options.pop("model", tiny_folder))), **options))
    with pytest.raises(error):
        await engine.start()
    assert engine.health() == "closed"
    await engine.close()


async def test_kv_events_that_cannot_be_had_cost_no_loading_or_leave_nothing(tiny_folder: Path) -> None:
    threads, stages = set(threading.enumerate()), list[str]()
    for text in ("no json", '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://nowhere"}'):
        engine = AsyncEngine(engine_config(tiny_folder, kv_events_config=text), on_stage=stages.append)
        with pytest.raises(InvalidConfig, match="KV events|kv_events_config"):
            await engine.start()
        assert bool(stages) == (text != "no json")
        assert engine.health() == "closed"
        assert set(threading.enumerate()) <= threads
        with pytest.raises(EngineClosed):
            engine.stats()
        await engine.close()


class Pause:
    """Stops the loading thread at a stage until it is let go, and then waits for it to end."""

    def __init__(self, stage: str) -> None:
        self._stage, self._go = stage, threading.Event()
        self._loop, self.reached = asyncio.get_running_loop(), asyncio.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, stage: str) -> None:
        if stage == self._stage:
            self._thread = threading.current_thread()
            self._loop.call_soon_threadsafe(self.reached.set)
            self._go.wait()

    def let_go(self) -> None:
        self._go.set()

    def join(self) -> None:
        self._go.set()
        assert self._thread is not None
        self._thread.join()


@pytest.mark.parametrize("stage", ["locating the model", "reading the checkpoint", "loading the weights"])
async def test_a_start_can_be_cancelled(tiny_folder: Path, stage: str) -> None:
    pause = Pause(stage)
    engine = AsyncEngine(engine_config(tiny_folder), on_stage=pause)
    starting = asyncio.create_task(engine.start())
    await pause.reached.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.health() == "closed"
    await asyncio.to_thread(pause.join)


async def test_a_start_cancelled_when_all_is_loaded_gives_it_back(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that nobody waits for any more closes the runner that it has just made."""
    pause, made = Pause("made"), []

    def load(*args: object) -> startup.Parts:
        made.append(original(*args))
        pause("made")
        return made[0]

    original = startup.load_parts
    monkeypatch.setattr(startup, "load_parts", load)
    engine = AsyncEngine(engine_config(tiny_folder))
    starting = asyncio.create_task(engine.start())
    await pause.reached.wait()
    starting.cancel()
    await asyncio.wait((starting,))
    await asyncio.to_thread(pause.join)
    assert starting.cancelled() and len(made) == 1
    assert "aioengine-cpu-runner" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("options", "param"),
    [({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"), ({"max_model_len": 192}, "max_model_len")],
)
async def test_a_pool_too_small_is_known_from_the_headers(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], param: str
) -> None:
    """Neither the tokenizer nor a weight is read for it."""
    monkeypatch.setattr(startup, "load_tokenizer", None)
    pool: dict[str, object] = {"num_gpu_blocks_override": None if param == "kv_cache_memory_bytes" else 4}
    with pytest.raises(InvalidConfig) as caught:
        await AsyncEngine(engine_config(tiny_folder, **pool, **options)).start()
    assert caught.value.param == param


async def test_close_during_the_start_ends_it(tiny_folder: Path) -> None:
    pause = Pause("reading the checkpoint")
    engine = AsyncEngine(engine_config(tiny_folder), on_stage=pause)
    starting = asyncio.create_task(engine.start())
    await pause.reached.wait()
    assert engine.health() == "starting"
    await engine.close()
    pause.let_go()
    with pytest.raises(EngineClosed, match="while it started"):
        await starting
    assert engine.health() == "closed"


async def test_drain_finishes_what_runs_and_takes_nothing_new(make_engine: MakeEngine) -> None:
    async with make_engine(max_num_seqs=2) as engine:
        running = [await engine.submit(f"d{n}", GREEDY) for n in range(5)]
        draining = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)
        assert engine.health() == "draining"
        with pytest.raises(EngineClosed, match="draining"):
            await engine.submit("late", GREEDY)
        assert await draining
        assert [len((await read(stream))[0].token_ids) for stream in running] == [16] * 5


async def test_drain_ends_what_is_left_at_the_deadline(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = await engine.submit("x", LONG)
        assert not await engine.drain(0)
        with pytest.raises(EngineClosed, match="shut down"):
            await read(stream)


async def test_a_full_queue_refuses_and_recovers(make_engine: MakeEngine) -> None:
    async with make_engine(max_waiting_requests=3, max_num_seqs=1) as engine:
        streams = [await engine.submit(f"q{n}", GREEDY) for n in range(3)]
        with pytest.raises(QueueFull, match="limit is 3"):
            await engine.submit("one too many", GREEDY)
        with pytest.raises(QueueFull):
            await engine.submit("two too many", dataclasses.replace(GREEDY, n=2))
        with pytest.raises(InvalidRequest, match="n=4 is above max_waiting_requests=3"):
            await engine.submit("never", dataclasses.replace(GREEDY, n=4))
        for stream in streams:
            await read(stream)
        assert (await ask(engine, "again")).last.is_finished


def break_forward(engine: AsyncEngine, make_broken: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
    """Replaces the forward pass of a running engine."""
    work = engine._parts.runner._worker.work
    work.forward = make_broken(work.forward)


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_a_device_failure_ends_every_reader(make_engine: MakeEngine, async_scheduling: bool) -> None:
    def fail_at_fifth(forward: Callable[..., object]) -> Callable[..., object]:
        calls = 0

        def broken(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise MemoryError("no more")
            return forward(*args)

        return broken

    async with make_engine(async_scheduling=async_scheduling, max_num_seqs=3) as engine:
        break_forward(engine, fail_at_fifth)
        readers = [asyncio.create_task(ask(engine, f"r{n}", LONG)) for n in range(6)]
        for reader in readers:
            with pytest.raises(EngineDead, match="no more"):
                await reader
        assert engine.health() == "dead"
        with pytest.raises(EngineDead, match="no more"):
            await engine.submit("late", GREEDY)
        await asyncio.wait((engine._steps_task,))
        assert_nothing_held(engine)
    assert engine.health() == "closed"


POISON = "~"
"""A prompt with this byte gets scores that are not numbers, where it stands."""


def poison(forward: Callable[..., torch.Tensor], poison_id: int) -> Callable[..., torch.Tensor]:
    def poisoned(input_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        hidden = forward(input_ids, *rest).clone()
        hidden[input_ids == poison_id] = torch.nan
        return hidden

    return poisoned


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("ends badly" + POISON, GREEDY),
        ("ends badly" + POISON, dataclasses.replace(GREEDY, temperature=0.7, n=3, logprobs=2)),
        ("starts" + POISON + " badly and goes on for some chunks", dataclasses.replace(GREEDY, prompt_logprobs=1)),
    ],
    ids=["greedy", "drawn", "prompt scores"],
)
async def test_scores_that_are_no_numbers_fail_one_request(
    make_engine: MakeEngine, prompt: str, params: SamplingParams, async_scheduling: bool
) -> None:
    async with make_engine(max_num_batched_tokens=16, async_scheduling=async_scheduling) as engine:
        before = await ask_all(engine, ["good one", "good two"])
        (poison_id,) = await engine.render(POISON)
        break_forward(engine, lambda forward: poison(forward, poison_id))
        others = asyncio.create_task(ask_all(engine, ["good one", "good two"]))
        with pytest.raises(EngineError, match="not finite"):
            await read(await engine.submit(prompt, params))
        assert [a.token_ids for a in await others] == [a.token_ids for a in before]
        assert engine.health() == "ready"
        await wait_idle(engine)
        assert engine.stats().num_requests_finished["error"] == params.n


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_nobody_hits_what_a_failed_request_has_computed(make_engine: MakeEngine, async_scheduling: bool) -> None:
    text = "a prompt of many blocks that does not end well"
    async with make_engine(max_num_batched_tokens=16, block_size=16, async_scheduling=async_scheduling) as engine:
        (poison_id,) = await engine.render(POISON)
        break_forward(engine, lambda forward: poison(forward, poison_id))
        with pytest.raises(EngineError, match="not finite"):
            await ask(engine, text + POISON)
        assert engine.cache.stats().num_cached_blocks == 0
        found = [(await ask(engine, text + end)).usage.cached_tokens for end in "!?"]
        assert found == [0, len(text)]
