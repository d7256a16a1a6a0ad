"""Models with windows in some layers: a block table per group, on every path, against transformers.

What a window has left is given back and becomes NaN, so that an answer is right only if nothing reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from aioengine import AsyncEngine, EngineConfig, SamplingParams
from aioengine.buckets import Bucket
from aioengine.cli.info import collect_facts
from aioengine.cli.startup_report import startup_report
from aioengine.config import ServerConfig
from aioengine.kv_layout import KVLayout
from aioengine.sampler import Choice
from tests.engine.test_cuda_runner import BLOCK_SIZE, MAX_SEQS, NUM_BLOCKS, make_forward, run_step, small_grids
from tests.models.plans import FakeRequest, Planner
from tests.models.tiny import VOCAB, make_checkpoint, random_prompt

__all__ = ["small_grids"]

HYBRIDS = ("qwen2-alternating", "qwen3-three-to-one", "qwen3-five-to-two")


@pytest.fixture(scope="module", params=HYBRIDS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(request.param, folder), folder


def reference_greedy(model: PreTrainedModel, request: FakeRequest) -> list[int]:
    """What transformers would have chosen after each of the known tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt + request.outputs])).logits[0, len(request.prompt) - 1 : -1]
    return logits.argmax(-1).tolist()


@pytest.mark.slow
def test_kernels_and_buckets_keep_the_groups_apart(family: tuple[PreTrainedModel, Path], small_grids: None) -> None:
    """Triton's interpreter: prompts longer than the windows, in chunks, mixed with decodes; one family eagerly."""
    model, folder = family
    level = 0 if "three" in folder.name else 2
    forward = make_forward(folder, level)
    groups = forward._layout.scheduler_groups
    assert len(groups) == len(forward.block_table) // MAX_SEQS > 1
    planner = Planner(
        vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_SEQS, kv_groups=groups
    )
    long, short = planner.request(random_prompt(37, seed=1)), planner.request(random_prompt(5, seed=2))
    with np.errstate(all="ignore"):
        run_step(forward, planner, {long: 20})
        run_step(forward, planner, {short: 5, long: 10})
        run_step(forward, planner, {long: 7, short: 1})
        for _ in range(3):
            run_step(forward, planner, {short: 1, long: 1})
        if level:
            forward.prepare(Bucket(2, few_queries=True, choice=Choice.OTHER))
        run_step(forward, planner, {long: 1, short: 1})
    assert len(long.outputs) == 5 and 0 in long.tables[1]
    for request in (long, short):
        assert request.outputs == reference_greedy(model, request)


# ---- the engine ---------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """One choice of a request."""

    prompt: list[int]
    outputs: list[int]
    logprobs: list[float]
    cached_tokens: int


async def ask(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[Answer]:
    choices = [Answer(prompt, [], [], 0) for _ in range(params.n)]
    async for output in await engine.submit(prompt, params):
        choice = choices[output.index]
        choice.outputs += output.delta_token_ids
        choice.logprobs += [position.chosen.logprob for position in output.delta_logprobs or ()]
        if output.usage is not None:
            choices[0].cached_tokens = output.usage.cached_tokens
    return choices


async def ask_all(engine: AsyncEngine, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    found = await asyncio.gather(*(ask(engine, prompt, params) for prompt in prompts))
    return [answer for choices in found for answer in choices]


def check(model: PreTrainedModel, answers: list[Answer], num_tokens: int, tolerance: float = 1e-3) -> None:
    """Each token is the likeliest for transformers, but for near-ties, and as likely as transformers says."""
    for answer in answers:
        assert len(answer.outputs) == num_tokens
        with torch.no_grad():
            logits = model(torch.tensor([answer.prompt + answer.outputs])).logits[0, len(answer.prompt) - 1 : -1]
        scores = logits.log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(answer.outputs)[:, None])[:, 0]
        assert bool((scores.max(-1).values - chosen < tolerance).all())
        torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=2 * tolerance, rtol=0)


