"""The step buffer's unpack against a model that walks the plan in plain Python."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from aioengine.batch import HostRows
from aioengine.kernels import step
from aioengine.kernels.step import StepInputs
from tests.kernels.triton_here import need_triton
from tests.models.plans import Planner

BLOCK_SIZE, MAX_ROWS, MAX_BLOCKS = 4, 8, 6


@dataclass
class Row:
    row: int
    computed: int
    tokens: list[int]  # -1 = the last token sampled for the row
    sample: bool
    num_outputs: int = 0
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (group, logical, block id)
    num_drafts: int = 0  # the last of the tokens
    num_rejected: int = 0  # as the host knew it


def packed(rows: list[Row], device: torch.device) -> torch.Tensor:
    words, tokens, updates, samples = [], [], [], 0
    for row in rows:
        index = -1
        if row.sample:
            index, samples = samples, samples + 1 + row.num_drafts
        words += [
            row.row,
            len(tokens),
            len(row.tokens),
            row.computed,
            int(row.sample) | row.num_drafts << 8,
            index,
            row.num_outputs,
            row.num_rejected,
        ]
        tokens += row.tokens
        for group, logical, block in row.new_blocks:
            updates += [group * MAX_ROWS + row.row, logical, block]
    off_tokens = 16 + len(words)
    off_blocks = off_tokens + len(tokens)
    total = off_blocks + len(updates)
    header = [1, 7, len(rows), len(tokens), samples, 16, off_tokens, off_blocks, len(updates) // 3, total]
    data = header + [0] * (16 - len(header)) + words + tokens + updates
    return torch.tensor(data, dtype=torch.int32, device=device)


def unpacked_slowly(
    rows: list[Row],
    tables: list[list[list[int]]],
    last: list[int],
    rejected: list[int],
    sizes: tuple[int, int, int],
    scales: list[int],
) -> dict:
    """What each field must be, as lists; updates `tables`, by group and row, in place."""
    num_tokens, num_rows, num_samples = sizes
    for row in rows:
        for group, logical, block in row.new_blocks:
            tables[group][row.row][logical] = block
    out = {name: [] for name in StepInputs.__dataclass_fields__}
    out["block_table"], out["slot_mapping"] = ([[] for _ in scales] for _ in range(2))
    for plan_row, row in enumerate(rows):
        shift = (rejected[row.row] - row.num_rejected) % 2**32
        computed = row.computed - shift
        out["query_start_loc"].append(len(out["input_ids"]))
        out["seq_lens"].append(computed + len(row.tokens))
        out["rows"].append(row.row)
        for group, scale in enumerate(scales):
            blocks = -(-out["seq_lens"][-1] // (BLOCK_SIZE * scale))
            out["block_table"][group].append(tables[group][row.row][:blocks] + [0] * (MAX_BLOCKS - blocks))
        for i, token in enumerate(row.tokens):
            position = computed + i
            out["input_ids"].append(last[row.row] if token == -1 else token)
            out["positions"].append(position)
            for group, scale in enumerate(scales):
                logical, offset = divmod(position, BLOCK_SIZE * scale)
                out["slot_mapping"][group].append(tables[group][row.row][logical] * BLOCK_SIZE * scale + offset)
        out["last_tokens"].append(len(out["input_ids"]) - 1)
        out["last_start_loc"].append(plan_row)
        for nth in range(1 + row.num_drafts if row.sample else 0):
            out["sample_plan_rows"].append(plan_row)
            out["sample_indices"].append(len(out["input_ids"]) - 1 - row.num_drafts + nth)
            out["sample_rows"].append(row.row)
            out["sample_num_outputs"].append(row.num_outputs - shift + nth)
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
        "sample_plan_rows": (num_samples, 0),
        "last_tokens": (num_rows, 0),
        "last_start_loc": (num_rows + 1, len(rows)),
    }
    for name, (size, value) in padding.items():
        for values in out[name] if name in ("block_table", "slot_mapping") else [out[name]]:
            values += [value] * (size - len(values))
    return out


@pytest.fixture
def unpack(run):
    if run == "reference":
        return step.unpack_ref

    def unpack_into_poisoned_buffers(buffer, table, last, rejected, block_size, *sizes, scales=(1,)) -> StepInputs:
        large = StepInputs.empty(sizes[0] + 3, sizes[1] + 2, sizes[2], table.shape[1], table.device, len(scales))
        out = large.first(*sizes)
        for name in StepInputs.__dataclass_fields__:
            getattr(out, name).fill_(-123)
        scales = torch.tensor(scales, dtype=torch.int32, device=table.device) if len(scales) > 1 else None
        step.unpack(buffer, table, last, rejected, block_size, out, scales)
        return out

    return unpack_into_poisoned_buffers


PREFILLS = [
    Row(3, 0, [11, 12, 13, 14, 15], True, 0, [(0, 0, 9), (0, 1, 4), (1, 0, 2), (2, 0, 12), (2, 1, 13)]),
    Row(0, 0, [21, 22], False, 0, [(0, 0, 7), (1, 0, 3), (2, 0, 14)]),
]
MIXED = [
    Row(3, 5, [-1], True, 1),
    Row(0, 2, [23, 24, 25, 26, 27, 28], True, 0, [(0, 1, 30), (2, 1, 15)]),
    Row(6, 8, [61], True, 0, [(0, 0, 5), (0, 1, 6), (0, 2, 8), (1, 1, 10), (2, 2, 16)]),  # out of windows: not sent
]
DECODES = [
    Row(6, 9, [-1], True, 1),
    Row(3, 6, [-1], True, 2),
    Row(0, 8, [-1], True, 1, [(0, 2, 31), (1, 1, 11), (2, 2, 17)]),
]
DRAFTED = [
    Row(
        3, 7, [-1, 71, 72, 73, 74], True, 3, [(0, 2, 40), (1, 1, 18), (2, 2, 19)], num_drafts=4, num_rejected=2**31 - 2
    ),
    Row(6, 10, [62], True, 2),
    Row(0, 9, [-1, 81, 82], True, 2, num_drafts=2),
    Row(1, 0, [41, 42, 43], False, 0, [(0, 0, 41), (1, 0, 20), (2, 0, 21)]),
]
# Of the drafts before three were rejected, which wraps, and two; three in row 6 while none was known of.
FOLLOWED = [
    Row(0, 12, [-1], True, 5, [(0, 3, 42)]),
    Row(1, 3, [44], True, 0),
    Row(3, 12, [-1, 75], True, 8, [(0, 3, 43), (2, 3, 22)], num_drafts=1, num_rejected=2**31 - 2),
    Row(6, 14, [-1, 63, 64], True, 6, [(0, 3, 44), (2, 3, 23)], num_drafts=2, num_rejected=1),
]


@pytest.mark.parametrize("scales", [[1], [1, 2, 1]], ids=["one group", "three groups"])
@pytest.mark.parametrize("padding", [(0, 0, 0), (1, 1, 1), (50, 5, 7)])
def test_steps_in_sequence_equal_the_model(unpack, padding, scales, device):
    """E11, E12, M11, A18: tokens from host and device mixed in any order; block tables persist by group and row.

    INV-41, INV-42: every position is written, and padding is null. INV-43, E14: what was rejected since is taken off.
    """
    num_groups = len(scales)
    table = torch.full((num_groups * MAX_ROWS, MAX_BLOCKS), 77, dtype=torch.int32, device=device)  # stale ids
    model_tables = table.view(num_groups, MAX_ROWS, MAX_BLOCKS).tolist()
    last = torch.arange(100, 100 + MAX_ROWS, dtype=torch.int32, device=device)
    rejected = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
    rejected[5] = 9  # of a row that has no part in this
    for step_rows in (PREFILLS, MIXED, DECODES, [], DECODES[:1], DRAFTED, FOLLOWED):
        if step_rows is FOLLOWED:
            rejected[:] = torch.tensor([2, 0, 0, -(2**31) + 1, 0, 9, 3, 0])
        elif step_rows is DRAFTED:
            rejected[3] = 2**31 - 2  # it wraps
        rows = [dataclasses.replace(r, new_blocks=[b for b in r.new_blocks if b[0] < num_groups]) for r in step_rows]
        exact = (sum(len(r.tokens) for r in rows), len(rows), sum(r.sample + r.num_drafts for r in rows))
        sizes = tuple(real + extra for real, extra in zip(exact, padding, strict=True))
        expected = unpacked_slowly(rows, model_tables, last.tolist(), rejected.tolist(), sizes, scales)
        got = unpack(packed(rows, device), table, last, rejected, BLOCK_SIZE, *sizes, scales=scales)
        for name, value in expected.items():
            assert getattr(got, name).tolist() == value, name
            assert getattr(got, name).dtype == torch.int32
        assert table.tolist() == [row for rows in model_tables for row in rows]


def test_a_step_larger_than_its_bucket_is_refused(device):
    table = torch.zeros(MAX_ROWS, MAX_BLOCKS, dtype=torch.int32, device=device)
    last = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="does not fit the bucket of 6 tokens"):
        step.unpack_ref(packed(PREFILLS, device), table, last, last, BLOCK_SIZE, 6, 8, 8)


def test_the_unpack_says_what_does_not_fit_together(device):
    need_triton(device)
    table = torch.zeros(2 * MAX_ROWS, MAX_BLOCKS, dtype=torch.int32, device=device)
    last = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
    buffer = packed(PREFILLS, device)
    two = StepInputs.empty(8, 2, 1, MAX_BLOCKS, device, 2)
    with pytest.raises(ValueError, match="2 groups need a scale each"):
        step.unpack(buffer, table, last, last, BLOCK_SIZE, two)
    with pytest.raises(ValueError, match="as wide as"):
        scales = torch.ones(2, dtype=torch.int32, device=device)
        step.unpack(buffer, table[:, :-1], last, last, BLOCK_SIZE, two, scales)


@pytest.mark.parametrize("sizes", [(5, 3, 1, 7), (8, 4, 4, 16), (0, 1, 1, 5), (1, 0, 0, 3)])
def test_every_group_begins_where_kernels_expect_it(sizes, device):
    step_inputs = StepInputs.empty(*sizes, device, num_groups=3)
    assert step_inputs.slot_mapping.shape == (3, sizes[0]) and step_inputs.block_table.shape == (3, sizes[1], sizes[3])
    for part in (*step_inputs.slot_mapping, *step_inputs.block_table):
        assert part.data_ptr() % 16 == 0 and part.is_contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_device_unpacks_what_the_host_unpacks(seed, run, device):
    """Random steps of several groups: the CPU's rows and the kernel keep the same tables and slots."""
    groups = [("full", 0, 1), ("sliding", 5, 1), ("sliding", 14, 2), ("chunked", 8, 4)]
    scales = [scale for _, _, scale in groups]
    planner = Planner(vocab_size=97, block_size=BLOCK_SIZE, num_blocks=200, max_num_seqs=MAX_ROWS, kv_groups=groups)
    host = HostRows(MAX_ROWS, 16, [BLOCK_SIZE * scale for scale in scales])
    table = torch.zeros(len(groups) * MAX_ROWS, 16, dtype=torch.int32, device=device)
    last = torch.arange(100, 100 + MAX_ROWS, dtype=torch.int32, device=device)
    rejected = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
    host.set_last_tokens(np.arange(MAX_ROWS), last.cpu().numpy())
    draw = random.Random(seed)
    live = []
    for _ in range(12):
        while len(live) < MAX_ROWS - 2:
            live.append(planner.request([draw.randrange(97) for _ in range(draw.randint(1, 40))]))
        chunks = {}
        for request in draw.sample(live, draw.randint(1, len(live))):
            left = len(request.prompt) + request.num_in_flight - request.num_computed
            chunks[request] = draw.randint(1, min(left, 9))
        buffer = planner.plan(chunks).buffer
        expected = host.unpack(buffer)
        words, sizes = (
            torch.from_numpy(buffer).to(device),
            (len(expected.input_ids), len(chunks), len(expected.sample_rows)),
        )
        if run == "reference":
            got = step.unpack_ref(words, table, last, rejected, BLOCK_SIZE, *sizes, scales=scales)
        else:
            got = StepInputs.empty(*sizes, 16, device, len(groups))
            on_device = torch.tensor(scales, dtype=torch.int32, device=device)
            step.unpack(words, table, last, rejected, BLOCK_SIZE, got, on_device)
        assert got.input_ids.cpu().equal(expected.input_ids) and got.positions.cpu().equal(expected.positions)
        for group, (scale, meta) in enumerate(zip(scales, expected.attention, strict=True)):
            assert got.slot_mapping[group].cpu().equal(meta.slot_mapping)
            for row, length in enumerate(meta.seq_lens.tolist()):
                blocks = -(-length // (BLOCK_SIZE * scale))
                assert got.block_table[group, row, :blocks].tolist() == meta.block_table[row, :blocks].tolist()
        for request in [r for r in live if r.num_computed == len(r.prompt) + r.num_in_flight and draw.random() < 0.3]:
            planner.leave(request)
            live.remove(request)
