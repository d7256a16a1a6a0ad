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
past seq_len are never read, whatever bytes an earlier owner of the block left there, nor those before the window
of a tile's first query: their blocks may belong to another request by now. Softmax and sums in float32, rounded
once at the store of out. Called by `aioengine/layers/ops.py` once per layer.

The kernel packs the heads of a group beside the queries, so that one load of a key serves them all:

    row m of a tile [BLOCK_M] = query m // GROUP, head m % GROUP of the KV head

and takes its tile and its range of keys from the work list of `attention_plan.py`.
"""

from __future__ import annotations

import torch

from .attention_plan import AttentionPlan, ItemList
from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs


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


@jit
def attend_keys(
    acc,
    row_max,
    row_sum,
    q,
    kv_ptr,
    table_ptr,
    positions,
    start,
    end,
    first_key,
    window,
    scale,
    softcap,
    stride_kv_block,
    stride_kv_slot,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Online softmax in base 2 over the keys start .. end; unmasked tiles are whole and visible to all.

    With a window, keys before `first_key` are not read: no query of the tile sees them.
    """
    dims = tl.arange(0, HEAD_BLOCK)
    dim_mask = (dims < HEAD_DIM)[None, :]
    ahead = start + tl.arange(0, BLOCK_N)
    next_blocks = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)  # [BLOCK_N]
    for first in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        keys = first + tl.arange(0, BLOCK_N)
        blocks = next_blocks  # loaded one iteration ahead: keys and values wait for no table entry
        ahead = keys + BLOCK_N
        next_blocks = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)  # [BLOCK_N]
        slots = blocks.to(tl.int64) * stride_kv_block + (keys % BLOCK_SIZE) * stride_kv_slot
        k_ptrs = kv_ptr + slots[:, None] + dims[None, :]
        if MASKED:
            is_read = keys < end
            if HAS_WINDOW:
                is_read = is_read & (keys >= first_key)
            load_mask = is_read[:, None] & dim_mask
            k = tl.load(k_ptrs, mask=load_mask, other=0.0)  # [BLOCK_N, HEAD_BLOCK]
            v = tl.load(k_ptrs + HEAD_DIM, mask=load_mask, other=0.0)  # [BLOCK_N, HEAD_BLOCK]
        elif HEAD_BLOCK != HEAD_DIM:
            k = tl.load(k_ptrs, mask=dim_mask, other=0.0)  # [BLOCK_N, HEAD_BLOCK]
            v = tl.load(k_ptrs + HEAD_DIM, mask=dim_mask, other=0.0)  # [BLOCK_N, HEAD_BLOCK]
        else:
            k = tl.load(k_ptrs)  # [BLOCK_N, HEAD_BLOCK]
            v = tl.load(k_ptrs + HEAD_DIM)  # [BLOCK_N, HEAD_BLOCK]
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # softcap * tanh
        scores = scores * 1.4426950408889634
        if MASKED:
            visible = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            if HAS_WINDOW:
                visible = visible & (positions[:, None] - keys[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows that see no key so far stay finite
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@jit
def _store_rows(
    out_ptr,
    sinks_ptr,
    acc,
    row_max,
    row_sum,
    rows,
    num_rows,
    token,
    head,
    stride_out_token,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Divides by the sum, sink included, and stores the rows of a tile that are real."""
    heads = head * GROUP + rows % GROUP
    mask = rows < num_rows
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634
        new_max = tl.maximum(row_max, sink)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.exp2(sink - new_max)
        acc = acc * shrink[:, None]
    out = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    tokens = (token + rows // GROUP).to(tl.int64)
    dims = tl.arange(0, HEAD_BLOCK)
    out_ptrs = out_ptr + tokens[:, None] * stride_out_token + (heads * HEAD_DIM)[:, None] + dims[None, :]
    store_mask = mask[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=store_mask)  # [rows, HEAD_BLOCK]


@jit
def _merge_parts(
    out_ptr,
    sinks_ptr,
    partial_acc_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    slot,
    num_parts,
    num_rows,
    token,
    head,
    stride_out_token,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merges the parts of one tile by their log-sum-exps, PARTS parts of ROWS rows at a time."""
    dims = tl.arange(0, HEAD_BLOCK)
    for first_row in range(0, num_rows, ROWS):
        rows = first_row + tl.arange(0, ROWS)
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
        for first_part in range(0, num_parts, PARTS):
            parts = first_part + tl.arange(0, PARTS)
            mask = (parts < num_parts)[:, None] & (rows < num_rows)[None, :]
            part_lines = (slot + parts).to(tl.int64) * tl.num_programs(0) + head
            lines = part_lines[:, None] * BLOCK_M + rows[None, :]  # [PARTS, ROWS]
            # .cg: other programs of this launch wrote these bytes; a stale line of L1 must not answer
            max_ptrs, sum_ptrs = partial_max_ptr + lines, partial_sum_ptr + lines
            part_max = tl.load(max_ptrs, mask=mask, other=float("-inf"), cache_modifier=".cg")
            part_sum = tl.load(sum_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
            acc_ptrs = partial_acc_ptr + lines[:, :, None] * HEAD_DIM + dims[None, None, :]
            acc_mask = mask[:, :, None] & (dims < HEAD_DIM)[None, None, :]
            # [PARTS, ROWS, HEAD_BLOCK]
            part_acc = tl.load(acc_ptrs, mask=acc_mask, other=0.0, cache_modifier=".cg")
            new_max = tl.maximum(row_max, tl.max(part_max, axis=0))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(part_max - base[None, :])
            shrink = tl.exp2(row_max - base)
            row_sum = row_sum * shrink + tl.sum(weights * part_sum, axis=0)
            acc = acc * shrink[:, None] + tl.sum(part_acc * weights[:, :, None], axis=0)
            row_max = new_max
        _store_rows(
            out_ptr,
            sinks_ptr,
            acc,
            row_max,
            row_sum,
            rows,
            num_rows,
            token,
            head,
            stride_out_token,
            GROUP,
            HEAD_DIM,
            HEAD_BLOCK,
            HAS_SINKS,
        )


@jit(varying=["window", "stride_table_row"])
def _attention_kernel(
    out_ptr,
    q_ptr,
    kv_cache_ptr,
    table_ptr,
    items_ptr,
    sinks_ptr,
    partial_acc_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    arrived_ptr,
    scale,
    softcap,
    window,
    stride_out_token,
    stride_q_token,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    stride_table_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FULL_TILES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (KV head, item). Each constexpr belongs to the layer or to the tile, none to the batch."""
    head = tl.program_id(0)
    if not SETTLED:
        wait_for_inputs(PDL)
    item_ptr = items_ptr + tl.program_id(1) * 8
    row = tl.load(item_ptr)
    token = tl.load(item_ptr + 1)
    num_rows = tl.load(item_ptr + 2) * GROUP
    position = tl.load(item_ptr + 3)
    start = tl.load(item_ptr + 4)
    end = tl.load(item_ptr + 5)
    slot = tl.load(item_ptr + 6)
    packed_parts = tl.load(item_ptr + 7)
    num_parts, part = packed_parts // 65536, packed_parts % 65536
    if SETTLED:
        wait_for_inputs(PDL)
    let_next_start(PDL)
    if row >= 0:
        rows = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, HEAD_BLOCK)
        row_mask = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
        q_tokens = (token + rows // GROUP).to(tl.int64)
        q_ptrs = q_ptr + q_tokens[:, None] * stride_q_token + (head * GROUP + rows % GROUP)[:, None] * HEAD_DIM
        q = tl.load(q_ptrs + dims[None, :], mask=row_mask, other=0.0)  # [BLOCK_M, HEAD_BLOCK]
        positions = position + rows // GROUP
        acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        kv_ptr = kv_cache_ptr + head.to(tl.int64) * stride_kv_head
        row_table_ptr = table_ptr + row.to(tl.int64) * stride_table_row
        masked_from = start
        if FULL_TILES:
            # keys that every query of the tile sees need no mask
            masked_from = start + (tl.minimum(position + 1, end) - start) // BLOCK_N * BLOCK_N
            masked_from = tl.maximum(masked_from, start)
            acc, row_max, row_sum = attend_keys(
                acc,
                row_max,
                row_sum,
                q,
                kv_ptr,
                row_table_ptr,
                positions,
                start,
                masked_from,
                0,
                window,
                scale,
                softcap,
                stride_kv_block,
                stride_kv_slot,
                HEAD_DIM,
                HEAD_BLOCK,
                BLOCK_SIZE,
                BLOCK_N,
                HAS_WINDOW,
                HAS_SOFTCAP,
                False,
                NUM_STAGES,
            )
        acc, row_max, row_sum = attend_keys(
            acc,
            row_max,
            row_sum,
            q,
            kv_ptr,
            row_table_ptr,
            positions,
            masked_from,
            end,
            position - window + 1,
            window,
            scale,
            softcap,
            stride_kv_block,
            stride_kv_slot,
            HEAD_DIM,
            HEAD_BLOCK,
            BLOCK_SIZE,
            BLOCK_N,
            HAS_WINDOW,
            HAS_SOFTCAP,
            True,
            NUM_STAGES,
        )
        if num_parts == 1:
            _store_rows(
                out_ptr,
                sinks_ptr,
                acc,
                row_max,
                row_sum,
                rows,
                num_rows,
                token,
                head,
                stride_out_token,
                GROUP,
                HEAD_DIM,
                HEAD_BLOCK,
                HAS_SINKS,
            )
        else:
            lines = ((slot + part).to(tl.int64) * tl.num_programs(0) + head) * BLOCK_M + rows
            tl.store(partial_max_ptr + lines, row_max, mask=rows < num_rows)  # [BLOCK_M]
            tl.store(partial_sum_ptr + lines, row_sum, mask=rows < num_rows)  # [BLOCK_M]
            acc_ptrs = partial_acc_ptr + lines[:, None] * HEAD_DIM + dims[None, :]
            tl.store(acc_ptrs, acc, mask=row_mask)  # [BLOCK_M, HEAD_BLOCK]
            tl.debug_barrier()  # all threads' stores come before the one atomic that publishes them
            counter_ptr = arrived_ptr + slot * tl.num_programs(0) + head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_parts - 1:
                _merge_parts(
                    out_ptr,
                    sinks_ptr,
                    partial_acc_ptr,
                    partial_max_ptr,
                    partial_sum_ptr,
                    slot,
                    num_parts,
                    num_rows,
                    token,
                    head,
                    stride_out_token,
                    GROUP,
                    HEAD_DIM,
                    HEAD_BLOCK,
                    HAS_SINKS,
                    BLOCK_M,
                    MERGE_ROWS,
                    MERGE_PARTS,
                )
                tl.store(counter_ptr, 0)


def _launch_list(
    work: ItemList,
    plan: AttentionPlan,
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    is_settled: bool,
) -> None:
    group = plan.num_heads // plan.num_kv_heads
    tile = work.tile
    few_queries = tile.block_m < 64
    merge_rows = min(triton.next_power_of_2(group), 32) if few_queries else 32
    partial_max, partial_sum = plan.partial_max_sum.chunk(2)
    _attention_kernel[(plan.num_kv_heads, work.num_items)](
        out,
        q,
        kv_cache,
        block_table,
        work.items,
        sinks,
        plan.partial_acc,
        partial_max,
        partial_sum,
        plan.arrived,
        scale,
        softcap,
        plan.window,
        out.stride(0),
        q.stride(0),
        *kv_cache.stride()[:3],
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=plan.head_dim,
        HEAD_BLOCK=triton.next_power_of_2(plan.head_dim),
        BLOCK_SIZE=kv_cache.shape[2],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HAS_WINDOW=plan.window > 0,
        HAS_SOFTCAP=softcap > 0.0,
        HAS_SINKS=sinks is not None,
        FULL_TILES=not few_queries and plan.window == 0,
        MERGE_ROWS=merge_rows,
        MERGE_PARTS=max(32 // merge_rows, 2),
        NUM_STAGES=tile.num_stages,
        SETTLED=is_settled,
        num_warps=tile.num_warps,
        **launch_options(q.device),
    )


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    is_settled: bool = False,
) -> torch.Tensor:
    """Attention of the batch that `plan` was filled for; one launch per work list. See the head of the file.

    The window is the plan's. Every token of the result is written, padding with zeros, but for those that the
    plan was told to skip. `is_settled`: some kernel that waits for its inputs was launched between the plan's
    last `fill_plan` and this call, so that the list may be read while that kernel still runs.
    """
    require_kernels(q.device)
    if q.shape != (plan.num_tokens, plan.num_heads * plan.head_dim):
        raise ValueError(f"q is {tuple(q.shape)}; the plan is for {plan.num_tokens} tokens")
    if q.stride(1) != 1 or kv_cache.stride(3) != 1 or block_table.stride(1) != 1:
        raise ValueError("q, kv_cache and block_table must be contiguous on their last axis")
    if kv_cache.shape[2] & (kv_cache.shape[2] - 1):
        raise ValueError(f"block_size must be a power of two; it is {kv_cache.shape[2]}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for work in plan.lists:
        _launch_list(work, plan, out, q, kv_cache, block_table, scale, softcap, sinks, is_settled)
    return out
