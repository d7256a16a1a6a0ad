"""Which layers share a block table and which share memory: from the layers' specs to groups, tensors and sizes.

Layers that keep the same of the past form groups of one size, and each group has a block table of its own. The pool
has as many tensors as a group has layers; tensor i holds layer i of every group, and a block is one page in each:

                group 0 (full)   group 1 (window)   group 2 (window)
    tensor 0       layer 5           layer 0            layer 3
    tensor 1       layer 11          layer 1            layer 4
    tensor 2       layer 17          layer 2              -        padding

So all groups draw their blocks from one pool: a block belongs to one group at a time, and a page has the same bytes in
all of them. Layers with smaller pages get more tokens in a block, by a whole factor (`scale`).

Without windows there is one group, and a tensor per layer. A model all of whose layers have a window stays one group
that keeps everything, because the prefix cache is governed through a group that does. Made once per engine from
`layout_of`; `device.py` allocates by it, the scheduler gets `scheduler_groups`, the runners the rest.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from aioengine.config import ResolvedConfig
from aioengine.kv_spec import (
    BUILTIN_SPECS,
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVGroup,
    KVSpec,
    SlidingWindowSpec,
    SpecRegistry,
    group_layers,
    layer_specs,
)
from aioengine.model_spec import ModelSpec

MAX_GROUPS = 8
"""Most that the scheduler has."""
TOLERATED_WASTE = 1.15
"""Fewer groups are preferred to less padding up to this factor of memory: every group is work in every step."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

