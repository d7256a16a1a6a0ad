"""Prompts of given lengths, and how a crowd of requests is run and timed.

Prompts are random token ids drawn from a seed, so that the prefix cache helps only where a workload shares a
prefix on purpose. Times come from the receiving side: when an output reaches the reader.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aioengine import SamplingParams
from aioengine.engine import AsyncEngine

FIRST_PLAIN_ID = 100
"""Smaller ids are often special tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload."""

    prompt: list[int]
    output_len: int


@dataclass(slots=True)
class Timeline:
    """When a request was sent and when its tokens came, seconds of one clock."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Time between successive tokens; tokens that arrive together count as gaps of zero."""
        times = self.token_times_s
        return [b - a for a, b in zip(times, times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


@dataclass(frozen=True, slots=True)
class PeerWork:
    """One workload that the engine and its peer both do; throughput counts `num_tokens`."""

    label: str
    batch_size: int
    input_len: int
    output_len: int
    counts_prompt: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens per run that the figure counts: of the prompts or of the outputs."""
        return self.batch_size * (self.input_len if self.counts_prompt else self.output_len)


PEER_WORK = {
    "decode1": PeerWork("decode: 16 in, 128 out, alone: output tokens/s", 1, 16, 128),
    "decode16": PeerWork("the same, 16 at once: output tokens/s", 16, 16, 128),
    "mixed1": PeerWork("128 in, 64 out, alone: output tokens/s", 1, 128, 64),
    "mixed16": PeerWork("the same, 16 at once: output tokens/s", 16, 128, 64),
    "prefill": PeerWork("prefill: 512 in, 1 out: prompt tokens/s", 1, 512, 1, counts_prompt=True),
}


def random_prompts(count: int, length: int, vocab_size: int, seed: int, *, prefix_len: int = 0) -> list[list[int]]:
    """`count` prompts of `length` ids, the first `prefix_len` of them equal in all."""
    rng = random.Random(seed)

    def draw(n: int) -> list[int]:
        return [rng.randrange(min(FIRST_PLAIN_ID, vocab_size - 1), vocab_size) for _ in range(n)]

    prefix = draw(prefix_len)
    return [prefix + draw(length - prefix_len) for _ in range(count)]


async def run_job(engine: AsyncEngine, job: Job, temperature: float = 0.0) -> Timeline:
    """One request from submission to its last token."""
    params = SamplingParams(
        max_tokens=job.output_len, temperature=temperature, ignore_eos=True, skip_special_tokens=False
    )
    line = Timeline(time.perf_counter())
    async for output in await engine.submit(job.prompt, params):
        line.token_times_s += [time.perf_counter()] * len(output.delta_token_ids)
        if output.usage is not None:
            line.num_prompt_tokens = output.usage.prompt_tokens
            line.num_cached_tokens = output.usage.cached_tokens
    return line


async def run_jobs(
    engine: AsyncEngine, jobs: Sequence[Job], temperature: float = 0.0, rate_per_s: float | None = None, seed: int = 0
) -> tuple[list[Timeline], float]:
    """All jobs at once, or arriving as a Poisson process; returns their timelines and the seconds elapsed."""
    rng = random.Random(seed)

    async def after(delay_s: float, job: Job) -> Timeline:
        await asyncio.sleep(delay_s)
        return await run_job(engine, job, temperature)

    begun = time.perf_counter()
    due_s = 0.0
    async with asyncio.TaskGroup() as group:
        tasks = []
        for job in jobs:
            tasks.append(group.create_task(after(due_s, job)))
            if rate_per_s:
                due_s += rng.expovariate(rate_per_s)
    return [task.result() for task in tasks], time.perf_counter() - begun


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of the sorted values lie (nearest rank); None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def summarize(lines: Sequence[Timeline], elapsed_s: float) -> dict[str, float | int | None]:
    """What a run of many requests amounts to; times in milliseconds."""
    num_out = sum(len(line.token_times_s) for line in lines)
    num_in = sum(line.num_prompt_tokens for line in lines)
    ttfts = [line.ttft_s for line in lines if line.token_times_s]
    gaps = [gap for line in lines for gap in line.gaps_s]
    tpots = [line.tpot_s for line in lines if line.tpot_s is not None]

    def ms(value: float | None) -> float | None:
        return None if value is None else round(1000 * value, 3)

    return {
        "requests": len(lines),
        "elapsed_s": round(elapsed_s, 4),
        "prompt_tokens": num_in,
        "output_tokens": num_out,
        "cached_tokens": sum(line.num_cached_tokens for line in lines),
        "output_tokens_per_s": round(num_out / elapsed_s, 2),
        "total_tokens_per_s": round((num_in + num_out) / elapsed_s, 2),
        "ttft_p50_ms": ms(percentile(ttfts, 50)),
        "ttft_p99_ms": ms(percentile(ttfts, 99)),
        "tpot_p50_ms": ms(percentile(tpots, 50)),
        "tpot_p99_ms": ms(percentile(tpots, 99)),
        "itl_p50_ms": ms(percentile(gaps, 50)),
        "itl_p90_ms": ms(percentile(gaps, 90)),
        "itl_p99_ms": ms(percentile(gaps, 99)),
    }


def median_run(runs: Sequence[dict[str, float | int | None]], key: str) -> dict[str, float | int | None]:
    """The run whose `key` is the (lower) median of all."""
    middle = statistics.median_low([float(run[key] or 0.0) for run in runs])
    return next(run for run in runs if float(run[key] or 0.0) == middle)
