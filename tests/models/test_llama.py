"""Our models against transformers on tiny random checkpoints, over the paged cache and in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from aioengine.layers.ops import Ops
from aioengine.layers.ops_cpu import CpuOps
from aioengine.layers.ops_torch import TorchOps

from .tiny import FAMILIES, load_paged, make_checkpoint, random_prompt

CHUNKINGS = [([41], 16), ([20, 21], 5), ([1, 7, 16, 2, 15], 1), ([1, 7, 16, 2, 15], 7)]
"""Chunks of a prompt of 41 tokens, and a block size."""


Family = tuple[PreTrainedModel, Path]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(request.param, folder), folder


@pytest.fixture(params=[TorchOps, CpuOps])
def ops(request: pytest.FixtureRequest) -> Ops:
    made: Ops = request.param()
    return made


def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def reference_greedy(model: PreTrainedModel, ids: list[int], num_tokens: int) -> list[int]:
    ids = list(ids)
    for _ in range(num_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[-num_tokens:]


@pytest.mark.parametrize(("chunks", "block_size"), CHUNKINGS)
def test_logits_of_a_chunked_prompt_equal_the_reference(
    family: Family, ops: Ops, chunks: list[int], block_size: int
) -> None:
    model, folder = family
    paged = load_paged(folder, ops, block_size)
    prompt = random_prompt(41)
    request = paged.planner.request(prompt)
    logits = torch.cat([paged.run({request: n}) for n in chunks])
    torch.testing.assert_close(logits, reference_logits(model, prompt), atol=1e-4, rtol=0)


def test_greedy_tokens_equal_the_reference(family: Family, ops: Ops) -> None:
    model, folder = family
    paged = load_paged(folder, ops, block_size=7)
    prompt = random_prompt(30, seed=1)
    assert paged.greedy(paged.planner.request(prompt), 24) == reference_greedy(model, prompt, 24)


def test_requests_in_one_step_do_not_disturb_each_other(family: Family, ops: Ops) -> None:
    model, folder = family
    paged = load_paged(folder, ops, block_size=4)
    prompts = [random_prompt(n, seed=n) for n in (9, 33, 1, 17)]
    requests = [paged.planner.request(prompt) for prompt in prompts]
    seen: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(prompts))}
    while any(r.num_computed < len(r.prompt) for r in requests):
        chunks = {r: min(5 + i, len(r.prompt) - r.num_computed) for i, r in enumerate(requests)}
        chunks = {r: n for r, n in chunks.items() if n > 0}
        logits = paged.run(chunks)
        for request, part in zip(chunks, logits.split(list(chunks.values())), strict=True):
            seen[requests.index(request)].append(part)
    for i, prompt in enumerate(prompts):
        torch.testing.assert_close(torch.cat(seen[i]), reference_logits(model, prompt), atol=1e-4, rtol=0)
