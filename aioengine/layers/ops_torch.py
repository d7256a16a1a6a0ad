"""Operations in plain torch, from the kernels' references: the oracle of tests, and a path for any device.

Weights are float tensors, dequantized when they are packed; results are new tensors. Slow and simple on
purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aioengine.kernels.activation import silu_mul_ref
from aioengine.kernels.attention import paged_attention_ref
from aioengine.kernels.norm import add_rms_norm_ref, rms_norm_ref
from aioengine.kernels.rope import rope_and_cache_ref
from aioengine.layers.context import AttentionMetadata
from aioengine.layers.ops import ComposedOps, Weight

if TYPE_CHECKING:
    from aioengine.raw_tensor import RawTensor


@dataclass(frozen=True, slots=True)
class TorchWeight:
    """A float matrix [N, K] and its bias [N]."""

    matrix: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_outputs(self) -> int:
        return self.matrix.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.matrix.shape[1]

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (self.bias.nbytes if self.bias is not None else 0)


class TorchOps(ComposedOps):
    """See `Ops` for what each operation does."""

    def __init__(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        self._device = device if device is not None else torch.device("cpu")
        self._dtype = dtype

    def pack(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor]) -> TorchWeight:
        matrix = torch.cat([self.vector(part) for part in parts])
        return TorchWeight(matrix, torch.cat([self.vector(bias) for bias in biases]) if biases else None)

    def vector(self, raw: RawTensor) -> torch.Tensor:
        return torch.tensor(raw.dequantize(), dtype=self._dtype, device=self._device)

    def table(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device)

    def embed(self, input_ids: torch.Tensor, table: Weight) -> torch.Tensor:
        return F.embedding(input_ids, _own(table).matrix)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm_ref(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm_ref(x, residual, weight, eps)

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        own = _own(weight)
        return F.linear(x, own.matrix, own.bias)

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
        return rope_and_cache_ref(
            qkv,
            positions,
            cos_sin,
            slot_mapping,
            kv_cache,
            q_norm,
            k_norm,
            eps,
            num_heads,
            num_kv_heads,
            head_dim,
        )

    def attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        return paged_attention_ref(
            q, kv_cache, meta.block_table, meta.query_start_loc, meta.seq_lens, scale, window, softcap
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul_ref(gate_up)

    def logits(self, hidden: torch.Tensor, weight: Weight) -> torch.Tensor:
        return self.linear(hidden, weight).float()


def _own(weight: Weight) -> TorchWeight:
    assert isinstance(weight, TorchWeight), type(weight)
    return weight
