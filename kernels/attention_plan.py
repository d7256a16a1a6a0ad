"""The work list of one step's attention: which program attends which queries to which keys.

A list is made once per step, on the device, and read by the attention kernel of every layer. Its length
depends on the bucket only, so a captured graph serves any batch; unused entries say so. It spreads the keys
of the whole batch evenly: a row with a long context is cut into parts that run side by side and are merged
by whichever part finishes last.

    item    8 int32: row (-1 = unused), first token, number of queries, position of the first query,
            first key, end of keys, first partial slot, parts * 65536 + part

Rows with few queries (decodes) and rows with many (prefill chunks) are tiled differently, so each has its
list; a decode-only bucket has one list that takes every row. Tokens past the last row are listed without
keys, which makes the attention kernel write zeros there.

    parts:  chunk = max(min_chunk, total keys / target_parts), so at most (query tiles + target_parts) items,
            and at most 2 * target_parts of them are parts of something

Made by the runner once per step and window size; read by `kernels/attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs

ITEM_WORDS = 8
ALIGN = 64
"""Parts start at multiples of this many keys from the first key of their tile."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How one attention launch is cut: set by `tile_for`, read by the plan and the attention kernel."""

    block_m: int  # queries x heads of a group per program
    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int
    min_chunk: int  # fewest keys worth a part of their own
    target_programs: int  # programs that fill the device, over all KV heads


def tile_for(group: int, few_queries: bool, num_rows: int = 64) -> Tile:
    """The tile for `group` query heads per KV head; measured on an H200 (`bench/results/h200_kernels.json`).

    A few decodes are a matter of latency and want a deeper pipeline, many of them one of more programs at once.
    """
    if few_queries:
        return Tile(max(16, triton.next_power_of_2(group)), 64, 4, 3 if num_rows <= 16 else 2, 256, 132 * 4)
    return Tile(max(64, triton.next_power_of_2(group)), 64, 4, 3, 512, 132 * 2)


@dataclass(frozen=True, slots=True)
class ItemList:
    """One list of a plan; the numbers are the bucket's, `items` is rewritten each step."""

    items: torch.Tensor  # [num_items, 8] int32
    tile: Tile
    queries_per_item: int
    target_parts: int
    min_queries: int  # rows with fewer or more queries belong to the other list
    max_queries: int
    takes_padding: bool

    @property
    def num_items(self) -> int:
        return self.items.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work lists of a bucket and the memory their parts meet in; made once per bucket and window."""

    lists: tuple[ItemList, ...]
    partial_acc: torch.Tensor  # float32, flat: [slots, KH, block_m, D] of the list in use
    partial_max_sum: torch.Tensor  # float32, flat: [2, slots, KH, block_m]
    arrived: torch.Tensor  # int32 [slots * KH], zero between launches
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int


_NO_LIMIT = 1 << 30


def make_plan(
    num_tokens: int,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    *,
    window: int = 0,
    decode_only: bool = False,
    few: Tile | None = None,
    many: Tile | None = None,
    share: AttentionPlan | None = None,
    query_lens: Sequence[int] | None = None,
) -> AttentionPlan:
    """Buffers of a plan for batches of up to `num_tokens` tokens in up to `num_rows` rows.

    `query_lens`: how many queries each row of the one batch to come leaves to this plan. Its lists are then as
    long as that batch needs, and those it does not need are left out: an unused entry still costs a program,
    and long prefills would have thousands. Such a plan takes no padding.

    `decode_only` leaves out the list for long query ranges: such a plan still serves any batch, but long
    ranges slowly. `share`: a plan, never used at the same time, whose partial buffers serve if large enough.
    """
    require_kernels(device)
    group = num_heads // num_kv_heads
    few = few or tile_for(group, few_queries=True, num_rows=num_rows)
    many = many or tile_for(group, few_queries=False)
    lists = []
    slots = acc_size = 0
    few_limit = _NO_LIMIT if decode_only else few.block_m // group
    for tile, lower, upper in ((few, 1, few_limit), (many, few_limit + 1, _NO_LIMIT)):
        if lower > upper:
            continue
        queries = tile.block_m // group
        target = max(1, tile.target_programs // num_kv_heads)
        num_query_tiles = min(num_tokens, num_rows + 1 + num_tokens // queries)
        takes_padding = upper == _NO_LIMIT
        if upper <= queries and not takes_padding:
            num_query_tiles = min(num_tokens, num_rows)
        if query_lens is not None:
            num_query_tiles = sum(_ceil(n, queries) for n in query_lens if lower <= n <= upper)
            takes_padding = False
            if num_query_tiles == 0:
                continue
        items = torch.empty(num_query_tiles + target, ITEM_WORDS, dtype=torch.int32, device=device)
        lists.append(ItemList(items, tile, queries, target, lower, upper, takes_padding))
        slots = max(slots, 2 * target * num_kv_heads)
        acc_size = max(acc_size, 2 * target * num_kv_heads * tile.block_m)
    if share is not None and share.arrived.numel() >= slots and share.partial_acc.numel() >= acc_size * head_dim:
        partial = share.partial_acc, share.partial_max_sum, share.arrived
    else:
        partial = (
            torch.empty(acc_size * head_dim, dtype=torch.float32, device=device),
            torch.empty(2 * acc_size, dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )
    return AttentionPlan(tuple(lists), *partial, num_tokens, num_heads, num_kv_heads, head_dim, window)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def fill_list_ref(
    work: ItemList,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    window: int,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """The items [num_items, 8] of one list, row after row, each row's last queries first."""
    bounds, lens = query_start_loc.tolist(), seq_lens.tolist()
    skips = [0] * len(lens) if skip is None else skip.tolist()
    starts = [bound + skipped for bound, skipped in zip(bounds, skips, strict=False)]
    tile_queries = work.queries_per_item
    rows = []
    for row, seq_len in enumerate(lens):
        count = bounds[row + 1] - starts[row]
        if work.min_queries <= count <= work.max_queries:
            span = min(seq_len, window + tile_queries - 1) if window else seq_len
            rows.append((row, count, seq_len, _ceil(count, tile_queries), span))
    total = sum(tiles * span for _, _, _, tiles, span in rows)
    chunk = _ceil(max(work.tile.min_chunk, _ceil(total, work.target_parts)), ALIGN) * ALIGN
    items: list[list[int]] = []
    slot = 0
    for row, count, seq_len, tiles, span in rows:
        parts = max(1, _ceil(span, chunk))
        for tile in range(tiles - 1, -1, -1):
            position = seq_len - count + tile * tile_queries
            num_queries = min(tile_queries, count - tile * tile_queries)
            end = position + num_queries
            first = max(0, position - window + 1) // ALIGN * ALIGN if window else 0
            length = _ceil(_ceil(end - first, parts), ALIGN) * ALIGN
            used = _ceil(end - first, length)
            for part in range(parts):
                key = first + part * length
                token = starts[row] + tile * tile_queries
                words = [
                    row,
                    token,
                    num_queries,
                    position,
                    key,
                    min(key + length, end),
                    slot,
                    used << 16 | part,
                ]
                items.append(words if part < used else [-1] + [0] * 7)
            slot += parts if parts > 1 else 0
    if work.takes_padding:
        for token in range(bounds[-1], num_tokens, tile_queries):
            items.append([0, token, min(tile_queries, num_tokens - token), 0, 0, 0, 0, 1 << 16])
    items += [[-1] + [0] * 7] * (work.num_items - len(items))
    return torch.tensor(items, dtype=torch.int32, device=query_start_loc.device)


