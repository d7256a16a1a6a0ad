"""How a device takes or draws tokens, penalizes and scores: one small interface, two implementations.

`NativeBackend` runs the C++ of fastcore on the CPU; `DeviceBackend` runs kernels on a GPU, or their torch
references on any device, and never waits for it. All give the same tokens up to the last bits of a
logarithm. Chosen once by `Sampler`, the only caller; `penalties.py` holds the part that has state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.fastcore import native
from aioengine.kernels.choose import DrawTable, choose, choose_ref
from aioengine.kernels.jit import unavailable_reason
from aioengine.kernels.penalties import apply_penalties, apply_penalties_ref, count_tokens, count_tokens_ref
from aioengine.kernels.score import MOST_TOP, score, score_ref
from aioengine.logprobs import LOGPROB_FLOOR, PendingLogprobs
from aioengine.penalties import ApplyPenalties, CountTokens, DensePenalties, NativePenalties, Penalties
from aioengine.transfer import to_device
from aioengine.types import GREEDY_TEMPERATURE

OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2
"""Status of a sampled row: fine; its logits hold NaN or +inf; its constraints left no token."""

SETTINGS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),  # 1 to vocab_size, which keeps all
        ("seed", np.int64),
        ("position", np.int32),  # number of output tokens so far
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
    ]
)
"""One row's numbers, packed as in fastcore/native/sampling.h: ten 32-bit words."""

_WIDE_CHUNK = 32
"""Rows of which all log-probabilities are made at once: bounds the memory of that."""

IntArray = NDArray[np.int64]
Settings = NDArray[np.void]


class SamplingBackend(Protocol):
    """Operations on logits [S, V] of any float type with unit stride along V."""

    penalties: Penalties
    edits_all: bool
    """Rows are edited in a copy of all logits rather than of theirs alone."""

    def choose(
        self, logits: Tensor, at: IntArray | None, settings: Settings, positions: Tensor | None = None
    ) -> Tensor:
        """Token ids and statuses of rows `at`, or of all, int32 [2, n] on the device.

        `settings` [n]; `positions` int32 [n] on the device stands for the positions there.
        """
        ...

    def score(
        self, logits: Tensor, at: IntArray | None, token_ids: Tensor, keys: list[int], counts: list[int]
    ) -> PendingLogprobs:
        """Log-probabilities of one token and of the most likely ones for rows `at`, or for all.

        `token_ids` int32 [S] has a token for every row of the logits; keys and counts are those of rows `at`.
        """
        ...


class NativeBackend:
    """C++ on the CPU: each row in a few passes, no copy of the logits if they are float32."""

    edits_all = False

    def __init__(self, vocab_size: int) -> None:
        self.penalties: Penalties = NativePenalties(vocab_size)

    def choose(
        self, logits: Tensor, at: IntArray | None, settings: Settings, positions: Tensor | None = None
    ) -> Tensor:
        x = logits.float()
        rows = np.arange(len(x)) if at is None else at
        if positions is not None:
            settings = settings.copy()
            settings["position"] = positions.numpy()
        out = np.empty((2, len(rows)), np.int32)
        words = settings.view(np.int32).reshape(len(rows), -1)
        native.choose_tokens(x.data_ptr(), x.stride(0), x.shape[1], rows, words, out)
        return torch.from_numpy(out)

    def score(
        self, logits: Tensor, at: IntArray | None, token_ids: Tensor, keys: list[int], counts: list[int]
    ) -> PendingLogprobs:
        x = logits.float()
        rows, vocab_size = np.arange(len(x)) if at is None else at, x.shape[1]
        num_rows, width, num_whole = len(rows), max(0, 0, *counts), counts.count(-1)
        wanted = np.array(counts, np.int64)
        offsets = np.arange(num_rows) * width
        offsets[wanted == -1] = num_rows * width + np.arange(num_whole) * vocab_size
        logprobs, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
        size = num_rows * width + num_whole * vocab_size
        top_ids, top_logprobs = np.empty(size, np.int32), np.empty(size, np.float32)
        chosen = token_ids.numpy()[rows]
        native.score_tokens(
            x.data_ptr(),
            x.stride(0),
            vocab_size,
            rows,
            chosen.astype(np.int64),
            wanted,
            LOGPROB_FLOOR,
            logprobs,
            ranks,
            offsets,
            top_ids,
            top_logprobs,
        )
        words = np.empty((num_rows, 3 + 2 * width), np.int32)
        words[:, 0], words[:, 1], words[:, 2] = chosen, logprobs.view(np.int32), ranks
        num_top = num_rows * width
        words[:, 3 : 3 + width] = top_ids[:num_top].reshape(num_rows, width)
        words[:, 3 + width :] = top_logprobs[:num_top].view(np.int32).reshape(num_rows, width)
        whole = torch.from_numpy(top_logprobs[num_top:].reshape(num_whole, vocab_size)) if num_whole else None
        return PendingLogprobs(keys, counts, torch.from_numpy(words), whole)


