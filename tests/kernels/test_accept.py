"""The acceptance of drafts against a walk over each row in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from aioengine.kernels import accept as kernels
from tests.kernels.launches import recorded_kernels

MAX_ROWS, MAX_SAMPLES, POISON = 8, 300, -77
NOBODY = 1234  # what is kept of rows that have no drafts

Accept = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]


@dataclass
class Row:
    row: int
    drafts: list[int]
    samples: list[int]
    """Of a row without drafts one or, if it does not sample, none."""
    num_before: int = 1
    """Tokens before the drafts."""


@pytest.fixture
def accept(run: str) -> Accept:
    if run == "reference":
        return lambda *step: kernels.accept_ref(*step[:-1])
    return kernels.accept


def packed(rows: list[Row], device: torch.device) -> torch.Tensor:
    words: list[int] = []
    tokens: list[int] = []
    num_samples = 0
    for row in rows:
        index = num_samples if row.samples else -1
        words += [row.row, len(tokens), row.num_before + len(row.drafts), 50, 1 | len(row.drafts) << 8, index, 3, 0]
        tokens += [-1] * row.num_before + row.drafts
        num_samples += len(row.samples)
    off_tokens = 19 + len(words)  # sections lie where the header says
    end = off_tokens + len(tokens)
    num_drafts = sum(len(row.drafts) for row in rows)
    header = [4, 7, len(rows), len(tokens), num_samples, 19, off_tokens, end, 0, end, end, 0, num_drafts, 0, 0, 0]
    return torch.tensor([*header, 9 << 8, 9 << 8, 9 << 8, *words, *tokens, 5, 5, 5], dtype=torch.int32, device=device)


def check(accept: Accept, rows: list[Row], num_padding: int, device: torch.device) -> None:
    ids = [token_id for row in rows for token_id in row.samples]
    statuses = [10 + i for i in range(len(ids))]
    choices = torch.full((2, MAX_SAMPLES), POISON, dtype=torch.int32, device=device)
    choices[0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    choices[1, : len(ids)] = torch.tensor(statuses, dtype=torch.int32)
    last = torch.full((MAX_ROWS,), NOBODY, dtype=torch.int32, device=device)
    rejected = torch.arange(MAX_ROWS, dtype=torch.int32, device=device) * 100
    expected_last, expected_rejected, first = last.tolist(), rejected.tolist(), 0
    for row in rows:
        num_accepted = 0
        while num_accepted < len(row.drafts) and row.drafts[num_accepted] == row.samples[num_accepted]:
            num_accepted += 1
        for at in range(first + num_accepted + 1, first + len(row.samples)):
            ids[at], statuses[at] = -1, 0
        if row.drafts:
            expected_last[row.row] = row.samples[num_accepted]
            expected_rejected[row.row] += len(row.drafts) - num_accepted
        first += len(row.samples)
    buffer = packed(rows, device)
    before = buffer.tolist()
    accept(buffer, choices, last, rejected, len(rows) + num_padding)
    assert choices[:, : len(ids)].tolist() == [ids, statuses]
    assert bool((choices[:, len(ids) :] == POISON).all())
    assert last.tolist() == expected_last and rejected.tolist() == expected_rejected
    assert buffer.tolist() == before


@pytest.mark.parametrize("num_padding", [0, 3])
def test_drafts_are_accepted_up_to_the_first_that_is_not_the_sample(
    accept: Accept, num_padding: int, device: torch.device
) -> None:
    """J3, J4: all of them, some, none; equal ones behind the first that differs do not count."""
    rows = [
        Row(5, [], [31]),
        Row(3, [11, 12, 13, 14], [11, 12, 13, 14, 15]),
        Row(0, [11, 12, 13, 14], [11, 12, 99, 14, 15]),
        Row(7, [], [], num_before=6),
        Row(2, [21, 22], [98, 22, 23]),
        Row(6, [0], [0, 1]),
        Row(1, [0], [1, 0]),
        Row(4, [], [32], num_before=3),
    ]
    check(accept, rows, num_padding, device)


@pytest.mark.parametrize("num_drafts", [31, 32, 33, 64, 65, 131])
def test_any_number_of_drafts_is_compared(accept: Accept, num_drafts: int, device: torch.device) -> None:
    drafts = list(range(1000, 1000 + num_drafts))
    for num_accepted in sorted({0, 1, 31, 32, num_drafts - 1, num_drafts} & set(range(num_drafts + 1))):
        samples = [*drafts, 7]
        samples[num_accepted] = 6
        check(accept, [Row(1, [5], [4, 4]), Row(2, drafts, samples, 2), Row(3, [8], [8, 9])], 1, device)


@pytest.mark.parametrize("seed", range(5))
def test_random_steps(accept: Accept, seed: int, device: torch.device) -> None:
    draw = random.Random(seed)
    rows = []
    for row in draw.sample(range(MAX_ROWS), draw.randint(1, MAX_ROWS)):
        num_drafts = draw.choice([0, 0, 1, 2, 5])
        drafts = [draw.randrange(2) for _ in range(num_drafts)]
        rows.append(Row(row, drafts, [draw.randrange(2) for _ in range(num_drafts + 1)], draw.randint(1, 4)))
    check(accept, rows, draw.randrange(3), device)


def test_a_count_of_rejected_drafts_wraps(accept: Accept, device: torch.device) -> None:
    choices = torch.tensor([[7, 8, 9], [0, 0, 0]], dtype=torch.int32, device=device)
    last = torch.zeros(1, dtype=torch.int32, device=device)
    rejected = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=device)
    accept(packed([Row(0, [1, 2], [7, 8, 9])], device), choices, last, rejected, 1)
    assert rejected.tolist() == [-(2**31) + 1] and last.tolist() == [7]
    assert choices.tolist() == [[7, -1, -1], [0, 0, 0]]


def test_a_step_without_rows_leaves_no_trace(accept: Accept, device: torch.device) -> None:
    check(accept, [], 4, device)
    check(accept, [], 0, device)


def test_steps_of_any_size_take_one_kernel(device: torch.device) -> None:
    with recorded_kernels() as found:
        for num_rows in (1, 2, 15, 16, 17):
            for max_samples in (1, 16, 33):
                rows = [Row(0, [], [3])]
                choices = torch.zeros((2, max_samples), dtype=torch.int32, device=device)
                row_state = torch.zeros((2, MAX_ROWS), dtype=torch.int32, device=device)
                kernels.accept(packed(rows, device), choices, *row_state, num_rows)
    assert len(found) == 1 and all(len(kinds) == 1 for kinds in found.values())
