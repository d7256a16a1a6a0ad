"""Operations on a CPU: the native kernels, on weights in their stored precision.

Activations are float32 and live in scratch buffers that are made once and used again, so the layer loop
allocates nothing. Kernels get raw addresses; shapes are checked where buffers are made, not per call. One
instance belongs to one engine and to the thread that runs its steps.

With a tape, nothing is computed: every kernel call is recorded there instead (`CpuForward`), which takes
Python out of the forward pass: no interpreter between kernels, and no contest for its lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.fastcore import native
from aioengine.layers.context import AttentionMetadata, StepContext
from aioengine.layers.ops import ComposedOps, Weight

if TYPE_CHECKING:
    from aioengine.models import Model
    from aioengine.raw_tensor import RawTensor

_KV_CODES = {
    torch.float32: native.KV_FLOAT32,
    torch.float16: native.KV_FLOAT16,
    torch.bfloat16: native.KV_BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix [N, K] and its float32 bias [N]."""

    matrix: native.PackedMatrix
    bias: torch.Tensor | None

    @property
    def num_outputs(self) -> int:
        return self.matrix.n

    @property
    def num_inputs(self) -> int:
        return self.matrix.k

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (self.bias.nbytes if self.bias is not None else 0)


class _Scratch:
    """Results of one operation: a buffer for each width, as long as the longest asked for yet."""

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def view(self, rows: int, width: int) -> tuple[torch.Tensor, int]:
        """A float32 tensor [rows, width] and its address, which changes only when the buffer grows."""
        buffer = self._buffers.get(width)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._buffers[width] = torch.empty(rows, width)
        return buffer[:rows], buffer.data_ptr()


