"""The persistent rows of a batch in host memory, and how a step buffer becomes a step's inputs there.

The CPU counterpart of the unpack kernel (`kernels/step.py` draws the buffer's layout). Rows outlive steps:
their block table grows by each step's block list, their last sampled token replaces the -1 of the next step, and
drafts rejected meanwhile move the next step back, so everything here happens in execution order on the thread
that runs the steps. Called by `runner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from aioengine.fastcore.step_buffer import FLAG_PROMPT_LOGITS, VERSION
from aioengine.kernels import step as layout
from aioengine.layers.context import AttentionMetadata
from aioengine.sampling_backend import OK

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """The tokens of one plan row whose logits score the prompt."""

    plan_row: int
    start: int
    """Its first token in the step."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """What a step's samples are compared with; R rows are sampled from."""

    ids: Ints
    """[N] the draft that stands where the sample belongs; -1 for the last sample of a row, which has none."""
    first_samples: Ints
    """[R] the first sample of each row, ascending."""
    counts: Ints
    """[R] drafts of each row."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step's inputs; N samples: one of each row to sample from, and one more for each of its drafts."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionMetadata, ...]
    """By group of layers."""
    sample_tokens: Ints
    """[N] which token of the step predicts the sample."""
    sample_rows: Ints
    """[N] persistent row of each sample."""
    sample_num_outputs: Ints
    """[N] position of the token to sample in its output."""
    sample_plan_rows: Ints
    """[N] position of each sample's row in the plan."""
    prompt_spans: tuple[PromptSpan, ...]
    copies: torch.Tensor | None
    """int32 [C, 2] (source, target) blocks to copy before the forward pass; None without any."""
    drafts: HostDrafts | None
    """None without any."""


