"""`python -m tests.simulation --seeds N`: many seeds on all cores; exits non-zero if any breaks a rule.

A violation is printed with the command that replays its seed and, after shrinking, as a short script.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulation.batch import Batch, run_batch
from tests.simulation.script import draw_script
from tests.simulation.shrink import shrink

SEEDS_PER_JOB = 10
SHRINK_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="How many seeds (default: 1000).")
    parser.add_argument("--first-seed", type=int, default=0, help="The first one (default: 0).")
    parser.add_argument("--steps", type=int, default=500, help="About how many steps per seed (default: 500).")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Processes (default: all cores).")
    parser.add_argument("--no-shrink", action="store_true", help="Do not cut the first failure down.")
    args = parser.parse_args(argv)
    if min(args.seeds, args.steps, args.jobs) < 1 or args.first_seed < 0:
        parser.error("--seeds, --steps and --jobs must be at least 1, --first-seed at least 0")
    console = Console()
    total, elapsed_s = _run_all(args, console)
    _print_table(total, elapsed_s, args.jobs, console)
    for seed, what in sorted(total.failures):
        console.print(f"seed {seed}: {what}", markup=False)
        command = f"python -m tests.simulation --first-seed {seed} --seeds 1 --steps {args.steps}"
        console.print(f"    replay: {command}", markup=False, soft_wrap=True)
    if total.failures and not args.no_shrink:
        seed = min(total.failures)[0]
        console.print(f"shrinking seed {seed} for at most {SHRINK_S:.0f} s ...")
        script, violation = shrink(draw_script(seed, args.steps), SHRINK_S)
        console.print(f"{violation}\n\n{script.code()}", markup=False, highlight=False, soft_wrap=True)
    return 1 if total.failures else 0


def _run_all(args: argparse.Namespace, console: Console) -> tuple[Batch, float]:
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs = iter([seeds[i : i + SEEDS_PER_JOB] for i in range(0, len(seeds), SEEDS_PER_JOB)])
    total = Batch()
    begun = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("seeds"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("0 steps", total=len(seeds))
        for batch in _batches(jobs, args.steps, min(args.jobs, -(-len(seeds) // SEEDS_PER_JOB))):
            total.num_seeds += batch.num_seeds
            total.num_steps += batch.num_steps
            total.cpu_s += batch.cpu_s
            total.counts += batch.counts
            total.failures += batch.failures
            text = f"{total.num_steps:,} steps, {len(total.failures)} violations"
            progress.update(bar, advance=batch.num_seeds, description=text)
    return total, time.monotonic() - begun


def _batches(jobs: Iterator[Sequence[int]], num_steps: int, num_processes: int) -> Iterator[Batch]:
    """The jobs' results as they come; in this process if one is enough."""
    if num_processes <= 1:
        for seeds in jobs:
            yield run_batch(seeds, num_steps)
        return
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        running: set[Future[Batch]] = set()
        for seeds in jobs:
            running.add(pool.submit(run_batch, seeds, num_steps))
            if len(running) >= 2 * num_processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in running:
            yield future.result()


def _print_table(total: Batch, elapsed_s: float, jobs: int, console: Console) -> None:
    table = Table(title=f"{total.num_seeds:,} seeds", title_justify="left", show_header=False)
    rate = total.num_steps / total.cpu_s if total.cpu_s else 0.0
    rows = {
        "steps": f"{total.num_steps:,}",
        "seconds": f"{elapsed_s:.1f} with {jobs} processes",
        "steps per second of processor time": f"{rate:,.0f}",
        "violations": f"{len(total.failures):,}",
        **{name: f"{count:,}" for name, count in total.counts.most_common()},
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:  # hashes of bytes choose lanes of the prefix tree: a seed must repeat them
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
