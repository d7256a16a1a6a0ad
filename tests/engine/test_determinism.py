"""Declared determinism is kept: bits do not depend on the company, and offline calls repeat step by step."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from aioengine.engine import AsyncEngine
from aioengine.errors import EngineError, InvalidRequest
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan
from aioengine.outputs import RequestStream
from aioengine.tokenizer import Tokenizer
from aioengine.types import PositionLogprobs, Prompt, SamplingParams
from tests.engine.conftest import MAX_LEN, VOCAB_SIZE, MakeEngine
from tests.engine.reading import Answer, ask, ask_all, read

Bits = tuple[list[int], list[tuple[float, tuple[int, ...], tuple[float, ...]]]]

EXACT = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
DRAWN = SamplingParams(temperature=1.3, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True, logprobs=3)


def bits(answer: Answer) -> Bits:
    """Tokens and log-probabilities, to the last bit."""
    positions: list[PositionLogprobs] = [p for o in answer.outputs for p in o.delta_logprobs or ()]
    return answer.token_ids, [
        (p.chosen.logprob, tuple(t.token_id for t in p.top), tuple(t.logprob for t in p.top)) for p in positions
    ]


def prompts_of(seed: int, count: int, longest: int) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB_SIZE, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


# ---- batch-invariant ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 2])
async def test_an_answer_s_bits_do_not_depend_on_company_chunks_cache_or_preemption(
    make_engine: MakeEngine, level: int
) -> None:
    prompt = list(range(5, 125))
    options = {"determinism": "batch-invariant", "optimization_level": level}
    async with make_engine(**options) as engine:
        alone = [bits(await ask(engine, prompt, params)) for params in (EXACT, DRAWN)]
        assert len(alone[0][1]) == 24 and alone[0] != alone[1]
        cached = await ask(engine, prompt, EXACT)
        assert cached.usage.cached_tokens == 119 and bits(cached) == alone[0]
        partly = await ask(engine, [*prompt[:70], 9, 9], EXACT)
        assert partly.usage.cached_tokens == 70
        fresh = await ask(engine, [*prompt[:70], 9, 9], EXACT, cache_salt="another")
        assert fresh.usage.cached_tokens == 0 and bits(fresh) == bits(partly)
    for chunk in (3, 17, 64):
        async with make_engine(**options, max_num_batched_tokens=chunk, max_num_seqs=3) as engine:
            assert [bits(await ask(engine, prompt, params)) for params in (EXACT, DRAWN)] == alone
    async with make_engine(
        **options, num_gpu_blocks_override=200, max_num_batched_tokens=96, max_num_seqs=17
    ) as engine:
        company = [asyncio.create_task(ask(engine, p, DRAWN)) for p in prompts_of(3, 16, 60)]
        for params, expected in zip((EXACT, DRAWN), alone, strict=True):
            assert bits(await ask(engine, prompt, params)) == expected
        await asyncio.gather(*company)
    async with make_engine(**options, num_gpu_blocks_override=2 + MAX_LEN // 16, num_threads=2) as engine:
        company = [asyncio.create_task(ask(engine, p, EXACT)) for p in prompts_of(4, 6, 60)]
        found = [asyncio.create_task(ask(engine, prompt, params)) for params in (EXACT, DRAWN)]
        assert [bits(await task) for task in found] == alone
        await asyncio.gather(*company)
        assert engine.stats().num_preemptions > 0


DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}])
async def test_drafts_change_no_bit(make_engine: MakeEngine, options: dict[str, object]) -> None:
    """A row's sums do not depend on how many tokens are verified with it, nor its draws on drafts."""
    prompts: list[Prompt] = [[*range(5, 45)] * 2, [7, 8, 9] * 12, *prompts_of(6, 3, 60)]
    options = {**options, "determinism": "batch-invariant"}
    async with make_engine(**options) as engine:
        plain = [[bits(a) for a in await ask_all(engine, prompts, params)] for params in (EXACT, DRAWN)]
    async with make_engine(**options, speculative_config=DRAFTS) as engine:
        drafted = [[bits(a) for a in await ask_all(engine, prompts, params)] for params in (EXACT, DRAWN)]
        drafts = engine.stats().drafts
        assert drafts is not None and 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    assert drafted == plain


# ---- offline ------------------------------------------------------------------------------------------------


class Recorder:
    """What every step of an engine was made of, while threads and loop are held up at random."""

    def __init__(self, engine: AsyncEngine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[object] = []
        rng = random.Random(seed)
        settle, encode = engine._steps._settle, Tokenizer.encode
        launch = engine._loaded.runner.launch

        def slow_encode(tokenizer: Tokenizer, *args: object, **options: object) -> list[int]:
            time.sleep(rng.random() * 0.01)
            return encode(tokenizer, *args, **options)  # type: ignore[arg-type]

        def recording_launch(plan: StepPlan) -> asyncio.Future[object]:
            rows = [(r.token_ids().tolist(), plan.num_computed(i)) for i, r in enumerate(plan.requests)]
            tables = [r.block_ids() for r in plan.requests]
            self.steps.append((rows, tables, plan.num_tokens, plan.num_samples, plan.num_copies))
            return launch(plan)  # type: ignore[return-value]

        def slow_settle(plan: StepPlan, result: object) -> None:
            time.sleep(rng.random() * 0.002)
            settle(plan, result)  # type: ignore[arg-type]

        monkeypatch.setattr(Tokenizer, "encode", slow_encode)
        monkeypatch.setattr(engine._loaded.runner, "launch", recording_launch)
        monkeypatch.setattr(engine._steps, "_settle", slow_settle)


TEXTS: list[Prompt] = [
    ("Some words, and more of them. " * (1 + i % 5) * (1 if i % 3 else 2))[: 20 + 7 * i] for i in range(14)
]
TEXTS[3] = "a" * 900  # tokenized in a thread, and too long
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)


