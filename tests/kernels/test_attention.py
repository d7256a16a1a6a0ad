"""Paged attention of mixed batches against dense attention in float64.

Every cache slot that no sequence owns is NaN, so finite output means that no stale slot was read (INV-26).
"""

from __future__ import annotations

import functools

import pytest
import torch

from aioengine.kernels import attention
from aioengine.kernels.attention import paged_attention
from aioengine.kernels.attention_plan import ItemList, Tile, fill_list_ref, fill_plan, make_plan
from tests.kernels.batches import RELATIVE_ERROR, PagedBatch, paged_batch, relative_error
from tests.kernels.triton_here import need_triton

MIXED = [(0, 5), (17, 1), (0, 1), (63, 1), (64, 2), (15, 17)]
DECODES = [(0, 1), (15, 1), (16, 1), (130, 1), (63, 1)]


def attend_reference(batch: PagedBatch, scale: float, **options) -> torch.Tensor:
    metadata = batch.block_table, batch.query_start_loc, batch.seq_lens
    return attention.paged_attention_ref(batch.q, batch.kv_cache, *metadata, scale, **options)


def attend_by_plan(
    batch: PagedBatch, scale: float, *, window: int = 0, decode_only: bool = False, exact: bool = False, **options
):
    """A plan whose tiles are small, so that short tests have many tiles and parts."""
    group = batch.num_heads // batch.kv_cache.shape[1]
    sizes = batch.q.shape[0], batch.seq_lens.shape[0]
    heads = batch.num_heads, batch.kv_cache.shape[1], batch.kv_cache.shape[3] // 2
    few = Tile(16, 32, 4, 2, min_chunk=64, target_programs=4 * heads[1])
    many = Tile(64, 32, 4, 2, min_chunk=64, target_programs=4 * heads[1])
    assert group <= 16
    plan = make_plan(
        *sizes,
        *heads,
        batch.q.device,
        window=window,
        decode_only=decode_only,
        few=few,
        many=many,
        query_lens=batch.query_lens if exact else None,
    )
    for work in plan.lists:
        work.items.fill_(1 << 20)
    plan.partial_acc.fill_(float("nan"))
    fill_plan(plan, batch.query_start_loc, batch.seq_lens)
    out = paged_attention(batch.q, batch.kv_cache, batch.block_table, plan, scale, **options)
    assert bool((plan.arrived == 0).all()), "counters are zero between launches"
    return out


@pytest.fixture(params=["reference", "triton"])
def attend(request, device):
    if request.param == "reference":
        return attend_reference
    need_triton(device)
    return attend_by_plan


def check(attend, batch: PagedBatch, dtype: torch.dtype, **options) -> None:
    scale = 0.2
    out = attend(batch, scale, **options)
    real = sum(batch.query_lens)
    assert relative_error(out[:real], batch.dense(scale, **options)[:real]) < RELATIVE_ERROR[dtype]
    assert bool((out[real:] == 0).all()), "padding tokens give zeros"


@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)], ids=["gqa2", "mha", "gqa7"])
def test_paged_equals_dense(attend, lens, heads, dtype, device):
    batch = paged_batch(lens, num_heads=heads[0], num_kv_heads=heads[1], head_dim=32, dtype=dtype, device=device)
    check(attend, batch, dtype)


def test_a_decode_only_plan_serves_any_batch(dtype, device):
    need_triton(device)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": dtype, "device": device}
    for lens in (DECODES, MIXED):
        batch = paged_batch(lens, padding_tokens=5, padding_rows=2, **sizes)
        check(functools.partial(attend_by_plan, decode_only=True), batch, dtype)


