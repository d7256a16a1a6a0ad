"""Chooses the next token of each row from its logits, on the device.

Owns the settings of the persistent rows and the order of the chain; `constraints.py` and `penalties.py` own
what must follow a row's tokens from step to step, `sampling_backend.py` the work on the device. All of it
is updated in execution order on the device, so a step may be launched before the tokens of the step before
it are known on the host. Nothing here knows requests, steps or batches. Called by `runner.py`: `leave` and
`join` as the plan says, then `sample`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from aioengine.constraints import Constraints
from aioengine.logprobs import PendingLogprobs, RowLogprobs
from aioengine.sampling_backend import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    OK,
    SETTINGS,
    DeviceBackend,
    IntArray,
    NativeBackend,
    SamplingBackend,
    Settings,
)
from aioengine.sampling_plan import SamplingPlan, compile_sampling
from aioengine.transfer import to_device

__all__ = [
    "NOTHING_ALLOWED",
    "NOT_FINITE",
    "OK",
    "PendingLogprobs",
    "RowLogprobs",
    "SampledStep",
    "Sampler",
    "SamplingPlan",
    "compile_sampling",
]

_LEAST_TOP_P = float(np.finfo(np.float32).tiny)
"""Less may be zero as a float32, and no token is needed to reach that."""

_DRAWN, _PENALIZED, _SCORED, _CONSTRAINED, _FILTERED = 1, 2, 4, 8, 16


class Choice(IntEnum):
    """How the tokens of a step can be chosen on the device without the sampler."""

    OTHER = 0
    """They cannot: some row's logits are edited, or its log-probabilities are wanted."""
    PLAIN = 1
    """Every row takes its greatest logit or draws from all tokens."""
    FILTERED = 2
    """Some rows draw from what min-p, top-k and top-p leave."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What one call of `sample` chose, on the device."""

    packed: Tensor
    """int32 [2, S]: token ids and statuses in one piece, so that one copy brings both to the host."""
    logprobs: PendingLogprobs | None
    """For the rows that asked, keyed by sample index."""

    @property
    def token_ids(self) -> Tensor:
        """int32 [S]; inside the vocabulary even for failed rows, so that they may feed the next step."""
        return self.packed[0]

    @property
    def status(self) -> Tensor:
        """int32 [S]: OK, NOT_FINITE or NOTHING_ALLOWED; the engine must fail the request of other than OK."""
        return self.packed[1]


