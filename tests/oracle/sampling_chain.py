"""The sampling chain for one row, written from its definition with numpy and Python integers, slow and plain.

Shares no code with the engine. `order` is the chain itself, so that a test can swap two steps and see that it
matters. A token id of -1 stands for a row without any token left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

CHAIN = (
    "allowed",
    "bad_words",
    "min_tokens",
    "bias",
    "repetition",
    "frequency",
    "presence",
    "greedy",
    "temperature",
    "min_p",
    "top_k",
    "top_p",
    "draw",
)

_U32 = 0xFFFFFFFF


@dataclass
class Row:
    """Settings of one row with the names of SamplingParams; token ids instead of texts."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed: Iterable[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    stop_ids: Sequence[int] = ()
    min_tokens: int = 0
    seed: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Ten rounds of Philox4x32."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & _U32, (first >> 32) ^ c[3] ^ k[1], first & _U32]
        k = [(k[0] + 0x9E3779B9) & _U32, (k[1] + 0xBB67AE85) & _U32]
    return c


def noise(seed: int, position: int, token_id: int) -> np.float32:
    """Gumbel noise of one token."""
    key = seed & (2**64 - 1)
    word = philox([token_id // 4, position, 0, 0], [key & _U32, key >> 32])[token_id % 4]
    folded = word if word < 2**31 else word ^ _U32
    uniform = max(np.float32(folded) * np.float32(4.6566127342e-10), np.float32(2.0**-32))
    return np.float32(-math.log(-math.log1p(-float(uniform))))


def survivors(row: Row, logits: np.ndarray, order: Sequence[str] = CHAIN) -> tuple[np.ndarray, int | None]:
    """Logits after the chain, -inf where nothing may be drawn, and the token if the row was greedy."""
    x = logits.astype(np.float32)
    vocab = np.arange(len(x))
    for step in order:
        match step:
            case "allowed" if row.allowed is not None:
                x[~np.isin(vocab, list(row.allowed))] = -np.inf
            case "bad_words":
                for *beginning, last in row.bad_words:
                    if len(beginning) == 0 or list(row.output[-len(beginning) :]) == beginning:
                        x[last] = -np.inf
            case "min_tokens" if len(row.output) < row.min_tokens:
                x[list(row.stop_ids)] = -np.inf
            case "bias":
                for token_id, bias in row.logit_bias.items():
                    x[token_id] += np.float32(bias)
            case "repetition":
                for token_id in {*row.prompt, *row.output}:
                    strength = np.float32(row.repetition_penalty)
                    x[token_id] = x[token_id] / strength if x[token_id] > 0 else x[token_id] * strength
            case "frequency":
                for token_id in set(row.output):
                    count = np.float32(list(row.output).count(token_id))
                    x[token_id] -= np.float32(row.frequency_penalty) * count
            case "presence":
                for token_id in set(row.output):
                    x[token_id] -= np.float32(row.presence_penalty)
            case "greedy" if row.temperature < 1e-5:
                return x, int(np.argmax(x)) if x.max() > -np.inf else -1
            case "temperature":
                x = x / np.float32(max(row.temperature, 1e-5))
            case "min_p" if row.min_p > 0:
                x[x < x.max() + np.log(np.float32(row.min_p))] = -np.inf
            case "top_k" if 0 < row.top_k < len(x):
                x[x < np.sort(x)[-row.top_k]] = -np.inf
            case "top_p" if row.top_p < 1:
                x = _top_p(x, float(np.float32(row.top_p)))
    return x, None


def is_top_p_clear(row: Row, logits: np.ndarray) -> bool:
    """Whether no partial sum of probabilities lies so near top_p that rounding decides."""
    if row.top_p >= 1:
        return True
    before = CHAIN[: CHAIN.index("top_p")]
    x, _ = survivors(row, logits, before)
    mass = _ordered_mass(x)[1]
    return bool(np.all(np.abs(mass - float(np.float32(row.top_p))) > 1e-5))


def choose(row: Row, logits: np.ndarray, order: Sequence[str] = CHAIN) -> int:
    """The token of this row, or -1."""
    x, greedy = survivors(row, logits, order)
    if greedy is not None:
        return greedy
    if x.max() == -np.inf:
        return -1
    candidates = np.flatnonzero(x > -np.inf)
    scores = [x[i] + noise(row.seed, len(row.output), int(i)) for i in candidates]
    return int(candidates[int(np.argmax(scores))])


def _ordered_mass(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ordered = np.sort(x)[::-1].astype(np.float64)
    weights = np.exp(ordered - ordered[0]) if ordered[0] > -np.inf else np.ones(len(x))
    return ordered, np.cumsum(weights) / weights.sum()


def _top_p(x: np.ndarray, top_p: float) -> np.ndarray:
    ordered, mass = _ordered_mass(x)
    last = min(int(np.searchsorted(mass, top_p)), len(x) - 1)
    return np.where(x >= np.float32(ordered[last]), x, np.float32(-np.inf))
