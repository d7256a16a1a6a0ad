"""The step buffer's unpack against a model that walks the plan in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from aioengine.kernels import step
from aioengine.kernels.step import StepInputs

BLOCK_SIZE, MAX_ROWS, MAX_BLOCKS = 4, 8, 6


@dataclass
class Row:
    row: int
    computed: int
    tokens: list[int]  # -1 = the last token sampled for the row
    sample: bool
    num_outputs: int = 0
    new_blocks: list[tuple[int, int]] = field(default_factory=list)  # (logical, block id)


def packed(rows: list[Row], device: torch.device) -> torch.Tensor:
    words, tokens, updates, samples = [], [], [], 0
    for row in rows:
        index = -1
        if row.sample:
            index, samples = samples, samples + 1
        words += [
            row.row,
            len(tokens),
            len(row.tokens),
            row.computed,
            int(row.sample),
            index,
            row.num_outputs,
            0,
        ]
        tokens += row.tokens
        updates += [word for logical, block in row.new_blocks for word in (row.row, logical, block)]
    off_tokens = 16 + len(words)
    off_blocks = off_tokens + len(tokens)
    total = off_blocks + len(updates)
    header = [1, 7, len(rows), len(tokens), samples, 16, off_tokens, off_blocks, len(updates) // 3, total]
    data = header + [0] * (16 - len(header)) + words + tokens + updates
    return torch.tensor(data, dtype=torch.int32, device=device)


def unpacked_slowly(rows: list[Row], table: list[list[int]], last: list[int], sizes: tuple[int, int, int]) -> dict:
    """What each field must be, as lists; updates `table` in place."""
    num_tokens, num_rows, num_samples = sizes
    for row in rows:
        for logical, block in row.new_blocks:
            table[row.row][logical] = block
    out = {name: [] for name in StepInputs.__dataclass_fields__}
    for row in rows:
        out["query_start_loc"].append(len(out["input_ids"]))
        out["seq_lens"].append(row.computed + len(row.tokens))
        out["rows"].append(row.row)
        blocks = -(-out["seq_lens"][-1] // BLOCK_SIZE)
        out["block_table"].append(table[row.row][:blocks] + [0] * (MAX_BLOCKS - blocks))
        for i, token in enumerate(row.tokens):
            position = row.computed + i
            out["input_ids"].append(last[row.row] if token == -1 else token)
            out["positions"].append(position)
            out["slot_mapping"].append(table[row.row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        if row.sample:
            out["sample_indices"].append(len(out["input_ids"]) - 1)
            out["sample_rows"].append(row.row)
            out["sample_num_outputs"].append(row.num_outputs)
    real = len(out["input_ids"])
    padding = {
        "input_ids": (num_tokens, 0),
        "positions": (num_tokens, 0),
        "slot_mapping": (num_tokens, -1),
        "query_start_loc": (num_rows + 1, real),
        "seq_lens": (num_rows, 0),
        "block_table": (num_rows, [0] * MAX_BLOCKS),
        "rows": (num_rows, -1),
        "sample_indices": (num_samples, 0),
        "sample_rows": (num_samples, -1),
        "sample_num_outputs": (num_samples, 0),
    }
    for name, (size, value) in padding.items():
        out[name] += [value] * (size - len(out[name]))
    return out


@pytest.fixture
def unpack(run):
    if run == "reference":
        return step.unpack_ref

    def unpack_into_poisoned_buffers(buffer, table, last, block_size, *sizes) -> StepInputs:
        out = StepInputs.empty(*sizes, table.shape[1], table.device)
        for name in StepInputs.__dataclass_fields__:
            getattr(out, name).fill_(-123)
        step.unpack(buffer, table, last, block_size, out)
        return out

    return unpack_into_poisoned_buffers


PREFILLS = [
    Row(3, 0, [11, 12, 13, 14, 15], True, 0, [(0, 9), (1, 4)]),
    Row(0, 0, [21, 22], False, 0, [(0, 7)]),
]
MIXED = [
    Row(3, 5, [-1], True, 1),
    Row(0, 2, [23, 24, 25, 26, 27, 28], True, 0, [(1, 30)]),
    Row(6, 8, [61], True, 0, [(0, 5), (1, 6), (2, 8)]),
]
DECODES = [Row(6, 9, [-1], True, 1), Row(3, 6, [-1], True, 2), Row(0, 8, [-1], True, 1, [(2, 31)])]


@pytest.mark.parametrize("padding", [(0, 0, 0), (1, 1, 1), (50, 5, 7)])
def test_steps_in_sequence_equal_the_model(unpack, padding, device):
    """E11, E12, M11: tokens from host and device mixed in any order; block tables persist by row."""
    table = torch.full((MAX_ROWS, MAX_BLOCKS), 77, dtype=torch.int32, device=device)  # stale ids
    model_table = table.tolist()
    last = torch.arange(100, 100 + MAX_ROWS, dtype=torch.int32, device=device)
    for rows in (PREFILLS, MIXED, DECODES, [], DECODES[:1]):
        exact = (sum(len(r.tokens) for r in rows), len(rows), sum(r.sample for r in rows))
        sizes = tuple(real + extra for real, extra in zip(exact, padding, strict=True))
        expected = unpacked_slowly(rows, model_table, last.tolist(), sizes)
        got = unpack(packed(rows, device), table, last, BLOCK_SIZE, *sizes)
        for name, value in expected.items():
            assert getattr(got, name).tolist() == value, name
            assert getattr(got, name).dtype == torch.int32
        assert table.tolist() == model_table


def test_a_step_larger_than_its_bucket_is_refused(device):
    table = torch.zeros(MAX_ROWS, MAX_BLOCKS, dtype=torch.int32, device=device)
    last = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="does not fit the bucket of 6 tokens"):
        step.unpack_ref(packed(PREFILLS, device), table, last, BLOCK_SIZE, 6, 8, 8)
