"""Checks and times every GPU kernel on one card, against float32 references and the floor of moving its bytes.

    python bench/gpu_kernels.py [--out DIR] [--sections NAME,...]

Needs a CUDA device, torch and triton; nothing of aioengine is built. Kernels are timed as CUDA graphs of several
calls on different data (more than the L2 holds), the median of the replays; floors are bytes / 4.1 TB/s. Compiles
all variants first, in parallel processes without touching the device. One failing case is reported and the rest
goes on. Writes gpu_kernels.json to --out and prints one line per case, the best variant of each.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from kernels import (  # noqa: E402
    activation,
    attention,
    attention_plan,
    attention_prefill,
    choose,
    jit,
    linear,
    norm,
    penalties,
    rope,
    sampling,
    sampling_triton,
    score,
    step,
)
from kernels.attention_plan import Tile, fill_plan, make_plan  # noqa: E402
from kernels.linear import SkinnyTile  # noqa: E402

BANDWIDTH = 4.1e12
BF16 = torch.bfloat16
MODELS = {
    "0.6B": {"layers": 28, "hidden": 1024, "mlp": 3072, "heads": 16, "kv_heads": 8, "vocab": 151936, "qk_norm": True},
    "8B": {"layers": 32, "hidden": 4096, "mlp": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "qk_norm": False},
}
HEAD_DIM, BLOCK_SIZE = 128, 16
MODULES = (
    activation,
    attention,
    attention_plan,
    attention_prefill,
    choose,
    linear,
    norm,
    penalties,
    rope,
    sampling_triton,
    score,
    step,
)


class Bench:
    """Where cases run: on the device, or (`dry`) on meta tensors, where each launch only compiles."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("meta" if dry else "cuda")
        self.records: list[dict[str, Any]] = []
        self.best_tiles: dict[tuple[str, str, int], tuple[float, SkinnyTile]] = {}
        self.section = ""

    def rand(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        x = torch.empty(shape, dtype=dtype, device=self.device)
        return x if self.dry else x.normal_().mul_(scale)

    def ints(self, values: list[int] | torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        values = torch.as_tensor(values, dtype=dtype)
        return torch.empty(values.shape, dtype=dtype, device="meta") if self.dry else values.cuda()

    def check(self, case: str, out: Callable[[], torch.Tensor], expected: Callable[[], torch.Tensor]) -> None:
        """Relative error of the norm; exact equality counts as 0, NaN as infinite."""
        result = out()
        if self.dry:
            return
        want = expected().double()
        error = ((result.double() - want).norm() / want.norm().clamp(min=1e-30)).item()
        self.add(case, error=error if math.isfinite(error) else float("inf"))

    def add(self, case: str, **figures: Any) -> None:
        self.records.append({"section": self.section, "case": case, **figures})

    def time(
        self,
        case: str,
        call: Callable[[int], Any],
        copies: int,
        *,
        config: str = "",
        moved: float = 0.0,
        flops: float = 0.0,
        replays: int = 12,
    ) -> float:
        """Median µs of call(i) in a graph of `copies` calls; `moved` bytes give the floor."""
        if self.dry:
            call(0)
            return 0.0
        for i in range(min(copies, 2)):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            keep = [call(i) for i in range(copies)]
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / copies)
        del keep
        us = statistics.median(times)
        figures: dict[str, Any] = {"us": round(us, 3), "config": config}
        if moved:
            figures["floor_us"] = round(moved / BANDWIDTH * 1e6, 3)
        if flops:
            figures["tflops"] = round(flops / us / 1e6, 1)
        self.add(case, **figures)
        return us


def copies_for(moved: float) -> int:
    """Enough different data that none of it waits in the 60 MB L2 when its turn comes."""
    return max(2, min(160, math.ceil(300e6 / max(moved, 1.0))))


# --- attention ---------------------------------------------------------------------------------------------------

FEW_TILES = [(64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3), (64, 8, 3), (32, 4, 4), (32, 2, 4)]
MANY_TILES = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3)]


