"""The operations that models are written in; each device has one implementation.

`TorchOps` (ops_torch.py) is plain torch: the oracle, and the path of any device. `CpuOps` (ops_cpu.py) calls
the native kernels on quantized weights; a CUDA device brings its Triton kernels. Models call nothing else,
so that one model file serves all devices.

Lifetime of results: an implementation may return buffers that it uses again. A result is valid until the
next call of the same operation, `add_rms_norm` may overwrite both its inputs, `rope_and_cache` its qkv. A
model that chains operations as a decoder layer does never notices; whoever keeps a result longer copies it.

What runs beside the layers of a model is a sum: `residual`, and `x`, what is still to be added to it (None:
nothing). `linear_add` makes such a pair and `add_norm_linear` takes it, so that a device may add at either place;
`ComposedOps` has both from the plain operations.

Legend: T tokens, H hidden size, N outputs, K inputs, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from aioengine.layers.context import AttentionMetadata
    from aioengine.raw_tensor import RawTensor


class Weight(Protocol):
    """A matrix as a device keeps it: made by `Ops.pack`, only handed back to the same `Ops`."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds, bias included."""


class Ops(Protocol):
    """One device's operations. An instance belongs to one engine and to the thread that runs its steps."""

    # ---- weights: called once, while loading ------------------------------------------------------------

    def pack(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor]) -> Weight:
        """One weight from matrices stacked along their outputs, in this order; `biases` likewise or empty."""

    def vector(self, raw: RawTensor) -> torch.Tensor:
        """A norm's weight, in the type the operations want."""

    def table(self, values: torch.Tensor) -> torch.Tensor:
        """A float32 table (rotary cosines and sines) on the device."""

    # ---- the forward pass -------------------------------------------------------------------------------

    def embed(self, input_ids: torch.Tensor, table: Weight) -> torch.Tensor:
        """Rows of an embedding table: ids [T] -> [T, H]. Ids are within the table; the intake checks them."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, H] -> [T, H]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """x W^T + bias: [T, K] -> [T, N]."""

    def linear_add(
        self, x: torch.Tensor, weight: Weight, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The sum of linear(x) and residual, which may be overwritten."""

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm_w: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""

    def add_norm_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm_w: torch.Tensor, eps: float, weight: Weight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(linear(norm(x + residual)), x + residual)."""

    def add_norm_gated_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm_w: torch.Tensor, eps: float, weight: Weight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(silu_mul(linear(norm(x + residual))), x + residual)."""

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> torch.Tensor:
        """Norms (if given) and rotates q and k, writes k and v to their slots, returns q [T, heads * D]."""

    def attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Causal attention of [T, heads * D] over the paged cache.

        Args:
            window: how many tokens a query sees, itself included; 0 sees all.
            softcap: bound of the scores by tanh; 0 is none.
        """

    def take(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows [S] of x [T, ...], anew: [S, ...]. Called on a device that gives `StepContext.final`."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half: [T, 2 I] -> [T, I]."""

    def logits(self, hidden: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Float32 scores of the vocabulary for a few rows: [R, H] -> [R, V]."""


class ComposedOps:
    """Fused operations from plain ones, for an implementation of `Ops` to inherit."""

    def take(self: Ops, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    def linear_add(
        self: Ops, x: torch.Tensor, weight: Weight, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return self.linear(x, weight), residual

    def add_norm(
        self: Ops, x: torch.Tensor | None, residual: torch.Tensor, norm_w: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x is None:
            return self.rms_norm(residual, norm_w, eps), residual
        return self.add_rms_norm(x, residual, norm_w, eps)

    def add_norm_linear(
        self: Ops, x: torch.Tensor | None, residual: torch.Tensor, norm_w: torch.Tensor, eps: float, weight: Weight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.add_norm(x, residual, norm_w, eps)
        return self.linear(x, weight), residual

    def add_norm_gated_linear(
        self: Ops, x: torch.Tensor | None, residual: torch.Tensor, norm_w: torch.Tensor, eps: float, weight: Weight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.add_norm_linear(x, residual, norm_w, eps, weight)
        return self.silu_mul(x), residual
