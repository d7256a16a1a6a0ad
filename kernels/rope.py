"""Rotary embedding of q and k, optional QK-norm before it, and the write of K and V to the paged cache.

NeoX layout: with r = rotary_dim / 2, the pair (x[i], x[i + r]) turns by the angle of position and i, whose
cosine and sine are cos_sin[position, i] and cos_sin[position, r + i]; dimensions from rotary_dim on pass.

    qkv        [T, (H + 2 KH) * D]   q heads, then k heads, then v heads
    kv_cache   [blocks, KH, block_size, 2 D]   K then V on the last axis; any strides but the last
    slot       block * block_size + offset, one per token; -1 is padding: nothing is written

Norm and rotation are computed in float32 and rounded once, to the type of qkv; the cache takes the rounded
value. Called by `aioengine/layers/ops.py` after the QKV projection of every layer.
"""

from __future__ import annotations

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs
from .norm import rms_norm_ref


def _rotate_ref(x_TND: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates float32 heads x [T, N, D] by cos_sin rows already gathered per token [T, rotary_dim]."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second, rest = x_TND[..., :half], x_TND[..., half : 2 * half], x_TND[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def write_kv_ref(k_TND: torch.Tensor, v_TND: torch.Tensor, slot_mapping: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Writes k, v [T, KH, D] to their slots of the cache; tokens with slot -1 write nothing."""
    block_size, head_dim = kv_cache.shape[2], k_TND.shape[-1]
    tokens = torch.nonzero(slot_mapping >= 0).flatten()
    slots = slot_mapping[tokens].long()
    blocks, offsets = slots // block_size, slots % block_size
    kv_cache[blocks, :, offsets, :head_dim] = k_TND[tokens].to(kv_cache.dtype)
    kv_cache[blocks, :, offsets, head_dim:] = v_TND[tokens].to(kv_cache.dtype)


def rope_and_cache_ref(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    q_norm_w: torch.Tensor | None,
    k_norm_w: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """Returns rotated q [T, H * D] and writes rotated k and plain v into `kv_cache`."""
    num_tokens = qkv.shape[0]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q = heads[:, :num_heads].float()
    k = heads[:, num_heads : num_heads + num_kv_heads].float()
    v = heads[:, num_heads + num_kv_heads :]
    if q_norm_w is not None:
        q = rms_norm_ref(q, q_norm_w, eps)
    if k_norm_w is not None:
        k = rms_norm_ref(k, k_norm_w, eps)
    angles = cos_sin[positions.long()].float()
    q = _rotate_ref(q, angles).to(qkv.dtype)
    k = _rotate_ref(k, angles).to(qkv.dtype)
    write_kv_ref(k, v, slot_mapping, kv_cache)
    return q.reshape(num_tokens, num_heads * head_dim)


@jit
def _rope_and_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    kv_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_out_ptr,
    eps,
    stride_qkv_row,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    block_size,
    num_heads,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,  # dimensions that do not rotate; 0 when all do
    HEADS_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    is_q = heads < num_heads
    is_k = (heads >= num_heads) & (heads < num_heads + num_kv_heads)
    is_v = (heads >= num_heads + num_kv_heads) & (heads < num_heads + 2 * num_kv_heads)
    cols = tl.arange(0, HALF_BLOCK)
    col_mask = cols < HALF
    valid = (is_q | is_k | is_v)[:, None]
    mask = valid & col_mask[None, :]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    angle_ptrs = cos_sin_ptr + position * (2 * HALF) + cols
    cos = tl.load(angle_ptrs, mask=col_mask, other=0.0).to(tl.float32)[None, :]  # [1, HALF]
    sin = tl.load(angle_ptrs + HALF, mask=col_mask, other=0.0).to(tl.float32)[None, :]  # [1, HALF]
    in_ptrs = qkv_ptr + token * stride_qkv_row + heads[:, None] * HEAD_DIM + cols[None, :]
    first = tl.load(in_ptrs, mask=mask, other=0.0).to(tl.float32)  # [HEADS_BLOCK, HALF]
    second = tl.load(in_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)  # [HEADS_BLOCK, HALF]
    rest_cols = tl.arange(0, max(REST_BLOCK, 1))
    rest_mask = valid & (rest_cols < HEAD_DIM - 2 * HALF)[None, :]
    if REST_BLOCK > 0:
        rest_ptrs = qkv_ptr + token * stride_qkv_row + heads[:, None] * HEAD_DIM + 2 * HALF + rest_cols[None, :]
        rest = tl.load(rest_ptrs, mask=rest_mask, other=0.0).to(tl.float32)  # [HEADS_BLOCK, REST_BLOCK]
    x1, x2 = first, second
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        norm_mask = col_mask[None, :]
        q_row = is_q[:, None]
        w1 = tl.where(
            q_row,
            tl.load(q_norm_ptr + cols[None, :], mask=norm_mask, other=0.0).to(tl.float32),
            tl.load(k_norm_ptr + cols[None, :], mask=norm_mask, other=0.0).to(tl.float32),
        )  # [HEADS_BLOCK, HALF]
        w2 = tl.where(
            q_row,
            tl.load(q_norm_ptr + HALF + cols[None, :], mask=norm_mask, other=0.0).to(tl.float32),
            tl.load(k_norm_ptr + HALF + cols[None, :], mask=norm_mask, other=0.0).to(tl.float32),
        )  # [HEADS_BLOCK, HALF]
        x1 = x1 * scale * w1
        x2 = x2 * scale * w2
        if REST_BLOCK > 0:
            at = 2 * HALF + rest_cols[None, :]
            w3_mask = (rest_cols < HEAD_DIM - 2 * HALF)[None, :]
            w3 = tl.where(
                q_row,
                tl.load(q_norm_ptr + at, mask=w3_mask, other=0.0).to(tl.float32),
                tl.load(k_norm_ptr + at, mask=w3_mask, other=0.0).to(tl.float32),
            )  # [HEADS_BLOCK, REST_BLOCK]
            rest = tl.where(is_v[:, None], rest, rest * scale * w3)
    dtype = q_out_ptr.dtype.element_ty
    y1 = tl.where(is_v[:, None], first, x1 * cos - x2 * sin).to(dtype)
    y2 = tl.where(is_v[:, None], second, x2 * cos + x1 * sin).to(dtype)
    q_ptrs = q_out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM + cols[None, :]
    q_mask = mask & is_q[:, None]
    tl.store(q_ptrs, y1, mask=q_mask)  # [HEADS_BLOCK, HALF]
    tl.store(q_ptrs + HALF, y2, mask=q_mask)  # [HEADS_BLOCK, HALF]
    kv_head = (heads - num_heads) % num_kv_heads
    block, offset = slot // block_size, slot % block_size
    kv_row = kv_cache_ptr + block * stride_kv_block + offset * stride_kv_slot
    kv_heads = kv_row + kv_head[:, None].to(tl.int64) * stride_kv_head + tl.where(is_v[:, None], HEAD_DIM, 0)
    is_stored = (is_k | is_v) & (slot + tl.zeros_like(heads) >= 0)
    kv_mask = mask & is_stored[:, None]
    kv_type = kv_cache_ptr.dtype.element_ty
    tl.store(kv_heads + cols[None, :], y1.to(kv_type), mask=kv_mask)  # [HEADS_BLOCK, HALF]
    tl.store(kv_heads + HALF + cols[None, :], y2.to(kv_type), mask=kv_mask)  # [HEADS_BLOCK, HALF]
    if REST_BLOCK > 0:
        y3 = rest.to(dtype)
        q_rest = q_out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM + 2 * HALF + rest_cols[None, :]
        tl.store(q_rest, y3, mask=rest_mask & is_q[:, None])  # [HEADS_BLOCK, REST_BLOCK]
        kv_rest_mask = rest_mask & is_stored[:, None]
        kv_rest = kv_heads + 2 * HALF + rest_cols[None, :]
        tl.store(kv_rest, y3.to(kv_type), mask=kv_rest_mask)  # [HEADS_BLOCK, REST_BLOCK]


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    q_norm_w: torch.Tensor | None,
    k_norm_w: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """One program per token and group of heads; see `rope_and_cache_ref`.

    Either both norm weights are given or none. Q, K and V heads share one code, told apart by masks.
    """
    require_kernels(qkv.device)
    if (q_norm_w is None) != (k_norm_w is None):
        raise ValueError("give norm weights for q and for k, or for neither")
    if qkv.stride(1) != 1 or kv_cache.stride(3) != 1 or not cos_sin.is_contiguous():
        raise ValueError("qkv, kv_cache and cos_sin must be contiguous on their last axis")
    num_tokens = qkv.shape[0]
    q_out = torch.empty((num_tokens, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q_out
    half = cos_sin.shape[1] // 2
    rest = head_dim - 2 * half
    heads_block = 4 if num_tokens <= 64 else 16
    _rope_and_cache_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads_block))](
        qkv,
        positions,
        cos_sin,
        slot_mapping,
        kv_cache,
        q_norm_w,
        k_norm_w,
        q_out,
        eps,
        qkv.stride(0),
        *kv_cache.stride()[:3],
        kv_cache.shape[2],
        num_heads,
        num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        HEADS_BLOCK=heads_block,
        HAS_NORM=q_norm_w is not None,
        num_warps=2 if heads_block == 4 else 4,
        **launch_options(qkv.device),
    )
    return q_out
