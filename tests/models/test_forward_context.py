"""INV-44: a forward pass knows its step by its arguments alone, whatever else runs, nested or broken off, meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from aioengine.layers.ops_torch import TorchOps

from .test_llama import reference_logits
from .tiny import PagedModel, load_paged, make_checkpoint, random_prompt


class Interrupted(TorchOps):
    """Does something else first, in one of its next calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_left = -1
        self.other: Callable[[], object] = lambda: None

    def attention(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            self.other()
        return super().attention(*args, **options)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("qwen2-alternating")  # two groups, so that layers have different tables
    return make_checkpoint("qwen2-alternating", folder), folder


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_pass_within_a_pass_changes_neither(family: tuple[PreTrainedModel, Path], at: int) -> None:
    model, folder = family
    ops = Interrupted()
    outer = load_paged(folder, ops, block_size=4)
    inner = PagedModel(outer.loaded, TorchOps(), block_size=4)  # one model object, another cache and batch
    prompts = random_prompt(30, seed=1), random_prompt(17, seed=2)
    requests = outer.planner.request(prompts[0]), inner.planner.request(prompts[1])
    seen = [[outer.run({requests[0]: 11})], [inner.run({requests[1]: 5})]]
    ops.calls_left, ops.other = at, lambda: seen[1].append(inner.run({requests[1]: 12}))
    seen[0].append(outer.run({requests[0]: 19}))
    for prompt, parts in zip(prompts, seen, strict=True):
        torch.testing.assert_close(torch.cat(parts), reference_logits(model, prompt), atol=1e-4, rtol=0)


def test_a_pass_that_is_broken_off_leaves_nothing_to_the_next(family: tuple[PreTrainedModel, Path]) -> None:
    model, folder = family

    def fail() -> None:
        raise RuntimeError("in the middle")

    ops = Interrupted()
    paged = load_paged(folder, ops, block_size=4)
    ops.calls_left, ops.other = 3, fail
    with pytest.raises(RuntimeError, match="in the middle"):
        paged.run({paged.planner.request(random_prompt(40, seed=3)): 40})
    prompt = random_prompt(9, seed=4)
    logits = paged.run({paged.planner.request(prompt): 9})
    torch.testing.assert_close(logits, reference_logits(model, prompt), atol=1e-4, rtol=0)
