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


def draw_settings(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.arange(rows, device=device) * 7919 - (1 << 62)
    return seeds, torch.arange(rows, device=device, dtype=torch.int32) * 3


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


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draw_equals_the_reference_and_ignores_the_batch(vocab, device):
    z = logits(9, vocab, device)
    seeds, positions = draw_settings(9, device)
    threshold = torch.full((9,), float("-inf"), device=device)
    threshold[3:6] = z[3:6].median(1).values
    threshold[6:] = z[6:].max(1).values
    expected = references.draw_ref(z, threshold, seeds, positions)
    assert torch.equal(kernels.draw(z, threshold, seeds, positions), expected)
    assert torch.equal(kernels.draw(z[4:5], threshold[4:5], seeds[4:5], positions[4:5]), expected[4:5])
    no_filter = threshold.fill_(float("-inf"))
    expected = references.draw_ref(z, no_filter, seeds, positions)
    assert torch.equal(kernels.draw(z, None, seeds, positions), expected)


def test_draw_divides_by_the_temperature(device):
    x = logits(8, 500, device)
    temperature = torch.linspace(0.3, 2.0, 8, device=device)
    seeds, positions = draw_settings(8, device)
    z = x / temperature[:, None]
    threshold = z.median(1).values
    expected = references.draw_ref(z, threshold, seeds, positions)
    assert torch.equal(kernels.draw(x, threshold, seeds, positions, temperature), expected)


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


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_penalties_equal_the_reference(vocab, device):
    x = logits(3, vocab, device)
    generator = torch.Generator(device).manual_seed(1)
    in_prompt = torch.rand(3, vocab, generator=generator, device=device) < 0.3
    counts = torch.randint(0, 3, (3, vocab), generator=generator, device=device, dtype=torch.int32)
    strengths = [torch.tensor(s, device=device) for s in ([1.0, 1.3, 0.8], [0.0, 0.5, -0.2], [0.0, 0.1, 1.5])]
    expected = x.clone()
    references.apply_penalties_ref(expected, in_prompt, counts, *strengths)
    kernels.apply_penalties(x, in_prompt, counts, *strengths)
    assert torch.allclose(x, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logprob_and_rank_of_a_token(vocab, device):
    x = logits(4, vocab, device)
    x[1, 2:4] = float("-inf")
    x[2] = x[2].round()
    ids = torch.tensor([0, 1, 4, vocab - 1], device=device)
    expected, ranks = references.rank_ref(x.log_softmax(-1), ids)
    logprobs, got = kernels.token_logprobs(x, ids)
    assert torch.allclose(logprobs, expected, atol=2e-5)
    assert torch.equal(got, ranks)
