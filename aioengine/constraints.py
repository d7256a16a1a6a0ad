"""What a row must not, or should rather, generate: allowed tokens, bad words, min-tokens and logit bias.

The part of the sampling chain that may change the most likely token and does not look at counts; the final
mask is the intersection of all constraints. State lives on the device and follows the sampled tokens there,
in execution order. Owned by `Sampler`, which calls it for the rows that have a constraint only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from aioengine.kernels import sampling as ops
from aioengine.sampling_plan import SamplingPlan
from aioengine.slot_table import SlotTable

IntArray = NDArray[np.int64]

_FOR_EVER = 2**31 - 1
_NO_TOKEN, _ANY_TOKEN = -1, -2  # in the recent output, and in a word's beginning


@dataclass(slots=True)
class _RowConstraints:
    plan: SamplingPlan
    stop_ids: IntArray
    """Forbidden before min_tokens."""
    bias_ids: IntArray
    bias_values: NDArray[np.float32]
    word_ends: IntArray
    """Last token of each bad word."""
    word_beginnings: NDArray[np.int32]
    """[words, L]: the other tokens, newest last, filled up on the left; L is the width of the recent output."""
    allowed_line: int = -1
    recent_line: int = -1


class Constraints:
    """By row. The device follows launch order: `apply` of a step, then `add` of its tokens."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, _RowConstraints] = {}
        self._forbidden = SlotTable(vocab_size, torch.bool, device)
        self._recent = SlotTable(1, torch.int32, device)

    def join(self, row: int, plan: SamplingPlan, output_ids: ArrayLike) -> int:
        """Returns before how many output tokens the row has a constraint; 0 if never, then it has not joined."""
        bias = plan.params.logit_bias or {}
        early = plan.stop_ids if plan.params.min_tokens > 0 else ()
        for_ever = bool(bias or plan.allowed_ids is not None or plan.bad_words)
        if not (early or for_ever):
            return 0
        state = self._rows[row] = _RowConstraints(
            plan,
            np.array(early, np.int64),
            np.fromiter(bias.keys(), np.int64, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
            np.array([word[-1] for word in plan.bad_words], np.int64),
            np.empty((len(plan.bad_words), 0), np.int32),
        )
        if plan.allowed_ids is not None:
            state.allowed_line = self._forbidden.take()
            line = self._forbidden.data[state.allowed_line].fill_(True)
            line.index_fill_(0, self._to_device(plan.allowed_ids), False)
        if plan.bad_words:
            self._join_recent(state, output_ids)
        return _FOR_EVER if for_ever else plan.params.min_tokens

    def leave(self, row: int) -> None:
        state = self._rows.pop(row)
        if state.allowed_line >= 0:
            self._forbidden.give_back(state.allowed_line)
        if state.recent_line >= 0:
            self._recent.give_back(state.recent_line)

    def apply(self, x: Tensor, at: IntArray, rows: IntArray, positions: IntArray) -> None:
        """Changes x[at[i]] for rows[i], which has positions[i] output tokens so far."""
        states = [self._rows[row] for row in rows.tolist()]
        allowed = [i for i, state in enumerate(states) if state.allowed_line >= 0]
        if allowed:
            self._apply_allowed(x, at[allowed], [states[i] for i in allowed])
        with_words = [i for i, state in enumerate(states) if state.recent_line >= 0]
        if with_words:
            self._apply_bad_words(x, at[with_words], [states[i] for i in with_words])
        self._apply_bias(x, at, states, positions)

    def add(self, rows: IntArray, token_ids: Tensor) -> None:
        """One more output token for each row."""
        states = [self._rows[row] for row in rows.tolist()]
        with_words = [i for i, state in enumerate(states) if state.recent_line >= 0]
        if not with_words:
            return
        lines = self._to_device([states[i].recent_line for i in with_words])
        newest = token_ids.index_select(0, self._to_device(with_words)).int()
        recent = self._recent.data.index_select(0, lines)
        self._recent.data.index_copy_(0, lines, torch.cat((recent[:, 1:], newest[:, None]), 1))

    def _join_recent(self, state: _RowConstraints, output_ids: ArrayLike) -> None:
        table = self._recent
        longest = max(len(word) - 1 for word in state.plan.bad_words)
        if table.data.shape[1] < longest:
            wider = table.data.new_full((len(table.data), longest), _NO_TOKEN)
            wider[:, longest - table.data.shape[1] :] = table.data
            table.data = wider
        state.recent_line = table.take()
        width = table.data.shape[1]
        newest = np.asarray(output_ids, np.int32)[-width:]
        line = np.full(width, _NO_TOKEN, np.int32)
        line[width - len(newest) :] = newest
        table.data[state.recent_line] = torch.from_numpy(line).to(self._device)

    def _apply_allowed(self, x: Tensor, at: IntArray, states: list[_RowConstraints]) -> None:
        at_device = self._to_device(at)
        lines = self._to_device([state.allowed_line for state in states])
        part = x.index_select(0, at_device)
        ops.mask_tokens_ref(part, self._forbidden.data.index_select(0, lines))
        x.index_copy_(0, at_device, part)

    def _apply_bad_words(self, x: Tensor, at: IntArray, states: list[_RowConstraints]) -> None:
        width = self._recent.data.shape[1]
        for state in states:
            if state.word_beginnings.shape[1] != width:
                state.word_beginnings = _beginnings(state.plan.bad_words, width)
        beginnings = np.concatenate([state.word_beginnings for state in states])
        num_words = [len(state.plan.bad_words) for state in states]
        recent_lines = np.repeat([state.recent_line for state in states], num_words)
        ops.mask_bad_words_ref(
            x,
            self._recent.data.index_select(0, self._to_device(recent_lines)),
            self._to_device(np.repeat(at, num_words)),
            torch.from_numpy(beginnings).to(self._device, non_blocking=True),
            self._to_device(np.concatenate([state.word_ends for state in states])),
        )

    def _apply_bias(self, x: Tensor, at: IntArray, states: list[_RowConstraints], positions: IntArray) -> None:
        ids: list[IntArray] = []
        values: list[NDArray[np.float32]] = []
        for state, position in zip(states, positions.tolist(), strict=True):
            early = state.stop_ids if position < state.plan.params.min_tokens else state.stop_ids[:0]
            ids.append(np.concatenate((early, state.bias_ids)))
            values.append(np.concatenate((np.full(len(early), -np.inf, np.float32), state.bias_values)))
        lengths = [len(part) for part in ids]
        if sum(lengths):
            ops.add_bias_ref(
                x,
                self._to_device(np.repeat(at, lengths)),
                self._to_device(np.concatenate(ids)),
                torch.from_numpy(np.concatenate(values)).to(self._device, non_blocking=True),
            )

    def _to_device(self, values: IntArray | Sequence[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device, non_blocking=True)


def _beginnings(words: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    lines = np.full((len(words), width), _ANY_TOKEN, np.int32)
    for line, word in zip(lines, words, strict=True):
        line[width - len(word) + 1 :] = word[:-1]
    return lines
