"""Attention of long prefill chunks through cuDNN, which on Hopper is well ahead of a portable kernel.

A chunk of n queries after a context of c tokens is dense problems that share their queries,

    square    n queries x the chunk's own n keys, causal
    context   n queries x the c keys before it, no mask

whose outputs are merged by their log-sum-exps: w_i = exp(lse_i - max(lse)), out = sum(w_i out_i) / sum(w_i).
Outputs are rounded to the type of q before the merge; running sums of more than two are float32.

cuDNN prepares a plan of its own for every shape, which takes about a tenth of a second. So only the sizes of
`SIZES` are ever asked of it, and `warm` does so in idle time: a chunk is cut into such squares, its context into
such rectangles. The last square may be filled up with queries and keys of nobody, which no real query sees; if
less than half of SIZES[0] is left of the chunk it belongs to the paged kernel instead. What is left of the context
belongs to a small kernel here.

`unsupported_reason` says when the path cannot be taken. Called by `aioengine/layers/ops.py`, eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .attention import attend_keys
from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs

SIZES = (2048, 4096, 8192, 16384)
"""Queries of a square and keys of a rectangle, ascending."""


@dataclass(frozen=True, slots=True)
class LongRow:
    """One row of the batch with a long chunk, known on the host; set by the runner from the step plan."""

    row: int  # of the block table
    first_token: int
    num_queries: int  # of the row; the first `num_covered` of them are computed here
    num_context: int

    @property
    def num_covered(self) -> int:
        """How many queries cuDNN takes: what the plan of the paged kernel must skip."""
        return min(self.num_queries, sum(_squares(self.num_queries)))


def _cut(length: int) -> list[int]:
    """`length` less what remains as a list of SIZES, largest first."""
    pieces = []
    for size in reversed(SIZES):
        pieces += [size] * (length // size)
        length %= size
    return pieces


def _squares(num_queries: int) -> list[int]:
    """Sizes of the squares of a chunk; together they may be up to half of SIZES[0] longer than it."""
    return _cut((num_queries + SIZES[0] // 2) // SIZES[0] * SIZES[0])


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


def merge_ref(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges outputs [n, H, D] by log-sum-exps [n, H]: the float32 output and its log-sum-exp."""
    lse = torch.logaddexp(lse_a, lse_b)
    merged = out_a.float() * (lse_a - lse).exp()[..., None] + out_b.float() * (lse_b - lse).exp()[..., None]
    return merged, lse


@jit(varying=["num_queries"])
def _merge_kernel(
    out_ptr,
    lse_ptr,
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
    """BLOCK (query, head) pairs per program; the merged log-sum-exps are [n, H], contiguous."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    query, head = pair // num_heads, pair % num_heads
    dims = tl.arange(0, HEAD_BLOCK)[None, :]
    row_mask = query < num_queries
    mask = row_mask[:, None] & (dims < HEAD_DIM)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    lse_a_ptrs = lse_a_ptr + query * stride_lse_a_query + head * stride_lse_a_head
    lse_b_ptrs = lse_b_ptr + query * stride_lse_b_query + head * stride_lse_b_head
    lse_a = tl.load(lse_a_ptrs, mask=row_mask, other=0.0)  # [BLOCK]
    lse_b = tl.load(lse_b_ptrs, mask=row_mask, other=0.0)  # [BLOCK]
    a_ptrs = a_ptr + (query * stride_a_query + head * stride_a_head)[:, None] + dims
    b_ptrs = b_ptr + (query * stride_b_query + head * stride_b_head)[:, None] + dims
    a = tl.load(a_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK, HEAD_BLOCK]
    b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK, HEAD_BLOCK]
    top = tl.maximum(lse_a, lse_b)
    weight_a, weight_b = tl.exp(lse_a - top), tl.exp(lse_b - top)
    total = weight_a + weight_b
    merged = a * (weight_a / total)[:, None] + b * (weight_b / total)[:, None]
    out_ptrs = out_ptr + (query * stride_out_query + head * HEAD_DIM)[:, None] + dims
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=mask)  # [BLOCK, HEAD_BLOCK]
    tl.store(lse_ptr + pair, top + tl.log(total), mask=row_mask)  # [BLOCK]


def merge(
    out: torch.Tensor,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> torch.Tensor:
    """Writes the merge of outputs [n, H, D] to rows out [n, H * D] in its type; returns its log-sum-exp [n, H]."""
    require_kernels(out.device)
    num_queries, num_heads, head_dim = out_a.shape
    lse = torch.empty((num_queries, num_heads), dtype=torch.float32, device=out.device)
    block = 32
    _merge_kernel[(triton.cdiv(num_queries * num_heads, block),)](
        out,
        lse,
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
    return lse


def context_attention_ref(
    q: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, num_keys: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unmasked attention of q [n, H, D] over the first keys of `blocks`: output like q, log-sum-exp [n, H]."""
    kv = gather_ref(kv_cache, blocks)[:num_keys].transpose(0, 1).float()
    head_dim, group = q.shape[2], q.shape[1] // kv.shape[0]
    keys, values = (part.repeat_interleave(group, 0) for part in (kv[..., :head_dim], kv[..., head_dim:]))
    scores = torch.einsum("qhd,hkd->hqk", q.float(), keys) * scale
    out = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values)
    return out.to(q.dtype), scores.logsumexp(-1).transpose(0, 1)


