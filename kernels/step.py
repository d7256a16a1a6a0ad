"""Unpacks a step buffer into what the forward pass reads, padded to a bucket.

The buffer is the packed step that the scheduler wrote (int32; one copy to the device per step):

    header  16 words: 0 version, 1 step_id, 2 num_rows, 3 num_tokens, 4 num_samples, 5 off_rows, 6 off_tokens,
            7 off_blocks, 8 num_block_updates, 9 total_words
    rows    num_rows x 8: row, query_start, num_new_tokens, num_computed_tokens, flags, sample_index or -1,
            position of the token to sample (number of output tokens so far), reserved
    tokens  num_tokens ids; -1 = the last token sampled for that row, still on the device
    blocks  num_block_updates x (row, logical index, block id)

Two tensors outlive the step and are kept here by row: `block_table` [max_rows, max_blocks], updated from the
block list before it is read, and `last_token` [max_rows], which the sampler writes.

Padding up to the bucket: tokens have id 0, position 0 and slot -1; rows are empty (query range at the end,
length 0, table of null blocks, row -1); samples point at token 0 and row -1. Table entries at or past a row's
length are the null block, so nothing of an earlier step shows through. Called by the runner at the head of
every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEADER_WORDS, ROW_WORDS, BLOCK_WORDS = 16, 8, 3
VERSION, STEP_ID, NUM_ROWS, NUM_TOKENS, NUM_SAMPLES = 0, 1, 2, 3, 4
OFF_ROWS, OFF_TOKENS, OFF_BLOCKS, NUM_BLOCK_UPDATES, TOTAL_WORDS = 5, 6, 7, 8, 9
ROW, QUERY_START, NUM_NEW, NUM_COMPUTED, FLAGS, SAMPLE_INDEX, NUM_OUTPUT = 0, 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The unpacked step, int32 on the device; written by the unpack, read by model and sampler."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [T], -1 = padding
    query_start_loc: torch.Tensor  # [S + 1]
    seq_lens: torch.Tensor  # [S], context + query; 0 = padding
    block_table: torch.Tensor  # [S, max_blocks]
    rows: torch.Tensor  # [S], persistent row; -1 = padding
    sample_indices: torch.Tensor  # [N], the token whose hidden state predicts the sample
    sample_rows: torch.Tensor  # [N], persistent row of the sample; -1 = padding
    sample_num_outputs: torch.Tensor  # [N], position of the token to sample

    @classmethod
    def empty(
        cls, num_tokens: int, num_rows: int, num_samples: int, max_blocks: int, device: torch.device
    ) -> StepInputs:
        """Uninitialized buffers of a bucket; an unpack writes every element."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            input_ids=ints(num_tokens),
            positions=ints(num_tokens),
            slot_mapping=ints(num_tokens),
            query_start_loc=ints(num_rows + 1),
            seq_lens=ints(num_rows),
            block_table=ints(num_rows, max_blocks),
            rows=ints(num_rows),
            sample_indices=ints(num_samples),
            sample_rows=ints(num_samples),
            sample_num_outputs=ints(num_samples),
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def num_samples(self) -> int:
        return self.sample_rows.shape[0]


def unpack_ref(
    buffer: torch.Tensor,
    block_table: torch.Tensor,
    last_token: torch.Tensor,
    block_size: int,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    num_samples: int | None = None,
) -> StepInputs:
    """Applies the block updates to `block_table` and returns the step's inputs, padded to the given sizes.

    Sizes left out are the step's own. `last_token` is read only. Raises ValueError when the step is larger.
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

    step = StepInputs.empty(num_tokens, num_rows, num_samples, block_table.shape[1], block_table.device)
    row_of_token = torch.repeat_interleave(torch.arange(real_rows, device=rows.device), rows[:, NUM_NEW])
    positions = torch.arange(real_tokens, device=rows.device) - rows[row_of_token, QUERY_START]
    positions = positions + rows[row_of_token, NUM_COMPUTED]
    persistent = rows[row_of_token, ROW]
    slots = block_table[persistent, positions // block_size].long() * block_size + positions % block_size
    step.input_ids.zero_()
    step.input_ids[:real_tokens] = torch.where(tokens >= 0, tokens, last_token[persistent].long()).int()
    step.positions.zero_()
    step.positions[:real_tokens] = positions.int()
    step.slot_mapping.fill_(-1)
    step.slot_mapping[:real_tokens] = slots.int()

    step.query_start_loc.fill_(real_tokens)
    step.query_start_loc[:real_rows] = rows[:, QUERY_START].int()
    step.seq_lens.zero_()
    step.seq_lens[:real_rows] = (rows[:, NUM_COMPUTED] + rows[:, NUM_NEW]).int()
    step.rows.fill_(-1)
    step.rows[:real_rows] = rows[:, ROW].int()
    logical = torch.arange(block_table.shape[1], device=rows.device)
    owned = logical[None, :] * block_size < step.seq_lens[:, None]
    step.block_table.zero_()
    step.block_table[:real_rows] = block_table[rows[:, ROW]]
    step.block_table.masked_fill_(~owned, 0)

    step.sample_indices.zero_()
    step.sample_rows.fill_(-1)
    step.sample_num_outputs.zero_()
    sampled = rows[rows[:, SAMPLE_INDEX] >= 0]
    at = sampled[:, SAMPLE_INDEX]
    step.sample_indices[at] = (sampled[:, QUERY_START] + sampled[:, NUM_NEW] - 1).int()
    step.sample_rows[at] = sampled[:, ROW].int()
    step.sample_num_outputs[at] = sampled[:, NUM_OUTPUT].int()
    return step