async def together(engine: AsyncEngine, prompts: Sequence[Prompt]) -> list[list[int]]:
    found = await engine.submit_all(
        prompts, [dataclasses.replace(UNSEEDED, max_tokens=30 + 3 * i) for i in range(len(prompts))]
    )
    assert [isinstance(one, EngineError) for one in found] == [prompt == TEXTS[3] for prompt in prompts]
    streams = [one for one in found if isinstance(one, RequestStream)]
    return [answer.token_ids for answers in await asyncio.gather(*map(read, streams)) for answer in answers]


async def run_offline(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, pace: int, **options: object
) -> tuple[list[object], list[list[int]]]:
    """Two calls, the second one made while the first runs, and a third of one prompt."""
    monkeypatch.setattr("aioengine.intake.INLINE_CHARS", 60)  # so that many a prompt is tokenized in a thread
    small = {"num_gpu_blocks_override": 36, "max_num_seqs": 32, "max_num_batched_tokens": 64}
    async with make_engine(determinism="offline", **{**small, **options}) as engine:
        assert engine.determinism.level == "offline"
        with monkeypatch.context() as patch:
            recorder = Recorder(engine, pace, patch)
            first = asyncio.create_task(together(engine, TEXTS))
            await asyncio.sleep(0.001 * pace)
            second = asyncio.create_task(together(engine, TEXTS[5:9]))
            answers = [*await first, *await second, (await ask(engine, TEXTS[6], UNSEEDED)).token_ids]
        assert engine.stats().num_preemptions > 0
        return recorder.steps, answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"eviction_policy": "cost"},
        {"speculative_config": DRAFTS},
        {"speculative_config": DRAFTS, "async_scheduling": True},
    ],
)
async def test_offline_calls_repeat_step_by_step_whatever_is_slow(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    runs = [await run_offline(make_engine, monkeypatch, pace, **options) for pace in (1, 2, 3)]
    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert runs[0][1] == runs[1][1] == runs[2][1]
    assert len(runs[0][1]) == len(TEXTS) - 1 + 4 + 1 and len(runs[0][0]) > 20
    other = await run_offline(make_engine, monkeypatch, 1, **options, seed=5)
    assert other[1] != runs[0][1]  # the seeds of the requests come from the engine's


async def test_a_call_is_queued_as_a_whole_before_anything_runs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine() as engine:
        num_waiting: list[int] = []
        schedule = Scheduler.schedule

        class Watched:
            """The scheduler, and how many wait whenever a step is made."""

            def __getattr__(self, name: str) -> object:
                return getattr(engine._scheduler, name)

            def schedule(self) -> StepPlan | None:
                num_waiting.append(engine._scheduler.num_waiting)
                return schedule(engine._scheduler)

        monkeypatch.setattr(engine._steps, "_scheduler", Watched())
        texts: list[Prompt] = ["short", "long " * 30, "x"]
        monkeypatch.setattr("aioengine.intake.INLINE_CHARS", 20)
        found = await engine.submit_all(texts, EXACT)
        answers = [
            answers[0] for answers in await asyncio.gather(*(read(s) for s in found if not isinstance(s, EngineError)))
        ]
        assert next(n for n in num_waiting if n) == 3
        assert [a.token_ids for a in answers] == [a.token_ids for a in await ask_all(engine, texts, EXACT)]


async def test_offline_the_next_call_waits_until_the_one_before_has_ended(make_engine: MakeEngine) -> None:
    async with make_engine(determinism="offline") as engine:
        stream = await engine.submit("abc", EXACT)
        other = asyncio.create_task(engine.submit("def", EXACT))
        answer = (await read(stream))[0]
        second = await other
        assert len(answer.token_ids) == 24
        cancelled = asyncio.create_task(engine.submit("ghi", EXACT))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait((cancelled,))
        await engine.abort(second.request_id)
        last = asyncio.create_task(engine.submit("jkl", EXACT))  # nobody holds the turn any more
        assert len((await read(await last))[0].token_ids) == 24
        waiting = [await engine.submit("x" * 100, EXACT), asyncio.create_task(engine.submit("mno", EXACT))]
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await waiting[1]  # type: ignore[misc]


# ---- demands ------------------------------------------------------------------------------------------------


async def test_a_demand_is_met_or_refused(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        assert engine.determinism.level == "unavailable" and len(engine.fingerprint) == 12
        for params in (EXACT, DRAWN):  # neither temperature 0 nor a seed declares anything
            with pytest.raises(InvalidRequest, match="is unavailable: the operator has declared nothing"):
                await engine.submit("abc", params, determinism="offline")
        plain = engine.fingerprint
        refused = await engine.submit_all(["abc"], EXACT, determinism="offline")
        assert isinstance(refused[0], InvalidRequest) and engine.metrics_text().count(b"rejected")
    async with make_engine(determinism="batch-invariant") as engine:
        assert engine.fingerprint != plain
        answer = await ask(engine, "abc", EXACT, determinism="batch-invariant")
        assert answer.token_ids == (await ask(engine, "abc", EXACT, determinism="offline")).token_ids
        with pytest.raises(InvalidRequest, match="needs a seed"):
            await engine.submit("abc", UNSEEDED, determinism="offline")
    async with make_engine(determinism="offline") as engine:
        assert (await ask(engine, "abc", UNSEEDED, determinism="offline")).token_ids
        with pytest.raises(InvalidRequest, match="one for each"):
            await engine.submit_all(["abc"], [EXACT, EXACT])
