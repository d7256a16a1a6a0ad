"""Models with windows in some layers: a block table per group, on every path, against transformers.

What a window has left is given back and becomes NaN, so that an answer is right only if nothing reads it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from aioengine.graphs import Bucket
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
