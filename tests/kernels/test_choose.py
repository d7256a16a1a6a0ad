"""The choice of simple rows: greedy, drawn and filtered at once, kept by row."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import choose as kernels
from aioengine.kernels.choose import DrawTable
from aioengine.kernels.sampling import draw_ref, filter_threshold_ref

MAX_ROWS = 9


@pytest.fixture
def choose(run):
    return getattr(kernels, "choose_ref" if run == "reference" else "choose")


def step(vocab, dtype, device):
    """Logits of six samples, their rows (the last is padding) and outputs; how all rows choose."""
    generator = torch.Generator(device).manual_seed(vocab)
    logits = (3 * torch.randn(6, vocab, generator=generator, device=device)).to(dtype)
    rows = torch.tensor([7, 0, 3, 8, 1, -1], dtype=torch.int32, device=device)
    num_outputs = torch.tensor([0, 5, 2, 9, 1, 0], dtype=torch.int32, device=device)
    table = DrawTable(
        temperature=torch.tensor([0.0, 0.8, 0.0, 1.3, 9.0, 9.0, 9.0, 2.4, 0.0], device=device),
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.7, 1.0, 1.0, 1.0, 1.0, 0.1], device=device),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 0.5], device=device),
        top_k=torch.tensor([vocab, vocab, 4, vocab, 1, 1, 1, min(3, vocab), 2], dtype=torch.int32, device=device),
        seeds=torch.arange(MAX_ROWS, device=device) * 77_777_777_777 - 5,
    )
    return logits, rows, num_outputs, table


def kept(device):
    packed = torch.full((2, 8), -7, dtype=torch.int32, device=device)
    return packed, torch.full((MAX_ROWS,), -9, dtype=torch.int32, device=device)


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("vocab", [5, 3000, 9001])
def test_tokens_are_those_of_the_separate_operations(choose, vocab, is_filtered, dtype, device):
    logits, rows, num_outputs, table = step(vocab, dtype, device)
    packed, last_token = kept(device)
    choose(logits, rows, num_outputs, table, packed, last_token, is_filtered)
    expected = []
    for x, row, position in zip(logits.float(), rows.tolist()[:5], num_outputs, strict=False):
        if table.temperature[row] == 0:
            expected.append(int(x.argmax()))
            continue
        z, one = (x / table.temperature[row])[None], slice(row, row + 1)
        threshold = torch.full((1,), -torch.inf, device=device)
        if is_filtered:
            threshold = filter_threshold_ref(z, table.top_k[one], table.top_p[one], table.min_p[one])
        expected.append(int(draw_ref(z, threshold, table.seeds[one], position[None])))
    assert packed[0, :5].tolist() == expected
    assert packed[1, :5].tolist() == [0] * 5 and bool((packed[:, 6:] == -7).all())
    assert last_token[rows[:5].long()].tolist() == expected
    assert last_token[[2, 4, 5, 6]].tolist() == [-9] * 4  # padding leaves no trace


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("first_row", [0, 1])
def test_scores_that_are_no_numbers_are_told(choose, first_row, is_filtered, dtype, device):
    logits, rows, num_outputs, table = step(50, dtype, device)
    rows[:4] = torch.arange(first_row, first_row + 4)  # greedy and drawn rows, turned round
    logits[0, 3] = float("nan")
    logits[1, 4] = float("inf")
    logits[2, :] = float("-inf")
    logits[3, 1:] = float("-inf")
    packed, last_token = kept(device)
    choose(logits, rows, num_outputs, table, packed, last_token, is_filtered)
    assert packed[1, :5].tolist() == [1, 1, 2, 0, 0]
    assert packed[0, :2].tolist() == [3, 4] and packed[0, 3] == 0
    assert bool((packed[0, :5] >= 0).all() & (packed[0, :5] < 50).all())


def test_the_lowest_id_wins_a_greedy_tie(choose, dtype, device):
    logits, rows, num_outputs, table = step(5000, dtype, device)
    logits.fill_(1.0)
    logits[:, [4100, 40, 2500]] = 2.0
    packed, last_token = kept(device)
    choose(logits, rows, num_outputs, DrawTable.zeros(MAX_ROWS, device), packed, last_token, False)
    assert packed[0, :6].tolist() == [40] * 6


def test_no_samples_are_no_launch(choose, dtype, device):
    logits, rows, num_outputs, table = step(5, dtype, device)
    packed, last_token = kept(device)
    choose(logits[:0], rows[:0], num_outputs[:0], table, packed, last_token)
    assert bool((packed == -7).all() & (last_token == -9).all())
