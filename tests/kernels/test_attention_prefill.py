"""Long prefill chunks: the split into a causal square and an unmasked context, and their merge."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import attention_prefill
from aioengine.kernels.attention import paged_attention
from aioengine.kernels.attention_plan import fill_list_ref, fill_plan, make_plan
from aioengine.kernels.attention_prefill import (
    LongRow,
    context_attention,
    context_attention_ref,
    gather_ref,
    long_prefill_attention,
    merge,
    merge_ref,
    unsupported_reason,
    warm,
)
from tests.kernels.batches import RELATIVE_ERROR, paged_batch, relative_error
from tests.kernels.launches import recorded_kernels
from tests.kernels.triton_here import need_triton


@pytest.fixture(autouse=True)
def needs_kernels(device):
    need_triton(device)


def dense_in_torch(q, kv, scale, is_causal):
    """What cuDNN computes, for machines without it."""
    kv = kv.transpose(0, 1)
    head_dim, group = q.shape[2], q.shape[1] // kv.shape[0]
    k, v = kv[..., :head_dim].float(), kv[..., head_dim:].float()
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hkd->hqk", q.float(), k) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out, scores.logsumexp(-1).transpose(0, 1)


def test_squares_rectangles_and_the_paged_rest_cover_the_batch(dtype, device, monkeypatch):
    monkeypatch.setattr(attention_prefill, "SIZES", (16, 32))
    if unsupported_reason(device, dtype, 32) is not None:
        monkeypatch.setattr(attention_prefill, "_dense", dense_in_torch)
    lens = [(20, 1), (0, 53), (70, 40), (5, 7), (16, 16)]
    batch = paged_batch(
        lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device, padding_tokens=3, padding_rows=1
    )
    starts = batch.query_start_loc.tolist()
    rows = [LongRow(r, starts[r], lens[r][1], lens[r][0]) for r in (1, 2, 4)]
    skip = [0] * 6
    for row in rows:
        skip[row.row] = row.num_covered
    assert skip == [0, 48, 40, 0, 16, 0], "five queries are left to the paged kernel, eight get a square"
    skip = torch.tensor(skip, dtype=torch.int32, device=device)
    plan = make_plan(batch.q.shape[0], 6, 4, 2, 32, device)
    for work in plan.lists:
        work.items.fill_(1 << 20)
    fill_plan(plan, batch.query_start_loc, batch.seq_lens, skip)
    for work in plan.lists:
        expected = fill_list_ref(work, batch.query_start_loc, batch.seq_lens, plan.num_tokens, 0, skip)
        assert torch.equal(work.items, expected)
    out = torch.full_like(batch.q, float("nan"))
    paged_attention(batch.q, batch.kv_cache, batch.block_table, plan, 0.2, out=out)
    for row in rows:
        covered = out[row.first_token : row.first_token + row.num_covered]
        assert bool(torch.isnan(covered).all()), "the paged kernel leaves skipped queries alone"
    long_prefill_attention(out, batch.q, batch.kv_cache, batch.block_table, rows, 0.2)
    real = sum(batch.query_lens)
    assert relative_error(out[:real], batch.dense(0.2)[:real]) < RELATIVE_ERROR[dtype]
    assert bool((out[real:] == 0).all())


def test_warming_asks_cudnn_for_every_shape_that_chunks_will_need(dtype, device, monkeypatch):
    asked = set()

    def dense(q, kv, scale, is_causal):
        asked.add((q.shape, q.stride(), kv.shape, kv.stride(), is_causal))
        return dense_in_torch(q, kv, scale, is_causal)

    monkeypatch.setattr(attention_prefill, "SIZES", (16, 32))
    monkeypatch.setattr(attention_prefill, "_dense", dense)
    lens = [(20, 17), (70, 40), (0, 32), (32, 31)]
    batch = paged_batch(lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device)
    assert len(list(warm(4, batch.kv_cache, 40))) > 8
    warmed = set(asked)
    asked.clear()
    starts = batch.query_start_loc.tolist()
    rows = [LongRow(r, starts[r], new, context) for r, (context, new) in enumerate(lens)]
    out = torch.empty_like(batch.q)
    long_prefill_attention(out, batch.q, batch.kv_cache, batch.block_table, rows, 0.2)
    assert asked and asked <= warmed
    asked.clear()
    assert list(warm(4, batch.kv_cache, 23))
    assert {q[0] for q, *_ in asked} == {16}
    assert not list(warm(4, batch.kv_cache, 15))  # no chunk is long


@pytest.mark.slow
def test_warming_compiles_every_kernel_that_chunks_will_need(dtype, device, monkeypatch):
    monkeypatch.setattr(attention_prefill, "SIZES", (16, 32))
    monkeypatch.setattr(attention_prefill, "_dense", dense_in_torch)
    lens = [(20, 17), (70, 40), (0, 32), (32, 31)]
    batch = paged_batch(lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device)
    table = batch.block_table.new_zeros((4, batch.block_table.shape[1] | 1))  # rows begin anywhere
    table[:, : batch.block_table.shape[1]] = batch.block_table
    starts = batch.query_start_loc.tolist()
    rows = [LongRow(r, starts[r], new, context) for r, (context, new) in enumerate(lens)]
    with recorded_kernels() as warmed:
        list(warm(4, batch.kv_cache, 40))
    with recorded_kernels() as needed:
        long_prefill_attention(torch.empty_like(batch.q), batch.q, batch.kv_cache, table, rows, 0.2)
    assert len(needed) >= 3
    for kernel, kinds in needed.items():
        assert kinds <= warmed[kernel]


def test_a_context_of_any_length_is_gathered_by_a_grid_that_devices_launch(device, monkeypatch):
    """Its second and third axis end at 65535."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(attention_prefill, "_gather_kernel", Kernel())
    kv_cache = torch.zeros((2, 3, 1, 8), device=device)
    attention_prefill.gather(kv_cache, torch.zeros(70_000, dtype=torch.int32, device=device), 70_000, 70_000)
    assert grids == [(210_000,)]


