"""RMSNorm, alone and with the residual addition before it.

    y = x * rsqrt(mean(x^2) + eps) * w

x, residual, y: [T, H] in any float type, w: [H]. Computed in float32 and rounded once, at the store of y.
With a residual, the sum is rounded to the type of x first and normalized as rounded, so that fused and
separate operations agree bit for bit. Called by `aioengine/layers/ops.py` between all projections of a layer.
"""

from __future__ import annotations

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs


def rms_norm_ref(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis: x [..., H], w [H] -> y like x."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale * w.float()).to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), both like x."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_ref(total, w, eps), total


@jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    total_ptr,
    eps,
    stride_x_row,
    stride_residual_row,
    num_cols,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    x = tl.load(x_ptr + row * stride_x_row + cols, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * stride_residual_row + cols, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)  # rounded here: y is the norm of what is returned
        tl.store(total_ptr + row * num_cols + cols, total, mask=mask)  # [BLOCK]
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_cols + eps)
    y = x * scale * w
    tl.store(y_ptr + row * num_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)  # [BLOCK]


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    w: torch.Tensor,
    y: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    require_kernels(x.device)
    num_rows, num_cols = x.shape
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the norm needs rows that are contiguous in memory")
    if num_rows == 0:
        return
    block = triton.next_power_of_2(num_cols)
    _norm_kernel[(num_rows,)](
        x,
        residual,
        w,
        y,
        total,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        num_cols,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **launch_options(x.device),
    )


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [T, H] by one program per row; see `rms_norm_ref`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, w, y, None, eps)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual) of [T, H] in one pass; see `add_rms_norm_ref`."""
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_norm(x, residual, w, y, total, eps)
    return y, total
