"""Operations on a GPU: the Triton kernels, cuBLAS for products, 16-bit weights.

Every result is a new tensor, so that the same calls serve eager steps and graph capture. Quantized weights
are dequantized to the model's type while they are packed. Attention takes its work lists from the step's
metadata (`DeviceAttention`), which the runner's `graphs.py` makes. One instance belongs to one engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aioengine.dummy import DummyTensor
from aioengine.kernels import activation, attention, attention_prefill, linear, norm, rope
from aioengine.kernels.attention_plan import AttentionPlan
from aioengine.kernels.attention_prefill import LongRow
from aioengine.layers.context import AttentionMetadata
from aioengine.layers.ops import ComposedOps, Weight

if TYPE_CHECKING:
    from aioengine.raw_tensor import RawTensor

_STORED_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class DeviceAttention(AttentionMetadata):
    """Attention metadata with the work lists of the step."""

    plans: Mapping[int, AttentionPlan] = field(default_factory=dict)
    """By window size of the layer; 0 sees all."""
    long_rows: tuple[LongRow, ...] = ()
    """Rows that the plan of window 0 leaves to cuDNN."""


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A matrix [N, K] in the model's type and its bias [N]."""

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


class CudaOps(ComposedOps):
    """See `Ops` for what each operation does; `logits` are in the model's type, the sampler widens them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, use_skinny: bool = True) -> None:
        """
        Args:
            device: a CUDA device, or a CPU where Triton's interpreter runs the kernels.
            use_skinny: products of few rows by our own kernel where its table prefers it to cuBLAS.
        """
        self.device = device
        self.dtype = dtype
        self.use_skinny = use_skinny

    # ---- weights ----------------------------------------------------------------------------------------

    def pack(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor]) -> DeviceWeight:
        num_inputs = parts[0].shape[1]
        matrix = torch.empty((sum(part.shape[0] for part in parts), num_inputs), dtype=self.dtype, device=self.device)
        first = 0
        for part in parts:
            self._fill(matrix[first : first + part.shape[0]], part)
            first += part.shape[0]
        if not biases:
            return DeviceWeight(matrix, None)
        bias = torch.empty(len(matrix), dtype=self.dtype, device=self.device)
        first = 0
        for raw in biases:
            self._fill(bias[first : first + raw.shape[0]], raw)
            first += raw.shape[0]
        return DeviceWeight(matrix, bias)

    def vector(self, raw: RawTensor) -> torch.Tensor:
        vector = torch.empty(raw.shape, dtype=torch.float32, device=self.device)
        self._fill(vector, raw)
        return vector

    def table(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, torch.float32).contiguous()

    def _fill(self, target: torch.Tensor, raw: RawTensor) -> None:
        """Writes a stored tensor to its place on the device, in the type of `target`."""
        if isinstance(raw, DummyTensor):
            if raw.std == 0:
                target.fill_(raw.mean)
            else:
                generator = torch.Generator(self.device).manual_seed(raw.seed)
                target.normal_(raw.mean, raw.std, generator=generator)
            return
        stored = _STORED_TYPES.get(raw.kind)
        if stored is None:
            values = torch.from_numpy(raw.dequantize())
        else:
            values = torch.from_numpy(raw.data).view(stored).view(tuple(raw.shape))
        target.copy_(values)

    # ---- the forward pass -------------------------------------------------------------------------------

    def embed(self, input_ids: torch.Tensor, table: Weight) -> torch.Tensor:
        return _own(table).matrix.index_select(0, input_ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.add_rms_norm(x, residual, weight, eps)

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        own = _own(weight)
        if self._is_skinny(x, own.num_outputs):
            return linear.linear(x, own.matrix, own.bias)
        return F.linear(x, own.matrix, own.bias)

    def linear_add(
        self, x: torch.Tensor, weight: Weight, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        own = _own(weight)
        if self._is_skinny(x, own.num_outputs) and own.bias is None:
            return None, linear.linear_add(x, own.matrix, residual)
        return super().linear_add(x, weight, residual)

    def add_norm_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm_w: torch.Tensor, eps: float, weight: Weight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = _own(weight)
        if x is None and self._is_skinny(residual, own.num_outputs):
            return linear.norm_linear(residual, norm_w, eps, own.matrix, own.bias), residual
        return super().add_norm_linear(x, residual, norm_w, eps, weight)

    def add_norm_gated_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm_w: torch.Tensor, eps: float, weight: Weight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = _own(weight)
        if x is None and own.bias is None and self._is_skinny(residual, own.num_outputs // 2, gated=True):
            return linear.norm_gated_linear(residual, norm_w, eps, own.matrix), residual
        normed, residual = self.add_norm(x, residual, norm_w, eps)  # the norm is fused with the gate or not at all
        return self.silu_mul(self.linear(normed, weight)), residual

    def _is_skinny(self, x: torch.Tensor, num_outputs: int, gated: bool = False) -> bool:
        """Whether our own kernel multiplies the rows of x faster than cuBLAS."""
        rows, num_inputs = x.shape
        return self.use_skinny and linear.skinny_tile(rows, num_outputs, num_inputs, gated) is not None

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
        return rope.rope_and_cache(
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
        assert isinstance(meta, DeviceAttention), type(meta)
        plan = meta.plans[window]
        # The rotary kernel stands between, so the work list may be read before the wait.
        out = attention.paged_attention(q, kv_cache, meta.block_table, plan, scale, softcap, is_settled=True)
        if meta.long_rows and window == 0:
            attention_prefill.long_prefill_attention(out, q, kv_cache, meta.block_table, meta.long_rows, scale)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)

    def logits(self, hidden: torch.Tensor, weight: Weight) -> torch.Tensor:
        return self.linear(hidden, weight)


def _own(weight: Weight) -> DeviceWeight:
    assert isinstance(weight, DeviceWeight), type(weight)
    return weight
