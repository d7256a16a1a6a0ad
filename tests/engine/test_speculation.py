"""Speculative decoding as a user meets it: answers stay the same, and what came of drafts is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re

import pytest

from aioengine.engine import AsyncEngine
from aioengine.outputs import RequestStream
from aioengine.types import Prompt, SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.reading import GREEDY, ask, ask_all, read
from tests.engine.test_metrics import samples

LONG = dataclasses.replace(GREEDY, max_tokens=80)
"""Long enough for a random model to repeat itself."""

PROMPTS: list[Prompt] = ["abcabcabcabc", "to be or not to be, to be or not", "x" * 30, "nothing repeats"]


def asked(**fields: object) -> str:
    return json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, **fields})


COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def counted(engine: AsyncEngine) -> tuple[int, ...]:
    """The exported counters, which are those of `stats()`."""
    drafts, found = engine.stats().drafts, samples(engine)
    assert drafts is not None
    counts = tuple(int(found[f"spec_decode_{name}_total"]) for name in COUNTERS)
    assert counts == dataclasses.astuple(drafts)
    return counts


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_answers_stay_the_same_and_take_fewer_steps(make_engine: MakeEngine, async_scheduling: bool) -> None:
    drawn = SamplingParams(temperature=0.8, seed=4, max_tokens=60, ignore_eos=True)
    answers, num_steps = [], []
    for options in ({}, {"speculative_config": asked()}):
        async with make_engine(async_scheduling=async_scheduling, **options) as engine:
            greedy = [await ask(engine, prompt, LONG) for prompt in PROMPTS]
            num_steps.append(engine.stats().num_steps)
            both = [*greedy, *await ask_all(engine, PROMPTS, LONG), *await ask_all(engine, PROMPTS, drawn)]
            answers.append([(a.token_ids, a.text, a.usage.completion_tokens) for a in both])
            if options:
                num_drafts, num_drafted, num_accepted = counted(engine)
                assert 0 < num_drafts < num_drafted <= 4 * num_drafts and 0 < num_accepted <= num_drafted
                assert samples(engine)["generation_tokens_total"] == sum(len(a.token_ids) for a in both)
            else:
                assert engine.stats().drafts is None
                assert not [name for name in samples(engine) if name.startswith("spec_decode")]
    assert answers[0] == answers[1]
    assert num_steps[1] < num_steps[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.01},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {5: 1.0}},
        {"bad_words": ["zq"]},
        {"allowed_token_ids": list(range(2, 40))},
        {"min_tokens": 2},
    ],
)
async def test_requests_that_need_the_text_before_each_token_get_no_drafts(
    make_engine: MakeEngine, fields: dict[str, object]
) -> None:
    async with make_engine(speculative_config=asked()) as engine:
        await ask(engine, PROMPTS[0], dataclasses.replace(LONG, **fields))
        assert counted(engine) == (0, 0, 0)
        await ask(engine, PROMPTS[0], LONG)
        assert counted(engine)[0] > 0


async def test_many_at_once_get_no_drafts(make_engine: MakeEngine) -> None:
    async with make_engine(speculative_config=asked(disable_by_batch_size=3)) as engine:

        async def together(prompts: list[Prompt]) -> None:
            streams = [s for s in await engine.submit_all(prompts, LONG) if isinstance(s, RequestStream)]
            assert len(streams) == len(prompts)
            await asyncio.gather(*map(read, streams))

        await together(PROMPTS)
        assert counted(engine) == (0, 0, 0)
        await together(PROMPTS[:3])
        assert counted(engine)[0] > 0


async def test_the_share_that_was_accepted_is_logged(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    async with make_engine(speculative_config=asked(), log_stats_interval_s=0.01) as engine:
        with caplog.at_level(logging.INFO, "aioengine.engine"):
            for _ in range(200):
                await ask(engine, PROMPTS[0], LONG)
                if "drafts accepted" in caplog.text:
                    break
    assert re.search(r"prefix hits .*, drafts accepted \d+ % of [1-9]\d* tokens", caplog.text)
