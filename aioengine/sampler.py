"""Chooses the next token of each row from its logits, on the device, in the order of DESIGN 3.6.

Owns what must survive between steps for a row: its settings, and for the few rows that need them an
allowed-token mask, penalty counts and the last output tokens. These are updated on the device in execution
order, so a step may be launched before the tokens of the step before it are known on the host. Nothing here
knows requests, steps or batches. Called by `runner.py`: `join` and `leave` as the plan says, then `sample`.

Shape suffixes: S rows to sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from aioengine.kernels import sampling as ops
from aioengine.sampling_plan import SamplingPlan, compile_sampling
from aioengine.types import GREEDY_TEMPERATURE

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

OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2
"""Status of a sampled row: fine; its logits hold NaN or +inf; its constraints left no token."""

_RANDOM, _ALLOWED, _BAD_WORDS, _MIN_TOKENS, _BIAS, _PENALTIES, _FILTERS, _LOGPROBS = (
    1 << i for i in range(8)
)
_EDITS = _ALLOWED | _BAD_WORDS | _MIN_TOKENS | _BIAS | _PENALTIES

_LOGPROB_FLOOR = -9999.0
"""Least log-probability reported, so that what leaves is always a finite JSON number."""
_PROMPT_CHUNK = 32
"""Prompt positions whose log-probabilities are in memory at once."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Raw log-probabilities at one position: of the chosen (or given) token and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    """1 + number of tokens with a strictly greater log-probability."""
    top_ids: NDArray[np.int32]
    """The k asked for, best first, lowest id first on ties; with -1 all tokens in the order of their ids."""
    top_logprobs: NDArray[np.float32]


@dataclass(slots=True)
class PendingLogprobs:
    """Log-probabilities of some positions, still on the device. `resolve` copies and waits for them."""

    keys: list[int]
    """What each entry belongs to: the sample index, or the position in a prompt chunk."""
    counts: list[int]
    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    is_finite: Tensor
    top: list[tuple[Tensor | None, Tensor] | None]
    """Per entry: ids (None: all in order) and values, or None for the chosen token only."""

    def resolve(self) -> dict[int, RowLogprobs | None]:
        """By key; None where the logits were not finite, so that the caller fails that request."""
        token_ids, logprobs, ranks = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        result: dict[int, RowLogprobs | None] = {}
        for i, is_finite in enumerate(self.is_finite.tolist()):
            top = self.top[i]
            ids, values = np.empty(0, np.int32), np.empty(0, np.float32)
            if top is not None:
                values = top[1].numpy(force=True)
                if top[0] is None:
                    ids = np.arange(len(values), dtype=np.int32)
                else:
                    ids = top[0].numpy(force=True).astype(np.int32)
            entry = RowLogprobs(token_ids[i], logprobs[i], ranks[i], ids, values)
            result[self.keys[i]] = entry if is_finite else None
        return result


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


class _SlotTable:
    """Device rows that are handed out on demand; the table doubles when they run out."""

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


@dataclass(slots=True)
class _RowState:
    """Host side of one row that has edits; tensors of words live on the device."""

    plan: SamplingPlan
    stop_ids: IntArray
    bias_ids: IntArray
    bias_values: NDArray[np.float32]
    allowed_slot: int = -1
    penalty_slot: int = -1
    recent_slot: int = -1
    word_prefixes: list[tuple[int, ...]] = field(default_factory=list)
    word_lasts: list[int] = field(default_factory=list)


class Sampler:
    """Sampling of up to `max_num_seqs` persistent rows. One caller at a time, calls in execution order."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows: dict[int, _RowState] = {}
        n = max_num_seqs
        self._flags = np.zeros(n, np.int32)
        self._temperature = np.ones(n, np.float32)
        self._top_k = np.full(n, vocab_size, np.int64)
        self._top_p = np.ones(n, np.float32)
        self._min_p = np.zeros(n, np.float32)
        self._penalties = np.zeros((n, 3), np.float32)  # repetition, frequency, presence
        self._seeds = np.zeros(n, np.int64)
        self._min_tokens = np.zeros(n, np.int64)
        self._num_logprobs = np.zeros(n, np.int64)
        self._forbidden = _SlotTable(vocab_size, torch.bool, self.device)
        self._in_prompt = _SlotTable(vocab_size, torch.bool, self.device)
        self._counts = _SlotTable(vocab_size, torch.int32, self.device)
        self._recent = _SlotTable(0, torch.int32, self.device)

    def join(self, row: int, plan: SamplingPlan, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        """Gives `row` to a choice, with all its tokens so far (those of a resumed one include its output)."""
        if plan.vocab_size != self.vocab_size:
            raise ValueError(f"plan for a vocabulary of {plan.vocab_size}, sampler has {self.vocab_size}")
        self.leave(row)
        p = plan.params
        flags = self._set_numbers(row, plan)
        bias = p.logit_bias or {}
        state = _RowState(
            plan,
            np.array(plan.stop_ids, np.int64),
            np.fromiter(bias.keys(), np.int64, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
        )
        if p.min_tokens > 0 and plan.stop_ids:
            flags |= _MIN_TOKENS
        if bias:
            flags |= _BIAS
        if plan.allowed_ids is not None:
            flags |= _ALLOWED
            state.allowed_slot = self._forbidden.take()
            self._forbidden.data[state.allowed_slot] = True
            self._forbidden.data[state.allowed_slot, self._ids(plan.allowed_ids)] = False
        if p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0:
            flags |= _PENALTIES
            self._join_penalties(state, prompt_ids, output_ids)
        if plan.bad_words:
            flags |= _BAD_WORDS
            self._join_bad_words(state, output_ids)
        self._flags[row] = flags
        self._rows[row] = state

    def leave(self, row: int) -> None:
        """Takes the row back; does nothing if nobody has it."""
        state = self._rows.pop(row, None)
        self._flags[row] = 0
        if state is None:
            return
        if state.allowed_slot >= 0:
            self._forbidden.give_back(state.allowed_slot)
        if state.penalty_slot >= 0:
            self._in_prompt.give_back(state.penalty_slot)
            self._counts.give_back(state.penalty_slot)
        if state.recent_slot >= 0:
            self._recent.give_back(state.recent_slot)

    def sample(self, logits: Tensor, rows: ArrayLike, num_outputs: ArrayLike) -> SampledStep:
        """Chooses one token for each row of `logits` and counts it as that row's newest output token.

        Args:
            logits: [S, V] on the device, any float type; never changed.
            rows: int [S] on the host: which persistent row each belongs to, no row twice.
            num_outputs: int [S] on the host: output tokens so far, those still in flight included.
        """
        row_S = np.asarray(rows, np.int64)
        position_S = np.asarray(num_outputs, np.int64)
        flag_S = self._flags[row_S]
        flag_S &= ~np.where(position_S >= self._min_tokens[row_S], _MIN_TOKENS, 0).astype(np.int32)
        used = int(np.bitwise_or.reduce(flag_S, initial=0))
        x = logits.float()
        best = _argmax(x)
        top = x.gather(1, best[:, None])[:, 0]
        token_ids = best
        if used & (_EDITS | _RANDOM):
            work = np.flatnonzero(flag_S & (_EDITS | _RANDOM))
            at = self._to_device(work)
            z = x.index_select(0, at)
            self._edit(z, row_S[work], flag_S[work])
            chosen = _argmax(z)
            top.index_copy_(0, at, z.gather(1, chosen[:, None])[:, 0])
            drawn = np.flatnonzero(flag_S[work] & _RANDOM)
            if drawn.size:
                drawn_at = self._to_device(drawn)
                z = z if drawn.size == work.size else z.index_select(0, drawn_at)
                ids = self._draw(z, row_S[work[drawn]], position_S[work[drawn]], flag_S[work[drawn]])
                chosen.index_copy_(0, drawn_at, ids)
            token_ids.index_copy_(0, at, chosen)
        packed = torch.empty((2, len(row_S)), dtype=torch.int32, device=self.device)
        packed[0] = token_ids
        packed[1] = torch.where(
            torch.isfinite(top), OK, torch.where(top == -torch.inf, NOTHING_ALLOWED, NOT_FINITE)
        )
        self._count(row_S, flag_S, token_ids)
        pending = self._logprobs(x, row_S, flag_S, token_ids) if used & _LOGPROBS else None
        return SampledStep(packed, pending)

    def prompt_logprobs(self, logits: Tensor, target_ids: ArrayLike, count: int) -> PendingLogprobs:
        """Raw log-probabilities of given tokens: row i of logits [N, V] predicts target_ids[i].

        `count` as in SamplingParams.prompt_logprobs; the result is keyed by i.
        """
        targets = torch.as_tensor(np.asarray(target_ids, np.int64)).to(self.device)
        parts = []
        for start in range(0, len(targets), _PROMPT_CHUNK):
            chunk = slice(start, min(start + _PROMPT_CHUNK, len(targets)))
            counts = [count] * (chunk.stop - chunk.start)
            keys = list(range(chunk.start, chunk.stop))
            parts.append(_raw_logprobs(logits[chunk].float(), targets[chunk], keys, counts))
        return PendingLogprobs(
            [k for p in parts for k in p.keys],
            [c for p in parts for c in p.counts],
            torch.cat([p.token_ids for p in parts]) if parts else targets,
            torch.cat([p.logprobs for p in parts]) if parts else targets.float(),
            torch.cat([p.ranks for p in parts]) if parts else targets,
            torch.cat([p.is_finite for p in parts]) if parts else targets.bool(),
            [t for p in parts for t in p.top],
        )

    def _set_numbers(self, row: int, plan: SamplingPlan) -> int:
        p = plan.params
        flags = 0
        top_k = p.top_k if 0 < p.top_k < self.vocab_size else self.vocab_size
        if p.temperature >= GREEDY_TEMPERATURE:
            flags |= _RANDOM
            if top_k < self.vocab_size or p.top_p < 1 or p.min_p > 0:
                flags |= _FILTERS
        if p.logprobs is not None:
            flags |= _LOGPROBS
        self._temperature[row] = p.temperature
        self._top_k[row] = top_k
        self._top_p[row] = p.top_p
        self._min_p[row] = p.min_p
        self._penalties[row] = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        self._seeds[row] = plan.seed
        self._min_tokens[row] = p.min_tokens
        self._num_logprobs[row] = 0 if p.logprobs is None else p.logprobs
        return flags

    def _join_penalties(self, state: _RowState, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        state.penalty_slot = slot = self._counts.take()
        in_prompt_slot = self._in_prompt.take()
        assert in_prompt_slot == slot
        self._in_prompt.data[slot] = False
        self._in_prompt.data[slot, self._ids(prompt_ids)] = True
        counts = self._counts.data[slot].zero_()
        ids = self._ids(output_ids)
        counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _join_bad_words(self, state: _RowState, output_ids: ArrayLike) -> None:
        state.word_prefixes = [form[:-1] for form in state.plan.bad_words]
        state.word_lasts = [form[-1] for form in state.plan.bad_words]
        longest = max(1, *map(len, state.word_prefixes))
        table = self._recent
        if table.data.shape[1] < longest:
            grown = table.data.new_full((len(table.data), longest), -1)
            grown[:, longest - table.data.shape[1] :] = table.data
            table.data = grown
        state.recent_slot = slot = table.take()
        width = table.data.shape[1]
        newest = np.asarray(output_ids, np.int32)[-width:]
        line = np.full(width, -1, np.int32)
        line[width - len(newest) :] = newest
        table.data[slot] = torch.from_numpy(line).to(self.device)

    def _edit(self, x: Tensor, rows: IntArray, flags: NDArray[np.int32]) -> None:
        """Constraints, bias and penalties of the chain, in place."""
        states = [self._rows.get(int(row)) for row in rows]
        used = int(np.bitwise_or.reduce(flags, initial=0))
        if used & _ALLOWED:
            at = np.flatnonzero(flags & _ALLOWED)
            slots = self._to_device([s.allowed_slot for s in _pick(states, at)])
            at_device = self._to_device(at)
            part = x.index_select(0, at_device)
            ops.mask_tokens_ref(part, self._forbidden.data.index_select(0, slots))
            x.index_copy_(0, at_device, part)
        if used & _BAD_WORDS:
            self._edit_bad_words(x, states, np.flatnonzero(flags & _BAD_WORDS))
        if used & (_MIN_TOKENS | _BIAS):
            self._edit_bias(x, states, flags)
        if used & _PENALTIES:
            at = np.flatnonzero(flags & _PENALTIES)
            slots = self._to_device([s.penalty_slot for s in _pick(states, at)])
            strengths = torch.from_numpy(self._penalties[rows[at]]).to(self.device)
            at_device = self._to_device(at)
            part = x.index_select(0, at_device)
            ops.apply_penalties_ref(
                part,
                self._in_prompt.data.index_select(0, slots),
                self._counts.data.index_select(0, slots),
                *strengths.unbind(1),
            )
            x.index_copy_(0, at_device, part)

    def _edit_bad_words(self, x: Tensor, states: list[_RowState | None], at: IntArray) -> None:
        owners = _pick(states, at)
        width = self._recent.data.shape[1]
        prefixes = [p for s in owners for p in s.word_prefixes]
        lines = np.full((len(prefixes), width), -2, np.int32)
        for line, prefix in zip(lines, prefixes, strict=True):
            line[width - len(prefix) :] = prefix
        word_rows = np.repeat(np.arange(len(at)), [len(s.word_lasts) for s in owners])
        recent = self._recent.data.index_select(0, self._to_device([s.recent_slot for s in owners]))
        at_device = self._to_device(at)
        part = x.index_select(0, at_device)
        ops.mask_bad_words_ref(
            part,
            recent,
            self._to_device(word_rows),
            torch.from_numpy(lines).to(self.device),
            self._to_device([i for s in owners for i in s.word_lasts]),
        )
        x.index_copy_(0, at_device, part)

    def _edit_bias(self, x: Tensor, states: list[_RowState | None], flags: NDArray[np.int32]) -> None:
        at: list[IntArray] = []
        ids: list[IntArray] = []
        values: list[NDArray[np.float32]] = []
        for i in np.flatnonzero(flags & (_MIN_TOKENS | _BIAS)):
            state = states[i]
            assert state is not None
            if flags[i] & _MIN_TOKENS:
                ids.append(state.stop_ids)
                values.append(np.full(len(state.stop_ids), -np.inf, np.float32))
                at.append(np.full(len(state.stop_ids), i, np.int64))
            ids.append(state.bias_ids)
            values.append(state.bias_values)
            at.append(np.full(len(state.bias_ids), i, np.int64))
        ops.add_bias_ref(
            x,
            self._to_device(np.concatenate(at)),
            self._to_device(np.concatenate(ids)),
            torch.from_numpy(np.concatenate(values)).to(self.device),
        )

    def _draw(self, z: Tensor, rows: IntArray, positions: IntArray, flags: NDArray[np.int32]) -> Tensor:
        """Temperature, filters and draw of rows that are not greedy; changes z."""
        z.div_(torch.from_numpy(self._temperature[rows]).to(self.device)[:, None])
        threshold = z.new_full((len(rows),), -torch.inf)
        filtered = np.flatnonzero(flags & _FILTERS)
        if filtered.size:
            at = self._to_device(filtered)
            chosen = rows[filtered]
            threshold.index_copy_(
                0,
                at,
                ops.filter_threshold_ref(
                    z.index_select(0, at),
                    self._to_device(self._top_k[chosen]),
                    torch.from_numpy(self._top_p[chosen]).to(self.device),
                    torch.from_numpy(self._min_p[chosen]).to(self.device),
                ),
            )
        return ops.draw_ref(z, threshold, self._to_device(self._seeds[rows]), self._to_device(positions))

    def _count(self, rows: IntArray, flags: NDArray[np.int32], token_ids: Tensor) -> None:
        """Adds the new tokens to the state of rows with penalties or bad words, without reading them."""
        at = np.flatnonzero(flags & _PENALTIES)
        if at.size:
            slots = self._to_device([self._rows[int(r)].penalty_slot for r in rows[at]])
            new = token_ids.index_select(0, self._to_device(at))
            one = torch.ones(len(at), dtype=torch.int32, device=self.device)
            self._counts.data.index_put_((slots, new), one, accumulate=True)
        at = np.flatnonzero(flags & _BAD_WORDS)
        if at.size:
            slots = self._to_device([self._rows[int(r)].recent_slot for r in rows[at]])
            new = token_ids.index_select(0, self._to_device(at)).int()
            recent = self._recent.data.index_select(0, slots)
            self._recent.data.index_copy_(0, slots, torch.cat((recent[:, 1:], new[:, None]), 1))

    def _logprobs(
        self, x: Tensor, rows: IntArray, flags: NDArray[np.int32], token_ids: Tensor
    ) -> PendingLogprobs:
        at = np.flatnonzero(flags & _LOGPROBS)
        at_device = self._to_device(at)
        counts = self._num_logprobs[rows[at]].tolist()
        return _raw_logprobs(
            x.index_select(0, at_device), token_ids.index_select(0, at_device), at.tolist(), counts
        )

    def _ids(self, ids: ArrayLike) -> Tensor:
        return torch.from_numpy(np.array(ids, np.int64)).to(self.device)

    def _to_device(self, values: IntArray | Sequence[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self.device, non_blocking=True)


def _pick(states: list[_RowState | None], at: IntArray) -> list[_RowState]:
    return [s for i in at if (s := states[i]) is not None]


def _argmax(x: Tensor) -> Tensor:
    """Index of the greatest value per row, the first on ties; NaN counts as greatest. int64 [S], fresh."""
    if x.device.type == "cpu":  # numpy's is vectorised, an order of magnitude faster than torch's
        return torch.from_numpy(np.asarray(x.numpy().argmax(1), np.int64))
    best: Tensor = x.argmax(-1)
    return best


def _raw_logprobs(x: Tensor, token_ids: Tensor, keys: list[int], counts: list[int]) -> PendingLogprobs:
    """Log-probabilities of the untouched float32 logits x [N, V] (INV-53)."""
    logprobs = x.log_softmax(-1).clamp_(min=_LOGPROB_FLOOR)
    chosen, ranks = ops.rank_ref(logprobs, token_ids)
    most = max(counts)
    top: list[tuple[Tensor | None, Tensor] | None] = [None] * len(counts)
    if most > 0:
        ids, values = ops.top_logprobs_ref(logprobs, most)
    for i, count in enumerate(counts):
        if count == -1:
            top[i] = (None, logprobs[i])
        elif count > 0:
            top[i] = (ids[i, :count], values[i, :count])
    return PendingLogprobs(keys, counts, token_ids, chosen, ranks, torch.isfinite(chosen), top)
