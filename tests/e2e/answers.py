"""Answers of the engine and of `transformers` to the same prompts, and how the two are compared."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from aioengine.engine import AsyncEngine
from aioengine.types import Prompt, SamplingParams
from tests.e2e.prompts import FILLERS, NUM_OUTPUT_TOKENS

LOGPROB_TOLERANCE = 1e-3
NEAR_TIE = 1e-3
"""Two tokens whose reference log-probabilities are closer than this may swap places by rounding."""

MOST_PADDED = 100
"""Prompts up to this many tokens share the reference's batch."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=1)


@dataclass(frozen=True)
class Answer:
    """What the engine generated for one prompt."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    num_cached_tokens: int


@dataclass(frozen=True)
class Reference:
    """What `transformers` generated, and its log-probabilities at every generated position."""

    token_ids: list[int]
    logprobs_TV: torch.Tensor


async def answer(engine: AsyncEngine, prompt: Prompt, params: SamplingParams = GREEDY, *, priority: int = 0) -> Answer:
    """Reads one request to its end and checks that the deltas add up."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    text = ""
    async for output in await engine.submit(prompt, params, priority=priority):
        token_ids += output.delta_token_ids
        logprobs += [position.chosen.logprob for position in output.delta_logprobs or ()]
        text += output.delta
    assert (output.token_ids, output.text, output.finish_reason) == (token_ids, text, "length")
    assert output.usage is not None and output.usage.completion_tokens == len(token_ids) == len(logprobs)
    return Answer(token_ids, logprobs, text, output.usage.cached_tokens)


async def answer_together(
    engine: AsyncEngine, prompts: Mapping[str, Prompt], *, with_fillers: bool = True, spread: bool = False
) -> dict[str, Answer]:
    """Answers to all prompts at once, beside unrelated sampled requests; `spread` gives them priorities."""
    filler = SamplingParams(temperature=0.8, seed=7, max_tokens=NUM_OUTPUT_TOKENS // 2, logprobs=0, ignore_eos=True)
    async with asyncio.TaskGroup() as group:
        tasks = {}
        for number, (name, prompt) in enumerate(prompts.items()):
            if with_fillers:
                for text in FILLERS[number :: len(prompts)]:
                    group.create_task(answer(engine, text, filler))
            tasks[name] = group.create_task(answer(engine, prompt, priority=-number if spread else 0))
    return {name: task.result() for name, task in tasks.items()}


def generate_references(path: Path, prompt_ids: Mapping[str, list[int]]) -> dict[str, Reference]:
    """Greedy answers of `transformers` to the same token ids, on the dequantized weights in float32.

    Its `generate` runs the short prompts as one padded batch, to save time. Log-probabilities come from one
    pass over each prompt with its answer, without padding or cache, which must choose the same tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # all answers have the same length
    model.generation_config.pad_token_id = 0
    short = {name: ids for name, ids in prompt_ids.items() if len(ids) <= MOST_PADDED}
    answers = dict(zip(short, _generate(model, list(short.values())), strict=True))
    for name, ids in prompt_ids.items():
        if name not in short:
            (answers[name],) = _generate(model, [ids])
    return {name: _score(model, ids, answers[name]) for name, ids in prompt_ids.items()}


def _generate(model: PreTrainedModel, prompts: Sequence[list[int]]) -> list[list[int]]:
    width = max(map(len, prompts))
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
            max_new_tokens=NUM_OUTPUT_TOKENS,
            do_sample=False,
        )
    assert ids.shape[1] == width + NUM_OUTPUT_TOKENS
    answers: list[list[int]] = ids[:, width:].tolist()
    return answers


def _score(model: PreTrainedModel, prompt_ids: list[int], answer_ids: list[int]) -> Reference:
    with torch.inference_mode():
        logits_1TV = model(
            torch.tensor([prompt_ids + answer_ids[:-1]]), logits_to_keep=len(answer_ids), use_cache=False
        ).logits
    logprobs_TV = logits_1TV[0].log_softmax(-1)
    behind = logprobs_TV.amax(-1) - logprobs_TV.gather(1, torch.tensor(answer_ids)[:, None])[:, 0]
    assert float(behind.max()) < NEAR_TIE, "transformers contradicts itself"
    return Reference(answer_ids, logprobs_TV)


def assert_equal(name: str, found: Answer, reference: Reference) -> None:
    """Tokens equal and log-probabilities within `LOGPROB_TOLERANCE`, up to a near-tie of the reference."""
    for i, (token_id, expected) in enumerate(zip(found.token_ids, reference.token_ids, strict=True)):
        row = reference.logprobs_TV[i]
        if token_id != expected:
            gap = float(row[expected] - row[token_id])
            assert gap < NEAR_TIE, f"{name}: token {i} is {token_id}, transformers has {expected}, {gap:.4f} better"
            print(f"{name}: near-tie at token {i}: {token_id} and {expected} differ by {gap:.1e}")
            return
        error = abs(found.logprobs[i] - float(row[expected]))
        assert error < LOGPROB_TOLERANCE, f"{name}: the log-probability of token {i} is off by {error:.2e}"
