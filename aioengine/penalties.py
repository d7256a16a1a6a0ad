"""Which tokens each row has seen: the state behind repetition, frequency and presence penalties.

Exists only for rows that use a penalty. Counts grow by the sampled tokens where these are, in execution
order, so the host need not know them. `NativePenalties` touches the few tokens a row has seen (CPU),
`DensePenalties` keeps a row of the vocabulary on any device. Owned by a sampling backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from aioengine.fastcore import native
from aioengine.slot_table import SlotTable
from aioengine.transfer import stack_to_device, to_device

IntArray = NDArray[np.int64]


class PenaltyStep(Protocol):
    """The penalized rows of one step: `apply` before the tokens are chosen, `add` afterwards."""

    def apply(self, logits: Tensor) -> None:
        """Changes the rows' logits as their settings want it."""
        ...

    def add(self, token_ids: Tensor) -> None:
        """One more output token for each row; token ids int32, one for every row of the logits."""
        ...


class Penalties(Protocol):
    """State by row."""

    def join(self, row: int, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None: ...
    def leave(self, row: int) -> None: ...
    def step(self, at: IntArray, rows: IntArray, settings: NDArray[np.void]) -> PenaltyStep:
        """Distinct rows that have joined; rows[i] lies at at[i] in the logits and has settings[i]."""
        ...


class NativePenalties:
    """On the CPU: the work is that of the distinct tokens seen, not of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[int, native.TokenCounts] = {}

    def join(self, row: int, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        counts = native.TokenCounts(self._vocab_size)
        counts.reset(_as_int32(prompt_ids), _as_int32(output_ids))
        self._counts[row] = counts

    def leave(self, row: int) -> None:
        del self._counts[row]

    def step(self, at: IntArray, rows: IntArray, settings: NDArray[np.void]) -> PenaltyStep:
        return _NativeStep([self._counts[row] for row in rows.tolist()], at, settings)


class _NativeStep:
    def __init__(self, counts: list[native.TokenCounts], at: IntArray, settings: NDArray[np.void]) -> None:
        self._counts = counts
        self._at = at
        self._settings = settings

    def apply(self, logits: Tensor) -> None:
        base, row_bytes = logits.data_ptr(), logits.stride(0) * logits.element_size()
        words = self._settings.view(np.int32).reshape(len(self._counts), 1, -1)
        for i, (counts, position) in enumerate(zip(self._counts, self._at.tolist(), strict=True)):
            counts.penalize(base + position * row_bytes, words[i])

    def add(self, token_ids: Tensor) -> None:
        for counts, token_id in zip(self._counts, token_ids.numpy()[self._at].tolist(), strict=True):
            counts.add(token_id)


ApplyPenalties = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
CountTokens = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class DensePenalties:
    """On any device: what a row has seen of the whole vocabulary, [lines, V]; see `kernels/penalties.py`."""

    def __init__(
        self, vocab_size: int, device: torch.device, apply_penalties: ApplyPenalties, count_tokens: CountTokens
    ) -> None:
        """Both operations as in `kernels/penalties.py`."""
        self._apply = apply_penalties
        self._count = count_tokens
        self._seen = SlotTable(vocab_size, torch.int32, device)
        self._line_of: dict[int, int] = {}
        self._device = device

    def join(self, row: int, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        self._line_of[row] = self._seen.take()
        line = self._seen.data[self._line_of[row]].zero_()
        line.index_fill_(0, self._ids(prompt_ids), 1)
        output = self._ids(output_ids)
        if len(output):
            line.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    def leave(self, row: int) -> None:
        self._seen.give_back(self._line_of.pop(row))

    def step(self, at: IntArray, rows: IntArray, settings: NDArray[np.void]) -> PenaltyStep:
        lines = [self._line_of[row] for row in rows.tolist()]
        strengths = (settings[name] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"))
        words = stack_to_device(self._device, at, lines, *strengths)
        return _DenseStep(words, self._seen.data, self._apply, self._count)

    def _ids(self, ids: ArrayLike) -> Tensor:
        return to_device(np.asarray(ids, np.int64), self._device)


class _DenseStep:
    def __init__(self, words: Tensor, seen: Tensor, apply_penalties: ApplyPenalties, count_tokens: CountTokens) -> None:
        self._at, self._lines = words[:2].unbind(0)
        self._strengths = words[2:].view(torch.float32).unbind(0)
        self._seen = seen
        self._apply = apply_penalties
        self._count = count_tokens

    def apply(self, logits: Tensor) -> None:
        self._apply(logits, self._at, self._seen, self._lines, *self._strengths)

    def add(self, token_ids: Tensor) -> None:
        self._count(self._seen, self._lines, self._at, token_ids)


def _as_int32(ids: ArrayLike) -> NDArray[np.int32]:
    return np.ascontiguousarray(ids, np.int32)
