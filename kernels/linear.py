"""Matrix products of a few rows with a large weight, fused with what stands before and after them.

    linear            y = x W^T (+ bias)
    norm_linear       y = rmsnorm(h; g) W^T (+ bias)
    norm_gated_linear y = act(n Wg^T) * (n Wu^T), n = rmsnorm(h; g), weight = [Wg | Wu] stacked
    linear_add        y = residual + x W^T

x, h [m, K] with m <= 8, weight [N, K] row-major, y [m, N] (gated: N / 2). At a few rows the time is that
of reading the weight once; cuBLAS is within a tenth of that for large weights, but small ones are over before
its kernels are under way. Here each program reads its rows of the weight before it waits for the kernel that
computes x (weights never change), and the norm's factor is applied to the finished sum, so that nothing is
read twice:

    y_n = rsqrt(mean(h^2) + eps) * sum_k h_k g_k W_nk

Multiply-and-add in float32, without tensor cores; y is rounded once, at the store. A row's result does not depend
on the others. `skinny_tile` knows, by shape, where this beats cuBLAS. Called by `aioengine/layers/ops_cuda.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .activation import gelu_tanh_mul_ref, silu_mul_ref
from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs
from .norm import rms_norm_ref

MAX_ROWS = 8


def linear_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T (+ bias) summed in float32, rounded once."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def norm_linear_ref(
    h: torch.Tensor, norm_w: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """rmsnorm(h) W^T (+ bias)."""
    return linear_ref(rms_norm_ref(h.float(), norm_w, eps), weight, bias).to(h.dtype)


def norm_gated_linear_ref(
    h: torch.Tensor, norm_w: torch.Tensor, eps: float, weight: torch.Tensor, gelu: bool = False
) -> torch.Tensor:
    """act(gate) * up of the two halves of rmsnorm(h) W^T."""
    gate_up = linear_ref(rms_norm_ref(h.float(), norm_w, eps), weight)
    return (gelu_tanh_mul_ref if gelu else silu_mul_ref)(gate_up).to(h.dtype)


def linear_add_ref(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + x W^T."""
    return (residual.float() + linear_ref(x.float(), weight)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """How one product is cut: outputs per program; inputs per iteration, for several rows all of them."""

    block_n: int
    block_k: int
    num_warps: int


@jit
def _finish(
    acc,
    acc_up,
    squares,
    bias_ptr,
    outs,
    out_mask,
    num_in,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
):
    """Norm factor, bias and gate of finished sums acc, acc_up [ROWS, BLOCK_N]; squares [ROWS]."""
    if HAS_NORM:
        scale = tl.rsqrt(squares / num_in + eps)[:, None]
        acc *= scale
        acc_up *= scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outs, mask=out_mask, other=0.0).to(tl.float32)[None, :]  # [1, BLOCK_N]
    if GATED:
        if GELU:
            acc *= tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))
        else:
            acc *= tl.sigmoid(acc)
        acc *= acc_up
    return acc


