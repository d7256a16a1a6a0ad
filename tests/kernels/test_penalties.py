"""Penalties by the table of seen tokens: their formula, and rows that share a batch with others."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import penalties as kernels


@pytest.fixture
def apply_penalties(run):
    return getattr(kernels, "apply_penalties_ref" if run == "reference" else "apply_penalties")


@pytest.fixture
def count_tokens(run):
    return getattr(kernels, "count_tokens_ref" if run == "reference" else "count_tokens")


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_penalties_follow_their_formula(apply_penalties, device):
    x = torch.tensor([[9.0] * 5, [2.0, -2.0, 1.0, 4.0, 0.0]], device=device)
    seen = ints(device, *[7] * 10, 1, 1 + 2 * 3, 2 * 1, 0, 2 * 2).view(3, 5)
    strengths = [torch.tensor([s], device=device) for s in (2.0, 0.5, 1.0)]
    apply_penalties(x, ints(device, 1), seen, ints(device, 2), *strengths)
    assert x[1].tolist() == [1.0, -4.0 - 1.5 - 1.0, 0.5 - 0.5 - 1.0, 4.0, 0.0 - 1.0 - 1.0]
    assert x[0].tolist() == [9.0] * 5  # nobody penalized it


@pytest.mark.parametrize("vocab", [5, 1000, 5000])
def test_each_row_has_its_own_line_and_strengths(apply_penalties, vocab, device):
    generator = torch.Generator(device).manual_seed(vocab)
    x = torch.randn(5, vocab, generator=generator, device=device) * 3
    seen = torch.randint(0, 6, (8, vocab), generator=generator, device=device, dtype=torch.int32)
    at, lines = ints(device, 4, 0, 3), ints(device, 7, 2, 0)
    strengths = [torch.tensor(s, device=device) for s in ([1.0, 1.3, 0.8], [0.0, 0.5, -0.2], [0.0, 0.1, 1.5])]
    expected = x.clone()
    for i in range(3):
        row, marks = x[at[i]].clone(), seen[lines[i]]
        r, f, p = (float(s[i]) for s in strengths)
        row = torch.where(marks > 0, torch.where(row > 0, row / r, row * r), row)
        expected[at[i]] = row - f * (marks // 2) - p * (marks >= 2)
    apply_penalties(x, at, seen, lines, *strengths)
    assert torch.allclose(x, expected, rtol=0, atol=1e-6)
    apply_penalties(x, at[:0], seen, lines[:0], *(s[:0] for s in strengths))
    assert torch.allclose(x, expected, rtol=0, atol=1e-6)


def test_tokens_are_counted_in_the_lines_of_their_rows(count_tokens, device):
    seen = torch.zeros((6, 300), dtype=torch.int32, device=device)
    seen[4, 17] = 1
    token_ids = ints(device, 17, 5, 299, 17)
    for _ in range(2):
        count_tokens(seen, ints(device, 4, 1, 3), ints(device, 0, 2, 3), token_ids)
    assert seen.nonzero().tolist() == [[1, 299], [3, 17], [4, 17]]
    assert [int(seen[line, token]) for line, token in ((1, 299), (3, 17), (4, 17))] == [4, 4, 5]
    count_tokens(seen, ints(device), ints(device), token_ids)
    assert int(seen.sum()) == 13


def test_more_rows_than_one_program_takes_are_counted(count_tokens, device):
    num_rows = 131
    seen = torch.zeros((num_rows, 7), dtype=torch.int32, device=device)
    numbers = torch.arange(num_rows, dtype=torch.int32, device=device)
    count_tokens(seen, numbers.flip(0).contiguous(), numbers, numbers % 7)
    expected = torch.zeros_like(seen)
    expected[numbers.flip(0).long(), (numbers % 7).long()] = 2
    assert torch.equal(seen, expected)