class Cache:
    """One pool of random blocks; `table` deals distinct blocks to rows, so that layers share no bytes in L2."""

    def __init__(self, b: Bench, num_blocks: int, kv_heads: int) -> None:
        self.b, self.num_blocks = b, num_blocks
        self.kv = b.rand(num_blocks, kv_heads, BLOCK_SIZE, 2 * HEAD_DIM)
        self.order = torch.empty(0) if b.dry else torch.randperm(num_blocks, device="cuda").int()

    def tables(self, lens: list[int], copies: int) -> list[torch.Tensor]:
        counts = [-(-n // BLOCK_SIZE) for n in lens]
        width, rows = max(counts), len(lens)
        if self.b.dry:
            return [torch.empty(rows, width, dtype=torch.int32, device="meta")] * copies
        result, at = [], 0
        for _ in range(copies):
            table = torch.zeros(rows, width, dtype=torch.int32, device="cuda")
            for row, count in enumerate(counts):
                if at + count > self.num_blocks:
                    at = 0
                table[row, :count] = self.order[at : at + count]
                at += count
            result.append(table)
        return result


def decode_shapes() -> Iterator[tuple[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    yield "1 x 192", [192]
    yield "8 x 192", [192] * 8
    yield "64 x 192", [192] * 64
    yield "256 x 384", [384] * 256
    yield "256 x 1024", [1024] * 256
    yield "64 x 2000", [2000] * 64
    yield "1 x 32768", [32768]
    yield "256 x 100-2048", torch.randint(100, 2049, (256,), generator=generator).tolist()
    yield "255 x 300, 1 x 32768", [300] * 255 + [32768]


def attention_plan_for(
    b: Bench, lens: list[int], queries: list[int], heads: int, kv_heads: int, **options: Any
) -> attention_plan.AttentionPlan:
    plan = make_plan(sum(queries), len(lens), heads, kv_heads, HEAD_DIM, b.device, **options)
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)
    fill_plan(plan, b.ints(starts), b.ints(lens))
    return plan


def run_decode(b: Bench, model: str, few: list[Tile | None], is_settled: bool = False) -> None:
    heads, kv_heads = MODELS[model]["heads"], MODELS[model]["kv_heads"]
    cache = Cache(b, 64 if b.dry else 40000, kv_heads)
    for name, lens in decode_shapes():
        moved = sum(lens) * kv_heads * HEAD_DIM * 4.0 + len(lens) * heads * HEAD_DIM * 4.0
        copies = copies_for(moved)
        tables = cache.tables(lens, copies)
        q = b.rand(len(lens), heads * HEAD_DIM)
        for few_tile in few:
            plan = attention_plan_for(b, lens, [1] * len(lens), heads, kv_heads, decode_only=True, few=few_tile)
            tile = plan.lists[0].tile
            label = f"bn{tile.block_n} w{tile.num_warps} s{tile.num_stages} c{tile.min_chunk} t{tile.target_programs}"

            def call(
                i: int, plan: attention_plan.AttentionPlan = plan, q: torch.Tensor = q, tables: list = tables
            ) -> Any:
                return attention.paged_attention(q, cache.kv, tables[i], plan, 0.09, is_settled=is_settled)

            b.time(f"{model} decode {name}", call, copies, config=label + is_settled * " settled", moved=moved)
        if b.dry:
            break


def section_decode(b: Bench) -> list[Callable[[], None]]:
    return [functools.partial(run_decode, b, model, [None], s) for model in MODELS for s in (False, True)]


def section_tiles(b: Bench) -> list[Callable[[], None]]:
    cases = []
    for model in MODELS:
        for bn, warps, stages in FEW_TILES:
            cases.append(functools.partial(run_decode, b, model, [Tile(16, bn, warps, stages, 256, 528)]))
    return cases


def section_split(b: Bench) -> list[Callable[[], None]]:
    """Numbers of parts, with the default tile."""
    base = attention_plan.tile_for(4, few_queries=True)
    tiles = [
        Tile(16, base.block_n, base.num_warps, base.num_stages, chunk, target)
        for target, chunk in ((264, 256), (528, 128), (528, 512), (1056, 128), (1056, 256), (2112, 128))
    ]
    return [functools.partial(run_decode, b, model, tiles) for model in MODELS]


def run_prefill(b: Bench, many: list[Tile | None]) -> None:
    heads, kv_heads = 32, 8
    cache = Cache(b, 64 if b.dry else 12000, kv_heads)
    shapes = {
        "1 x 2048": ([2048], [2048]),
        "1 x 8192": ([8192], [8192]),
        "512 after 8192": ([8704], [512]),
        "16 x 512": ([512] * 16, [512] * 16),
        "32 after 32768": ([32800], [32]),
        "64 x 1 + 1 x 1024": ([500] * 64 + [1024], [1] * 64 + [1024]),
    }
    for name, (lens, queries) in shapes.items():
        pairs = sum(q * (n - q) + q * (q + 1) / 2 for n, q in zip(lens, queries, strict=True))
        table = cache.tables(lens, 1)[0]
        q = b.rand(sum(queries), heads * HEAD_DIM)
        for tile in many:
            plan = attention_plan_for(b, lens, queries, heads, kv_heads, many=tile)
            used = plan.lists[-1].tile
            label = f"bm{used.block_m} bn{used.block_n} w{used.num_warps} s{used.num_stages}"
            call = functools.partial(lambda i, p, q, t: attention.paged_attention(q, cache.kv, t, p, 0.09), p=plan, q=q, t=table)  # fmt: skip  # noqa: E501
            b.time(f"8B prefill {name}", call, 2, config=label, flops=4 * heads * HEAD_DIM * pairs, replays=5)
        if b.dry:
            break


def run_cudnn(b: Bench) -> None:
    """Chunks of one row through cuDNN and what is left through the paged kernels, against the paged kernel alone."""
    heads, kv_heads = 32, 8
    cache = Cache(b, 200 if b.dry else 12000, kv_heads)
    reason = attention_prefill.unsupported_reason(b.device, BF16, HEAD_DIM)
    b.add("cuDNN refusal", note=str(reason))
    if not b.dry:
        started = time.perf_counter()
        null = torch.zeros((2, kv_heads, 16, 2 * HEAD_DIM), dtype=BF16, device=b.device)
        for _ in attention_prefill.warm(heads, null, 8192):
            pass
        torch.cuda.synchronize()
        b.add("cuDNN warm", first_call_ms=round((time.perf_counter() - started) * 1000, 1))
    for queries, context in (
        (2048, 0),
        (8192, 0),
        (8192, 24576),
        (2048, 8192),
        (5000, 3001),
        (8155, 8192),
        (16384, 16384),
    ):
        table = cache.tables([queries + context], 1)[0]
        q = b.rand(queries, heads * HEAD_DIM)
        row = attention_prefill.LongRow(0, 0, queries, context)
        starts, lens, skip = b.ints([0, queries]), b.ints([queries + context]), b.ints([row.num_covered])
        plan = make_plan(queries, 1, heads, kv_heads, HEAD_DIM, b.device)
        fill_plan(plan, starts, lens)
        case = f"8B long chunk {queries} after {context}"
        flops = 4 * heads * HEAD_DIM * (queries * context + queries * (queries + 1) / 2)
        paged = attention.paged_attention(q, cache.kv, table, plan, 0.09)
        fill_plan(plan, starts, lens, skip)
        if b.dry:
            attention_prefill.merge(
                q, *[b.rand(queries, heads, HEAD_DIM), b.rand(queries, heads, dtype=torch.float32)] * 2
            )
            attention_prefill.context_attention(q.unflatten(1, (heads, HEAD_DIM)), cache.kv, table[0], 100, 0.09)
            continue
        out = torch.full_like(q, float("nan"))

        def call(i: int, q=q, table=table, row=row, out=out, plan=plan) -> None:
            if row.num_covered < row.num_queries:
                attention.paged_attention(q, cache.kv, table, plan, 0.09, out=out)
            attention_prefill.long_prefill_attention(out, q, cache.kv, table, [row], 0.09)

        torch.cuda.synchronize()
        started = time.perf_counter()
        call(0)
        torch.cuda.synchronize()
        first_ms = (time.perf_counter() - started) * 1000
        error = ((out.float() - paged.float()).norm() / paged.float().norm()).item()
        b.add(case, error=error if math.isfinite(error) else float("inf"), first_call_ms=round(first_ms, 1))
        b.time(case, call, 1, flops=flops, replays=5)


def section_prefill(b: Bench) -> list[Callable[[], None]]:
    tiles = [Tile(*t, 512, 264) for t in MANY_TILES]
    return [functools.partial(run_prefill, b, [tile]) for tile in tiles] + [functools.partial(run_cudnn, b)]


# --- products of few rows ----------------------------------------------------------------------------------------

ONE_ROW = [
    SkinnyTile(*sizes)
    for sizes in ((8, 512, 4), (4, 512, 4), (4, 512, 2), (8, 256, 2))
    + ((16, 256, 4), (2, 2048, 4), (4, 2048, 8), (16, 512, 8))
]
FEW_ROWS = [(2, 2), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8), (2, 4), (4, 8), (2, 8)]
"""Outputs per program and warps; every program takes all inputs."""


def products(model: str) -> Iterator[tuple[str, int, int, str]]:
    """name, outputs, inputs, kind of every product of a layer, and the head."""
    m = MODELS[model]
    hidden, mlp, heads, kv_heads = m["hidden"], m["mlp"], m["heads"], m["kv_heads"]
    yield "qkv", (heads + 2 * kv_heads) * HEAD_DIM, hidden, "norm"
    yield "o", hidden, heads * HEAD_DIM, "add"
    yield "gate_up", 2 * mlp, hidden, "gated"
    yield "down", hidden, mlp, "add"
    yield "head", m["vocab"], hidden, "norm"


def run_product(b: Bench, model: str, name: str, outs: int, ins: int, kind: str, rows: int) -> None:
    moved = 2.0 * outs * ins
    copies = 1 if b.dry else copies_for(moved)
    weights = [b.rand(outs, ins, scale=ins**-0.5) for _ in range(copies)]
    x, gain = b.rand(rows, ins), b.rand(ins)
    residual = b.rand(rows, outs)

    def fused(i: int, tile: SkinnyTile) -> torch.Tensor:
        if kind == "norm":
            return linear.norm_linear(x, gain, 1e-6, weights[i], tile=tile)
        if kind == "gated":
            return linear.norm_gated_linear(x, gain, 1e-6, weights[i], tile=tile)
        return linear.linear_add(x, weights[i], residual, tile=tile)

    def separate(i: int) -> torch.Tensor:
        """The same through cuBLAS and the elementwise kernels; the residual addition is the next norm's."""
        if kind == "add":
            return F.linear(x, weights[i])
        y = F.linear(norm.add_rms_norm(x, x, gain, 1e-6)[0], weights[i])
        return activation.silu_mul(y) if kind == "gated" else y

    case = f"{model} {name} {rows} rows"
    if not b.dry:
        reference = {
            "norm": lambda: linear.norm_linear_ref(x, gain, 1e-6, weights[0]),
            "gated": lambda: linear.norm_gated_linear_ref(x, gain, 1e-6, weights[0]),
            "add": lambda: linear.linear_add_ref(x, weights[0], residual),
        }[kind]().float()
        b.time(case, separate, copies, config="cuBLAS", moved=moved)
        b.time(case + ", product alone", lambda i: F.linear(x, weights[i]), copies, config="cuBLAS", moved=moved)
    padded = 1 << (ins - 1).bit_length()
    tiles = ONE_ROW if rows == 1 else [SkinnyTile(bn, padded, warps) for bn, warps in FEW_ROWS]
    for tile in tiles:
        elements = tile.block_n * tile.block_k * (2 if kind == "gated" else 1) / tile.num_warps
        if not (512 if rows > 1 else 0) <= elements <= 4096:
            continue  # too many registers, or threads without work
        label = f"bn{tile.block_n} bk{tile.block_k} w{tile.num_warps}"
        try:
            y = fused(0, tile)
            if not b.dry:
                error = ((y.float() - reference).norm() / reference.norm()).item()
                if not error < 1.2e-2:
                    b.add(case, config=label, error=error)
                    continue
            us = b.time(case, functools.partial(fused, tile=tile), copies, config=label, moved=moved)
            key = model, name, rows
            if not b.dry and us < b.best_tiles.get(key, (1e9, tile))[0]:
                b.best_tiles[key] = us, tile
        except Exception as error:  # a variant that does not compile or launch is a result
            b.add(case, config=label, failure=f"{type(error).__name__}: {str(error)[:200]}")


def section_products(b: Bench) -> list[Callable[[], None]]:
    return [
        functools.partial(run_product, b, model, *product, rows)
        for model in MODELS
        for rows in ((1, 2, 4, 8) if model == "0.6B" else (1, 2, 8))
        for product in products(model)
        if rows == 1 or product[2] <= 4096
    ]


# --- the small kernels -------------------------------------------------------------------------------------------


def run_elementwise(b: Bench, model: str, tokens: int) -> None:
    m = MODELS[model]
    hidden, mlp, heads, kv_heads = m["hidden"], m["mlp"], m["heads"], m["kv_heads"]
    x, residual, gain = b.rand(tokens, hidden), b.rand(tokens, hidden), b.rand(hidden)
    b.check(
        f"{model} add_rms_norm {tokens}",
        lambda: norm.add_rms_norm(x, residual, gain, 1e-6)[0],
        lambda: norm.add_rms_norm_ref(x, residual, gain, 1e-6)[0],
    )
    b.time(
        f"{model} add_rms_norm {tokens}",
        lambda i: norm.add_rms_norm(x, residual, gain, 1e-6),
        32 if tokens <= 256 else 4,
        moved=8.0 * tokens * hidden,
    )
    gate_up = b.rand(tokens, 2 * mlp)
    b.check(
        f"{model} silu_mul {tokens}",
        lambda: activation.silu_mul(gate_up),
        lambda: activation.silu_mul_ref(gate_up.float()),
    )
    b.time(
        f"{model} silu_mul {tokens}",
        lambda i: activation.silu_mul(gate_up),
        32 if tokens <= 256 else 4,
        moved=6.0 * tokens * mlp,
    )
    qkv = b.rand(tokens, (heads + 2 * kv_heads) * HEAD_DIM)
    cos_sin = b.rand(1024, HEAD_DIM, dtype=torch.float32)
    positions = b.ints(torch.arange(tokens) % 1024)
    slots = b.ints(torch.arange(tokens))
    cache = b.rand(tokens // BLOCK_SIZE + 1, kv_heads, BLOCK_SIZE, 2 * HEAD_DIM)
    weights = [b.rand(HEAD_DIM) if m["qk_norm"] else None for _ in range(2)]
    sizes = (1e-6, heads, kv_heads, HEAD_DIM)
    if tokens <= 256:
        other = cache.clone()
        b.check(
            f"{model} rope q {tokens}",
            lambda: rope.rope_and_cache(qkv, positions, cos_sin, slots, cache, *weights, *sizes),
            lambda: rope.rope_and_cache_ref(qkv.float(), positions, cos_sin, slots, other, *weights, *sizes),
        )
        b.check(f"{model} rope cache {tokens}", lambda: cache, lambda: other)
    b.time(
        f"{model} rope_and_cache {tokens}",
        lambda i: rope.rope_and_cache(qkv, positions, cos_sin, slots, cache, *weights, *sizes),
        32 if tokens <= 256 else 4,
        moved=4.0 * tokens * (heads + 2 * kv_heads) * HEAD_DIM,
    )


def run_step(b: Bench, rows: int) -> None:
    """A decode step of `rows` rows at 1000 tokens of context: unpack and plan."""
    max_blocks = 2500
    words = []
    for row in range(rows):
        words += [row, row, 1, 1000, 1, row, 3, 0]
    off_tokens = 16 + len(words)
    header = [1, 0, rows, rows, rows, 16, off_tokens, off_tokens + rows, 4, off_tokens + rows + 12] + [0] * 6
    buffer = b.ints(header + words + [-1] * rows + [0, 62, 7, 0, 63, 8, 0, 64, 9, 0, 65, 10])
    table = b.ints(torch.arange(256 * max_blocks).view(256, max_blocks) % 5000)
    last, rejected = b.ints(torch.arange(256)), b.ints(torch.zeros(256))
    inputs = step.StepInputs.empty(rows, rows, rows, max_blocks, b.device)
    step.unpack(buffer, table, last, rejected, BLOCK_SIZE, inputs)
    if not b.dry:
        expected = step.unpack_ref(buffer.clone(), table, last, rejected, BLOCK_SIZE)
        wrong = [n for n in step.StepInputs.__dataclass_fields__ if not getattr(inputs, n).equal(getattr(expected, n))]
        b.add(f"unpack {rows}", error=float(len(wrong)), note=str(wrong))
    b.time(f"unpack {rows} rows", lambda i: step.unpack(buffer, table, last, rejected, BLOCK_SIZE, inputs), 32)
    for heads, kv_heads in ((32, 8), (16, 8)):
        plan = make_plan(rows, rows, heads, kv_heads, HEAD_DIM, b.device, decode_only=True)
        b.time(f"plan {rows} rows, {heads} heads", lambda i, p=plan: fill_plan(p, inputs.query_start_loc, inputs.seq_lens), 32)  # fmt: skip  # noqa: E501


def run_attention_checks(b: Bench, heads: int, kv_heads: int) -> None:
    if b.dry:
        return
    from tests.kernels.batches import paged_batch

    lens = [(0, 37), (1000, 1), (2999, 1), (500, 200), (15, 1), (63, 2), (4000, 17), (0, 1), (777, 130)]
    for window in (0, 300):
        batch = paged_batch(
            lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=BF16, device="cuda", seed=window,
            padding_tokens=9, padding_rows=3,
        )  # fmt: skip
        expected = batch.dense(0.088, window=window)
        for decode_only in (False, True):
            sizes = batch.q.shape[0], batch.seq_lens.shape[0], heads, kv_heads, HEAD_DIM
            plan = make_plan(*sizes, b.device, window=window, decode_only=decode_only)
            plan.partial_acc.fill_(float("nan"))
            results = []
            for _ in range(3):
                fill_plan(plan, batch.query_start_loc, batch.seq_lens)
                out = torch.full_like(batch.q, float("nan"))
                results.append(
                    attention.paged_attention(batch.q, batch.kv_cache, batch.block_table, plan, 0.088, out=out)
                )
            case = f"attention {heads}/{kv_heads} window {window} {'one list' if decode_only else 'two lists'}"
            error = ((results[0].double() - expected).norm() / expected.norm()).item()
            same = all(r.equal(results[0]) for r in results)
            b.add(case, error=error if math.isfinite(error) else float("inf"), note=f"repeats equal: {same}")


def section_small(b: Bench) -> list[Callable[[], None]]:
    cases = [functools.partial(run_elementwise, b, m, t) for m in MODELS for t in (1, 64, 256, 8192)]
    cases += [functools.partial(run_step, b, rows) for rows in (1, 256)]
    return cases + [functools.partial(run_attention_checks, b, h, k) for h, k in ((32, 8), (16, 8), (14, 2))]


# --- sampling ----------------------------------------------------------------------------------------------------


def run_sampling(b: Bench, rows: int) -> None:
    vocab = 151936
    logits = b.rand(rows, vocab, scale=3.0)
    z = b.rand(rows, vocab, dtype=torch.float32, scale=3.0)
    seeds = b.ints(torch.arange(rows) * 12345, torch.int64)
    positions = b.ints(torch.arange(rows))
    ones = torch.ones(rows, device=b.device)
    top_k = b.ints(torch.full((rows,), 50), torch.int64)
    everything = b.ints(torch.full((rows,), vocab), torch.int64)
    top_p = ones * 0.9
    zeros = ones * 0.0
    token_ids, numbers = b.ints(torch.arange(rows) * 31), b.ints(torch.arange(rows))
    packed, last_token = b.ints(torch.zeros(2, rows)), b.ints(torch.zeros(rows))
    table = choose.DrawTable(ones * 0.6, ones, zeros, b.ints(torch.full((rows,), vocab)), seeds)
    seen = b.ints(torch.arange(vocab) % 7 % 4)[None].repeat(rows, 1)

    def chosen(operation: Callable[..., None], x: torch.Tensor = z) -> torch.Tensor:
        operation(x, numbers, positions, table, packed, last_token, False)
        return packed

    def penalized(operation: Callable[..., None]) -> torch.Tensor:
        x = z + 0.0
        operation(x, numbers, seen, numbers, ones * 1.2, ones * 0.5, ones)
        return x

    b.check(f"argmax {rows}", lambda: sampling_triton.argmax(logits), lambda: logits.argmax(-1))
    b.check(f"choose {rows}", lambda: chosen(choose.choose), lambda: chosen(choose.choose_ref))
    b.check(
        f"penalties {rows}",
        lambda: penalized(penalties.apply_penalties),
        lambda: penalized(penalties.apply_penalties_ref),
    )
    for width in (0, 1, 20):
        b.check(
            f"ranks and top {width} of {rows}",
            lambda width=width: score.score(logits, None, token_ids, width, -9999.0)[:, 2 : 3 + width],
            lambda width=width: score.score_ref(logits, None, token_ids, width, -9999.0)[:, 2 : 3 + width],
        )
    for name, k, p in (("top_k 50", top_k, ones), ("top_p 0.9", everything, top_p), ("both", top_k, top_p)):
        b.check(
            f"survivors {name} {rows}",
            lambda k=k, p=p: (z >= sampling_triton.filter_threshold(z, k, p, zeros)[:, None]).sum(-1),
            lambda k=k, p=p: (z >= sampling.filter_threshold_ref(z, k, p, zeros)[:, None]).sum(-1),
        )
        b.time(f"filter {name} {rows}", lambda i, k=k, p=p: sampling_triton.filter_threshold(z, k, p, zeros), 2)
    moved = 2.0 * rows * vocab
    b.time(f"argmax {rows}", lambda i: sampling_triton.argmax(logits), 16, moved=moved)
    b.time(f"argmax {rows}, torch", lambda i: logits.argmax(-1), 4, moved=moved)
    b.time(f"choose {rows}", lambda i: chosen(choose.choose, logits), 4, moved=moved)
    for width in (0, 1, 20):
        b.time(
            f"logprobs, top {width}, {rows}",
            lambda i, width=width: score.score(logits, None, token_ids, width, -9999.0),
            2,
            moved=2 * moved,
        )
    b.time(
        f"penalties {rows}",
        lambda i: penalties.apply_penalties(z, numbers, seen, numbers, ones, zeros, zeros),
        2,
        moved=6 * moved,
    )
    b.time(f"count {rows}", lambda i: penalties.count_tokens(seen, numbers, numbers, token_ids), 2)


def section_sampling(b: Bench) -> list[Callable[[], None]]:
    return [functools.partial(run_sampling, b, rows) for rows in (1, 64, 256)]


# --- a whole decode step -----------------------------------------------------------------------------------------


class Layers:
    """Random weights of a model and one decode step of `rows` rows at `context` tokens, fused or through cuBLAS."""

    def __init__(self, b: Bench, model: str) -> None:
        self.b, self.model, self.m = b, model, MODELS[model]
        self.num_layers = 1 if b.dry else self.m["layers"]
        shapes = {name: (outs, ins) for name, outs, ins, _ in products(model)}
        self.head = b.rand(*shapes.pop("head"), scale=0.02)
        self.weights = [{n: b.rand(*s, scale=s[1] ** -0.5) for n, s in shapes.items()} for _ in range(self.num_layers)]
        self.gain = b.rand(self.m["hidden"])
        self.qk_gain = b.rand(HEAD_DIM) if self.m["qk_norm"] else None
        self.cos_sin = b.rand(4096, HEAD_DIM, dtype=torch.float32)

    def prepare(self, rows: int, context: int) -> None:
        b, m = self.b, self.m
        blocks = rows * (context // BLOCK_SIZE + 1)
        shape = blocks, m["kv_heads"], BLOCK_SIZE, 2 * HEAD_DIM
        self.caches = [b.rand(*shape) for _ in range(self.num_layers)]
        self.table = b.ints(torch.arange(blocks).view(rows, -1))
        self.positions = b.ints(torch.full((rows,), context))
        self.slots = b.ints(torch.arange(rows) * (context // BLOCK_SIZE + 1) * BLOCK_SIZE + context)
        self.h = b.rand(rows, m["hidden"])
        lens = [context + 1] * rows
        self.plan = attention_plan_for(b, lens, [1] * rows, m["heads"], m["kv_heads"], decode_only=True)

    def attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        m, cache = self.m, self.caches[layer]
        q = rope.rope_and_cache(
            qkv, self.positions, self.cos_sin, self.slots, cache, self.qk_gain, self.qk_gain, 1e-6,
            m["heads"], m["kv_heads"], HEAD_DIM,
        )  # fmt: skip
        return attention.paged_attention(q, cache, self.table, self.plan, 0.09, is_settled=True)

    def fused(self, _: int) -> torch.Tensor:
        """Every product through our kernel, with the best tile that `products` found."""
        h, rows = self.h, self.h.shape[0]
        tile = {n: self.b.best_tiles.get((self.model, n, rows), (0.0, None))[1] for n, *_ in products(self.model)}
        for layer, w in enumerate(self.weights):
            out = self.attend(linear.norm_linear(h, self.gain, 1e-6, w["qkv"], tile=tile["qkv"]), layer)
            h = linear.linear_add(out, w["o"], h, tile=tile["o"])
            gated = linear.norm_gated_linear(h, self.gain, 1e-6, w["gate_up"], tile=tile["gate_up"])
            h = linear.linear_add(gated, w["down"], h, tile=tile["down"])
        return sampling_triton.argmax(linear.norm_linear(h, self.gain, 1e-6, self.head, tile=tile["head"]))

    def separate(self, _: int, product: Callable[..., torch.Tensor] = F.linear) -> torch.Tensor:
        h, residual = self.h, torch.zeros_like(self.h)
        for layer, w in enumerate(self.weights):
            h, residual = norm.add_rms_norm(h, residual, self.gain, 1e-6)
            h = product(self.attend(product(h, w["qkv"]), layer), w["o"])
            h, residual = norm.add_rms_norm(h, residual, self.gain, 1e-6)
            h = product(activation.silu_mul(product(h, w["gate_up"])), w["down"])
        h, residual = norm.add_rms_norm(h, residual, self.gain, 1e-6)
        return sampling_triton.argmax(product(h, self.head))


def run_layers(b: Bench, model: str) -> None:
    layers = Layers(b, model)
    weight_bytes = 2.0 * (layers.head.numel() + sum(w.numel() for d in layers.weights for w in d.values()))
    for rows, context in ((1, 191), (1, 4095), (2, 191), (4, 191), (8, 191), (64, 191), (256, 383)):
        layers.prepare(rows, context)
        kv_bytes = rows * context * layers.m["kv_heads"] * HEAD_DIM * 4.0 * layers.num_layers
        case, moved = f"{model} step {rows} x {context + 1}", weight_bytes + kv_bytes
        b.time(case, layers.separate, 1, config="cuBLAS", moved=moved)
        if rows == 1 or (rows <= linear.MAX_ROWS and model == "0.6B"):
            b.time(case, layers.fused, 1, config="fused", moved=moved)
            own = functools.partial(layers.separate, product=linear.linear)
            b.time(case, own, 1, config="own products, unfused", moved=moved)
        if rows in (1, 64) and context == 191 and not b.dry:
            with_pdl = jit.launch_options
            for module in MODULES:
                module.launch_options = lambda device: {"PDL": False}
            try:
                b.time(case, layers.separate, 1, config="cuBLAS, no dependent launch", moved=moved)
                if rows == 1:
                    b.time(case, layers.fused, 1, config="fused, no dependent launch", moved=moved)
            finally:
                for module in MODULES:
                    module.launch_options = with_pdl


def section_layers(b: Bench) -> list[Callable[[], None]]:
    return [functools.partial(run_layers, b, model) for model in MODELS]


# --- running -----------------------------------------------------------------------------------------------------

SECTIONS = {
    "small": section_small,
    "decode": section_decode,
    "tiles": section_tiles,
    "split": section_split,
    "prefill": section_prefill,
    "products": section_products,
    "sampling": section_sampling,
    "layers": section_layers,
}


def compile_share(share: int, shares: int, sections: list[str]) -> list[str]:
    """In a process of its own: compiles every `shares`-th case into the disk cache; returns failures."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
        )
    )
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    for module in MODULES:
        module.launch_options = lambda device: {"PDL": True, "launch_pdl": True}
        module.require_kernels = lambda device: None
    torch.set_num_threads(1)
    bench = Bench(dry=True)
    failures = []
    cases = [(name, case) for name in sections for case in SECTIONS[name](bench)]
    for _, case in cases[share::shares]:
        try:
            case()
        except Exception:
            failures.append(traceback.format_exc(limit=-3))
    failures += [str(r) for r in bench.records if "failure" in r]
    return failures


def precompile(sections: list[str]) -> list[str]:
    shares = max(1, (os.cpu_count() or 2) - 1)
    with multiprocessing.get_context("fork").Pool(shares) as pool:
        results = pool.starmap(compile_share, [(i, shares, sections) for i in range(shares)])
    return [failure for failures in results for failure in failures]


def summary(records: list[dict[str, Any]]) -> str:
    """One line per timed case: the best variant, the next, the cuBLAS figure if there is one; then the errors."""
    lines, cases = [], {}
    for record in records:
        if "us" in record:
            cases.setdefault(record["case"], []).append(record)
    for case, variants in cases.items():
        variants.sort(key=lambda r: r["us"])
        best = variants[0]
        line = f"{case:34} {best['us']:9.2f} us"
        if "floor_us" in best:
            line += f"  floor {best['floor_us']:8.2f} ({best['us'] / max(best['floor_us'], 1e-9):5.2f}x)"
        if "tflops" in best:
            line += f"  {best['tflops']:6.1f} TFLOP/s"
        line += f"  {best['config']}"
        others = [f"{r['config']} {r['us']:.2f}" for r in variants[1:3]]
        others += [f"{r['config']} {r['us']:.2f}" for r in variants[3:] if "cuBLAS" in r["config"]]
        lines.append(line + ("  | " + ", ".join(others) if others else ""))
    checked = [r for r in records if "error" in r]
    lines.append("errors: " + "; ".join(f"{r['case']} {r['error']:.1e} {r.get('note', '')}" for r in checked))
    lines += [f"FAILED {r['case']} {r.get('config', '')}: {r['failure']}" for r in records if "failure" in r]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further case starts")
    parser.add_argument("--compile-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.compile_only and torch.cuda.device_count() == 0:  # asks the driver, and can be forked after it
        raise SystemExit("gpu_kernels: error: it measures a GPU, and PyTorch sees no CUDA device here")
    sections = arguments.sections.split(",")
    started = time.perf_counter()
    for failure in precompile(sections):
        print("COMPILE", failure, flush=True)
    print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    if arguments.compile_only:
        return
    import triton

    bench = Bench(dry=False)
    torch.manual_seed(int(time.time()))
    for name in sections:
        bench.section = name
        for case in SECTIONS[name](bench):
            if time.perf_counter() - started > arguments.budget:
                bench.add(name, failure="out of time")
                break
            try:
                case()
            except Exception as error:
                bench.add(str(getattr(case, "args", ""))[:80], failure=f"{type(error).__name__}: {str(error)[:300]}")
                print(traceback.format_exc(limit=-2), flush=True)
        torch.cuda.empty_cache()
        print(f"{name} done after {time.perf_counter() - started:.0f} s", flush=True)
    report = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(sys.argv),
        "records": bench.records,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_kernels.json").write_text(json.dumps(report, indent=0))
    print(summary(bench.records))


if __name__ == "__main__":
    main()
