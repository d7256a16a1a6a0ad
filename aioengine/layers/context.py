"""What one forward pass needs to know besides its tokens: made by the runner for each step, never global.

`StepContext` is handed to `model.forward` and from there to every layer. On a CPU its tensors are exactly
as long as the step; under a CUDA graph they are fixed device buffers padded to a bucket (slot -1, empty
rows, null blocks), and only their contents change between replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aioengine.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens belong to which sequence, and where their keys and values lie in the layers of one group.

    T tokens, S sequences; all tensors int32 and contiguous.
    """

    query_start_loc: torch.Tensor
    """[S + 1] prefix sum of the numbers of new tokens."""
    seq_lens: torch.Tensor
    """[S] context + new tokens; 0 in padding rows."""
    block_table: torch.Tensor
    """[S, max_blocks] block ids in logical order; entries past a sequence's end, or before the window of its first
    query where the group's layers have one, are never read."""
    slot_mapping: torch.Tensor
    """[T] block id * block_size + offset; -1 is padding and writes nothing."""
    num_tokens: int
    num_seqs: int
    max_query_len: int
    """Hint for the shape of the work; the true value is in `query_start_loc`."""
    max_seq_len: int
    """Hint likewise."""


@dataclass(frozen=True, slots=True)
class FinalRows:
    """The only tokens whose hidden states are read: the last of each sequence.

    Of all others the last layer keeps the keys and values, and computes nothing more.
    """

    tokens: torch.Tensor
    """[S] which token of the step; any one in padding rows."""
    attention: Sequence[AttentionMetadata]
    """By group: these tokens as the step's only queries."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """The explicit context of one forward pass."""

    ops: Ops
    """The device's operations."""
    attention: Sequence[AttentionMetadata]
    """By group of layers that share a block table (`kv_layout.py`)."""
    kv_caches: Sequence[torch.Tensor]
    """Per layer [num_blocks, num_kv_heads, block_size, 2 * head_dim], K then V on the last axis."""
    group_of_layer: Sequence[int]
    final: FinalRows | None = None
    """None: the hidden states of all tokens are wanted."""

    def attention_of(self, layer: int) -> AttentionMetadata:
        """The metadata of the group that a layer is in."""
        return self.attention[self.group_of_layer[layer]]
