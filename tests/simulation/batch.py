"""Some seeds one after another, as a worker process runs them, and what they amount to."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.simulation.script import draw_script
from tests.simulation.world import Violation, run


@dataclass
class Batch:
    """What a few seeds amount to."""

    num_seeds: int = 0
    num_steps: int = 0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Seed and what broke."""


def run_batch(seeds: Sequence[int], num_steps: int, on_step: Callable[[], object] = lambda: None) -> Batch:
    """Runs seeds one after another; called in a worker process, or by a test, to which it leaves the log as it was."""
    logger = logging.getLogger("aioengine")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return _run_all(seeds, num_steps, on_step)
    finally:
        logger.setLevel(level)


def _run_all(seeds: Sequence[int], num_steps: int, on_step: Callable[[], object]) -> Batch:
    batch = Batch()
    begun = time.process_time()
    for seed in seeds:
        batch.num_seeds += 1
        try:
            report = run(draw_script(seed, num_steps), on_step)
        except Violation as violation:
            batch.failures.append((seed, str(violation)))
            continue
        batch.num_steps += report.num_steps
        batch.counts += report.counts
    batch.cpu_s = time.process_time() - begun
    return batch
