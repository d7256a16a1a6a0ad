"""RMSNorm, alone and with the residual addition before it.

    y = x * rsqrt(mean(x^2) + eps) * w

x, residual, y: [T, H] in any float type, w: [H]. Computed in float32 and rounded once, at the store of y.
With a residual, the sum is rounded to the type of x first and normalized as rounded, so that fused and
separate operations agree bit for bit. Called by `aioengine/layers/ops.py` between all projections of a layer.
"""

from __future__ import annotations

import torch


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