def test_merge_equals_the_reference_far_apart_and_close(dtype, device):
    torch.manual_seed(1)
    a, b = (torch.randn(7, 3, 48, device=device).to(dtype) for _ in range(2))
    lse_a = torch.randn(3, 7, device=device).transpose(0, 1) * 30
    lse_b = torch.randn(7, 3, device=device)
    out = torch.full((7, 144), float("nan"), dtype=dtype, device=device)
    lse = merge(out, a, lse_a, b, lse_b)
    expected, expected_lse = merge_ref(a, lse_a, b, lse_b)
    assert relative_error(out, expected.flatten(1)) < RELATIVE_ERROR[dtype]
    assert torch.allclose(lse, expected_lse, atol=1e-4)


@pytest.mark.parametrize("num_keys", [1, 64, 75])
def test_context_attention_sees_every_key(num_keys, dtype, device):
    batch = paged_batch([(90, 33)], num_heads=6, num_kv_heads=2, head_dim=48, dtype=dtype, device=device)
    q = batch.q.unflatten(1, (6, 48))
    out, lse = context_attention(q, batch.kv_cache, batch.block_table[0], num_keys, 0.2)
    used = batch.block_table[0, : -(-num_keys // 16)]
    expected, expected_lse = context_attention_ref(q, batch.kv_cache, used, num_keys, 0.2)
    assert relative_error(out, expected) < RELATIVE_ERROR[dtype]
    assert torch.allclose(lse, expected_lse, atol=2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((torch.device("cpu"), torch.bfloat16, 128), "needs a CUDA device"),
        pytest.param((torch.device("cuda"), torch.float32, 128), "not torch.float32", marks=pytest.mark.gpu),
        pytest.param((torch.device("cuda"), torch.bfloat16, 256), "head sizes", marks=pytest.mark.gpu),
        pytest.param((torch.device("cuda"), torch.bfloat16, 128, 512), "sliding window", marks=pytest.mark.gpu),
    ],
)
def test_a_refusal_names_its_reason(arguments, reason):
    assert reason in (unsupported_reason(*arguments) or "")


@pytest.mark.parametrize(
    ("capability", "has_cudnn", "arguments", "reason"),
    [
        ((7, 5), True, (torch.float16, 128), "compute capability 8.0"),
        ((8, 0), True, (torch.bfloat16, 128), None),
        ((9, 0), True, (torch.bfloat16, 64), None),
        ((9, 0), False, (torch.bfloat16, 128), "no cuDNN"),
        ((9, 0), True, (torch.float32, 128), "not torch.float32"),
        ((9, 0), True, (torch.bfloat16, 256), "head sizes"),
        ((9, 0), True, (torch.bfloat16, 100), "head sizes"),
        ((9, 0), True, (torch.bfloat16, 128, 512), "sliding window"),
        ((9, 0), True, (torch.bfloat16, 128, 0, 30.0), "soft cap"),
        ((9, 0), True, (torch.bfloat16, 128, 0, 0.0, True), "sinks"),
    ],
)
def test_what_cudnn_serves_by_device_and_layer(monkeypatch, capability, has_cudnn, arguments, reason):
    """F4, F5: a table over devices that need not be here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: has_cudnn)
    told = unsupported_reason(torch.device("cuda"), *arguments)
    assert told is None if reason is None else reason in (told or "")


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 32), (4, 24)])
def test_gathered_tokens_are_those_of_the_blocks_in_order(block_size, head_dim, dtype, device):
    kv_cache = torch.randn((9, 3, block_size, 2 * head_dim), device=device).to(dtype)
    blocks = torch.tensor([7, 1, 8, 1, 3], dtype=torch.int32, device=device)[1:]
    expected = gather_ref(kv_cache, blocks)
    assert torch.equal(attention_prefill.gather(kv_cache, blocks, len(expected), len(expected)), expected)
    num_keys = len(expected) - 1
    filled = attention_prefill.gather(kv_cache, blocks, num_keys, len(expected) + 5)
    assert torch.equal(filled[:num_keys], expected[:num_keys]) and len(filled) == len(expected) + 5
    assert not filled[num_keys:].any()


def test_queries_and_keys_of_nobody_do_not_touch_the_others(dtype, device, monkeypatch):
    """The last square is filled up: with what follows in the batch, or zeros; neither may reach a real query."""
    monkeypatch.setattr(attention_prefill, "SIZES", (16, 32))
    if unsupported_reason(device, dtype, 32) is not None:
        monkeypatch.setattr(attention_prefill, "_dense", dense_in_torch)
    lens = [(7, 28), (0, 13), (0, 30)]
    batch = paged_batch(lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, device=device)
    expected = batch.dense(0.2)
    batch.q[28:41] = float("nan")  # the row between fails
    batch.kv_cache[batch.block_table[0, 2], :, 35 % 16 :] = float("nan")  # the rest of a half full block
    rows = [LongRow(0, 0, 28, 7), LongRow(2, 41, 30, 0)]
    out = torch.full_like(batch.q, float("nan"))
    long_prefill_attention(out, batch.q, batch.kv_cache, batch.block_table, rows, 0.2)
    for first, end in ((0, 28), (41, 71)):
        assert relative_error(out[first:end], expected[first:end]) < RELATIVE_ERROR[dtype]
    assert bool(torch.isnan(out[28:41]).all()), "no other rows are written"
