"""Tables of rotary position embeddings, with the scalings that Llama-like checkpoints use.

The result is one float32 table [positions, rotary_dim], cosines in the first half and sines in the second,
in the rotate-half (NeoX) layout. Models make it once at load; kernels only read it. A set of frequencies
that a scaling would choose per sequence (dynamic, longrope) is chosen here once, from the engine's context
window, so that a token's rotation never depends on what else is in the batch.

Sources: Su et al. 2021 (RoFormer); linear and NTK-aware scaling as published for Llama; Peng et al. 2023
(YaRN); Ding et al. 2024 (LongRoPE); the frequency rule published with Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from aioengine.errors import ModelLoadError

Scaling = Mapping[str, object]


def cos_sin_table(
    *,
    rotary_dim: int,
    theta: float,
    scaling: Scaling | None,
    max_position_embeddings: int,
    num_positions: int,
) -> torch.Tensor:
    """The table for positions 0 to `num_positions` - 1.

    Args:
        scaling: `ModelSpec.rope_scaling`; None for plain rotary embeddings.
        max_position_embeddings: the checkpoint's own figure, which the scalings refer to.

    Raises:
        ModelLoadError: the scaling is of an unknown type or lacks a value; the message names it.
    """
    rope_type = scaling_type(scaling)
    if rope_type not in _SCALINGS:
        raise ModelLoadError(
            f"rotary scaling {rope_type!r} is not supported; supported: {', '.join(sorted(_SCALINGS))}"
        )
    frequencies, magnitude = _SCALINGS[rope_type](
        rotary_dim, theta, _Values(rope_type, scaling or {}), max_position_embeddings, num_positions
    )
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1).contiguous()


def scaling_type(scaling: Scaling | None) -> str:
    """The name of a scaling; older checkpoints call the key `type`."""
    if not scaling:
        return "default"
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


class _Values:
    """The numbers of one scaling, with errors that name what is missing."""

    def __init__(self, rope_type: str, scaling: Scaling) -> None:
        self._rope_type = rope_type
        self._scaling = scaling

    def number(self, name: str, default: float | None = None) -> float:
        value = self._scaling.get(name)
        if value is None:
            if default is None:
                raise ModelLoadError(f"rotary scaling {self._rope_type!r} lacks {name}")
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelLoadError(f"rotary scaling {self._rope_type!r}: {name}={value!r} is not a number")
        return float(value)

    def optional(self, name: str) -> float | None:
        return None if self._scaling.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._scaling.get(name)
        return default if value is None else bool(value)

    def numbers(self, name: str, length: int) -> torch.Tensor:
        value = self._scaling.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != length:
            raise ModelLoadError(f"rotary scaling {self._rope_type!r}: {name} must be a list of {length} numbers")
        return torch.tensor([float(v) for v in value], dtype=torch.float32)


def _exponents(rotary_dim: int) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _plain(rotary_dim: int, theta: float) -> torch.Tensor:
    return 1.0 / torch.pow(theta, _exponents(rotary_dim))


def _default(
    rotary_dim: int, theta: float, values: _Values, max_positions: int, num_positions: int
) -> tuple[torch.Tensor, float]:
    return _plain(rotary_dim, theta), 1.0


def _linear(
    rotary_dim: int, theta: float, values: _Values, max_positions: int, num_positions: int
) -> tuple[torch.Tensor, float]:
    return _plain(rotary_dim, theta) / values.number("factor"), 1.0


def _dynamic(
    rotary_dim: int, theta: float, values: _Values, max_positions: int, num_positions: int
) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling of the base, by how far the context window exceeds the trained one."""
    factor = values.number("factor")
    stretch = factor * max(num_positions, max_positions) / max_positions - (factor - 1.0)
    return _plain(rotary_dim, theta * stretch ** (rotary_dim / (rotary_dim - 2))), 1.0


def _llama3(
    rotary_dim: int, theta: float, values: _Values, max_positions: int, num_positions: int
) -> tuple[torch.Tensor, float]:
    """Long waves are slowed by `factor`, short ones kept, those between blended linearly in frequency."""
    frequencies = _plain(rotary_dim, theta)
    factor, low, high = (values.number(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = values.number("original_max_position_embeddings", max_positions)
    turns = trained / (2 * math.pi / frequencies)  # how often a wave turns within the trained context
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: slowed, 1: kept
    return (1 - share) * frequencies / factor + share * frequencies, 1.0


def _yarn(
    rotary_dim: int, theta: float, values: _Values, max_positions: int, num_positions: int
) -> tuple[torch.Tensor, float]:
    trained = values.number("original_max_position_embeddings", max_positions)
    factor = values.number("factor", max_positions / trained)

    def dimension(turns: float) -> float:
        """The dimension whose wave turns this often within the trained context."""
        return rotary_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(values.number("beta_fast", 32.0)), dimension(values.number("beta_slow", 1.0))
    if values.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = (last - first) or 0.001
    slowed = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    waves = torch.pow(theta, _exponents(rotary_dim))
    frequencies = 1.0 / (factor * waves) * slowed + 1.0 / waves * (1 - slowed)

    magnitude = values.optional("attention_factor")
    if magnitude is None:
        own, all_dims = values.optional("mscale"), values.optional("mscale_all_dim")
        if own and all_dims:
            magnitude = _yarn_magnitude(factor, own) / _yarn_magnitude(factor, all_dims)
        else:
            magnitude = _yarn_magnitude(factor, 1.0)
    return frequencies, magnitude


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    rotary_dim: int, theta: float, values: _Values, max_positions: int, num_positions: int
) -> tuple[torch.Tensor, float]:
    """One set of divisors for windows within the trained context, another for longer ones."""
    trained = values.number("original_max_position_embeddings")
    divisors = values.numbers("long_factor" if num_positions > trained else "short_factor", rotary_dim // 2)
    factor = values.number("factor", max_positions / trained)
    magnitude = values.optional("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return 1.0 / (divisors * torch.pow(theta, _exponents(rotary_dim))), magnitude


def _factors(
    rotary_dim: int, theta: float, values: _Values, max_positions: int, num_positions: int
) -> tuple[torch.Tensor, float]:
    """Divisors stored in the checkpoint (GGUF writes the outcome of a scaling instead of its parameters)."""
    return _plain(rotary_dim, theta) / values.numbers("factors", rotary_dim // 2), 1.0


_SCALINGS: dict[str, Callable[[int, float, _Values, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
