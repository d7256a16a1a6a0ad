"""Scheduler and CPU runner together: whatever the scheduling, each request's tokens are the same."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from aioengine.checkpoint import load_checkpoint
from aioengine.device import CpuDevice
from aioengine.fastcore.drafts import Drafter, NgramDrafter
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan
from aioengine.kv_connector import Store
from aioengine.kv_layout import layout_of
from aioengine.loader import load_model, make_runner
from aioengine.runner import CpuRunner, StepResult
from aioengine.sampler import compile_sampling
from aioengine.types import SamplingParams
from tests.models.tiny import VOCAB, make_checkpoint, random_prompt, resolve_for

SHARED = random_prompt(24, seed=99)
PROMPTS = [random_prompt(n, seed=n) for n in (1, 30, 7)] + [SHARED + random_prompt(n, seed=n) for n in (4, 5, 9)]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0)
MIXED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=20, frequency_penalty=0.7),
    GREEDY,
    SamplingParams(seed=3, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=1.0),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("qwen3")
    return make_checkpoint("qwen3", folder), folder


async def run_all(
    folder: Path,
    sampling: list[SamplingParams],
    *,
    num_blocks: int = 200,
    budget: int = 512,
    depth: int = 1,
    max_num_seqs: int = 8,
    prefix_caching: bool = True,
    partial_blocks: bool = False,
    rounds: int = 1,
    drafter: Drafter | None = None,
    num_tokens: int = NUM_TOKENS,
    poisons: bool = False,
) -> tuple[list[list[int]], Scheduler]:
    """The tokens of all prompts, run together; later rounds find the earlier ones in the prefix cache.

    With `poisons` no step finds anything in blocks that nobody holds when it is launched.
    """
    config, resolved = resolve_for(
        str(folder), 128, block_size=4, num_gpu_blocks_override=num_blocks, max_num_seqs=max_num_seqs
    )
    device = CpuDevice(resolved)
    loaded = load_model(load_checkpoint(config.model), resolved, device)
    layout = layout_of(loaded.spec, resolved)
    runner = make_runner(loaded, layout, resolved, config.cache, device)
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=128,
        enable_prefix_caching=prefix_caching,
        enable_partial_block_reuse=partial_blocks,
        max_in_flight=depth,
        kv_groups=layout.scheduler_groups,
        drafter=drafter,
        num_speculative_tokens=4 if drafter is not None else 0,
    )
    launched: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
    for _ in range(rounds):
        plans = [compile_sampling(params, None, VOCAB, (), 0, 0) for params in sampling]
        requests = [
            Request(str(i), prompt, max_tokens=num_tokens, sampling=plan, takes_drafts=plan.takes_drafts)
            for i, (prompt, plan) in enumerate(zip(PROMPTS, plans, strict=True))
        ]
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work():
            while len(launched) < depth and (plan := scheduler.schedule()) is not None:
                if poisons:
                    runner.store(poison_free(runner, scheduler, len(layout.scheduler_groups)))
                launched.append((plan, runner.launch(plan)))
            plan, done = launched.popleft()
            scheduler.update(plan, (await done).token_ids)
            scheduler.check_invariants()
    await runner.close()
    return [request.output_ids_from(0) for request in requests], scheduler


def poison_free(runner: CpuRunner, scheduler: Scheduler, num_groups: int) -> Store:
    """To be done in the order of the steps: blocks that no request has are filled with NaN."""
    assert runner._worker.work is not None
    caches = runner._worker.work.kv_caches
    held = {block for r in scheduler.running_requests() for g in range(num_groups) for block in r.block_ids(g)}
    free = [block for block in range(1, scheduler.num_blocks) if block not in held]

    def poison() -> None:
        for cache in caches:
            cache[free] = float("nan")

    return poison


async def test_greedy_tokens_are_those_of_the_reference(checkpoint: tuple[PreTrainedModel, Path]) -> None:
    model, folder = checkpoint
    outputs, _ = await run_all(folder, [GREEDY] * len(PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0]
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": 16},
        {"num_blocks": 24},
        {"num_blocks": 24, "budget": 16, "prefix_caching": False},
        {"max_num_seqs": 2, "budget": 9},
        {"rounds": 2},
        {"rounds": 2, "num_blocks": 30, "budget": 16, "partial_blocks": True},
    ],
    ids=["together", "chunked", "preempted", "preempted, chunked, uncached", "two rows", "cached", "cached in parts"],
)
async def test_scheduling_does_not_change_what_is_sampled(
    checkpoint: tuple[PreTrainedModel, Path], options: dict[str, int], depth: int
) -> None:
    """INV-19, INV-32, INV-40: seeds and settings go with their request, however rows are shared."""
    expected, _ = await run_all(checkpoint[1], MIXED, prefix_caching=False)
    outputs, scheduler = await run_all(checkpoint[1], MIXED, depth=depth, **options)
    assert outputs == expected
    if "num_blocks" in options:
        assert scheduler.num_preemptions_total > 0
    if "rounds" in options:
        assert scheduler.prefix_hit_tokens > 0
    elif not options:
        assert scheduler.prefix_hit_tokens == 2 * len(SHARED), "the shared prefix was computed more than once"
    if "partial_blocks" in options:
        assert scheduler.prefix_hit_tokens % 4, "no hit ended inside a block"
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1


class Guesses(Drafter):
    """Drafts what is known to come, or something else, at a rate."""

    def __init__(self, outputs: Sequence[Sequence[int]], acceptance: float) -> None:
        self._outputs = outputs
        self._acceptance = acceptance
        self._draw = random.Random(1)

    def propose(self, request: Request, most: int) -> list[int]:
        start = request.num_tokens + request.num_in_flight - request.num_prompt_tokens
        right = self._outputs[int(request.request_id)][start : start + most]
        return [token if self._draw.random() < self._acceptance else (token + 1) % VOCAB for token in right]


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a window of six tokens in most of its layers."""
    folder = tmp_path_factory.mktemp("windows")
    make_checkpoint("qwen3-five-to-two", folder)
    return folder