@dataclass(frozen=True, slots=True)
class Operations:
    """The device operations behind `DeviceBackend`, as in `kernels/`."""

    choose: Callable[[Tensor, Tensor, Tensor, DrawTable, Tensor, Tensor, bool], None]
    apply_penalties: ApplyPenalties
    count_tokens: CountTokens
    score: Callable[[Tensor, Tensor | None, Tensor, int, float], Tensor]


REFERENCES = Operations(choose_ref, apply_penalties_ref, count_tokens_ref, score_ref)
KERNELS = Operations(choose, apply_penalties, count_tokens, score)


class DeviceBackend:
    """Kernels where they run, else their references; nothing in it waits for the device."""

    edits_all = True

    def __init__(self, vocab_size: int, device: torch.device, operations: Operations | None = None) -> None:
        if operations is None:
            operations = KERNELS if unavailable_reason(device) is None else REFERENCES
        self.device = device
        self._run = operations
        self.penalties: Penalties = DensePenalties(
            vocab_size, device, operations.apply_penalties, operations.count_tokens
        )

    def choose(
        self, logits: Tensor, at: IntArray | None, settings: Settings, positions: Tensor | None = None
    ) -> Tensor:
        x = logits if at is None else logits.index_select(0, to_device(at, self.device))
        drawn = settings["temperature"] >= GREEDY_TEMPERATURE
        kept_whole = (settings["top_k"] >= x.shape[1]) & (settings["top_p"] >= 1) & (settings["min_p"] <= 0)
        rows, num_outputs, table = self._draw_table(settings, drawn)
        packed = torch.empty((2, len(x)), dtype=torch.int32, device=self.device)
        # Rows are counted through, so that a last token by row is the first half of what is chosen.
        positions = num_outputs if positions is None else positions
        self._run.choose(x, rows, positions, table, packed, packed[0], bool((drawn & ~kept_whole).any()))
        return packed

    def score(
        self, logits: Tensor, at: IntArray | None, token_ids: Tensor, keys: list[int], counts: list[int]
    ) -> PendingLogprobs:
        width = max(0, 0, *counts)
        at_device = None if at is None else to_device(at.astype(np.int32), self.device)
        if width <= MOST_TOP:
            words = self._run.score(logits, at_device, token_ids, width, LOGPROB_FLOOR)
        else:
            words = self._score_wide(logits, at_device, token_ids, width)
        whole = None
        if -1 in counts:
            all_rows = np.arange(len(counts)) if at is None else at
            rows = to_device(all_rows[[i for i, count in enumerate(counts) if count == -1]], self.device)
            whole = torch.empty((len(rows), logits.shape[1]), dtype=torch.float32, device=self.device)
            for line, part in zip(whole.split(_WIDE_CHUNK), rows.split(_WIDE_CHUNK), strict=True):
                line.copy_(logits.index_select(0, part).log_softmax(-1, torch.float32))
            whole.clamp_(min=LOGPROB_FLOOR)
        return PendingLogprobs(keys, counts, words, whole)

    def _score_wide(self, logits: Tensor, at: Tensor | None, token_ids: Tensor, width: int) -> Tensor:
        if at is None:
            at = torch.arange(len(logits), dtype=torch.int32, device=self.device)
        return torch.cat([score_ref(logits, part, token_ids, width, LOGPROB_FLOOR) for part in at.split(_WIDE_CHUNK)])

    def _draw_table(self, settings: Settings, drawn: NDArray[np.bool_]) -> tuple[Tensor, Tensor, DrawTable]:
        """Numbers of the rows, their positions and how they choose, brought over in one piece."""
        num_rows = len(settings)
        host = np.empty((8, num_rows), np.int32)
        host[:2].reshape(-1).view(np.int64)[:] = settings["seed"]
        real = host[2:5].view(np.float32)
        real[0], real[1], real[2] = np.where(drawn, settings["temperature"], 0), settings["top_p"], settings["min_p"]
        host[5], host[6], host[7] = settings["top_k"], settings["position"], np.arange(num_rows)
        words = to_device(host, self.device)
        temperature, top_p, min_p = words[2:5].view(torch.float32).unbind(0)
        top_k, positions, rows = words[5:].unbind(0)
        seeds = words[:2].view(-1).view(torch.int64)
        return rows, positions, DrawTable(temperature, top_p, min_p, top_k, seeds)
