"""The sampler over the sampling kernels gives what it gives over their references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aioengine.sampler import OK, PendingLogprobs, Sampler, SamplingPlan
from aioengine.sampling_backend import KERNELS, REFERENCES, DeviceBackend
from aioengine.types import SamplingParams
from tests.kernels.launches import recorded_kernels
from tests.kernels.triton_here import need_triton

VOCAB = 130
ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "logprobs": 0},
    {"top_p": 0.7},
    {"top_k": 5, "logprobs": -1},
    {"min_p": 0.2, "temperature": 1.5},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {3: 2.0, 4: -5.0}},
    {"min_tokens": 2},
    {"top_p": 0.9, "logit_bias": {7: 4.0}, "repetition_penalty": 0.9},
]
EXTRAS: dict[int, dict[str, Any]] = {
    4: {"allowed_ids": tuple(range(0, VOCAB, 2))},
    6: {"bad_words": ((1,), (2, 3), (4, 5, 6))},
    8: {"stop_ids": (0, 1)},
}


@pytest.fixture(autouse=True)
def needs_kernels(device: torch.device) -> None:
    need_triton(device)


def run(sampler: Sampler, batches: list[list[int]], device: torch.device) -> list[list[object]]:
    seen: list[list[object]] = [[] for _ in ROWS]
    for row, params in enumerate(ROWS):
        plan = SamplingPlan(SamplingParams(**params), VOCAB, seed=row - 3, **EXTRAS.get(row, {}))
        sampler.join(row, plan, [row, 50, 51], [20] * (row % 3))
    for step, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(step)
        logits = (torch.randn(len(ROWS), VOCAB, generator=generator)[batch] * 3).to(device)
        positions = [row % 3 + sum(row in earlier for earlier in batches[:step]) for row in batch]
        sampled = sampler.sample(logits, batch, positions)
        assert sampled.status.tolist() == [OK] * len(batch)
        entries = sampled.logprobs.resolve() if sampled.logprobs else {}
        for i, row in enumerate(batch):
            seen[row].append(int(sampled.token_ids[i]))
            if (entry := entries.get(i)) is not None:
                seen[row] += [entry.rank, entry.top_ids.tolist(), round(entry.logprob, 4)]
    return seen


def test_kernels_and_references_sample_alike(device: torch.device) -> None:
    everyone = list(range(len(ROWS)))
    batches = [everyone, [9, 2, 5], [1], everyone[::-1], [0], [4, 6, 3], everyone]
    results = [
        run(Sampler(VOCAB, 16, device, DeviceBackend(VOCAB, device, operations)), batches, device)
        for operations in (REFERENCES, KERNELS)
    ]
    assert results[0] == results[1]


def test_broken_row_fails_alone_over_kernels(device: torch.device) -> None:
    sampler = Sampler(VOCAB, 4, device, DeviceBackend(VOCAB, device, KERNELS))
    for row, params in enumerate([{"temperature": 0.0}, {"top_p": 0.5}, {"logprobs": 1}]):
        sampler.join(row, SamplingPlan(SamplingParams(**params), VOCAB, seed=row), [], [])
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    whole = sampler.sample(logits, [0, 1, 2], [0, 0, 0]).token_ids.tolist()
    for broken in range(3):
        poisoned = logits.clone()
        poisoned[broken, 9] = torch.nan
        step = sampler.sample(poisoned, [0, 1, 2], [0, 0, 0])
        assert [bool(s) for s in step.status.tolist()] == [row == broken for row in range(3)]
        tokens = step.token_ids.tolist()
        assert 0 <= tokens[broken] < VOCAB
        assert [t for row, t in enumerate(tokens) if row != broken] == [
            t for row, t in enumerate(whole) if row != broken
        ]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_sampling_never_waits_for_the_device(device: torch.device) -> None:
    def step(position: int) -> list[PendingLogprobs]:
        for row, params in enumerate(ROWS):
            plan = SamplingPlan(SamplingParams(**params), VOCAB, seed=row, **EXTRAS.get(row, {}))
            sampler.join(row, plan, [1, 2], [3])
        sampled = sampler.sample(logits, range(len(ROWS)), np.full(len(ROWS), position))
        assert sampled.logprobs is not None
        return [sampled.logprobs.to_host(), sampler.prompt_logprobs(logits, range(len(ROWS)), 2).to_host()]

    sampler = Sampler(VOCAB, 16, device)
    logits = torch.randn(len(ROWS), VOCAB, device=device)
    step(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for part in pending:
        assert part.words.is_pinned() and list(part.resolve()) == part.keys


@pytest.mark.gpu
def test_a_full_batch_on_the_gpu_gives_what_the_cpu_gives(device: torch.device) -> None:
    """Penalties that remember and log-probabilities in differing numbers, for 200 rows of a real vocabulary."""
    vocab_size, num_rows = 32_003, 200
    samplers = [Sampler(vocab_size, num_rows), Sampler(vocab_size, num_rows, device)]
    for row in range(num_rows):
        params: dict[str, Any] = {"temperature": 0.0 if row % 3 else 0.8, "logprobs": [None, 0, 1, 5, 20][row % 5]}
        if row % 4:
            params |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2 * (row % 7)}
        if row % 7 == 0:
            params |= {"logit_bias": {row: 5.0, 3: -2.0}, "min_tokens": 2}
        plan = SamplingPlan(SamplingParams(**params), vocab_size, seed=row, stop_ids=(1, 2))
        for sampler in samplers:
            sampler.join(row, plan, [row, 7, 9], [4] * (row % 3))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator).mul(2).bfloat16()
    for step in range(4):
        rows = [row for row in range(num_rows) if row % (step + 1) == 0]
        positions = [row % 3 + sum(row % (s + 1) == 0 for s in range(step)) for row in rows]
        cpu, gpu = (sampler.sample(logits[rows].to(sampler.device), rows, positions) for sampler in samplers)
        assert gpu.packed.tolist() == cpu.packed.tolist()
        assert cpu.logprobs is not None and gpu.logprobs is not None
        expected, found = cpu.logprobs.resolve(), gpu.logprobs.resolve()
        assert list(found) == list(expected)
        for key, entry in found.items():
            other = expected[key]
            assert entry is not None and other is not None
            assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            np.testing.assert_allclose(entry.top_logprobs, other.top_logprobs, atol=1e-4)
            assert entry.top_ids.tolist() == other.top_ids.tolist()


@pytest.mark.slow
def test_batches_of_any_size_take_the_same_kernels(device: torch.device) -> None:
    """A kernel that is compiled while requests wait keeps all of them waiting."""
    sampler = Sampler(VOCAB, 8, device, DeviceBackend(VOCAB, device, KERNELS))
    params = SamplingParams(top_p=0.9, repetition_penalty=1.2, logit_bias={3: 1.0}, logprobs=3)
    for row in range(8):
        sampler.join(row, SamplingPlan(params, VOCAB, seed=row), [row, 50, 51], [20])
    with recorded_kernels() as kernels:
        for size in range(1, 9):
            sampler.sample(torch.zeros(size, VOCAB, device=device), range(size), [1] * size)
    assert len(kernels) >= 8 and {name: len(kinds) for (name, _), kinds in kernels.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize("top_p", [1e-50, 1e-45, 1e-30])
def test_the_least_nucleus_holds_the_most_likely_tokens(top_p: float, device: torch.device) -> None:
    """Less than a float32 can tell from zero, and tokens that are equally likely."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, [700, 701]] = 9.0
    sampler = Sampler(1000, 1, device, DeviceBackend(1000, device, KERNELS))
    sampler.join(0, SamplingPlan(SamplingParams(top_p=top_p), 1000, seed=1), [], [])
    sampled = sampler.sample(logits, [0], [0])
    assert int(sampled.token_ids[0]) in (700, 701) and int(sampled.status[0]) == OK