class CpuOps(ComposedOps):
    """See `Ops` for what each operation does.

    Args:
        tape: record calls there instead of running them; the forward pass only.
    """

    def __init__(self, tape: native.Tape | None = None) -> None:
        self._kernels = native if tape is None else tape
        self._rows = native.PackedMatrix.rows if tape is None else tape.rows
        self._embedded = _Scratch()
        self._normed = _Scratch()
        self._projected = _Scratch()
        self._queries = _Scratch()
        self._attended = _Scratch()
        self._activated = _Scratch()
        self._logits = _Scratch()

    def pack(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor]) -> PackedWeight:
        packed = [native.PackedMatrix.pack(p.kind, p.data, p.shape[0], p.shape[1]) for p in parts]
        matrix = packed[0] if len(packed) == 1 else native.PackedMatrix.concat(packed)
        bias = torch.cat([self.vector(b) for b in biases]).contiguous() if biases else None
        return PackedWeight(matrix, bias)

    def vector(self, raw: RawTensor) -> torch.Tensor:
        return torch.tensor(raw.dequantize(), dtype=torch.float32)

    def table(self, values: torch.Tensor) -> torch.Tensor:
        return values.float().contiguous()

    def embed(self, input_ids: torch.Tensor, table: Weight) -> torch.Tensor:
        matrix = _own(table).matrix
        out, address = self._embedded.view(input_ids.shape[0], matrix.k)
        self._rows(matrix, input_ids.data_ptr(), input_ids.shape[0], address)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, dim = x.shape
        out, address = self._normed.view(rows, dim)
        self._kernels.rms_norm(x.data_ptr(), weight.data_ptr(), eps, address, rows, dim)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dim = x.shape
        out, address = self._normed.view(rows, dim)
        self._kernels.add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, address, rows, dim)
        return out, residual

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return self._matmul(x, _own(weight), self._projected)

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
        num_tokens = qkv.shape[0]
        q, address = self._queries.view(num_tokens, num_heads * head_dim)
        self._kernels.rope_and_cache(
            qkv.data_ptr(),
            num_tokens,
            positions.data_ptr(),
            cos_sin.data_ptr(),
            slot_mapping.data_ptr(),
            kv_cache.data_ptr(),
            _KV_CODES[kv_cache.dtype],
            q_norm.data_ptr() if q_norm is not None else 0,
            k_norm.data_ptr() if k_norm is not None else 0,
            eps,
            address,
            num_heads,
            num_kv_heads,
            head_dim,
            cos_sin.shape[1],
            kv_cache.shape[2],
        )
        return q

    def attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        num_tokens, width = q.shape
        _, num_kv_heads, block_size, kv_width = kv_cache.shape
        head_dim = kv_width // 2
        out, address = self._attended.view(num_tokens, width)
        self._kernels.paged_attention(
            q.data_ptr(),
            kv_cache.data_ptr(),
            _KV_CODES[kv_cache.dtype],
            meta.block_table.data_ptr(),
            meta.block_table.stride(0),
            meta.query_start_loc.data_ptr(),
            meta.seq_lens.data_ptr(),
            meta.num_seqs,
            width // head_dim,
            num_kv_heads,
            head_dim,
            block_size,
            scale,
            window,
            softcap,
            address,
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out, address = self._activated.view(rows, width // 2)
        self._kernels.silu_mul(gate_up.data_ptr(), address, rows, width // 2)
        return out

    def logits(self, hidden: torch.Tensor, weight: Weight) -> torch.Tensor:
        return self._matmul(hidden.contiguous(), _own(weight), self._logits)

    def _matmul(self, x: torch.Tensor, weight: PackedWeight, scratch: _Scratch) -> torch.Tensor:
        rows, k = x.shape
        matrix, bias = weight.matrix, weight.bias
        out, address = scratch.view(rows, matrix.n)
        bias_address = bias.data_ptr() if bias is not None else 0
        self._kernels.matmul(x.data_ptr(), rows, k, matrix, bias_address, address, matrix.n)
        return out


class CpuForward:
    """A model's forward pass, recorded once and replayed for every step.

    Args:
        group_of_layer: which block table each layer reads.
        max_num_tokens: most tokens of a step; scratch is reserved for them, but occupies memory only as used.
    """

    def __init__(
        self, model: Model, kv_caches: Sequence[torch.Tensor], group_of_layer: Sequence[int], max_num_tokens: int
    ) -> None:
        self._max_num_tokens = max_num_tokens
        self._tape = native.Tape()
        self._recorder = CpuOps(self._tape)  # owns the scratch that the tape's addresses point into
        self._kv_caches = kv_caches
        ints = torch.empty(max_num_tokens, dtype=torch.int32)
        metas = []
        for _ in range(max(group_of_layer) + 1):
            slots, table = torch.empty(max_num_tokens, dtype=torch.int32), torch.empty((1, 1), dtype=torch.int32)
            self._tape.add_group(slots.data_ptr(), table.data_ptr())  # by which the tape knows the group of a call
            metas.append(AttentionMetadata(ints, ints, table, slots, max_num_tokens, 1, 1, 1))
        self._hidden = model.forward(ints, ints, StepContext(self._recorder, metas, kv_caches, group_of_layer))

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Sequence[AttentionMetadata]
    ) -> torch.Tensor:
        """Hidden states of a step [T, H]; valid until the next call."""
        meta = attention[0]
        if meta.num_tokens > self._max_num_tokens:
            raise ValueError(f"a step of {meta.num_tokens} tokens, recorded for {self._max_num_tokens}")
        self._tape.run(
            meta.num_tokens,
            meta.num_seqs,
            input_ids.data_ptr(),
            positions.data_ptr(),
            [group.slot_mapping.data_ptr() for group in attention],
            [group.block_table.data_ptr() for group in attention],
            meta.block_table.stride(0),
            meta.query_start_loc.data_ptr(),
            meta.seq_lens.data_ptr(),
        )
        return self._hidden[: meta.num_tokens]


def _own(weight: Weight) -> PackedWeight:
    assert isinstance(weight, PackedWeight), type(weight)
    return weight
