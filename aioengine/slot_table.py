"""Lines of a device tensor that are lent to the few rows of a batch that need one.

Memory follows the greatest number of rows that ever needed a line at once. Used by the state that sampling
keeps between steps (`constraints.py`, `penalties.py`).
"""

from __future__ import annotations

import torch


class SlotTable:
    """`data` [lines, width]; doubles when lines run out, so hold line numbers, never views of it."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros((0, width), dtype=dtype, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        if not self._free:
            old = self.data
            self.data = old.new_zeros((max(4, 2 * len(old)), old.shape[1]))
            self.data[: len(old)] = old
            self._free = list(range(len(self.data) - 1, len(old) - 1, -1))
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
