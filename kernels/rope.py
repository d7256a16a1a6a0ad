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

from .norm import rms_norm_ref


def _rotate_ref(x_TND: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates float32 heads x [T, N, D] by cos_sin rows already gathered per token [T, rotary_dim]."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second, rest = x_TND[..., :half], x_TND[..., half : 2 * half], x_TND[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def write_kv_ref(
    k_TND: torch.Tensor, v_TND: torch.Tensor, slot_mapping: torch.Tensor, kv_cache: torch.Tensor
) -> None:
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
