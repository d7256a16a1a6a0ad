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

IntArray = NDArray[np.int64]


class Penalties(Protocol):
    """State by row. `apply` and `add` take distinct rows that have joined."""

    def join(self, row: int, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None: ...
    def leave(self, row: int) -> None: ...
    def apply(self, logits: Tensor, at: IntArray, rows: IntArray, settings: NDArray[np.void]) -> None:
        """Changes logits[at[i]] as rows[i] with settings[i] wants it."""
        ...

    def add(self, rows: IntArray, token_ids: Tensor) -> None:
        """One more output token for each row."""
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

    def apply(self, logits: Tensor, at: IntArray, rows: IntArray, settings: NDArray[np.void]) -> None:
        base, row_bytes = logits.data_ptr(), logits.stride(0) * logits.element_size()
        words = settings.view(np.int32).reshape(len(rows), 1, -1)
        for i, row in enumerate(rows.tolist()):
            self._counts[row].penalize(base + int(at[i]) * row_bytes, words[i])

    def add(self, rows: IntArray, token_ids: Tensor) -> None:
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self._counts[row].add(token_id)


class DensePenalties:
    """On any device: prompt mask and output counts, [slots, V]; the tables double when they run out."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        apply_penalties: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None],
    ) -> None:
        """`apply_penalties` as in `kernels/sampling.py`, or its kernel."""
        self._apply = apply_penalties
        self._in_prompt = SlotTable(vocab_size, torch.bool, device)
        self._counts = SlotTable(vocab_size, torch.int32, device)
        self._slots: dict[int, tuple[int, int]] = {}
        self._device = device

    def join(self, row: int, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        slots = self._slots[row] = (self._in_prompt.take(), self._counts.take())
        self._in_prompt.data[slots[0]] = False
        self._in_prompt.data[slots[0]].index_fill_(0, self._ids(prompt_ids), True)
        ids = self._ids(output_ids)
        self._counts.data[slots[1]].zero_().index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def leave(self, row: int) -> None:
        in_prompt, counts = self._slots.pop(row)
        self._in_prompt.give_back(in_prompt)
        self._counts.give_back(counts)

    def apply(self, logits: Tensor, at: IntArray, rows: IntArray, settings: NDArray[np.void]) -> None:
        slots = np.array([self._slots[row] for row in rows.tolist()], np.int64)
        at_device = self._ids(at)
        part = logits.index_select(0, at_device)
        self._apply(
            part,
            self._in_prompt.data.index_select(0, self._ids(slots[:, 0])),
            self._counts.data.index_select(0, self._ids(slots[:, 1])),
            *(
                torch.from_numpy(np.ascontiguousarray(settings[name])).to(self._device, non_blocking=True)
                for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
            ),
        )
        logits.index_copy_(0, at_device, part)

    def add(self, rows: IntArray, token_ids: Tensor) -> None:
        slots = self._ids([self._slots[row][1] for row in rows.tolist()])
        one = torch.ones(len(rows), dtype=torch.int32, device=self._device)
        self._counts.data.index_put_((slots, token_ids.long()), one, accumulate=True)

    def _ids(self, ids: ArrayLike) -> Tensor:
        return torch.from_numpy(np.array(ids, np.int64)).to(self._device, non_blocking=True)


def _as_int32(ids: ArrayLike) -> NDArray[np.int32]:
    return np.ascontiguousarray(ids, np.int32)