class Sampler:
    """Sampling of up to `max_num_seqs` persistent rows. One caller at a time, calls in execution order."""

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        device: torch.device | str = "cpu",
        backend: SamplingBackend | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        if backend is None:
            is_cpu = self.device.type == "cpu"
            backend = NativeBackend(vocab_size) if is_cpu else DeviceBackend(vocab_size, self.device)
        self._backend = backend
        self._penalties = backend.penalties
        self._constraints = Constraints(vocab_size, self.device)
        self._plans: dict[int, SamplingPlan] = {}
        self._special: set[int] = set()  # rows whose choice is OTHER, or was at first
        self._filtered: set[int] = set()
        self._flags = np.zeros(max_num_seqs, np.int32)  # _CONSTRAINED depends on the position, see _flags_at
        self._constrained_before = np.zeros(max_num_seqs, np.int64)
        self._settings = np.zeros(max_num_seqs, SETTINGS)
        self._num_logprobs = np.zeros(max_num_seqs, np.int64)
        self._draws_told = np.zeros(max_num_seqs, np.bool_)  # rows that draw by what `changed_draws` returned last
        self._draws_changed = False

    def join(self, row: int, plan: SamplingPlan, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        """Gives `row` to a choice, with all its tokens so far (those of a resumed one include its output)."""
        if plan.vocab_size != self.vocab_size:
            raise ValueError(f"plan for a vocabulary of {plan.vocab_size}, sampler has {self.vocab_size}")
        self.leave(row)
        p = plan.params
        self._settings[row] = (
            p.temperature,
            max(p.top_p, _LEAST_TOP_P),
            p.min_p,
            p.top_k if 0 < p.top_k < self.vocab_size else self.vocab_size,
            plan.seed,
            0,
            p.repetition_penalty,
            p.frequency_penalty,
            p.presence_penalty,
        )
        flags = 0
        if not p.is_greedy:
            is_filtered = p.top_p < 1 or p.min_p > 0 or 0 < p.top_k < self.vocab_size
            flags = _DRAWN | _FILTERED if is_filtered else _DRAWN
        self._constrained_before[row] = self._constraints.join(row, plan, output_ids)
        if p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0:
            flags |= _PENALIZED
            self._penalties.join(row, prompt_ids, output_ids)
        if p.logprobs is not None:
            flags |= _SCORED
            self._num_logprobs[row] = p.logprobs
        self._flags[row] = flags
        self._plans[row] = plan
        if flags & ~(_DRAWN | _FILTERED) or self._constrained_before[row]:
            self._special.add(row)
        if flags & _FILTERED:
            self._filtered.add(row)
        if flags & _DRAWN or self._draws_told[row]:
            self._draws_changed = True

    def leave(self, row: int) -> None:
        """Takes the row back; does nothing if nobody has it."""
        if self._plans.pop(row, None) is None:
            return
        if self._constrained_before[row]:
            self._constraints.leave(row)
            self._constrained_before[row] = 0
        if self._flags[row] & _PENALIZED:
            self._penalties.leave(row)
        self._flags[row] = 0
        self._special.discard(row)
        self._filtered.discard(row)

    def choice(self, rows: ArrayLike, num_outputs: ArrayLike) -> Choice:
        """What serves all of these rows."""
        if self._special:
            flags = self._flags_at(np.asarray(rows, np.int64), np.asarray(num_outputs, np.int64))
            if (flags & ~(_DRAWN | _FILTERED)).any():
                return Choice.OTHER
        return Choice.FILTERED if self._filtered else Choice.PLAIN

    def changed_draws(self) -> tuple[NDArray[np.generic], ...] | None:
        """Temperature, 0 for greedy choice, top-p, min-p, top-k and seed of every row.

        None if what was returned last time still serves all rows that somebody has.
        """
        if not self._draws_changed:
            return None
        settings, self._draws_changed = self._settings, False
        self._draws_told = (self._flags & _DRAWN) != 0
        temperature = np.where(self._draws_told, settings["temperature"], 0)
        return temperature, settings["top_p"], settings["min_p"], settings["top_k"], settings["seed"]

    def sample(
        self, logits: Tensor, rows: ArrayLike, num_outputs: ArrayLike, positions: Tensor | None = None
    ) -> SampledStep:
        """Chooses one token for each row of `logits` and counts it as that row's newest output token.

        Args:
            logits: [S, V] on the device, any float type; never changed.
            rows: int [S] on the host: which persistent row each belongs to; no row twice that is penalized, or
                constrained at its position, since each choice of such a row depends on the one before it.
            num_outputs: int [S] on the host: output tokens so far, those still in flight included.
            positions: int32 [S] on the device: the same less the drafts in flight that were rejected, where the host
                counted any. Equal to num_outputs in a row that is penalized or constrained.
        """
        row_ids = np.asarray(rows, np.int64)
        x = logits if logits.stride(-1) == 1 else logits.contiguous()
        flags = self._flags_at(row_ids, np.asarray(num_outputs, np.int64))
        settings = self._settings[row_ids]
        settings["position"] = num_outputs
        edited = np.flatnonzero(flags & (_CONSTRAINED | _PENALIZED))
        if edited.size == 0:
            packed = self._backend.choose(x, None, settings, positions)
        else:
            packed = self._choose_edited(x, edited, row_ids, flags, settings, positions)
        scored = np.flatnonzero(flags & _SCORED)
        if scored.size == 0:
            return SampledStep(packed, None)
        at = None if scored.size == len(row_ids) else scored
        counts = self._num_logprobs[row_ids[scored]].tolist()
        return SampledStep(packed, self._backend.score(x, at, packed[0], scored.tolist(), counts))

    def prompt_logprobs(self, logits: Tensor, target_ids: ArrayLike, count: int) -> PendingLogprobs:
        """Raw log-probabilities of given tokens: row i of logits [N, V] predicts target_ids[i].

        `count` as in SamplingParams.prompt_logprobs; the result is keyed by i.
        """
        token_ids = to_device(np.asarray(target_ids, np.int32), self.device)
        x = logits if logits.stride(-1) == 1 else logits.contiguous()
        return self._backend.score(x, None, token_ids, list(range(len(token_ids))), [count] * len(token_ids))

    def _flags_at(self, rows: IntArray, positions: IntArray) -> NDArray[np.int32]:
        constrained = np.where(positions < self._constrained_before[rows], _CONSTRAINED, 0)
        return self._flags[rows] | constrained.astype(np.int32)

    def _choose_edited(
        self,
        x: Tensor,
        edited: IntArray,
        rows: IntArray,
        flags: NDArray[np.int32],
        settings: Settings,
        positions: Tensor | None,
    ) -> Tensor:
        """Constraints, then penalties, on a copy of the rows that have any; all rows take their tokens."""
        is_part = len(edited) < len(rows) and not self._backend.edits_all
        part = edited if is_part else np.arange(len(rows))
        z = x.index_select(0, torch.from_numpy(edited)) if is_part else x
        z = z.to(torch.float32, copy=z is x, memory_format=torch.contiguous_format)
        rows, flags, own = rows[part], flags[part], settings[part]
        constrained, penalized = np.flatnonzero(flags & _CONSTRAINED), np.flatnonzero(flags & _PENALIZED)
        penalties = None
        if constrained.size:
            num_outputs = own["position"][constrained].astype(np.int64)
            self._constraints.apply(z, constrained, rows[constrained], num_outputs)
        if penalized.size:
            penalties = self._penalties.step(penalized, rows[penalized], own[penalized])
            penalties.apply(z)
        packed = self._backend.choose(z, None, own, _at(positions, part) if is_part else positions)
        if constrained.size:
            self._constraints.add(packed[0], constrained, rows[constrained])
        if penalties is not None:
            penalties.add(packed[0])
        if not is_part:
            return packed
        plain = np.setdiff1d(np.arange(len(x)), edited, assume_unique=True)
        whole = packed.new_empty((2, len(x)))
        whole[:, edited] = packed
        whole[:, plain] = self._backend.choose(x, plain, settings[plain], _at(positions, plain))
        return whole


def _at(positions: Tensor | None, rows: IntArray) -> Tensor | None:
    return None if positions is None else positions[torch.from_numpy(rows)]