@pytest.fixture(scope="module")
def mixed(checkpoint: tuple[PreTrainedModel, Path]) -> list[list[int]]:
    """What MIXED says without drafts."""
    return asyncio.run(run_all(checkpoint[1], MIXED, prefix_caching=False, num_tokens=30))[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": 16},
        {"num_blocks": 36},
        {"max_num_seqs": 2, "budget": 9},
        {"rounds": 2, "num_blocks": 40, "budget": 16, "partial_blocks": True},
    ],
    ids=["together", "chunked", "preempted", "two rows", "cached in parts"],
)
async def test_drafts_do_not_change_what_is_sampled(
    checkpoint: tuple[PreTrainedModel, Path],
    mixed: list[list[int]],
    options: dict[str, int],
    acceptance: float,
    depth: int,
) -> None:
    """INV-43, INV-59, INV-60: rows with penalties have no drafts, the others each position's own draw."""
    drafter = Guesses(mixed, acceptance)
    outputs, scheduler = await run_all(checkpoint[1], MIXED, depth=depth, drafter=drafter, num_tokens=30, **options)
    assert outputs == mixed
    assert scheduler.num_draft_tokens_total > 0
    if acceptance == 0.0:
        assert scheduler.num_accepted_tokens_total < scheduler.num_draft_tokens_total / 4
    if acceptance == 1.0 and not options:
        assert scheduler.num_accepted_tokens_total == scheduler.num_draft_tokens_total
    if options == {"num_blocks": 36}:
        assert scheduler.num_preemptions_total > 0
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
async def test_drafts_do_not_take_what_windows_still_show(windows: Path, acceptance: float, depth: int) -> None:
    """INV-60: after a rejection the window is further back than it was when the step was packed."""
    expected, _ = await run_all(windows, MIXED, prefix_caching=False, num_tokens=30)
    drafter = Guesses(expected, acceptance)
    outputs, scheduler = await run_all(
        windows,
        MIXED,
        depth=depth,
        drafter=drafter,
        num_tokens=30,
        num_blocks=90,
        prefix_caching=False,
        poisons=True,
    )
    assert outputs == expected
    assert scheduler.num_draft_tokens_total > 0
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lengths", [(1, 1), (4, 2)])
async def test_ngram_drafts_do_not_change_greedy_tokens(
    checkpoint: tuple[PreTrainedModel, Path], depth: int, lengths: tuple[int, int]
) -> None:
    """INV-59; what a random model says soon repeats itself."""
    sampling, (most, least) = [GREEDY] * len(PROMPTS), lengths
    expected, _ = await run_all(checkpoint[1], sampling, num_tokens=60)
    drafter = NgramDrafter(most_tokens=most, least_tokens=least)
    outputs, scheduler = await run_all(checkpoint[1], sampling, depth=depth, drafter=drafter, num_tokens=60)
    assert outputs == expected
    assert 0 < scheduler.num_accepted_tokens_total < scheduler.num_draft_tokens_total