@pytest.mark.parametrize(
    ("lens", "num_lists"), [(MIXED, 2), (DECODES, 1), ([(40, 17), (0, 130)], 1)], ids=["mixed", "decodes", "prefills"]
)
def test_a_plan_for_one_batch_has_the_lists_it_needs(lens, num_lists, dtype, device, monkeypatch):
    need_triton(device)
    batch = paged_batch(lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device)
    launched = []
    launch = attention._launch_list
    monkeypatch.setattr(attention, "_launch_list", lambda work, *rest: launched.append(work) or launch(work, *rest))
    check(functools.partial(attend_by_plan, exact=True), batch, dtype)
    assert len(launched) == num_lists
    tiles = sum(-(-n // work.queries_per_item) for work in launched for n in batch.query_lens if in_list(n, work))
    assert sum(work.num_items for work in launched) == tiles + sum(work.target_parts for work in launched)


def in_list(num_queries: int, work: ItemList) -> bool:
    return work.min_queries <= num_queries <= work.max_queries


def test_a_context_in_many_parts(attend, dtype, device):
    lens = [(900, 1), (5, 1), (301, 20)]
    batch = paged_batch(lens, num_heads=4, num_kv_heads=1, head_dim=16, dtype=dtype, device=device, seed=9)
    check(attend, batch, dtype)
    check(attend, batch, dtype, window=400)


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 16), (16, 80), (32, 64), (64, 128)])
def test_block_and_head_sizes(attend, block_size, head_dim, dtype, device):
    batch = paged_batch(
        [(33, 3), (20, 1)],
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    check(attend, batch, dtype)


@pytest.mark.parametrize("window", [1, 16, 40, 1000])
@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_sliding_window(attend, lens, window, device, dtype):
    batch = paged_batch(lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device, seed=2)
    check(attend, batch, dtype, window=window)


@pytest.mark.parametrize("window", [1, 16, 40, 150])
@pytest.mark.parametrize("lens", [[*MIXED, (300, 70)], [*DECODES, (700, 1)]], ids=["mixed", "decodes"])
def test_nothing_before_the_window_is_read(attend, lens, window, device, dtype):
    """A20: blocks that fell out of a window belong to others by now, and 0 x NaN is NaN."""
    batch = paged_batch(lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device, seed=2)
    batch.poison_before(window)
    check(attend, batch, dtype, window=window)


@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_soft_cap_and_sinks(attend, lens, dtype, device):
    batch = paged_batch(lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device, seed=3)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    check(attend, batch, dtype, softcap=3.0)
    check(attend, batch, dtype, sinks=sinks)
    check(attend, batch, dtype, softcap=5.0, sinks=sinks, window=20)


@pytest.mark.parametrize("lens", [MIXED, DECODES, []], ids=["mixed", "decodes", "empty"])
@pytest.mark.parametrize(("padding_tokens", "padding_rows"), [(0, 3), (40, 0), (5, 9)])
def test_padding_gives_zeros_and_changes_nothing(attend, lens, padding_tokens, padding_rows, dtype, device):
    """INV-42: real rows are those of an exact batch."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": dtype, "device": device, "seed": 4}
    if not lens and not padding_rows:
        padding_rows = 1
    padded = paged_batch(lens, padding_tokens=padding_tokens, padding_rows=padding_rows, **sizes)
    out = attend(padded, 0.2)
    real = sum(padded.query_lens)
    assert bool((out[real:] == 0).all())
    if lens:
        exact = paged_batch(lens, **sizes)
        exact.q = padded.q[:real]
        assert torch.equal(out[:real], attend(exact, 0.2)), "a row depends on the padding"


def test_chunks_of_a_prompt_give_the_rows_of_the_whole(attend, dtype, device):
    """INV-47: any split of a prompt yields the same outputs within tolerance."""
    whole = paged_batch([(0, 37)], num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device)
    expected = whole.dense(0.2)
    for split in (1, 16, 30):
        rows = []
        for start, end in ((0, split), (split, 37)):
            part = PagedBatch(
                q=whole.q[start:end],
                kv_cache=whole.kv_cache,
                block_table=whole.block_table,
                query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
                keys=[],
                values=[],
                query_lens=[end - start],
                num_heads=4,
            )
            rows.append(attend(part, 0.2))
        assert relative_error(torch.cat(rows), expected) < RELATIVE_ERROR[dtype], f"split at {split}"


def test_cache_with_swapped_strides(attend, dtype, device):
    """F7: block_size may come before the heads in memory; only strides differ."""
    batch = paged_batch(MIXED, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device)
    batch.kv_cache = batch.kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert not batch.kv_cache.is_contiguous()
    check(attend, batch, dtype)


def test_large_scores_do_not_overflow(attend, dtype, device):
    batch = paged_batch([(50, 1), (0, 20)], num_heads=2, num_kv_heads=1, head_dim=32, dtype=dtype, device=device)
    batch.q *= 60
    out = attend(batch, 1.0)
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("decode_only", [False, True], ids=["two_lists", "one_list"])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("lens", [MIXED, DECODES, [(3000, 70), (0, 200)], []])
def test_work_lists_equal_the_reference_and_stay_in_bounds(lens, window, decode_only, device):
    need_triton(device)
    for padding_tokens, padding_rows in ((0, 1), (33, 2)):
        counts = [query for _, query in lens] + [0] * padding_rows
        seq_lens = [context + query for context, query in lens] + [0] * padding_rows
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        ints = {"dtype": torch.int32, "device": device}
        few = Tile(16, 32, 4, 2, min_chunk=64, target_programs=14)
        many = Tile(64, 32, 4, 2, min_chunk=64, target_programs=6)
        plan = make_plan(
            starts[-1] + padding_tokens,
            len(counts),
            8,
            2,
            32,
            device,
            window=window,
            decode_only=decode_only,
            few=few,
            many=many,
        )
        tensors = torch.tensor(starts, **ints), torch.tensor(seq_lens, **ints)
        for work in plan.lists:
            work.items.fill_(1 << 20)
        fill_plan(plan, *tensors)
        slots = plan.arrived.numel() // plan.num_kv_heads
        covered = torch.zeros(plan.num_tokens, dtype=torch.int64)
        for work in plan.lists:
            expected = fill_list_ref(work, *tensors, plan.num_tokens, window)
            assert expected.shape == work.items.shape, "the bucket's list is long enough"
            assert torch.equal(work.items, expected)
            for row, token, queries, _, _, _, slot, packed in expected.tolist():
                parts, part = packed >> 16, packed & 0xFFFF
                if row >= 0 and part == 0:
                    covered[token : token + queries] += 1
                assert parts < 2 or slot + parts <= slots
        assert bool((covered == 1).all()), "every token belongs to one tile"