_VARYING = ["num_tokens", "num_rows", "num_items", "window", "tile_queries", "target_parts"]
_VARYING += ["min_chunk", "min_queries", "max_queries"]


@jit(varying=_VARYING)
def _fill_list_kernel(
    items_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    skip_ptr,
    num_tokens,
    num_rows,
    num_items,
    window,
    tile_queries,
    target_parts,
    min_chunk,
    min_queries,
    max_queries,
    HAS_SKIP: tl.constexpr,
    TAKES_PADDING: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    ITEMS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every program scans all rows, then finds the rows of its ITEMS_BLOCK items by comparing."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    rows = tl.arange(0, ROWS_BLOCK)
    row_mask = rows < num_rows
    starts = tl.load(query_start_loc_ptr + rows, mask=row_mask, other=0)  # [ROWS_BLOCK]
    if HAS_SKIP:
        starts += tl.load(skip_ptr + rows, mask=row_mask, other=0)  # [ROWS_BLOCK]
    counts = tl.load(query_start_loc_ptr + rows + 1, mask=row_mask, other=0) - starts  # [ROWS_BLOCK]
    lens = tl.load(seq_lens_ptr + rows, mask=row_mask, other=0)  # [ROWS_BLOCK]
    mine = (counts >= min_queries) & (counts <= max_queries)
    tiles = tl.where(mine, (counts + tile_queries - 1) // tile_queries, 0)
    spans = tl.where(window > 0, tl.minimum(lens, window + tile_queries - 1), lens)
    total = tl.sum(tiles.to(tl.int64) * spans, axis=0)
    chunk = tl.maximum(min_chunk, (total + target_parts - 1) // target_parts).to(tl.int32)
    chunk = (chunk + ALIGN - 1) // ALIGN * ALIGN
    parts_of_row = tl.maximum((spans + chunk - 1) // chunk, 1)
    sizes = tiles * parts_of_row
    ends = tl.cumsum(sizes, axis=0)
    slot_sizes = tl.where(parts_of_row > 1, sizes, 0)
    slot_starts = tl.cumsum(slot_sizes, axis=0) - slot_sizes

    item = tl.program_id(0) * ITEMS_BLOCK + tl.arange(0, ITEMS_BLOCK)
    row = tl.sum((ends[None, :] <= item[:, None]).to(tl.int32), axis=1)  # [ITEMS_BLOCK]
    is_row = rows[None, :] == row[:, None]  # [ITEMS_BLOCK, ROWS_BLOCK]
    local = item - tl.sum(tl.where(is_row, (ends - sizes)[None, :], 0), axis=1)
    slot = tl.sum(tl.where(is_row, slot_starts[None, :], 0), axis=1)
    parts = tl.maximum(tl.sum(tl.where(is_row, parts_of_row[None, :], 0), axis=1), 1)
    num_listed = tl.sum(sizes, axis=0)
    listed = item < num_listed
    row_start = tl.load(query_start_loc_ptr + row, mask=listed, other=0)  # [ITEMS_BLOCK]
    if HAS_SKIP:
        row_start += tl.load(skip_ptr + row, mask=listed, other=0)  # [ITEMS_BLOCK]
    count = tl.load(query_start_loc_ptr + row + 1, mask=listed, other=0) - row_start  # [ITEMS_BLOCK]
    seq_len = tl.load(seq_lens_ptr + row, mask=listed, other=0)  # [ITEMS_BLOCK]
    tile = (count + tile_queries - 1) // tile_queries - 1 - local // parts
    part = local % parts
    first_query = tile * tile_queries
    token = row_start + first_query
    num_queries = tl.minimum(tile_queries, count - first_query)
    position = seq_len - count + first_query
    end = position + num_queries
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0) // ALIGN * ALIGN, 0)
    length = tl.maximum(((end - first + parts - 1) // parts + ALIGN - 1) // ALIGN * ALIGN, ALIGN)
    used = (end - first + length - 1) // length
    key = first + part * length
    key_end = tl.minimum(key + length, end)
    listed = listed & (part < used)

    padding_token = tl.load(query_start_loc_ptr + num_rows) + (item - num_listed) * tile_queries
    is_padding = (item >= num_listed) & (padding_token < num_tokens)
    if not TAKES_PADDING:
        is_padding = is_padding & (item < 0)
    padding_queries = tl.minimum(tile_queries, num_tokens - padding_token)
    item_ptrs = items_ptr + item * 8
    mask = item < num_items
    zero = tl.zeros_like(item)
    queries = tl.where(listed, num_queries, padding_queries)
    has_queries = listed | is_padding
    tl.store(item_ptrs, tl.where(listed, row, tl.where(is_padding, zero, -1)), mask=mask)  # [ITEMS_BLOCK]
    token = tl.where(has_queries, tl.where(listed, token, padding_token), zero)
    tl.store(item_ptrs + 1, token, mask=mask)  # [ITEMS_BLOCK]
    tl.store(item_ptrs + 2, tl.where(has_queries, queries, zero), mask=mask)  # [ITEMS_BLOCK]
    tl.store(item_ptrs + 3, tl.where(listed, position, zero), mask=mask)  # [ITEMS_BLOCK]
    tl.store(item_ptrs + 4, tl.where(listed, key, zero), mask=mask)  # [ITEMS_BLOCK]
    tl.store(item_ptrs + 5, tl.where(listed, key_end, zero), mask=mask)  # [ITEMS_BLOCK]
    tl.store(
        item_ptrs + 6, tl.where(listed, slot + tl.where(parts > 1, local - part, 0), zero), mask=mask
    )  # [ITEMS_BLOCK]
    packed = tl.where(listed, used * 65536 + part, tl.where(is_padding, 65536, zero))
    tl.store(item_ptrs + 7, packed, mask=mask)  # [ITEMS_BLOCK]


def _rows_block(num_rows: int) -> int:
    """A power of two; few different ones, because each is compiled on its own."""
    return 16 if num_rows <= 16 else 128 if num_rows <= 128 else triton.next_power_of_2(num_rows)


def row_counts(most: int) -> list[int]:
    """Numbers of rows up to `most`, ascending, that between them take every kernel that lists rows."""
    counts = [min(most, 16)]
    while counts[-1] < most:
        counts.append(min(most, max(128, 2 * counts[-1])))
    return counts


def fill_plan(
    plan: AttentionPlan,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    skip: torch.Tensor | None = None,
) -> None:
    """Writes the lists of one step from query_start_loc [S + 1] and seq_lens [S]; one launch per list.

    `skip` [S]: how many of each row's first queries somebody else attends (`attention_prefill.py`).
    """
    require_kernels(seq_lens.device)
    num_rows = seq_lens.shape[0]
    block = 8
    for work in plan.lists:
        _fill_list_kernel[(triton.cdiv(work.num_items, block),)](
            work.items,
            query_start_loc,
            seq_lens,
            skip,
            plan.num_tokens,
            num_rows,
            work.num_items,
            plan.window,
            work.queries_per_item,
            work.target_parts,
            work.tile.min_chunk,
            work.min_queries,
            work.max_queries,
            HAS_SKIP=skip is not None,
            TAKES_PADDING=work.takes_padding,
            ALIGN=ALIGN,
            ROWS_BLOCK=_rows_block(num_rows),
            ITEMS_BLOCK=block,
            num_warps=8,
            **launch_options(seq_lens.device),
        )
