"""What a row must not, or should rather, generate: allowed tokens, bad words, min-tokens and logit bias.

The part of the sampling chain that may change the most likely token and does not look at counts; the final
mask is the intersection of all constraints. State lives on the device and follows the sampled tokens there,
in execution order. Owned by `Sampler`, which calls it for the rows that have a constraint only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from aioengine.kernels import sampling as ops
from aioengine.sampling_plan import SamplingPlan
from aioengine.slot_table import SlotTable
from aioengine.transfer import stack_to_device, to_device

IntArray = NDArray[np.int64]

_FOR_EVER = 2**31 - 1
_NO_TOKEN, _ANY_TOKEN = -1, -2  # in the recent output, and in a word's beginning


_Bias = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Token ids and what is added to their logits."""


@dataclass(slots=True)
class _RowConstraints:
    plan: SamplingPlan
    bias: _Bias
    early_bias: _Bias
    """Before min_tokens: the end tokens are forbidden too."""
    word_ends: NDArray[np.int32]
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
            _bias_of(bias),
            _bias_of({**bias, **dict.fromkeys(early, -np.inf)}),
            np.array([word[-1] for word in plan.bad_words], np.int32),
            np.empty((len(plan.bad_words), 0), np.int32),
        )
        if plan.allowed_ids is not None:
            state.allowed_line = self._forbidden.take()
            line = self._forbidden.data[state.allowed_line].fill_(True)
            line.index_fill_(0, to_device(np.array(plan.allowed_ids, np.int64), self._device), False)
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

    def add(self, token_ids: Tensor, at: IntArray, rows: IntArray) -> None:
        """One more output token for each row: token_ids[at[i]] for rows[i]."""
        states = [self._rows[row] for row in rows.tolist()]
        with_words = [i for i, state in enumerate(states) if state.recent_line >= 0]
        if not with_words:
            return
        lines, places = self._send([states[i].recent_line for i in with_words], at[with_words])
        newest = token_ids.index_select(0, places)
        recent = self._recent.data.index_select(0, lines)
        self._recent.data.index_copy_(0, lines.long(), torch.cat((recent[:, 1:], newest[:, None]), 1))

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
        table.data[state.recent_line] = to_device(line, self._device)

    def _apply_allowed(self, x: Tensor, at: IntArray, states: list[_RowConstraints]) -> None:
        places, lines = self._send(at, [state.allowed_line for state in states])
        part = x.index_select(0, places)
        ops.mask_tokens_ref(part, self._forbidden.data.index_select(0, lines))
        x.index_copy_(0, places.long(), part)

    def _apply_bad_words(self, x: Tensor, at: IntArray, states: list[_RowConstraints]) -> None:
        width = self._recent.data.shape[1]
        for state in states:
            if state.word_beginnings.shape[1] != width:
                state.word_beginnings = _beginnings(state.plan.bad_words, width)
        num_words = [len(state.plan.bad_words) for state in states]
        words = self._send(
            np.repeat([state.recent_line for state in states], num_words),
            np.repeat(at, num_words),
            np.concatenate([state.word_ends for state in states]),
            *np.concatenate([state.word_beginnings for state in states]).T,
        )
        lines, places, ends = words[:3]
        ops.mask_bad_words_ref(x, self._recent.data.index_select(0, lines), places, words[3:].T, ends)

    def _apply_bias(self, x: Tensor, at: IntArray, states: list[_RowConstraints], positions: IntArray) -> None:
        parts = [
            state.early_bias if position < state.plan.params.min_tokens else state.bias
            for state, position in zip(states, positions.tolist(), strict=True)
        ]
        lengths = [len(ids) for ids, _ in parts]
        if any(lengths):
            ids, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            words = self._send(np.repeat(at, lengths), ids, values)
            ops.add_bias_ref(x, words[0], words[1], words[2].view(torch.float32))

    def _send(self, *rows: ArrayLike) -> Tensor:
        return stack_to_device(self._device, *rows)


def _bias_of(bias: Mapping[int, float]) -> _Bias:
    return np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))


def _beginnings(words: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    lines = np.full((len(words), width), _ANY_TOKEN, np.int32)
    for line, word in zip(lines, words, strict=True):
        line[width - len(word) + 1 :] = word[:-1]
    return lines