class HostRows:
    """State of all rows that must survive from step to step.

    Args:
        max_blocks: most blocks of a row in the group with the smallest, which is the first.
        block_sizes: by group of layers with a block table of their own.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_sizes: Sequence[int]) -> None:
        self._block_sizes = tuple(block_sizes)
        self._first_rows = np.arange(len(block_sizes), dtype=np.int32)[:, None] * np.int32(max_num_seqs)
        self._block_table = np.zeros((len(block_sizes) * max_num_seqs, max_blocks), np.int32)
        self._last_token = np.zeros(max_num_seqs, np.int32)
        self._rejected = np.zeros(max_num_seqs, np.int32)  # drafts since the beginning, whoever had the row; wraps

    def unpack(self, buffer: Ints) -> HostStep:
        """Applies the block updates of a step and derives its inputs.

        Raises:
            ValueError: the buffer has another layout than this version knows.
        """
        header = buffer[: layout.HEADER_WORDS].tolist()
        if header[layout.VERSION] != VERSION:
            raise ValueError(f"step buffer of version {header[layout.VERSION]}, expected {VERSION}")
        num_rows, num_tokens = header[layout.NUM_ROWS], header[layout.NUM_TOKENS]
        rows = _section(buffer, header[layout.OFF_ROWS], num_rows, layout.ROW_WORDS)
        tokens = buffer[header[layout.OFF_TOKENS] :][:num_tokens]
        updates = _section(buffer, header[layout.OFF_BLOCKS], header[layout.NUM_BLOCK_UPDATES], layout.BLOCK_WORDS)
        if len(updates):
            self._block_table[updates[:, 0], updates[:, 1]] = updates[:, 2]

        copies = None
        if header[layout.NUM_COPIES]:
            pairs = _section(buffer, header[layout.OFF_COPIES], header[layout.NUM_COPIES], layout.COPY_WORDS)
            copies = torch.from_numpy(pairs)

        row_ids, starts, num_new = rows[:, layout.ROW], rows[:, layout.QUERY_START], rows[:, layout.NUM_NEW]
        # INV-43: the step was packed as if all drafts in flight were accepted. Those that were not have no place.
        shift = self._rejected[row_ids] - rows[:, layout.NUM_REJECTED]
        computed = rows[:, layout.NUM_COMPUTED] - shift
        seq_lens = computed + num_new
        max_query_len, max_seq_len = int(num_new.max()), int(seq_lens.max())
        tables = self._block_table[self._first_rows + row_ids, : -(-max_seq_len // self._block_sizes[0])]
        query_start_loc = np.empty(num_rows + 1, np.int32)
        query_start_loc[:-1] = starts
        query_start_loc[-1] = num_tokens

        plan_row = np.repeat(np.arange(num_rows, dtype=np.int32), num_new)
        positions = np.arange(num_tokens, dtype=np.int32) + (computed - starts)[plan_row]
        slots = np.empty((len(tables), num_tokens), np.int32)
        for table, block_size, group_slots in zip(tables, self._block_sizes, slots, strict=True):
            np.multiply(table[plan_row, positions // block_size], np.int32(block_size), out=group_slots)
            group_slots += positions % block_size
        input_ids = np.where(tokens < 0, self._last_token[row_ids[plan_row]], tokens)

        found = np.flatnonzero(rows[:, layout.SAMPLE_INDEX] >= 0)
        sampled = found[np.argsort(rows[found, layout.SAMPLE_INDEX], kind="stable")].astype(np.int32)
        sample_tokens = starts[sampled] + num_new[sampled] - 1
        num_outputs = rows[sampled, layout.NUM_OUTPUT] - shift[sampled]
        drafts = None
        if header[layout.NUM_DRAFTS]:
            counts = rows[sampled, layout.FLAGS] >> layout.DRAFTS_SHIFT
            of_row, nth, drafts = _compare(tokens, sample_tokens - counts, counts)
            sample_tokens = sample_tokens[of_row] - counts[of_row] + nth
            num_outputs, sampled = num_outputs[of_row] + nth, sampled[of_row]
        scored = np.flatnonzero(rows[:, layout.FLAGS] & FLAG_PROMPT_LOGITS)
        return HostStep(
            torch.from_numpy(input_ids),
            torch.from_numpy(positions),
            self._attention(query_start_loc, seq_lens, tables, slots, num_tokens, max_query_len, max_seq_len),
            sample_tokens,
            row_ids[sampled],
            num_outputs,
            sampled,
            tuple(PromptSpan(int(i), int(starts[i]), int(num_new[i])) for i in scored),
            copies,
            drafts,
        )

    def _attention(
        self,
        query_start_loc: Ints,
        seq_lens: Ints,
        tables: Ints,
        slots: Ints,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> tuple[AttentionMetadata, ...]:
        """One for each of the tables [G, S, width] and slots [G, T]."""
        starts, lens = torch.from_numpy(query_start_loc), torch.from_numpy(seq_lens)
        return tuple(
            AttentionMetadata(starts, lens, table, group_slots, num_tokens, len(lens), max_query_len, max_seq_len)
            for table, group_slots in zip(torch.from_numpy(tables), torch.from_numpy(slots), strict=True)
        )

    def accept(self, step: HostStep, token_ids: Ints, status: Ints) -> None:
        """Keeps what a step sampled, for the steps launched before it was known; both arrays are [N].

        A draft is accepted if it is what was sampled in its place; the samples up to the first that is not, that one
        included, are the row's new tokens. The others followed a rejected draft and mean nothing: their ids become
        -1, their status OK.
        """
        drafts = step.drafts
        if drafts is None:
            self.set_last_tokens(step.sample_rows, token_ids)
            return
        differs = token_ids != drafts.ids  # of each row the last sample at least
        num_before = np.cumsum(differs) - differs
        is_behind = num_before > np.repeat(num_before[drafts.first_samples], drafts.counts + 1)
        last = np.flatnonzero(differs & ~is_behind)  # one of each row
        row_ids = step.sample_rows[last]
        self.set_last_tokens(row_ids, token_ids[last])
        self._rejected[row_ids] += drafts.first_samples + drafts.counts - last.astype(np.int32)
        token_ids[is_behind] = -1
        status[is_behind] = OK

    def set_last_tokens(self, row_ids: Ints, token_ids: Ints) -> None:
        """Keeps what was sampled for these rows, for the steps launched before it was known."""
        self._last_token[row_ids] = token_ids


def scored_rows(buffer: Ints) -> list[tuple[int, int, int]]:
    """(position in the plan, tokens computed before, new tokens) of the rows whose prompt is scored."""
    rows = _section(buffer, int(buffer[layout.OFF_ROWS]), int(buffer[layout.NUM_ROWS]), layout.ROW_WORDS)
    scored = np.flatnonzero(rows[:, layout.FLAGS] & FLAG_PROMPT_LOGITS)
    return [(i, int(rows[i, layout.NUM_COMPUTED]), int(rows[i, layout.NUM_NEW])) for i in scored.tolist()]


def _compare(tokens: Ints, first_tokens: Ints, counts: Ints) -> tuple[Ints, Ints, HostDrafts]:
    """Of each sample [N] its row among those sampled from and which of the row's samples it is; and the drafts.

    Args:
        tokens: the step's, as packed.
        first_tokens: [R] the token of each row that its drafts follow.
        counts: [R] drafts of each row.
    """
    num_samples = counts + 1
    ends = np.cumsum(num_samples, dtype=np.int32)
    firsts = ends - num_samples
    of_row = np.repeat(np.arange(len(counts), dtype=np.int32), num_samples)
    nth = np.arange(len(of_row), dtype=np.int32) - firsts[of_row]
    ids = np.full(len(of_row), -1, np.int32)
    has_draft = nth < counts[of_row]
    ids[has_draft] = tokens[(first_tokens[of_row] + 1 + nth)[has_draft]]
    return of_row, nth, HostDrafts(ids, firsts, counts)


def _section(buffer: Ints, offset: int, count: int, width: int) -> Ints:
    return buffer[offset : offset + count * width].reshape(count, width)
