"""`aioengine bench core`: what the compiled core costs, beside plain Python, and the host alone without a device.

Four parts: operations of the block pool per block (a plain-Python pool in the same run, memory of both);
schedule + update per step; Python objects over many steps; and the whole host side with a runner that computes
nothing. Times are medians of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from aioengine.bench.host_only import run_host_only
from aioengine.bench.naive_pool import NaivePool, chain_hashes
from aioengine.bench.report import print_table, write_json
from aioengine.bench.workloads import random_prompts
from aioengine.errors import InvalidConfig
from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler

PARTS = ("pool", "scheduler", "objects", "host")
BLOCK_SIZE = 16
POOL_BLOCKS = 65_536
BLOCKS_PER_REQUEST = 256
VOCAB_SIZE = 32_000
MEASURED_STEPS = 200
CHURN_STEPS = 100_000

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench core`."""
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="What to measure (default: all)."
    )
    parser.add_argument("--host-only", action="store_true", help="The same as --parts host.")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256], help="Requests at once, host part.")
    parser.add_argument("--input-len", type=int, default=128, help="Prompt tokens, host part (default: 128).")
    parser.add_argument("--output-len", type=int, default=512, help="Output tokens, host part (default: 512).")
    parser.add_argument("--steps", type=int, default=CHURN_STEPS, help="Steps over which objects are counted.")


async def run_core(args: argparse.Namespace) -> None:
    """Measures the parts asked for."""
    if min(args.steps, args.output_len, *args.num_seqs) < 1:
        raise InvalidConfig("--steps, --output-len and --num-seqs must be at least 1")
    parts = ["host"] if args.host_only else args.parts
    report: dict[str, Any] = {"benchmark": "core", "median_of": args.repeats}
    if "pool" in parts:
        report["pool"] = pool_rows(args.repeats)
        print_table(f"block pool, ns per block of {BLOCK_SIZE} tokens, median of {args.repeats}", report["pool"])
        report["memory"] = memory_row()
        print_table("memory", [report["memory"]])
    if "scheduler" in parts:
        report["scheduler"] = [scheduler_row(*shape) for shape in ((1, 0), (64, 0), (256, 0), (1024, 0), (256, 10_000))]
        print_table(f"schedule + update, one token per request, median of {MEASURED_STEPS} steps", report["scheduler"])
    if "objects" in parts:
        report["objects"] = objects_row(args.steps)
        print_table("Python objects", [report["objects"]])
    if "host" in parts:
        report["host"] = await host_rows(args)
        title = f"host alone: {args.input_len} in, {args.output_len} out, median of {args.repeats}"
        print_table(title, report["host"])
    write_json(args.json, report)


# ---- the pool -------------------------------------------------------------------------------------------


def pool_rows(repeats: int) -> list[Row]:
    """Nanoseconds per block of each operation, ours and plain Python's."""
    ours, naive = [], []
    for seed in range(repeats + 1):  # the first one warms up
        ours.append(_time_core(seed))
        naive.append(_time_naive(seed))
    rows = []
    for name in ours[0]:
        mine, plain = (statistics.median(run[name] for run in runs[1:]) for runs in (ours, naive))
        rows.append(
            {
                "operation": name,
                "aioengine_ns": round(mine, 1),
                "plain_python_ns": round(plain, 1),
                "ratio": round(plain / mine, 1),
                "aioengine_per_s": round(1e9 / mine),
            }
        )
    return rows


def _prompts(seed: int) -> list[list[int]]:
    """As many prompts as fill the pool."""
    count = (POOL_BLOCKS - 1) // BLOCKS_PER_REQUEST
    return random_prompts(count, BLOCKS_PER_REQUEST * BLOCK_SIZE, VOCAB_SIZE, seed)


