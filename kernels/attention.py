"""Paged attention over a mixed batch: prefill chunks and decodes in one call.

Row s of the batch owns the queries query_start_loc[s] .. query_start_loc[s+1]; they are the last ones of its
seq_lens[s] tokens (seq_len = context + query), so query i of n sits at position seq_len - n + i and sees the
keys at positions <= its own, of these the last `window` ones when window > 0.

    q            [T, H * D]
    kv_cache     [blocks, KH, block_size, 2 D]   K then V on the last axis
    block_table  [S, max_blocks] int32           logical block -> block id
    out          [T, H * D] like q

    score = scale * q.k;  softcap > 0: score = softcap * tanh(score / softcap)
    out   = sum(exp(score) v) / (sum(exp(score)) + exp(sink of the head, if any))

Padding: rows with an empty query range read nothing; tokens past query_start_loc[S] give zeros. Slots at or
past seq_len are never read, whatever bytes an earlier owner of the block left there. Softmax and sums in
float32, rounded once at the store of out. Called by `aioengine/layers/ops.py` once per layer.
"""

from __future__ import annotations

import torch


def paged_attention_ref(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each row over its own keys, one row after another; see the head of the file for shapes."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[1], kv_cache.shape[2], kv_cache.shape[3] // 2
    num_heads = q.shape[1] // head_dim
    out = torch.zeros_like(q)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for row, seq_len in enumerate(lens):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        first_query = seq_len - (end - start)
        first_key = max(0, first_query - window + 1) if window > 0 else 0
        positions = torch.arange(first_key, seq_len, device=q.device)
        blocks = block_table[row].long()[positions // block_size]
        keys_values = kv_cache[blocks, :, positions % block_size].float()  # [keys, KH, 2D]
        k = keys_values[..., :head_dim].transpose(0, 1)  # [KH, keys, D]
        v = keys_values[..., head_dim:].transpose(0, 1)
        queries = q[start:end].float().view(end - start, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("qhgd,hkd->hgqk", queries, k) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        query_positions = torch.arange(first_query, seq_len, device=q.device)[:, None]
        visible = positions[None, :] <= query_positions
        if window > 0:
            visible &= query_positions - positions[None, :] < window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, end - start, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : positions.numel()]
        out[start:end] = torch.einsum("hgqk,hkd->qhgd", weights, v).reshape(end - start, -1).to(q.dtype)
    return out
