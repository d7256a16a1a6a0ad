"""The sampling kernels against the references of `kernels/sampling.py`."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import sampling as references
from aioengine.kernels import sampling_triton as kernels
from tests.kernels.triton_here import need_triton

VOCABULARIES = [5, 1000, 5000]


@pytest.fixture(autouse=True)
def needs_kernels(device):
    need_triton(device)


def logits(rows: int, vocab: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator, device=device) * 3


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_argmax_takes_the_lowest_id_on_ties_and_nan_first(vocab, device):
    x = logits(6, vocab, device)
    x[1, [2, 4]] = 50.0
    x[2] = float("-inf")
    x[3, 3] = float("nan")
    x[4] = -0.0
    x[4, vocab - 1] = 0.0
    x[5, vocab - 1] = float("inf")
    ids = kernels.argmax(x)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [int(x[0].argmax()), 2, 0, 3, 0, vocab - 1]
    half = logits(3, vocab, device).half()
    assert torch.equal(kernels.argmax(half)[:, None], (half == half.max(1, True).values).int().argmax(1, True))
    assert kernels.argmax(x[:0]).tolist() == []


CASES = [
    ("none", {}),
    ("top_k", {"top_k": [1, 2, 3, 40, 4]}),
    ("top_p", {"top_p": [0.1, 0.5, 0.9, 0.99, 0.3]}),
    ("min_p", {"min_p": [0.01, 0.1, 0.5, 1.0, 0.0]}),
    (
        "all",
        {"top_k": [50, 3, 10, 5, 4], "top_p": [0.9, 0.5, 0.7, 1.0, 0.2], "min_p": [0.0, 0.1, 0.0, 0.02, 0.0]},
    ),
]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("settings", [c[1] for c in CASES], ids=[c[0] for c in CASES])
def test_the_same_tokens_survive_the_filters(settings, vocab, device):
    z = logits(5, vocab, device, seed=vocab)
    z[3] = (z[3] * 2).round() / 2  # ties
    z[4, 1:] = torch.where(z[4, 1:] > 1, z[4, 1:], float("-inf"))  # most are forbidden
    top_k = torch.tensor(settings.get("top_k", [vocab] * 5), device=device).clamp(max=vocab)
    top_p = torch.tensor(settings.get("top_p", [1.0] * 5), device=device)
    min_p = torch.tensor(settings.get("min_p", [0.0] * 5), device=device)
    expected = z >= references.filter_threshold_ref(z, top_k, top_p, min_p)[:, None]
    survivors = z >= kernels.filter_threshold(z, top_k, top_p, min_p)[:, None]
    assert torch.equal(survivors, expected), (survivors.sum(1), expected.sum(1))


def test_one_value_everywhere_survives_every_filter(device):
    z = torch.full((1, 100), 2.5, device=device)
    top_k = torch.tensor([3], device=device)
    threshold = kernels.filter_threshold(
        z, top_k, torch.tensor([0.2], device=device), torch.tensor([0.9], device=device)
    )
    assert bool((z >= threshold[:, None]).all())
