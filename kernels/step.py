"""Unpacks a step buffer into what the forward pass reads, padded to a bucket.

The buffer is the packed step that the scheduler wrote (int32; one copy to the device per step):

    header  16 words: 0 version, 1 step_id, 2 num_rows, 3 num_tokens, 4 num_samples, 5 off_rows, 6 off_tokens,
            7 off_blocks, 8 num_block_updates, 9 total_words, 10 off_copies, 11 num_copies, 12 num_drafts
    rows    num_rows x 8: row, query_start, num_new_tokens, num_computed_tokens, flags (number of drafts from bit 8
            on), index of its first sample or -1, position of the token to sample (number of output tokens so far),
            num_rejected
    tokens  num_tokens ids; -1 = the last token sampled for that row, still on the device
    blocks  num_block_updates x (group * max_rows + row, logical index, block id)
    copies  num_copies x (source block, target block), made before the unpack (`block_copy.py`)

Three tensors outlive the step and are kept here by row: `block_table` [G * max_rows, max_blocks], updated from the
block list before it is read, `last_token` [max_rows], which the sampler writes, and `rejected` [max_rows], which
`accept.py` does. G groups of layers have a block table each, whose blocks may hold a multiple (`scales`) of the first
group's tokens.

A row with d drafts, its last tokens, has d + 1 samples: of the token before them and of each. The buffer counts drafts
of steps in flight as accepted. What was rejected in a row since the buffer's `num_rejected` was read makes context
and output so much shorter, and all positions here are the true ones.

Padding up to the bucket: tokens have id 0, position 0 and slot -1; rows are empty (query range at the end,
length 0, table of null blocks, row -1); samples point at token 0 and row -1. Table entries at or past a row's
length are the null block, so nothing of an earlier step shows through there; entries before a group's window may be
stale. Called by the runner at the head of every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs

HEADER_WORDS, ROW_WORDS, BLOCK_WORDS, COPY_WORDS = 16, 8, 3, 2
VERSION, STEP_ID, NUM_ROWS, NUM_TOKENS, NUM_SAMPLES = 0, 1, 2, 3, 4
OFF_ROWS, OFF_TOKENS, OFF_BLOCKS, NUM_BLOCK_UPDATES, TOTAL_WORDS, OFF_COPIES, NUM_COPIES = 5, 6, 7, 8, 9, 10, 11
NUM_DRAFTS = 12
ROW, QUERY_START, NUM_NEW, NUM_COMPUTED, FLAGS, SAMPLE_INDEX, NUM_OUTPUT, NUM_REJECTED = 0, 1, 2, 3, 4, 5, 6, 7
DRAFTS_SHIFT = 8


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The unpacked step, int32 on the device; written by the unpack, read by model and sampler."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [G, T], -1 = padding
    query_start_loc: torch.Tensor  # [S + 1]
    seq_lens: torch.Tensor  # [S], context + query; 0 = padding
    block_table: torch.Tensor  # [G, S, max_blocks]
    rows: torch.Tensor  # [S], persistent row; -1 = padding
    sample_indices: torch.Tensor  # [N], the token whose hidden state predicts the sample
    sample_rows: torch.Tensor  # [N], persistent row of the sample; -1 = padding
    sample_num_outputs: torch.Tensor  # [N], position of the token to sample
    sample_plan_rows: torch.Tensor  # [N], the sample's row of the step
    last_tokens: torch.Tensor  # [S], each row's last token; 0 = padding
    last_start_loc: torch.Tensor  # [S + 1], query_start_loc of a step that has these tokens alone

    @classmethod
    def empty(
        cls,
        num_tokens: int,
        num_rows: int,
        num_samples: int,
        max_blocks: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> StepInputs:
        """Uninitialized buffers of a bucket; an unpack writes every element."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        def by_group(*shape: int) -> torch.Tensor:
            """A part per group, each at a multiple of 16 bytes: kernels are compiled anew for other addresses."""
            size = math.prod(shape)
            return ints(num_groups, -(-size // 4) * 4)[:, :size].view(num_groups, *shape)

        return cls(
            input_ids=ints(num_tokens),
            positions=ints(num_tokens),
            slot_mapping=by_group(num_tokens),
            query_start_loc=ints(num_rows + 1),
            seq_lens=ints(num_rows),
            block_table=by_group(num_rows, max_blocks),
            rows=ints(num_rows),
            sample_indices=ints(num_samples),
            sample_rows=ints(num_samples),
            sample_num_outputs=ints(num_samples),
            sample_plan_rows=ints(num_samples),
            last_tokens=ints(num_rows),
            last_start_loc=ints(num_rows + 1),
        )

    def first(self, num_tokens: int, num_rows: int, num_samples: int) -> StepInputs:
        """The beginning of these buffers as the buffers of a smaller bucket."""
        return StepInputs(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:, :num_tokens],
            query_start_loc=self.query_start_loc[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            block_table=self.block_table[:, :num_rows],
            rows=self.rows[:num_rows],
            sample_indices=self.sample_indices[:num_samples],
            sample_rows=self.sample_rows[:num_samples],
            sample_num_outputs=self.sample_num_outputs[:num_samples],
            sample_plan_rows=self.sample_plan_rows[:num_samples],
            last_tokens=self.last_tokens[:num_rows],
            last_start_loc=self.last_start_loc[: num_rows + 1],
        )

    def zero_(self) -> StepInputs:
        """Fills all of it with zeros."""
        for part in fields(self):
            getattr(self, part.name).zero_()
        return self

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def num_samples(self) -> int:
        return self.sample_rows.shape[0]

    @property
    def num_groups(self) -> int:
        return self.slot_mapping.shape[0]


def unpack_ref(
    buffer: torch.Tensor,
    block_table: torch.Tensor,
    last_token: torch.Tensor,
    rejected: torch.Tensor,
    block_size: int,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    num_samples: int | None = None,
    scales: Sequence[int] = (1,),
) -> StepInputs:
    """Applies the block updates to `block_table` and returns the step's inputs, padded to the given sizes.

    Sizes left out are the step's own. `last_token` and `rejected` are read only. `scales` has an entry per group.
    Raises ValueError when the step is larger.
    """
    header = buffer[:HEADER_WORDS].tolist()
    real_rows, real_tokens, real_samples = header[NUM_ROWS], header[NUM_TOKENS], header[NUM_SAMPLES]
    num_tokens = real_tokens if num_tokens is None else num_tokens
    num_rows = real_rows if num_rows is None else num_rows
    num_samples = real_samples if num_samples is None else num_samples
    if num_tokens < real_tokens or num_rows < real_rows or num_samples < real_samples:
        raise ValueError(
            f"step of {real_tokens} tokens, {real_rows} rows, {real_samples} samples does not fit the "
            f"bucket of {num_tokens} tokens, {num_rows} rows, {num_samples} samples"
        )

    def section(offset: int, count: int, width: int) -> torch.Tensor:
        return buffer[offset : offset + count * width].view(count, width).long()

    rows = section(header[OFF_ROWS], real_rows, ROW_WORDS)
    tokens = section(header[OFF_TOKENS], real_tokens, 1).flatten()
    updates = section(header[OFF_BLOCKS], header[NUM_BLOCK_UPDATES], BLOCK_WORDS)
    block_table[updates[:, 0], updates[:, 1]] = updates[:, 2].to(block_table.dtype)

    width, num_groups = block_table.shape[1], len(scales)
    tables = block_table.view(num_groups, -1, width)
    step = StepInputs.empty(num_tokens, num_rows, num_samples, width, block_table.device, num_groups)
    row_of_token = torch.repeat_interleave(torch.arange(real_rows, device=rows.device), rows[:, NUM_NEW])
    shift = (rejected[rows[:, ROW]] - rows[:, NUM_REJECTED].int()).long()  # in int32: both wrap
    computed, num_outputs = rows[:, NUM_COMPUTED] - shift, rows[:, NUM_OUTPUT] - shift
    positions = torch.arange(real_tokens, device=rows.device) - rows[row_of_token, QUERY_START]
    positions = positions + computed[row_of_token]
    persistent = rows[row_of_token, ROW]
    step.input_ids.zero_()
    step.input_ids[:real_tokens] = torch.where(tokens >= 0, tokens, last_token[persistent].long()).int()
    step.positions.zero_()
    step.positions[:real_tokens] = positions.int()

    step.query_start_loc.fill_(real_tokens)
    step.query_start_loc[:real_rows] = rows[:, QUERY_START].int()
    step.seq_lens.zero_()
    step.seq_lens[:real_rows] = (computed + rows[:, NUM_NEW]).int()
    step.rows.fill_(-1)
    step.rows[:real_rows] = rows[:, ROW].int()
    step.last_tokens.zero_()
    step.last_tokens[:real_rows] = (rows[:, QUERY_START] + rows[:, NUM_NEW] - 1).int()
    step.last_start_loc.copy_(torch.arange(num_rows + 1).clamp(max=real_rows))
    step.slot_mapping.fill_(-1)
    step.block_table.zero_()
    logical = torch.arange(width, device=rows.device)
    for group, scale in enumerate(scales):
        size = block_size * scale
        slots = tables[group, persistent, positions // size].long() * size + positions % size
        step.slot_mapping[group, :real_tokens] = slots.int()
        step.block_table[group, :real_rows] = tables[group, rows[:, ROW]]
        step.block_table[group].masked_fill_(logical[None, :] * size >= step.seq_lens[:, None], 0)

    step.sample_indices.zero_()
    step.sample_rows.fill_(-1)
    step.sample_num_outputs.zero_()
    step.sample_plan_rows.zero_()
    plan_rows = torch.nonzero(rows[:, SAMPLE_INDEX] >= 0).flatten()
    drafts = rows[plan_rows, FLAGS] >> DRAFTS_SHIFT
    nth = torch.cat([torch.arange(count + 1) for count in drafts.tolist()] or [drafts.cpu()]).to(rows.device)
    plan_rows, drafts = (t.repeat_interleave(drafts + 1) for t in (plan_rows, drafts))
    sampled = rows[plan_rows]
    at = sampled[:, SAMPLE_INDEX] + nth
    step.sample_plan_rows[at] = plan_rows.int()
    step.sample_indices[at] = (sampled[:, QUERY_START] + sampled[:, NUM_NEW] - 1 - drafts + nth).int()
    step.sample_rows[at] = sampled[:, ROW].int()
    step.sample_num_outputs[at] = (num_outputs[plan_rows] + nth).int()
    return step


# The layout above as constants that kernels may read.
_HEADER_ROWS = tl.constexpr(NUM_ROWS)
_HEADER_TOKENS = tl.constexpr(NUM_TOKENS)
_HEADER_SAMPLES = tl.constexpr(NUM_SAMPLES)
_HEADER_OFF_ROWS = tl.constexpr(OFF_ROWS)
_HEADER_OFF_TOKENS = tl.constexpr(OFF_TOKENS)
_HEADER_OFF_BLOCKS = tl.constexpr(OFF_BLOCKS)
_HEADER_UPDATES = tl.constexpr(NUM_BLOCK_UPDATES)
_ROW_WORDS = tl.constexpr(ROW_WORDS)
_BLOCK_WORDS = tl.constexpr(BLOCK_WORDS)
_ROW = tl.constexpr(ROW)
_QUERY_START = tl.constexpr(QUERY_START)
_NUM_NEW = tl.constexpr(NUM_NEW)
_NUM_COMPUTED = tl.constexpr(NUM_COMPUTED)
_SAMPLE_INDEX = tl.constexpr(SAMPLE_INDEX)
_NUM_OUTPUT = tl.constexpr(NUM_OUTPUT)
_FLAGS = tl.constexpr(FLAGS)
_NUM_REJECTED = tl.constexpr(NUM_REJECTED)
_DRAFTS_SHIFT = tl.constexpr(DRAFTS_SHIFT)


@jit(varying=["stride_table_row"])
def _update_blocks_kernel(buffer_ptr, table_ptr, stride_table_row, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Scatters the block updates, however many there are, over a fixed number of programs."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    num_updates = tl.load(buffer_ptr + _HEADER_UPDATES)
    updates_ptr = buffer_ptr + tl.load(buffer_ptr + _HEADER_OFF_BLOCKS)
    for start in range(tl.program_id(0) * BLOCK, num_updates, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < num_updates
        words_ptr = updates_ptr + at * _BLOCK_WORDS
        row = tl.load(words_ptr, mask=mask, other=0).to(tl.int64)  # [BLOCK]
        logical = tl.load(words_ptr + 1, mask=mask, other=0)  # [BLOCK]
        block = tl.load(words_ptr + 2, mask=mask, other=0)  # [BLOCK]
        tl.store(table_ptr + row * stride_table_row + logical, block, mask=mask)  # [BLOCK]


@jit
def _unpack_tokens(
    buffer_ptr,
    table_ptr,
    last_token_ptr,
    rejected_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    first_token,
    num_tokens,
    search_steps,
    stride_table_row,
    block_size,
    BLOCK: tl.constexpr,
):
    """Ids, positions and a group's slots of BLOCK tokens; each finds its row by binary search over the query starts.

    Programs of all groups write the same ids and positions.
    """
    token = first_token + tl.arange(0, BLOCK)
    real = token < tl.load(buffer_ptr + _HEADER_TOKENS)
    rows_ptr = buffer_ptr + tl.load(buffer_ptr + _HEADER_OFF_ROWS)
    low = tl.zeros_like(token)
    high = low + tl.load(buffer_ptr + _HEADER_ROWS)
    for _ in range(search_steps):
        middle = (low + high) // 2
        start = tl.load(rows_ptr + middle * _ROW_WORDS + _QUERY_START, mask=real & (low < high), other=0)  # [BLOCK]
        is_before = (start <= token) & (low < high)
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    row_ptr = rows_ptr + (low - 1) * _ROW_WORDS
    row = tl.load(row_ptr + _ROW, mask=real, other=0).to(tl.int64)  # [BLOCK]
    start = tl.load(row_ptr + _QUERY_START, mask=real, other=0)  # [BLOCK]
    shift = tl.load(rejected_ptr + row, mask=real, other=0)  # [BLOCK]
    shift -= tl.load(row_ptr + _NUM_REJECTED, mask=real, other=0)  # [BLOCK]
    computed = tl.load(row_ptr + _NUM_COMPUTED, mask=real, other=0) - shift  # [BLOCK]
    position = tl.where(real, computed + token - start, 0)
    tokens_ptr = buffer_ptr + tl.load(buffer_ptr + _HEADER_OFF_TOKENS)
    token_id = tl.load(tokens_ptr + token, mask=real, other=0)  # [BLOCK]
    on_device = real & (token_id < 0)
    token_id = tl.where(on_device, tl.load(last_token_ptr + row, mask=on_device, other=0), token_id)  # [BLOCK]
    block_ptrs = table_ptr + row * stride_table_row + position // block_size
    block = tl.load(block_ptrs, mask=real, other=0)  # [BLOCK]
    slot = tl.where(real, block * block_size + position % block_size, -1)
    mask = token < num_tokens
    tl.store(input_ids_ptr + token, token_id, mask=mask)  # [BLOCK]
    tl.store(positions_ptr + token, position, mask=mask)  # [BLOCK]
    tl.store(slots_ptr + token, slot, mask=mask)  # [BLOCK]


@jit
def _unpack_row(
    buffer_ptr,
    table_ptr,
    rejected_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    table_out_ptr,
    rows_ptr,
    sample_indices_ptr,
    sample_rows_ptr,
    sample_num_outputs_ptr,
    sample_plan_rows_ptr,
    last_tokens_ptr,
    last_start_loc_ptr,
    index,
    stride_table_row,
    block_size,
    max_blocks,
    BLOCK: tl.constexpr,
):
    """Everything of one row of the step, or of a padding row; groups differ in the table alone."""
    real_rows = tl.load(buffer_ptr + _HEADER_ROWS)
    real = index < real_rows
    words_ptr = buffer_ptr + tl.load(buffer_ptr + _HEADER_OFF_ROWS) + index * _ROW_WORDS
    row = tl.load(words_ptr + _ROW, mask=real, other=-1)
    start = tl.load(words_ptr + _QUERY_START, mask=real, other=0)
    num_new = tl.load(words_ptr + _NUM_NEW, mask=real, other=0)
    shift = tl.load(rejected_ptr + row, mask=real, other=0) - tl.load(words_ptr + _NUM_REJECTED, mask=real, other=0)
    seq_len = tl.load(words_ptr + _NUM_COMPUTED, mask=real, other=0) - shift + num_new
    sample = tl.load(words_ptr + _SAMPLE_INDEX, mask=real, other=-1)
    num_output = tl.load(words_ptr + _NUM_OUTPUT, mask=real, other=0) - shift
    num_drafts = tl.load(words_ptr + _FLAGS, mask=real, other=0) >> _DRAFTS_SHIFT
    if not real:
        start = tl.load(buffer_ptr + _HEADER_TOKENS)
    tl.store(query_start_loc_ptr + index, start)
    tl.store(seq_lens_ptr + index, seq_len)
    tl.store(rows_ptr + index, row)
    tl.store(last_tokens_ptr + index, tl.where(real, start + num_new - 1, 0))
    tl.store(last_start_loc_ptr + index, tl.minimum(index, real_rows))
    if sample >= 0:
        for nth in range(num_drafts + 1):
            tl.store(sample_plan_rows_ptr + sample + nth, index)
            tl.store(sample_indices_ptr + sample + nth, start + num_new - 1 - num_drafts + nth)
            tl.store(sample_rows_ptr + sample + nth, row)
            tl.store(sample_num_outputs_ptr + sample + nth, num_output + nth)
    source_ptr = table_ptr + row.to(tl.int64) * stride_table_row
    target_ptr = table_out_ptr + index.to(tl.int64) * max_blocks
    for first in range(0, max_blocks, BLOCK):
        logical = first + tl.arange(0, BLOCK)
        block = tl.load(source_ptr + logical, mask=logical * block_size < seq_len, other=0)  # [BLOCK]
        tl.store(target_ptr + logical, block, mask=logical < max_blocks)  # [BLOCK]


_VARYING = ["num_tokens", "num_rows", "num_samples", "search_steps", "stride_table_row", "max_blocks"]
_VARYING += ["group_rows", "stride_slots_group", "stride_table_out_group"]


@jit(varying=_VARYING)
def _unpack_kernel(
    buffer_ptr,
    table_ptr,
    last_token_ptr,
    rejected_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    table_out_ptr,
    rows_ptr,
    sample_indices_ptr,
    sample_rows_ptr,
    sample_num_outputs_ptr,
    sample_plan_rows_ptr,
    last_tokens_ptr,
    last_start_loc_ptr,
    num_tokens,
    num_rows,
    num_samples,
    search_steps,
    group_rows,
    stride_table_row,
    stride_slots_group,
    stride_table_out_group,
    block_size,
    scales_ptr,
    max_blocks,
    HAS_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs 0 .. num_rows-1 of a group take a row each, the next one the tails, the others BLOCK tokens each."""
    index = tl.program_id(0)
    if HAS_GROUPS:
        group = tl.program_id(1)
        table_ptr += group.to(tl.int64) * group_rows * stride_table_row
        slots_ptr += group.to(tl.int64) * stride_slots_group
        table_out_ptr += group.to(tl.int64) * stride_table_out_group
        block_size *= tl.load(scales_ptr + group)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if index < num_rows:
        _unpack_row(
            buffer_ptr,
            table_ptr,
            rejected_ptr,
            query_start_loc_ptr,
            seq_lens_ptr,
            table_out_ptr,
            rows_ptr,
            sample_indices_ptr,
            sample_rows_ptr,
            sample_num_outputs_ptr,
            sample_plan_rows_ptr,
            last_tokens_ptr,
            last_start_loc_ptr,
            index,
            stride_table_row,
            block_size,
            max_blocks,
            BLOCK,
        )
    elif index == num_rows:
        tl.store(query_start_loc_ptr + num_rows, tl.load(buffer_ptr + _HEADER_TOKENS))
        tl.store(last_start_loc_ptr + num_rows, tl.minimum(index, tl.load(buffer_ptr + _HEADER_ROWS)))
        first_padding = tl.load(buffer_ptr + _HEADER_SAMPLES)
        for first in range(first_padding, num_samples, BLOCK):
            sample = first + tl.arange(0, BLOCK)
            mask = sample < num_samples
            zero = tl.zeros_like(sample)
            tl.store(sample_indices_ptr + sample, zero, mask=mask)  # [BLOCK]
            tl.store(sample_rows_ptr + sample, zero - 1, mask=mask)  # [BLOCK]
            tl.store(sample_num_outputs_ptr + sample, zero, mask=mask)  # [BLOCK]
            tl.store(sample_plan_rows_ptr + sample, zero, mask=mask)  # [BLOCK]
    else:
        _unpack_tokens(
            buffer_ptr,
            table_ptr,
            last_token_ptr,
            rejected_ptr,
            input_ids_ptr,
            positions_ptr,
            slots_ptr,
            (index - num_rows - 1) * BLOCK,
            num_tokens,
            search_steps,
            stride_table_row,
            block_size,
            BLOCK,
        )


def unpack(
    buffer: torch.Tensor,
    block_table: torch.Tensor,
    last_token: torch.Tensor,
    rejected: torch.Tensor,
    block_size: int,
    step: StepInputs,
    scales: torch.Tensor | None = None,
) -> None:
    """Fills `step`, the buffers of a bucket, from the packed step on the device; see `unpack_ref`.

    `scales` [G] int32 on the device, needed with more than one group. Reads nothing back: the caller has checked that
    the step fits the bucket. Two launches of a fixed grid, so a graph captured for a bucket serves every step of at
    most that many tokens, rows and samples.
    """
    require_kernels(buffer.device)
    num_groups, max_blocks = step.num_groups, block_table.shape[1]
    if step.block_table.shape[2] != max_blocks:
        raise ValueError("the step's block table must be as wide as the persistent one")
    if (
        block_table.stride(1) != 1
        or step.block_table.stride()[1:] != (max_blocks, 1)
        or step.slot_mapping.stride(1) != 1
    ):
        raise ValueError(
            "block tables and slots must be contiguous along a row, and each group's table of a step whole"
        )
    if block_table.shape[0] % num_groups or (num_groups > 1 and (scales is None or len(scales) != num_groups)):
        raise ValueError(f"{num_groups} groups need a scale each, and as many tables of equal size")
    options = launch_options(buffer.device)
    _update_blocks_kernel[(32,)](buffer, block_table, block_table.stride(0), BLOCK=256, num_warps=4, **options)
    block = 256
    _unpack_kernel[(step.num_rows + 1 + triton.cdiv(step.num_tokens, block), num_groups)](
        buffer,
        block_table,
        last_token,
        rejected,
        step.input_ids,
        step.positions,
        step.slot_mapping,
        step.query_start_loc,
        step.seq_lens,
        step.block_table,
        step.rows,
        step.sample_indices,
        step.sample_rows,
        step.sample_num_outputs,
        step.sample_plan_rows,
        step.last_tokens,
        step.last_start_loc,
        step.num_tokens,
        step.num_rows,
        step.num_samples,
        step.num_rows.bit_length() + 1,
        block_table.shape[0] // num_groups,
        block_table.stride(0),
        step.slot_mapping.stride(0),
        step.block_table.stride(0),
        block_size,
        scales,
        max_blocks,
        HAS_GROUPS=num_groups > 1,
        BLOCK=block,
        num_warps=4,
        **options,
    )
