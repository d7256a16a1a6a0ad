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
    """Some positions, still on the device. Sizes are known on the host before the values are."""

    keys: list[int]
    """What each entry belongs to: the sample index, or the index of a prompt position."""
    counts: list[int]
    """How many top entries each has; -1 for the whole vocabulary."""
    offsets: list[int]
    """Where they begin in `top_ids` and `top_logprobs`; those of -1 have values only."""
    vocab_size: int
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    """0 where the logits hold NaN or +inf."""
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def resolve(self) -> dict[int, RowLogprobs | None]:
        """By key; waits for the device. None where the logits were not finite: that request has failed."""
        token_ids, logprobs, ranks = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        all_ids = self.top_ids.numpy(force=True).astype(np.int32, copy=False)
        all_values = self.top_logprobs.numpy(force=True)
        result: dict[int, RowLogprobs | None] = {}
        for i, (key, count, offset) in enumerate(zip(self.keys, self.counts, self.offsets, strict=True)):
            if ranks[i] == 0:
                result[key] = None
                continue
            values = all_values[offset : offset + (self.vocab_size if count == -1 else count)]
            ids = all_ids[offset : offset + count] if count >= 0 else np.arange(self.vocab_size, dtype=np.int32)
            result[key] = RowLogprobs(token_ids[i], logprobs[i], ranks[i], ids, values)
        return result
