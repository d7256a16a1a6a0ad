"""What each layer keeps of the past: its bytes per block, which blocks its queries still read, and equal layers.

`KVSpec`s are frozen and say everything that sizes a cache, so that whoever allocates and whoever reads agree
(INV-02). A `SpecRegistry` finds the rules for a spec by its class or the nearest parent that has some; a spec
without rules is refused at start. `kv_layout.py` makes groups and sizes of it.

    block   | state | state | ... |   block_size tokens, block_size / tokens_per_state states of state_bytes each
    page      the same, per layer    group    layers with equal specs, which can share a block table
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal, Protocol

from aioengine.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """What one layer keeps. Subclasses say how large a block is; `SpecRegistry` says how many are needed.

    Raises:
        ValueError: a size that cannot be.
    """

    block_size: int
    """Tokens per block."""

    def __post_init__(self) -> None:
        for name in ("block_size", *self.positive()):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{type(self).__name__}: {name}={value} must be at least 1")

    def positive(self) -> tuple[str, ...]:
        """Fields that must be at least 1 where they are given."""
        return ()

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError(f"{type(self).__name__} does not say how large its blocks are")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVSpec):
    """Keys and values per KV head."""

    num_kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of a stored number."""
    tokens_per_state: Fraction = Fraction(1)
    """Tokens that share a stored state: above 1 where a cache is compressed, below 1 where it is refined."""

    def __post_init__(self) -> None:
        KVSpec.__post_init__(self)  # no super() in a class with slots
        if self.tokens_per_state <= 0 or (self.block_size / self.tokens_per_state).denominator != 1:
            raise ValueError(
                f"{type(self).__name__}: a block of {self.block_size} tokens does not hold a whole number of states "
                f"of {self.tokens_per_state} tokens"
            )

    def positive(self) -> tuple[str, ...]:
        return ("num_kv_heads", "head_dim", "itemsize")

    @property
    def state_bytes(self) -> int:
        """Bytes of one stored state."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def page_bytes(self) -> int:
        return int(self.block_size / self.tokens_per_state) * self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is kept. A window or chunk only narrows what a query reads (the hybrid allocator is off, A20)."""

    window: int | None = None
    chunk: int | None = None

    def positive(self) -> tuple[str, ...]:
        return (*AttentionSpec.positive(self), "window", "chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A query reads the last `window` tokens, itself included; older ones can go."""

    window: int

    def positive(self) -> tuple[str, ...]:
        return (*AttentionSpec.positive(self), "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """A query reads from the beginning of its own chunk; finished chunks can go."""

    chunk: int

    def positive(self) -> tuple[str, ...]:
        return (*AttentionSpec.positive(self), "chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec(FullAttentionSpec):
    """One latent vector per token in place of keys and values (`num_kv_heads` 1), padded to an alignment."""

    alignment: int = 1

    def positive(self) -> tuple[str, ...]:
        return (*FullAttentionSpec.positive(self), "alignment")

    @property
    def state_bytes(self) -> int:
        plain = self.num_kv_heads * self.head_dim * self.itemsize
        return -(-plain // self.alignment) * self.alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of an encoder's output, whose length does not grow."""

    max_encoder_len: int

    def positive(self) -> tuple[str, ...]:
        return (*AttentionSpec.positive(self), "max_encoder_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class SSMSpec(KVSpec):
    """States of constant size, whatever the context: a block holds one of each.

    Cache modes: `none` keeps the running state, `align` also the last one at a block's end and the one being
    written, `all` the state at the end of every block.
    """

    state_shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    cache_mode: Literal["none", "align", "all"] = "none"
    num_speculative: int = 0

    def __post_init__(self) -> None:
        KVSpec.__post_init__(self)
        if not self.state_shapes or len(self.state_shapes) != len(self.itemsizes):
            raise ValueError(f"SSMSpec: {len(self.state_shapes)} state shapes, {len(self.itemsizes)} item sizes")
        if self.cache_mode not in ("none", "align", "all") or self.num_speculative < 0:
            raise ValueError(f"SSMSpec: cache_mode={self.cache_mode!r}, num_speculative={self.num_speculative}")

    @property
    def page_bytes(self) -> int:
        return sum(prod(shape) * size for shape, size in zip(self.state_shapes, self.itemsizes, strict=True))


class BlockRules(Protocol):
    """How many blocks a request has in a layer, and which of them no query will read again."""

    def num_blocks(self, spec: KVSpec, num_tokens: int) -> int:
        """Entries of the block table that cover so many tokens."""

    def num_out(self, spec: KVSpec, num_computed: int) -> int:
        """Leading entries that the token after `num_computed` and all later ones do not read."""

    def num_held(self, spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
        """Most blocks at a time of a request that grows to `num_tokens` by up to `step_tokens` in a step."""


class KeepAll:
    """Every token may be read by every later one."""

    def num_blocks(self, spec: KVSpec, num_tokens: int) -> int:
        return -(-num_tokens // spec.block_size)

    def num_out(self, spec: KVSpec, num_computed: int) -> int:
        return 0

    def num_held(self, spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
        return self.num_blocks(spec, num_tokens)


class KeepWindow(KeepAll):
    """Tokens before the window of the next query are out."""

    def num_out(self, spec: KVSpec, num_computed: int) -> int:
        assert isinstance(spec, SlidingWindowSpec)
        return max(0, num_computed - spec.window + 1) // spec.block_size

    def num_held(self, spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
        assert isinstance(spec, SlidingWindowSpec)
        return _held(spec.window, spec, num_tokens, step_tokens)


class KeepChunk(KeepAll):
    """Tokens before the chunk of the next query are out."""

    def num_out(self, spec: KVSpec, num_computed: int) -> int:
        assert isinstance(spec, ChunkedLocalSpec)
        return num_computed // spec.chunk * spec.chunk // spec.block_size

    def num_held(self, spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
        assert isinstance(spec, ChunkedLocalSpec)
        return _held(spec.chunk, spec, num_tokens, step_tokens)


def _held(reach: int, spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
    """Blocks over what the first query of a step reads, at most `reach` tokens with itself, and the step's tokens."""
    spanned = -(-(reach - 1 + step_tokens) // spec.block_size) + 1  # they may begin anywhere in a block
    return min(-(-num_tokens // spec.block_size), spanned)


class KeepEncoder(KeepAll):
    """The encoder's output, from the beginning to the end of the request."""

    def num_blocks(self, spec: KVSpec, num_tokens: int) -> int:
        assert isinstance(spec, CrossAttentionSpec)
        return -(-spec.max_encoder_len // spec.block_size)


class KeepStates:
    """The states that the cache mode asks for."""

    def num_blocks(self, spec: KVSpec, num_tokens: int) -> int:
        assert isinstance(spec, SSMSpec)
        if spec.cache_mode == "all":
            return -(-num_tokens // spec.block_size)
        return (1 if spec.cache_mode == "none" else 2) + spec.num_speculative

    def num_out(self, spec: KVSpec, num_computed: int) -> int:
        return 0

    def num_held(self, spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
        return self.num_blocks(spec, num_tokens)


@dataclass(frozen=True, slots=True)
class SpecRegistry:
    """The rules of each kind of spec. Immutable: `extended` makes another one."""

    rules: Mapping[type[KVSpec], BlockRules]

    def rules_of(self, spec: object) -> BlockRules:
        """The rules of the spec's class, or of the nearest parent that has some (A22).

        Raises:
            ValueError: there are none.
        """
        for cls in type(spec).__mro__:
            if cls in self.rules:
                return self.rules[cls]
        known = ", ".join(sorted(cls.__name__ for cls in self.rules))
        raise ValueError(f"{type(spec).__name__} is no kind of KV cache that is known; known are {known}")

    def extended(self, rules: Mapping[type[KVSpec], BlockRules]) -> SpecRegistry:
        """A registry with more kinds, or other rules for the same."""
        return SpecRegistry({**self.rules, **rules})


BUILTIN_SPECS = SpecRegistry(
    {
        FullAttentionSpec: KeepAll(),
        SlidingWindowSpec: KeepWindow(),
        ChunkedLocalSpec: KeepChunk(),
        CrossAttentionSpec: KeepEncoder(),
        SSMSpec: KeepStates(),
    }
)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with equal specs."""

    spec: KVSpec
    layers: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return len(self.layers) * self.spec.page_bytes


def layer_specs(model: ModelSpec, itemsize: int, block_size: int, *, hybrid: bool = False) -> tuple[KVSpec, ...]:
    """The spec of each layer. With `hybrid`, layers with a window keep no more than it."""

    def spec_of(window: int | None) -> KVSpec:
        full = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            itemsize=itemsize,
            window=window,
        )
        if not hybrid or window is None:
            return full
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            itemsize=itemsize,
            window=window,
        )

    return tuple(spec_of(window) for window in model.layer_windows)


def group_layers(specs: tuple[KVSpec, ...], registry: SpecRegistry = BUILTIN_SPECS) -> tuple[KVGroup, ...]:
    """Layers with equal specs together, in the order of their first layers.

    Raises:
        ValueError: a layer whose spec has no rules.
    """
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        try:
            registry.rules_of(spec)
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from None
        layers.setdefault(spec, []).append(layer)
    return tuple(KVGroup(spec, tuple(found)) for spec, found in layers.items())