class _Stopwatch:
    """Nanoseconds per block of named operations."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.ns: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        """Runs the work once, on all blocks."""
        gc.collect()
        begun = time.perf_counter_ns()
        work()
        self.ns[name] = (time.perf_counter_ns() - begun) / self._num_blocks


def _time_core(seed: int) -> dict[str, float]:
    kv = KVManager(POOL_BLOCKS, BLOCK_SIZE)
    length = BLOCKS_PER_REQUEST * BLOCK_SIZE
    # One token more than its full blocks, as in an engine, where the last token is always computed.
    prompts = [prompt + [1] for prompt in _prompts(seed)]
    first, again, other = (
        [Request(str(i), np.array(prompt, np.int32), max_tokens=1) for i, prompt in enumerate(some)]
        for some in (prompts, prompts, [[2, *prompt[1:]] for prompt in prompts])
    )
    watch = _Stopwatch(len(prompts) * BLOCKS_PER_REQUEST)

    def each(work: Callable[[Request], object], requests: list[Request]) -> Callable[[], None]:
        def run() -> None:
            for request in requests:
                work(request)

        return run

    watch.time("allocate", each(lambda request: kv.admit(request, 0, length), first))
    watch.time("hash and publish", each(lambda request: kv.publish(request, length), first))
    watch.time("free", each(kv.release, first))
    watch.time("hash and look up", each(kv.match, again))
    watch.time("look up", each(kv.match, again))
    watch.time("touch", each(lambda request: kv.admit(request, BLOCKS_PER_REQUEST, length), again))
    for request in again:
        kv.release(request)
    watch.time("allocate by eviction", each(lambda request: kv.admit(request, 0, length), other))
    return watch.ns


def _time_naive(seed: int) -> dict[str, float]:
    pool = NaivePool(POOL_BLOCKS)
    prompts = _prompts(seed)
    watch = _Stopwatch(len(prompts) * BLOCKS_PER_REQUEST)
    tables: list[list[Any]] = []
    hashes: list[list[bytes]] = []

    def allocate() -> None:
        tables[:] = [pool.allocate(BLOCKS_PER_REQUEST) for _ in prompts]

    def publish() -> None:
        hashes[:] = [chain_hashes(prompt, BLOCK_SIZE) for prompt in prompts]
        for table, digests in zip(tables, hashes, strict=True):
            pool.publish(table, digests)

    def free() -> None:
        for table in tables:
            pool.release_all(table)

    def hash_and_look_up() -> None:
        for prompt in prompts:
            pool.lookup(chain_hashes(prompt, BLOCK_SIZE))

    def look_up() -> None:
        tables[:] = [pool.lookup(digests) for digests in hashes]

    def touch() -> None:
        for table in tables:
            pool.touch(table)

    watch.time("allocate", allocate)
    watch.time("hash and publish", publish)
    watch.time("free", free)
    watch.time("hash and look up", hash_and_look_up)
    watch.time("look up", look_up)
    watch.time("touch", touch)
    free()
    watch.time("allocate by eviction", allocate)
    return watch.ns


def memory_row() -> Row:
    """Bytes per block, every block cached: all of the core's arrays, and plain Python's objects."""
    ours, kv = _traced(lambda: KVManager(POOL_BLOCKS, BLOCK_SIZE, enable_partial_block_reuse=True))
    plain, _ = _traced(_full_naive_pool)
    return {
        "aioengine_bytes_per_block": round(ours / kv.pool.num_blocks, 1),
        "plain_python_bytes_per_block": round(plain / POOL_BLOCKS, 1),
        "ratio": round(plain / ours, 1),
    }


def _full_naive_pool() -> NaivePool:
    pool = NaivePool(POOL_BLOCKS)
    blocks = pool.allocate(POOL_BLOCKS - 1)
    pool.publish(blocks, [i.to_bytes(16, "little") for i in range(len(blocks))])
    pool.release_all(blocks)
    return pool


def _traced(make: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that are still allocated once something was made."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        return tracemalloc.get_traced_memory()[0], made
    finally:
        tracemalloc.stop()


# ---- the scheduler --------------------------------------------------------------------------------------


def scheduler_row(num_running: int, num_waiting: int) -> Row:
    """Microseconds of schedule + update with all running requests decoding."""
    input_len, num_steps = 128, MEASURED_STEPS + 200
    blocks_each = -(-(input_len + num_steps + 64) // BLOCK_SIZE)
    scheduler = Scheduler(
        num_blocks=2 + num_running * blocks_each,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_model_len=blocks_each * BLOCK_SIZE,
    )
    prompts = random_prompts(num_running + num_waiting, input_len, VOCAB_SIZE, seed=0)
    for i, prompt in enumerate(prompts):
        scheduler.add(Request(str(i), np.array(prompt, np.int32), max_tokens=num_steps + 60, ignore_eos=True))
    while not _all_decode(scheduler, num_running):
        pass
    token_ids = np.ones(num_running, np.int32)
    times = []
    for _ in range(MEASURED_STEPS):
        begun = time.perf_counter_ns()
        plan = scheduler.schedule()
        scheduler.update(plan, token_ids)
        times.append((time.perf_counter_ns() - begun) / 1000)
    assert scheduler.num_running == num_running and scheduler.num_waiting == num_waiting
    times.sort()
    return {
        "running": num_running,
        "waiting": num_waiting,
        "median_us": round(statistics.median(times), 2),
        "p99_us": round(times[int(0.99 * len(times))], 2),
        "us_per_request": round(statistics.median(times) / num_running, 4),
    }


def _all_decode(scheduler: Scheduler, num_running: int) -> bool:
    """Runs a step; whether it was one of decoding alone."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, np.ones(plan.num_samples, np.int32))
    return plan.num_tokens == plan.num_samples == num_running