SHARED = random_prompt(70, seed=70)
"""Longer than every window."""
ROUNDS = (
    [random_prompt(n, seed=n) for n in (5, 90, 33, 1)] + [SHARED],
    [SHARED, [*SHARED, 7], [*SHARED[:40], *random_prompt(30, seed=3)], [*SHARED, *random_prompt(50, seed=4)]],
)
"""The second finds the first one's prefixes in the cache."""
NUM_TOKENS = 24


async def ask_rounds(
    folder: Path,
    *,
    rounds: Sequence[list[list[int]]] = ROUNDS,
    num_tokens: int = NUM_TOKENS,
    n: int = 1,
    num_blocks: int = 400,
    **options: Any,
) -> tuple[list[Answer], int, KVLayout]:
    """All answers, how often a request was preempted, and the layout."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, n=n)
    config = EngineConfig(model=str(folder), num_gpu_blocks_override=num_blocks, max_num_seqs=8, **options)
    async with AsyncEngine(config) as engine:
        answers = [answer for prompts in rounds for answer in await ask_all(engine, prompts, params)]
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        return answers, stats.num_preemptions, engine.memory_report.layout


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [True, False], ids=["windows", "everything"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"async_scheduling": True, "max_num_batched_tokens": 24},
        {"n": 2, "async_scheduling": True, "max_num_batched_tokens": 48},
    ],
    ids=["whole prompts", "chunks", "ahead", "choices"],
)
async def test_answers_of_both_allocators_are_those_of_transformers(
    family: tuple[PreTrainedModel, Path], hybrid: bool, options: dict[str, Any]
) -> None:
    """A18, A20: the same tokens and log-probabilities, whatever a layer keeps."""
    model, folder = family
    answers, _, layout = await ask_rounds(
        folder, device="cpu", block_size=4, disable_hybrid_kv_cache_manager=not hybrid, **options
    )
    check(model, answers, NUM_TOKENS)
    assert (len(layout.groups) > 1) == hybrid
    cached = [answer.cached_tokens for answer in answers[len(ROUNDS[0]) * options.get("n", 1) :]]
    assert max(cached) >= 64, cached


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [True, False], ids=["windows", "everything"])
async def test_preempted_requests_go_on_where_they_were(family: tuple[PreTrainedModel, Path], hybrid: bool) -> None:
    model, folder = family
    answers, num_preemptions, _ = await ask_rounds(
        folder,
        rounds=([random_prompt(n, seed=n) for n in (5, 30, 9, 1, 14, 22)],),
        num_tokens=60,
        num_blocks=76,
        device="cpu",
        block_size=4,
        max_num_batched_tokens=24,
        max_model_len=120,
        async_scheduling=True,
        disable_hybrid_kv_cache_manager=not hybrid,
    )
    check(model, answers, 60)
    assert num_preemptions > 0


@pytest.mark.slow
async def test_start_and_info_show_the_groups(family: tuple[PreTrainedModel, Path]) -> None:
    options = EngineConfig(model=str(family[1]), device="cpu", block_size=4, max_model_len=200)
    facts = collect_facts(options)["run"]
    async with AsyncEngine(options) as engine:
        layout = engine.memory_report.layout
        report = startup_report(engine, ServerConfig(), "http://here", 0.0)
        assert f"{layout}; {facts['num_kv_tokens']} tokens fit" in report and "layers window" in report
        assert facts["kv_groups"] == str(layout)
        assert engine.memory_report.kv_cache_bytes == engine.stats().num_blocks * layout.block_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 2], ids=["eager", "graphs"])
@pytest.mark.parametrize("hybrid", [True, False], ids=["windows", "everything"])
async def test_answers_on_the_gpu_are_those_of_transformers(
    family: tuple[PreTrainedModel, Path], hybrid: bool, level: int
) -> None:
    """Against transformers in float32, which the CPU path equals; float16 may swap near-ties."""
    model, folder = family
    answers, _, layout = await ask_rounds(
        folder,
        device="cuda",
        dtype="float16",
        block_size=16,
        max_num_batched_tokens=64,
        optimization_level=level,
        disable_hybrid_kv_cache_manager=not hybrid,
    )
    check(model, answers, NUM_TOKENS, tolerance=0.03)
    assert (len(layout.groups) > 1) == hybrid
    assert max(answer.cached_tokens for answer in answers) >= 64
