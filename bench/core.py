"""`aioengine bench core`: what the compiled core costs, beside plain Python, and the host alone without a device.

Four parts: operations of the block pool per block (`pool`: a plain-Python pool in the same run, memory of both);
schedule + update per step; Python objects over many steps; and the whole host side with a runner that computes
nothing. Times are medians of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any

import numpy as np

from aioengine.bench.host_only import run_host_only
from aioengine.bench.pool import BLOCK_SIZE, memory_row, pool_rows
from aioengine.bench.report import print_table, write_json
from aioengine.bench.workloads import random_prompts
from aioengine.errors import InvalidConfig
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler

PARTS = ("pool", "scheduler", "objects", "host")
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
        assert plan is not None
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
