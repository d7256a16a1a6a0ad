"""Greedy answers of the default model equal those of `transformers`, token for token, however they are run.

Every test answers the same prompts with another schedule: what is in the batch, what is cached, how prompts
are cut and who is preempted must not show.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aioengine.config import EngineConfig
from aioengine.engine import AsyncEngine
from tests.e2e.answers import Answer, Reference, answer, answer_together, assert_equal
from tests.e2e.conftest import Library
from tests.e2e.prompts import PROMPTS

pytestmark = pytest.mark.slow

References = dict[str, Reference]


def make_engine(path: Path, **options: object) -> AsyncEngine:
    return AsyncEngine(EngineConfig(model=str(path), **options))


def assert_all_equal(answers: dict[str, Answer], references: References) -> None:
    assert answers.keys() == references.keys()
    for name, found in answers.items():
        assert_equal(name, found, references[name])


def assert_idle(engine: AsyncEngine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks - 1)


def test_the_prompts_are_varied_and_one_is_long(library: Library) -> None:
    lengths = [len(ids) for ids in library.prompt_ids.values()]
    assert len(lengths) >= 12 and max(lengths) >= 600 and min(lengths) == 1


def test_together_with_sixteen_others(library: Library, references: References) -> None:
    assert_all_equal(library.answers, references)


async def test_alone(smollm2_path: Path, references: References) -> None:
    async with make_engine(smollm2_path, max_num_seqs=1, enable_prefix_caching=False) as engine:
        assert_all_equal({name: await answer(engine, prompt) for name, prompt in PROMPTS.items()}, references)
        assert engine.stats().prefix_hit_tokens == 0
        assert_idle(engine)


async def test_from_the_prefix_cache(smollm2_path: Path, references: References) -> None:
    """INV-19: on a real model."""
    async with make_engine(smollm2_path) as engine:
        cold = await answer_together(engine, PROMPTS, with_fillers=False)
        warm = await answer_together(engine, PROMPTS, with_fillers=False)
        assert_idle(engine)
    assert_all_equal(cold, references)
    assert_all_equal(warm, references)
    num_cached = {name: found.num_cached_tokens for name, found in warm.items()}
    assert num_cached["long"] >= 600 - 16
    assert sum(1 for count in num_cached.values() if count > 0) >= 8, num_cached


async def test_prompts_cut_into_chunks_of_sixteen(smollm2_path: Path, references: References) -> None:
    async with make_engine(
        smollm2_path, max_num_batched_tokens=16, max_num_seqs=16, enable_prefix_caching=False
    ) as engine:
        answers = await answer_together(engine, PROMPTS, with_fillers=False)
        num_prompt_tokens = engine.stats().prompt_tokens
        assert engine.stats().num_steps > num_prompt_tokens / 16
        assert_idle(engine)
    assert_all_equal(answers, references)


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_preempted_for_lack_of_blocks(smollm2_path: Path, references: References, async_scheduling: bool) -> None:
    """INV-32: on a real model."""
    async with make_engine(smollm2_path, num_gpu_blocks_override=64, async_scheduling=async_scheduling) as engine:
        answers = await answer_together(engine, PROMPTS)
        assert engine.stats().num_preemptions > 0
        assert_idle(engine)
    assert_all_equal(answers, references)


async def test_scheduled_one_step_ahead_by_priority(smollm2_path: Path, references: References) -> None:
    async with make_engine(smollm2_path, async_scheduling=True, scheduling_policy="priority", max_num_seqs=6) as engine:
        answers = await answer_together(engine, PROMPTS, with_fillers=False, spread=True)
        assert_idle(engine)
    assert_all_equal(answers, references)