@jit
def _one_row_kernel(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    num_out,
    num_in,
    stride_w_row,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of one row by multiply-and-add; lanes are summed once, at the end."""
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_mask = outs < num_out
    ks = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + outs.to(tl.int64)[:, None] * stride_w_row + ks[None, :]
    up_ptrs = w_ptrs + num_out.to(tl.int64) * stride_w_row
    w_mask = out_mask[:, None] & (ks < num_in)[None, :]
    w = tl.load(w_ptrs, mask=w_mask, other=0.0)  # [BLOCK_N, BLOCK_K]
    w_up = w
    if GATED:
        w_up = tl.load(up_ptrs, mask=w_mask, other=0.0)  # [BLOCK_N, BLOCK_K]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums_up = sums
    squares = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, num_in, BLOCK_K):
        ahead = ks < num_in - first - BLOCK_K
        next_w = tl.load(w_ptrs + first + BLOCK_K, mask=out_mask[:, None] & ahead[None, :], other=0.0)
        next_w_up = next_w
        if GATED:
            next_w_up = tl.load(up_ptrs + first + BLOCK_K, mask=out_mask[:, None] & ahead[None, :], other=0.0)
        here = ks < num_in - first
        x = tl.load(x_ptr + first + ks, mask=here, other=0.0).to(tl.float32)  # [BLOCK_K]
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + first + ks, mask=here, other=0.0).to(tl.float32)  # [BLOCK_K]
        sums += w.to(tl.float32) * x[None, :]
        if GATED:
            sums_up += w_up.to(tl.float32) * x[None, :]
        w, w_up = next_w, next_w_up
    acc = tl.sum(sums, axis=1)[None, :]
    acc_up = tl.sum(sums_up, axis=1)[None, :] if GATED else acc
    square = tl.sum(squares, axis=0, keep_dims=True)
    acc = _finish(acc, acc_up, square, bias_ptr, outs, out_mask, num_in, eps, HAS_NORM, HAS_BIAS, GATED, GELU)
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + outs, mask=out_mask, other=0.0).to(tl.float32)[None, :]  # [1, BLOCK_N]
    tl.store(y_ptr + outs[None, :], acc.to(y_ptr.dtype.element_ty), mask=out_mask[None, :])  # [1, BLOCK_N]


@jit(varying=["num_rows"])
def _few_rows_kernel(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    num_rows,
    num_out,
    num_in,
    stride_x_row,
    stride_w_row,
    stride_residual_row,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of up to ROWS rows: all inputs of the weight's rows stay in registers, row after row."""
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_mask = outs < num_out
    ks = tl.arange(0, BLOCK_K)
    k_mask = ks < num_in
    w_ptrs = w_ptr + outs.to(tl.int64)[:, None] * stride_w_row + ks[None, :]
    w_mask = out_mask[:, None] & k_mask[None, :]
    w = tl.load(w_ptrs, mask=w_mask, other=0.0)  # [BLOCK_N, BLOCK_K]
    if GATED:
        up_ptrs = w_ptrs + num_out.to(tl.int64) * stride_w_row
        w_up = tl.load(up_ptrs, mask=w_mask, other=0.0)  # [BLOCK_N, BLOCK_K]
    if HAS_NORM:
        gain = tl.load(norm_ptr + ks, mask=k_mask, other=0.0).to(tl.float32)  # [BLOCK_K]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    for row in tl.static_range(ROWS):
        source = tl.minimum(row, num_rows - 1)  # rows past the last repeat it and are not stored
        x = tl.load(x_ptr + source * stride_x_row + ks, mask=k_mask, other=0.0).to(tl.float32)  # [BLOCK_K]
        square = tl.sum(x * x, axis=0, keep_dims=True) if HAS_NORM else tl.zeros([1], tl.float32)
        if HAS_NORM:
            x *= gain
        acc = tl.sum(w.to(tl.float32) * x[None, :], axis=1)[None, :]
        acc_up = tl.sum(w_up.to(tl.float32) * x[None, :], axis=1)[None, :] if GATED else acc
        acc = _finish(acc, acc_up, square, bias_ptr, outs, out_mask, num_in, eps, HAS_NORM, HAS_BIAS, GATED, GELU)
        mask = (outs < tl.where(row < num_rows, num_out, 0))[None, :]
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + row * stride_residual_row + outs[None, :]
            acc += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)  # [1, BLOCK_N]
        tl.store(y_ptr + row * num_out + outs[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)  # [1, BLOCK_N]


def skinny_tile(rows: int, num_out: int, num_in: int, gated: bool) -> SkinnyTile | None:
    """The tile for a product of `rows` rows, None where cuBLAS is faster; measured on an H200."""
    if rows > 1:
        return _few_rows_tile(rows, num_out, num_in, gated)
    if gated and num_in > 2048:
        return None
    if num_out * num_in > 100_000_000:
        return SkinnyTile(16, 256, 4)
    if num_out <= 2048 <= num_in:
        return SkinnyTile(4, 2048, 8)
    if num_in <= 2048:
        return SkinnyTile(4, 512, 2) if gated else SkinnyTile(8, 512, 4)
    if num_out <= 4096 and num_in <= 4096:
        return SkinnyTile(16, 512, 8)
    return SkinnyTile(4, 512, 4)


def _few_rows_tile(rows: int, num_out: int, num_in: int, gated: bool) -> SkinnyTile | None:
    """For 2 to 4 rows of small weights; beyond them multiply-and-add itself takes longer than reading."""
    if rows > 4 or num_in > 4096 or num_out * num_in > 10_000_000:
        return None
    if num_out <= 2048 <= num_in:
        return SkinnyTile(4, triton.next_power_of_2(num_in), 4)
    if rows == 2 and num_in <= 1024:
        return SkinnyTile(4, 1024, 2)
    return None


def _launch_skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    gated: bool,
    gelu: bool,
    tile: SkinnyTile | None,
) -> torch.Tensor:
    require_kernels(x.device)
    num_rows, num_in = x.shape
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows are too many for a skinny product; the limit is {MAX_ROWS}")
    if weight.shape[1] != num_in or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must agree and be row-major")
    tile = tile or skinny_tile(num_rows, num_out, num_in, gated)
    if tile is None:  # the caller insists: any tile that is right
        tile = SkinnyTile(4, 512, 4) if num_rows == 1 else SkinnyTile(4, triton.next_power_of_2(num_in), 8)
    if num_rows > 1 and tile.block_k < num_in:
        raise ValueError(f"several rows need all {num_in} inputs in one tile; it takes {tile.block_k}")
    y = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    pointers = (x, weight, norm_w, bias, residual, y, eps)
    meta = {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HAS_NORM": norm_w is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "GELU": gelu,
        "num_warps": tile.num_warps,
    } | launch_options(x.device)
    grid = (triton.cdiv(num_out, tile.block_n),)
    if num_rows == 1:
        _one_row_kernel[grid](*pointers, num_out, num_in, weight.stride(0), **meta)
    else:
        strides = x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0)
        rows = triton.next_power_of_2(num_rows)
        _few_rows_kernel[grid](*pointers, num_rows, num_out, num_in, *strides, ROWS=rows, **meta)
    return y


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tile: SkinnyTile | None = None
) -> torch.Tensor:
    """x W^T (+ bias); see the head of the file. `tile` overrides the table."""
    return _launch_skinny(x, weight, None, bias, None, 0.0, False, False, tile)


def norm_linear(
    h: torch.Tensor,
    norm_w: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: SkinnyTile | None = None,
) -> torch.Tensor:
    """rmsnorm(h) W^T (+ bias); see the head of the file."""
    return _launch_skinny(h, weight, norm_w, bias, None, eps, False, False, tile)


def norm_gated_linear(
    h: torch.Tensor,
    norm_w: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    gelu: bool = False,
    tile: SkinnyTile | None = None,
) -> torch.Tensor:
    """act(gate) * up with weight [2I, K]: -> [m, I]; see the head of the file."""
    return _launch_skinny(h, weight, norm_w, None, None, eps, True, gelu, tile)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, tile: SkinnyTile | None = None
) -> torch.Tensor:
    """residual + x W^T, a new tensor; see the head of the file."""
    return _launch_skinny(x, weight, None, None, residual, 0.0, False, False, tile)