SchedulerGroup = tuple[Literal["full", "sliding", "chunked"], int, int]
"""Kind (full, sliding or chunked), window or chunk in tokens (0 for full), block size in units of the finest."""


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model and how they lie in the pool."""

    groups: tuple[KVGroup, ...]
    """The first keeps everything; its blocks are the finest."""
    num_tensors: int
    """Tensors of the pool: layers of the largest group."""
    max_step_tokens: int
    """Most new tokens of a request in one step: a window is this much wider while they are computed."""
    registry: SpecRegistry = BUILTIN_SPECS

    @cached_property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @cached_property
    def group_of_layer(self) -> tuple[int, ...]:
        """Which block table a layer reads."""
        found = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        return tuple(found[layer] for layer in range(self.num_layers))

    @cached_property
    def tensor_of_layer(self) -> tuple[int, ...]:
        """Which tensor of the pool a layer has, shared with a layer of each other group."""
        found = {layer: i for group in self.groups for i, layer in enumerate(group.layers)}
        return tuple(found[layer] for layer in range(self.num_layers))

    @property
    def block_size(self) -> int:
        """Tokens of a block of the first group."""
        return self.groups[0].spec.block_size

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, by group."""
        return tuple(group.spec.block_size for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all tensors."""
        return self.num_tensors * self.groups[0].spec.page_bytes

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return sum(group.page_bytes // group.spec.block_size for group in self.groups)

    @property
    def scheduler_groups(self) -> tuple[SchedulerGroup, ...]:
        """The groups as the scheduler wants them."""
        return tuple(_scheduler_group(group.spec, self.block_size) for group in self.groups)

    def page_shape(self, layer: int) -> tuple[int, int, int]:
        """A block of a layer: KV heads, tokens, keys and values side by side."""
        spec = self.groups[self.group_of_layer[layer]].spec
        assert isinstance(spec, AttentionSpec)
        return spec.num_kv_heads, spec.block_size, 2 * spec.head_dim

    def blocks_of(self, num_tokens: int) -> int:
        """Most blocks that a request of so many tokens holds at a time, over all groups."""
        held = (
            self.registry.rules_of(group.spec).num_held(group.spec, num_tokens, self.max_step_tokens)
            for group in self.groups
        )
        return sum(held)

    def longest_request(self, num_blocks: int) -> int:
        """Tokens of the longest request that so many blocks hold."""
        return bisect_right(range(num_blocks * self.block_size + 1), num_blocks, key=self.blocks_of) - 1

    def num_kv_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """Tokens that fit into so many blocks, in requests as long as they may be."""
        longest = -(-max_model_len // self.block_size) * self.block_size
        return longest * num_blocks // self.blocks_of(longest)

    def __str__(self) -> str:
        """For people: how many layers keep what."""
        kinds: dict[KVSpec, list[int]] = {}
        for group in self.groups:
            kinds.setdefault(group.spec, []).append(len(group.layers))
        parts = []
        for spec, sizes in kinds.items():
            kind, size, _ = _scheduler_group(spec, self.block_size)
            name = {"full": "full", "sliding": f"window {size}", "chunked": f"chunk {size}"}[kind]
            in_groups = f" ({len(sizes)} groups)" if len(sizes) > 1 else ""
            parts.append(f"{sum(sizes)} layers {name}{in_groups}")
        return f"{len(self.groups)} group{'s' if len(self.groups) > 1 else ''}: {', '.join(parts)}"


def layout_of(model: ModelSpec, resolved: ResolvedConfig) -> KVLayout:
    """The layout that a configuration gives a model."""
    windows = [None if window is None or window >= resolved.max_model_len else window for window in model.layer_windows]
    hybrid = resolved.hybrid_kv_cache and None in windows
    model = dataclasses.replace(model, layer_windows=tuple(windows))
    specs = layer_specs(model, DTYPE_BYTES[resolved.kv_cache_dtype], resolved.block_size, hybrid=hybrid)
    # As in the scheduler: a step's first query comes as many positions earlier as drafts may be in flight.
    reach = 1 + resolved.num_speculative_tokens * (2 if resolved.async_scheduling else 1)
    step_tokens = min(max(resolved.max_num_batched_tokens, reach), resolved.max_model_len)
    return make_layout(specs, max_model_len=resolved.max_model_len, max_step_tokens=step_tokens)


def make_layout(
    specs: Sequence[KVSpec], *, max_model_len: int, max_step_tokens: int, registry: SpecRegistry = BUILTIN_SPECS
) -> KVLayout:
    """The layout of layers with these specs.

    Groups of n layers waste memory where a kind of layer does not fill its last group, and groups that keep more than
    they need waste it too. Of all n, and of one group that keeps everything, those count that waste at worst (for
    requests shorter than any window, or as long as may be) little more than the best; of these, the fewest groups win.

    Raises:
        ValueError: a layer of a kind that has no place in a layout, pages that do not fit together, too many groups.
    """
    kinds = group_layers(tuple(_equal_pages(specs)), registry)
    kinds = tuple(sorted(kinds, key=lambda kind: not isinstance(kind.spec, FullAttentionSpec)))
    for kind in kinds:
        _scheduler_group(kind.spec, kind.spec.block_size)
    base = kinds[0].spec
    if not isinstance(base, FullAttentionSpec) or base.block_size != min(kind.spec.block_size for kind in kinds):
        raise ValueError(
            f"the layers that keep the most of the past are {type(base).__name__} with blocks of {base.block_size} "
            "tokens; some layer must keep everything, in blocks no larger than those of the others"
        )

    def layout(kinds: Sequence[KVGroup], size: int) -> KVLayout:
        groups = [
            KVGroup(kind.spec, kind.layers[first : first + size])
            for kind in kinds
            for first in range(0, len(kind.layers), size)
        ]
        return KVLayout(tuple(groups), size, max_step_tokens, registry)

    choices = [layout(kinds, size) for size in range(1, max(len(kind.layers) for kind in kinds) + 1)]
    if {_as_full(kind.spec) for kind in kinds} == {base}:
        choices.append(layout([KVGroup(base, tuple(range(len(specs))))], len(specs)))
    choices = [choice for choice in choices if len(choice.groups) <= MAX_GROUPS]
    if not choices:
        raise ValueError(f"{len(kinds)} kinds of layers need more than {MAX_GROUPS} groups")

    def pages(kinds: Sequence[KVGroup], num_tokens: int, size: int | None = None) -> int:
        """Pages of a request, in groups of `size` layers or without any padding."""
        held = ((kind, registry.rules_of(kind.spec).num_held(kind.spec, num_tokens, 1)) for kind in kinds)
        return sum((size or len(kind.layers)) * blocks for kind, blocks in held)

    def waste(choice: KVLayout) -> float:
        lengths = (max(kind.spec.block_size for kind in kinds), max_model_len)
        return max(pages(choice.groups, n, choice.num_tensors) / pages(kinds, n) for n in lengths)

    least = min(waste(choice) for choice in choices)
    few = [choice for choice in choices if waste(choice) <= TOLERATED_WASTE * least]
    return min(few, key=lambda choice: (len(choice.groups), waste(choice)))


def _equal_pages(specs: Sequence[KVSpec]) -> Iterator[KVSpec]:
    """The specs with block sizes that make all pages equal, and without windows that narrow only what is read.

    Raises:
        ValueError: a page does not fit the largest a whole number of times.
    """
    largest = max(spec.page_bytes for spec in specs)
    for layer, spec in enumerate(specs):
        if isinstance(spec, FullAttentionSpec):
            spec = dataclasses.replace(spec, window=None, chunk=None)
        if largest % spec.page_bytes:
            raise ValueError(
                f"layer {layer}: a page of {spec.page_bytes} bytes does not fit into one of {largest} bytes, the "
                "largest of all layers, a whole number of times; they cannot share a pool"
            )
        yield dataclasses.replace(spec, block_size=spec.block_size * (largest // spec.page_bytes))


def _as_full(spec: KVSpec) -> KVSpec:
    """The spec of a layer that keeps everything in pages of the same shape."""
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalSpec):
        return spec
    names = (field.name for field in dataclasses.fields(AttentionSpec))
    return FullAttentionSpec(**{name: getattr(spec, name) for name in names})


def _scheduler_group(spec: KVSpec, base: int) -> SchedulerGroup:
    """
    Raises:
        ValueError: the scheduler has no rules for this kind.
    """
    scale = spec.block_size // base
    if isinstance(spec, SlidingWindowSpec):
        return "sliding", spec.window, scale
    if isinstance(spec, ChunkedLocalSpec):
        return "chunked", spec.chunk, scale
    if isinstance(spec, FullAttentionSpec):
        return "full", 0, scale
    raise ValueError(f"{type(spec).__name__} layers cannot be run yet: the scheduler keeps full, sliding and chunked")