@jit(varying=["num_queries", "num_keys"])
def _context_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    kv_cache_ptr,
    blocks_ptr,
    num_queries,
    num_keys,
    scale,
    stride_q_token,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (KV head, tile of BLOCK_M queries x heads of the group); all keys are visible to all queries."""
    head = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = (rows // GROUP).to(tl.int64)
    q_head = head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_BLOCK)
    row_mask = rows < num_queries * GROUP
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    q_ptrs = q_ptr + query[:, None] * stride_q_token + (q_head * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)  # [BLOCK_M, HEAD_BLOCK]
    acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    masked_from = num_keys // BLOCK_N * BLOCK_N  # whole tiles need no mask
    for part in tl.static_range(2):
        acc, row_max, row_sum = attend_keys(
            acc,
            row_max,
            row_sum,
            q,
            kv_cache_ptr + head.to(tl.int64) * stride_kv_head,
            blocks_ptr,
            tl.zeros_like(rows) + num_keys,
            0 if part == 0 else masked_from,
            masked_from if part == 0 else num_keys,
            0,
            0,
            scale,
            0.0,
            stride_kv_block,
            stride_kv_slot,
            HEAD_DIM,
            HEAD_BLOCK,
            BLOCK_SIZE,
            BLOCK_N,
            False,
            False,
            part == 1,
            3,
        )
    num_heads = tl.num_programs(0) * GROUP
    line = query * num_heads + q_head
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], out, mask=mask)  # [BLOCK_M, HEAD_BLOCK]
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + line, lse, mask=row_mask)  # [BLOCK_M]


def context_attention(
    q: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, num_keys: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unmasked attention of q [n, H, D] over the first `num_keys` > 0 keys of `blocks`, straight from the cache."""
    require_kernels(q.device)
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    out = torch.empty((num_queries, num_heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_queries, num_heads), dtype=torch.float32, device=q.device)
    group, block_m = num_heads // num_kv_heads, 128  # at least a square of queries: large tiles fill the device
    _context_kernel[(num_kv_heads, triton.cdiv(num_queries * group, block_m))](
        out,
        lse,
        q,
        kv_cache,
        blocks,
        num_queries,
        num_keys,
        scale,
        q.stride(0),
        *kv_cache.stride()[:3],
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=64,
        num_warps=8,
        **launch_options(q.device),
    )
    return out, lse


