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
from aioengine.kernels import sampling as ops
from aioengine.kernels import sampling_triton
from aioengine.kernels.jit import unavailable_reason
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


def _draw_ref(
    x: Tensor, threshold: Tensor | None, seeds: Tensor, positions: Tensor, temperature: Tensor | None
) -> Tensor:
    z = x if temperature is None else x / temperature[:, None]
    if threshold is None:
        threshold = z.new_full((len(z),), -torch.inf)
    return ops.draw_ref(z, threshold, seeds, positions)


def _token_logprobs_ref(x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    logprobs: Tensor = x.log_softmax(-1)
    return logprobs.gather(1, token_ids[:, None])[:, 0], ops.rank_ref(x, token_ids)[1]


@dataclass(frozen=True, slots=True)
class Operations:
    """The device operations behind `DeviceBackend`: signatures as in `kernels/sampling_triton.py`."""

    argmax: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor | None], Tensor]
    filter_threshold: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    apply_penalties: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    token_logprobs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


REFERENCES = Operations(
    lambda x: x.argmax(-1), _draw_ref, ops.filter_threshold_ref, ops.apply_penalties_ref, _token_logprobs_ref
)
KERNELS = Operations(
    sampling_triton.argmax,
    sampling_triton.draw,
    sampling_triton.filter_threshold,
    sampling_triton.apply_penalties,
    sampling_triton.token_logprobs,
)


class DeviceBackend:
    """Kernels where they run, else their references; nothing in it waits for the device."""

    def __init__(self, vocab_size: int, device: torch.device, operations: Operations | None = None) -> None:
        if operations is None:
            operations = KERNELS if unavailable_reason(device) is None else REFERENCES
        self.device = device
        self._run = operations
        self.penalties: Penalties = DensePenalties(vocab_size, device, operations.apply_penalties)

    def choose(self, logits: Tensor, at: IntArray, settings: Settings) -> Tensor:
        x = logits if len(at) == len(logits) else logits.index_select(0, self._to_device(at))
        token_ids = self._run.argmax(x)
        best = x.gather(1, token_ids[:, None])[:, 0]
        drawn = np.flatnonzero(settings["temperature"] >= GREEDY_TEMPERATURE)
        if drawn.size == len(at):
            token_ids = self._draw(x, settings)
        elif drawn.size:
            drawn_at = self._to_device(drawn)
            token_ids.index_copy_(0, drawn_at, self._draw(x.index_select(0, drawn_at), settings[drawn]))
        impossible = torch.where(best == -torch.inf, NOTHING_ALLOWED, NOT_FINITE)
        return torch.stack((token_ids, torch.where(torch.isfinite(best), OK, impossible))).int()

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
            x, ids = logits.index_select(0, self._to_device(at[chunk])), token_ids[chunk].long()
            chosen, rank = self._run.token_logprobs(x, ids)
            ranks.append(torch.where(torch.isfinite(x.gather(1, self._run.argmax(x)[:, None])[:, 0]), rank, 0))
            logprobs.append(chosen.clamp(min=LOGPROB_FLOOR))
            in_chunk = [i for i in whole if start <= i < start + _SCORE_CHUNK]
            if width or in_chunk:
                values = x.log_softmax(-1).clamp_(min=LOGPROB_FLOOR)
                whole_values += [values[i - start] for i in in_chunk]
            if width:
                best_ids, best = ops.top_logprobs_ref(values, width)
                top_ids.append(best_ids.flatten())
                top_values.append(best.flatten())
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

    def _draw(self, x: Tensor, settings: Settings) -> Tensor:
        whole = np.stack([settings[name].astype(np.int64) for name in ("seed", "position", "top_k")])
        real = np.stack([settings[name] for name in ("temperature", "top_p", "min_p")])
        seeds, positions, top_k = self._to_device(whole)
        temperature, top_p, min_p = self._to_device(real)
        filtered = np.flatnonzero((whole[2] < x.shape[1]) | (real[1] < 1) | (real[2] > 0))
        if filtered.size == 0:
            return self._run.draw(x, None, seeds, positions, temperature)
        z = x / temperature[:, None]
        if filtered.size == len(x):
            threshold = self._run.filter_threshold(z, top_k, top_p, min_p)
        else:
            at = self._to_device(filtered)
            some = (t.index_select(0, at) for t in (z, top_k, top_p, min_p))
            threshold = z.new_full((len(z),), -torch.inf).index_copy_(0, at, self._run.filter_threshold(*some))
        return self._run.draw(z, threshold, seeds, positions, None)

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def _cat(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.device)
