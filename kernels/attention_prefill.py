"""Attention of long prefill chunks through cuDNN, which on Hopper is well ahead of a portable kernel.

A chunk of n queries after a context of c tokens is two dense problems that share their queries,

    square    n queries x the chunk's own n keys, causal
    context   n queries x the c keys before it, no mask

whose outputs are merged by their log-sum-exps: w_i = exp(lse_i - max(lse)), out = sum(w_i out_i) / sum(w_i). The two
outputs are rounded to the type of q before the merge, the result once more. Keys and values are gathered from the
paged cache first, which costs little beside n large enough to come here.

`unsupported_reason` says when the path cannot be taken. The caller knows the rows on the host; it makes its plan
with `skip_from`, so that the paged kernel leaves them out. Called by `aioengine/layers/ops.py`, eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs


@dataclass(frozen=True, slots=True)
class LongRow:
    """One row of the batch with a long chunk, known on the host; set by the runner from the step plan."""

    row: int  # of the block table
    first_token: int
    num_queries: int
    num_context: int


def unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> str | None:
    """None when cuDNN attention serves this layer, else one sentence."""
    if device.type != "cuda":
        return f"cuDNN attention needs a CUDA device, not {device.type!r}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "cuDNN attention needs compute capability 8.0 or newer"
    if not torch.backends.cudnn.is_available():
        return "this torch build has no cuDNN"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN attention computes in bfloat16 or float16, not {dtype}"
    if head_dim % 8 or head_dim > 128:
        return f"cuDNN attention takes head sizes up to 128 in multiples of 8, not {head_dim}"
    if window or softcap or has_sinks:
        return "cuDNN attention is used without sliding window, soft cap and sinks only"
    return None


def merge_ref(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Merges outputs [n, H, D] by log-sum-exps [n, H], in float32."""
    top = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = (lse_a - top).exp()[..., None], (lse_b - top).exp()[..., None]
    merged = (out_a.float() * weight_a + out_b.float() * weight_b) / (weight_a + weight_b)
    return merged.to(out_a.dtype)


@jit(varying=["num_queries"])
def _merge_kernel(
    out_ptr,
    a_ptr,
    b_ptr,
    lse_a_ptr,
    lse_b_ptr,
    num_queries,
    num_heads,
    stride_out_query,
    stride_a_query,
    stride_a_head,
    stride_b_query,
    stride_b_head,
    stride_lse_a_query,
    stride_lse_a_head,
    stride_lse_b_query,
    stride_lse_b_head,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK (query, head) pairs per program."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    query, head = pair // num_heads, pair % num_heads
    dims = tl.arange(0, HEAD_BLOCK)[None, :]
    row_mask = query < num_queries
    mask = row_mask[:, None] & (dims < HEAD_DIM)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    lse_a = tl.load(
        lse_a_ptr + query * stride_lse_a_query + head * stride_lse_a_head, mask=row_mask, other=0.0
    )  # [BLOCK]
    lse_b = tl.load(
        lse_b_ptr + query * stride_lse_b_query + head * stride_lse_b_head, mask=row_mask, other=0.0
    )  # [BLOCK]
    a_ptrs = a_ptr + (query * stride_a_query + head * stride_a_head)[:, None] + dims
    b_ptrs = b_ptr + (query * stride_b_query + head * stride_b_head)[:, None] + dims
    a = tl.load(a_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK, HEAD_BLOCK]
    b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK, HEAD_BLOCK]
    top = tl.maximum(lse_a, lse_b)
    weight_a = tl.exp(lse_a - top)[:, None]
    weight_b = tl.exp(lse_b - top)[:, None]
    merged = (a * weight_a + b * weight_b) / (weight_a + weight_b)
    out_ptrs = out_ptr + (query * stride_out_query + head * HEAD_DIM)[:, None] + dims
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=mask)  # [BLOCK, HEAD_BLOCK]


def merge(
    out: torch.Tensor,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> None:
    """Writes the merge of two outputs [n, H, D] with log-sum-exps [n, H] to rows out [n, H * D]."""
    require_kernels(out.device)
    num_queries, num_heads, head_dim = out_a.shape
    block = 32
    _merge_kernel[(triton.cdiv(num_queries * num_heads, block),)](
        out,
        out_a,
        out_b,
        lse_a,
        lse_b,
        num_queries,
        num_heads,
        out.stride(0),
        *out_a.stride()[:2],
        *out_b.stride()[:2],
        *lse_a.stride(),
        *lse_b.stride(),
        HEAD_DIM=head_dim,
        HEAD_BLOCK=triton.next_power_of_2(head_dim),
        BLOCK=block,
        num_warps=4,
        **launch_options(out.device),
    )


def gather_ref(kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The tokens of `blocks` in order, [KH, len(blocks) * block_size, 2 D]."""
    return kv_cache.index_select(0, blocks).transpose(0, 1).flatten(1, 2)


def _dense(q: torch.Tensor, kv: torch.Tensor, scale: float, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN attention of q [n, H, D] over kv [KH, keys, 2D]: output [n, H, D] and log-sum-exp [n, H]."""
    head_dim = q.shape[2]
    queries = q.transpose(0, 1)[None]
    keys, values = kv[None, ..., :head_dim], kv[None, ..., head_dim:]
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, False, scale=scale
    )[:2]
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0]).transpose(0, 1)


def long_prefill_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    rows: Sequence[LongRow],
    scale: float,
) -> None:
    """Writes out [T, H * D] at the tokens of `rows`; q like out, kv_cache and block_table as in `attention.py`.

    The keys and values of the chunks are in the cache already. `unsupported_reason` was None.
    """
    block_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
    for row in rows:
        tokens = slice(row.first_token, row.first_token + row.num_queries)
        queries = q[tokens].unflatten(1, (-1, head_dim))
        num_keys = row.num_context + row.num_queries
        num_blocks = -(-num_keys // block_size)
        kv = gather_ref(kv_cache, block_table[row.row, :num_blocks])
        square, square_lse = _dense(queries, kv[:, row.num_context : num_keys], scale, is_causal=True)
        if row.num_context == 0:
            out[tokens] = square.flatten(1)
            continue
        context, context_lse = _dense(queries, kv[:, : row.num_context], scale, is_causal=False)
        merge(out[tokens], square, square_lse, context, context_lse)
