"""How a device takes or draws tokens, penalizes and scores: one small interface, two implementations.

`NativeBackend` runs the C++ of fastcore on the CPU; `TorchBackend` runs the references of
`kernels/sampling.py` on any device and never waits for it. Both give the same tokens up to the last bit of
a logarithm. Chosen once by `Sampler`, the only caller; `penalties.py` holds the part that has state.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.fastcore import native
from aioengine.kernels import sampling as ops
from aioengine.logprobs import LOGPROB_FLOOR, PendingLogprobs
from aioengine.penalties import DensePenalties, NativePenalties, Penalties
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

_SCORE_CHUNK = 32

IntArray = NDArray[np.int64]
Settings = NDArray[np.void]


class SamplingBackend(Protocol):
    """Operations on float32 logits [S, V] with unit stride along V; `at` [n] picks rows of them."""

    penalties: Penalties

    def choose(self, logits: Tensor, at: IntArray, settings: Settings) -> Tensor:
        """Token ids and statuses of rows `at`, int32 [2, n] on the device."""
        ...

    def score(
        self, logits: Tensor, at: IntArray, token_ids: Tensor, keys: list[int], counts: list[int]
    ) -> PendingLogprobs:
        """Log-probabilities of one token and the most likely ones for each of rows `at`."""
        ...


class NativeBackend:
    """C++ on the CPU: each row in a few passes, no copy of the logits."""

    def __init__(self, vocab_size: int) -> None:
        self.penalties: Penalties = NativePenalties(vocab_size)

    def choose(self, logits: Tensor, at: IntArray, settings: Settings) -> Tensor:
        out = np.empty((2, len(at)), np.int32)
        words = settings.view(np.int32).reshape(len(at), -1)
        native.choose_tokens(logits.data_ptr(), logits.stride(0), logits.shape[1], at, words, out)
        return torch.from_numpy(out)

    def score(
        self, logits: Tensor, at: IntArray, token_ids: Tensor, keys: list[int], counts: list[int]
    ) -> PendingLogprobs:
        vocab_size, num_rows = logits.shape[1], len(at)
        lengths = np.array([vocab_size if count == -1 else count for count in counts], np.int64)
        offsets = np.cumsum(lengths) - lengths
        logprobs, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
        top_ids, top_logprobs = np.empty(lengths.sum(), np.int32), np.empty(lengths.sum(), np.float32)
        native.score_tokens(
            logits.data_ptr(),
            logits.stride(0),
            vocab_size,
            at,
            token_ids.numpy().astype(np.int64),
            np.array(counts, np.int64),
            LOGPROB_FLOOR,
            logprobs,
            ranks,
            offsets,
            top_ids,
            top_logprobs,
        )
        tensors = (torch.from_numpy(a) for a in (logprobs, ranks, top_ids, top_logprobs))
        return PendingLogprobs(keys, counts, offsets.tolist(), vocab_size, token_ids, *tensors)


class TorchBackend:
    """Plain torch on any device; nothing in it waits for the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.penalties: Penalties = DensePenalties(vocab_size, device)

    def choose(self, logits: Tensor, at: IntArray, settings: Settings) -> Tensor:
        x = logits if len(at) == len(logits) else logits.index_select(0, self._to_device(at))
        token_ids = x.argmax(-1)
        best = x.gather(1, token_ids[:, None])[:, 0]
        drawn = np.flatnonzero(settings["temperature"] >= GREEDY_TEMPERATURE)
        if drawn.size:
            drawn_at = self._to_device(drawn)
            token_ids.index_copy_(0, drawn_at, self._draw(x.index_select(0, drawn_at), settings[drawn]))
        impossible = torch.where(best == -torch.inf, NOTHING_ALLOWED, NOT_FINITE)
        status = torch.where(torch.isfinite(best), OK, impossible)
        return torch.stack((token_ids.int(), status.int()))

    def score(
        self, logits: Tensor, at: IntArray, token_ids: Tensor, keys: list[int], counts: list[int]
    ) -> PendingLogprobs:
        vocab_size, width = logits.shape[1], max(0, *counts) if counts else 0
        num_top = len(at) * width
        whole = [i for i, count in enumerate(counts) if count == -1]
        offsets = [i * width for i in range(len(counts))]
        for n, i in enumerate(whole):
            offsets[i] = num_top + n * vocab_size
        logprobs, ranks, top_ids = [], [], []
        top_values: list[Tensor] = []
        whole_values: list[Tensor] = []
        for start in range(0, len(at), _SCORE_CHUNK):  # bounds the memory of long prompts
            chunk = slice(start, start + _SCORE_CHUNK)
            values = logits.index_select(0, self._to_device(at[chunk])).log_softmax(-1)
            values.clamp_(min=LOGPROB_FLOOR)
            chosen, rank = ops.rank_ref(values, token_ids[chunk])
            logprobs.append(chosen)
            ranks.append(torch.where(torch.isfinite(chosen), rank, 0))
            if width:
                ids, best = ops.top_logprobs_ref(values, width)
                top_ids.append(ids.flatten())
                top_values.append(best.flatten())
            whole_values += [values[i - start] for i in whole if start <= i < start + _SCORE_CHUNK]
        return PendingLogprobs(
            keys,
            counts,
            offsets,
            vocab_size,
            token_ids,
            self._cat(logprobs, torch.float32),
            self._cat(ranks, torch.int64),
            self._cat(top_ids, torch.int64),
            self._cat(top_values + whole_values, torch.float32),
        )

    def _draw(self, z: Tensor, settings: Settings) -> Tensor:
        z.div_(self._to_device(settings["temperature"])[:, None])
        threshold = z.new_full((len(z),), -torch.inf)
        top_k, top_p, min_p = settings["top_k"], settings["top_p"], settings["min_p"]
        filtered = np.flatnonzero((top_k < z.shape[1]) | (top_p < 1) | (min_p > 0))
        if filtered.size:
            at = self._to_device(filtered)
            numbers = [self._to_device(a[filtered]) for a in (top_k.astype(np.int64), top_p, min_p)]
            threshold.index_copy_(0, at, ops.filter_threshold_ref(z.index_select(0, at), *numbers))
        positions = self._to_device(settings["position"].astype(np.int64))
        return ops.draw_ref(z, threshold, self._to_device(settings["seed"]), positions)

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def _cat(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.device)
