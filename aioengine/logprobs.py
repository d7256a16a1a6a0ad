"""Log-probabilities of sampled or given tokens on their way from the device to the outputs.

Made by the sampler, resolved by the runner once the step has ended, read by `outputs.py`. All of them are
raw: of the model's own logits, before any constraint, penalty, temperature or filter (INV-53).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

LOGPROB_FLOOR = -9999.0
"""Least log-probability reported, so that what leaves is always a finite JSON number."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """One position: the chosen (or given) token and the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    """1 + number of tokens with a strictly greater logit."""
    top_ids: NDArray[np.int32]
    """As many as asked for, best first, lowest id first on ties; with -1 all tokens, by their ids."""
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Some positions, where they were computed. What belongs to whom is known on the host before the values are."""

    keys: list[int]
    """What each entry belongs to: the sample index, or the index of a prompt position."""
    counts: list[int]
    """How many top entries each has; -1 for the whole vocabulary."""
    words: torch.Tensor
    """int32 [entries, 3 + 2 width], a line as in `kernels/score.py`; rank 0: the logits hold NaN or +inf."""
    whole: torch.Tensor | None = None
    """float32 [W, V]: all log-probabilities of the entries whose count is -1, in their order."""
    source: PendingLogprobs | None = None
    """What is being copied here; its memory must not be used again before."""

    def to_host(self) -> PendingLogprobs:
        """The same in pinned memory, once the current stream has done what is enqueued here."""
        words, whole = _pinned(self.words), None if self.whole is None else _pinned(self.whole)
        return PendingLogprobs(self.keys, self.counts, words, whole, self)

    def resolve(self) -> dict[int, RowLogprobs | None]:
        """By key; waits for the device, unless it is all on the host.

        None where the logits were not finite: that request has failed.
        """
        words = self.words.numpy(force=True)
        if self.words.is_pinned():
            words = words.copy()  # a reader that is slow shall not hold pinned memory
        width = (words.shape[1] - 3) // 2
        token_ids, ranks = words[:, 0].tolist(), words[:, 2].tolist()
        logprobs = words[:, 1].view(np.float32).tolist()
        top_ids, top_logprobs = words[:, 3 : 3 + width], words[:, 3 + width :].view(np.float32)
        whole = iter(() if self.whole is None else self.whole.numpy(force=True))
        result: dict[int, RowLogprobs | None] = {}
        for i, (key, count) in enumerate(zip(self.keys, self.counts, strict=True)):
            if count == -1:
                values = next(whole)
                ids = np.arange(len(values), dtype=np.int32)
            else:
                ids, values = top_ids[i, :count], top_logprobs[i, :count]
            is_finite = ranks[i] > 0
            result[key] = RowLogprobs(token_ids[i], logprobs[i], ranks[i], ids, values) if is_finite else None
        return result


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
