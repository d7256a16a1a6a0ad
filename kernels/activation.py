"""Gated activations of the MLP: SwiGLU and GeGLU (tanh form).

    y = act(gate) * up,   gate_up = [gate | up] on the last axis

gate_up: [T, 2I] in any float type, y: [T, I]. Computed in float32, rounded once at the store of y. Called by
`aioengine/layers/ops.py` between the gate-up and the down projection.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., 2I] -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * up: [..., 2I] -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


@jit
def _gated_kernel(gate_up_ptr, y_ptr, stride_row, width, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    wait_for_inputs(PDL)
    let_next_start(PDL)
    gate_ptrs = gate_up_ptr + row * stride_row + cols
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    if GELU:
        # 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        act = gate * tl.sigmoid(gate)
    tl.store(y_ptr + row * width + cols, (act * up).to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK]


def _launch_gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    require_kernels(gate_up.device)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError("the activation needs rows that are contiguous in memory")
    y = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return y
    block = min(triton.next_power_of_2(width), 1024)
    _gated_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up,
        y,
        gate_up.stride(0),
        width,
        GELU=gelu,
        BLOCK=block,
        num_warps=4,
        **launch_options(gate_up.device),
    )
    return y


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2I] -> [T, I]; see `silu_mul_ref`."""
    return _launch_gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * up of [T, 2I] -> [T, I]; see `gelu_tanh_mul_ref`."""
    return _launch_gated(gate_up, gelu=True)