def objects_row(num_steps: int) -> Row:
    """Memory blocks and tracked objects of Python before and after many steps with requests coming and going."""
    num_seqs, input_len, output_len = 16, 64, 50
    scheduler = Scheduler(
        num_blocks=200, block_size=BLOCK_SIZE, max_num_seqs=num_seqs, max_num_batched_tokens=512, max_model_len=256
    )
    prompts = [np.array(prompt, np.int32) for prompt in random_prompts(64, input_len, VOCAB_SIZE, seed=0)]
    num_added = 0

    def run(count: int) -> None:
        nonlocal num_added
        for _ in range(count):
            while scheduler.num_running + scheduler.num_waiting < num_seqs:
                prompt = prompts[num_added % len(prompts)]
                scheduler.add(Request(str(num_added), prompt, max_tokens=1 + num_added % output_len, ignore_eos=True))
                num_added += 1
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(plan, np.ones(plan.num_samples, np.int32))

    run(min(2000, num_steps))
    before = _live_objects()
    run(num_steps)
    after = _live_objects()
    return {
        "steps": num_steps,
        "requests": num_added,
        "memory_blocks_before": before[0],
        "memory_blocks_after": after[0],
        "objects_before": before[1],
        "objects_after": after[1],
    }


def _live_objects() -> tuple[int, int]:
    gc.collect()
    return sys.getallocatedblocks(), len(gc.get_objects())


# ---- the host -------------------------------------------------------------------------------------------


async def host_rows(args: argparse.Namespace) -> list[Row]:
    """Output tokens per second and time per step with a device that is always done at once."""
    rows = []
    for reads_late in (True, False):
        for num_seqs in args.num_seqs:
            runs = []
            for seed in range(args.repeats):
                lengths = {"input_len": args.input_len, "output_len": args.output_len}
                runs.append(await run_host_only(num_seqs, **lengths, reads_late=reads_late, seed=seed))
            runs.sort(key=lambda run: run["output_tokens_per_s"])
            rows.append(
                {"face": "offline" if reads_late else "generate()", "requests": num_seqs, **runs[len(runs) // 2]}
            )
    return rows
