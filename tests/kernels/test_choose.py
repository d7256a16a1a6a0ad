"""The choice of plain rows: greedy and drawn in one launch, kept by row."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import choose as kernels
from aioengine.kernels import sampling_triton

MAX_ROWS = 9


@pytest.fixture
def choose(run):
    return getattr(kernels, "choose_ref" if run == "reference" else "choose")


def step(vocab, dtype, device):
    """Logits of six samples, their rows (the last is padding) and outputs; temperatures and seeds of all rows."""
    generator = torch.Generator(device).manual_seed(vocab)
    logits = (3 * torch.randn(6, vocab, generator=generator, device=device)).to(dtype)
    rows = torch.tensor([7, 0, 3, 8, 1, -1], dtype=torch.int32, device=device)
    num_outputs = torch.tensor([0, 5, 2, 9, 1, 0], dtype=torch.int32, device=device)
    temperature = torch.tensor([0.0, 0.8, 0.0, 1.3, 9.0, 9.0, 9.0, 0.4, 0.0], device=device)
    seeds = torch.arange(MAX_ROWS, device=device) * 77_777_777_777 - 5
    return logits, rows, num_outputs, temperature, seeds


def kept(device):
    packed = torch.full((2, 8), -7, dtype=torch.int32, device=device)
    return packed, torch.full((MAX_ROWS,), -9, dtype=torch.int32, device=device)


@pytest.mark.parametrize("vocab", [5, 3000, 9001])
def test_tokens_are_those_of_the_separate_operations(choose, vocab, dtype, device):
    logits, rows, num_outputs, temperature, seeds = step(vocab, dtype, device)
    packed, last_token = kept(device)
    choose(logits, rows, num_outputs, temperature, seeds, packed, last_token)
    at = rows.clamp(min=0).long()
    x = logits.float()
    drawn = sampling_triton.draw(x, None, seeds[at], num_outputs.long(), temperature[at].clamp(min=1e-3))
    expected = torch.where(temperature[at] > 0, drawn, x.argmax(-1))
    assert packed[0, :5].tolist() == expected[:5].tolist()
    assert packed[1, :5].tolist() == [0] * 5 and bool((packed[:, 6:] == -7).all())
    assert last_token[rows[:5].long()].tolist() == expected[:5].tolist()
    assert last_token[[2, 4, 5, 6]].tolist() == [-9] * 4  # padding leaves no trace


@pytest.mark.parametrize("first_row", [0, 1])
def test_scores_that_are_no_numbers_are_told(choose, first_row, dtype, device):
    logits, rows, num_outputs, temperature, seeds = step(50, dtype, device)
    rows[:4] = torch.arange(first_row, first_row + 4)  # greedy and drawn rows, turned round
    logits[0, 3] = float("nan")
    logits[1, 4] = float("inf")
    logits[2, :] = float("-inf")
    logits[3, 1:] = float("-inf")
    packed, last_token = kept(device)
    choose(logits, rows, num_outputs, temperature, seeds, packed, last_token)
    assert packed[1, :5].tolist() == [1, 1, 2, 0, 0]
    assert packed[0, :2].tolist() == [3, 4] and packed[0, 3] == 0
    assert bool((packed[0, :5] >= 0).all() & (packed[0, :5] < 50).all())


def test_the_lowest_id_wins_a_greedy_tie(choose, dtype, device):
    logits, rows, num_outputs, temperature, seeds = step(5000, dtype, device)
    logits.fill_(1.0)
    logits[:, [4100, 40, 2500]] = 2.0
    packed, last_token = kept(device)
    choose(logits, rows, num_outputs, torch.zeros_like(temperature), seeds, packed, last_token)
    assert packed[0, :6].tolist() == [40] * 6


def test_no_samples_are_no_launch(choose, dtype, device):
    logits, rows, num_outputs, temperature, seeds = step(5, dtype, device)
    packed, last_token = kept(device)
    choose(logits[:0], rows[:0], num_outputs[:0], temperature, seeds, packed, last_token)
    assert bool((packed == -7).all() & (last_token == -9).all())