def gather_ref(kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The tokens of `blocks` in order, [len(blocks) * block_size, KH, 2 D]."""
    return kv_cache.index_select(0, blocks).transpose(1, 2).flatten(0, 1)


@jit(unaligned=["blocks_ptr"])
def _gather_kernel(
    out_ptr,
    kv_cache_ptr,
    blocks_ptr,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program logical block * NUM_HEADS + KV head copies the head's slots of one block."""
    head = tl.program_id(0) % NUM_HEADS
    index = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    slots = tl.arange(0, BLOCK_SIZE).to(tl.int64)[:, None]
    words = tl.arange(0, WIDTH_BLOCK)[None, :]
    mask = (words < WIDTH) & (slots < BLOCK_SIZE)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    block = tl.load(blocks_ptr + index).to(tl.int64)
    kv_ptrs = kv_cache_ptr + block * stride_kv_block + head * stride_kv_head + slots * stride_kv_slot + words
    values = tl.load(kv_ptrs, mask=mask, other=0.0)  # [BLOCK_SIZE, WIDTH_BLOCK]
    line = ((index * BLOCK_SIZE + slots) * NUM_HEADS + head) * WIDTH
    tl.store(out_ptr + line + words, values, mask=mask)  # [BLOCK_SIZE, WIDTH_BLOCK]


def gather(kv_cache: torch.Tensor, blocks: torch.Tensor, num_keys: int, length: int) -> torch.Tensor:
    """The first `num_keys` tokens of `blocks` [n] in order, token-major, then zeros: [length or more, KH, 2 D]."""
    require_kernels(kv_cache.device)
    _, num_kv_heads, block_size, width = kv_cache.shape
    out = kv_cache.new_empty((max(length, blocks.shape[0] * block_size), num_kv_heads, width))
    # One axis: the others end at 65535, and a context may have more blocks.
    _gather_kernel[(num_kv_heads * blocks.shape[0],)](
        out,
        kv_cache,
        blocks,
        *kv_cache.stride()[:3],
        NUM_HEADS=num_kv_heads,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        BLOCK_SIZE=block_size,
        num_warps=4,
        **launch_options(kv_cache.device),
    )
    if length > num_keys:
        out[num_keys:].zero_()  # a key that is masked must still be a number
    return out


def _dense(q: torch.Tensor, kv: torch.Tensor, scale: float, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN attention of q [n, H, D] over kv [keys, KH, 2D]: output [n, H, D] and log-sum-exp [n, H].

    Token-major, so that strides depend on the model only: cuDNN's plans are kept by shape and stride.
    """
    head_dim = q.shape[2]
    queries, pairs = q.transpose(0, 1)[None], kv.transpose(0, 1)[None]
    keys, values = pairs[..., :head_dim], pairs[..., head_dim:]
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, False, scale=scale
    )[:2]
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0]).transpose(0, 1)


def _attend_square(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,
    first: int,
    scale: float,
) -> None:
    """Writes out [valid, H * D]: of q [n, H, D] at positions first .. the valid ones, over `kv` up to their own."""
    num_queries, num_heads, head_dim = q.shape
    num_valid = out.shape[0]
    pieces, at = [(first, num_queries)], 0  # the square, then the rectangles of its context
    for size in _cut(first):
        pieces.append((at, size))
        at += size
    num_parts = len(pieces) + (at < first)
    merged, lse = _dense(q, kv[first : first + num_queries], scale, is_causal=True)
    merged, lse = merged[:num_valid], lse[:num_valid]
    for index in range(1, num_parts):
        if index < len(pieces):
            key, size = pieces[index]
            part, part_lse = _dense(q, kv[key : key + size], scale, is_causal=False)
        else:
            rest = blocks[at // kv_cache.shape[2] :]  # SIZES are multiples of every block size
            part, part_lse = context_attention(q[:num_valid], kv_cache, rest, first - at, scale)
        target = out
        if index < num_parts - 1:
            target = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        lse = merge(target, merged, lse, part[:num_valid], part_lse[:num_valid])
        merged = target.unflatten(1, (num_heads, head_dim))
    if num_parts == 1:
        out.unflatten(1, (num_heads, head_dim)).copy_(merged)


def long_prefill_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    rows: Sequence[LongRow],
    scale: float,
) -> None:
    """Writes out [T, H * D] at the first `num_covered` queries of each row; the paged kernel owes the others.

    q like out; kv_cache and block_table as in `attention.py`; the keys and values of the chunks are in the cache
    already. `unsupported_reason` was None.
    """
    block_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
    for row in rows:
        num_keys = row.num_context + row.num_covered
        blocks = block_table[row.row, : -(-num_keys // block_size)]
        squares = _squares(row.num_queries)
        kv = gather(kv_cache, blocks, num_keys, row.num_context + sum(squares))
        offset = 0
        for size in squares:
            first, end = row.first_token + offset, row.first_token + min(offset + size, row.num_queries)
            queries = _rows_from(q, first, size).unflatten(1, (-1, head_dim))
            _attend_square(out[first:end], queries, kv, kv_cache, blocks, row.num_context + offset, scale)
            offset += size


def _rows_from(q: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """`size` rows of q from `first` on, whosever they are, with zeros past its end."""
    found = q[first : first + size]
    if found.shape[0] == size:
        return found
    filled = q.new_zeros((size, q.shape[1]))
    filled[: found.shape[0]] = found
    return filled


def warm(num_heads: int, kv_cache: torch.Tensor, max_queries: int) -> Iterator[None]:
    """Has cuDNN prepare every shape it will be asked for with chunks of up to `max_queries`, and compiles the rest.

    A piece at a time, each of about a tenth of a second, a second where a kernel is compiled for the first time.
    """
    _, num_kv_heads, _, width = kv_cache.shape
    head_dim = width // 2
    if max_queries < SIZES[0]:
        return
    largest = sum(_squares(max_queries))
    yield from _compile_rest(num_heads, kv_cache)
    for num_queries in (size for size in SIZES if size <= largest):
        q = kv_cache.new_zeros((num_queries, num_heads, head_dim))
        for num_keys in SIZES:
            kv = kv_cache.new_zeros((num_keys, num_kv_heads, width))
            _dense(q, kv, head_dim**-0.5, is_causal=False)
            if num_keys == num_queries:
                _dense(q, kv, head_dim**-0.5, is_causal=True)
            yield


def _compile_rest(num_heads: int, kv_cache: torch.Tensor) -> Iterator[None]:
    """One call of every kind of merge, and of the rest of a context: the null block's keys."""
    num_queries, block_size, head_dim = SIZES[0], kv_cache.shape[2], kv_cache.shape[3] // 2
    part = kv_cache.new_zeros((num_queries, num_heads, head_dim))
    dense_lse = part.new_zeros((num_heads, num_queries), dtype=torch.float32).transpose(0, 1)
    out = part.flatten(1)
    running = out.float()
    blocks = torch.zeros(2, dtype=torch.int32, device=part.device)
    gather(kv_cache, blocks, block_size, 2 * block_size)
    yield
    context_attention(part, kv_cache, blocks[1:], block_size, head_dim**-0.5)  # tables begin anywhere
    yield
    rest, rest_lse = context_attention(part, kv_cache, blocks, block_size, head_dim**-0.5)
    merged, lse = part, dense_lse
    for _ in range(2):  # of two parts, then of a running sum and one more
        merge(out, merged, lse, part, dense_lse)
        yield
        merge(out, merged, lse, rest, rest_lse)
        yield
        lse = merge(running, merged, lse, part, dense_lse)
        merged = running.unflatten(1, (num_heads, head_dim))
