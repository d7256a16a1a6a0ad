"""What the engine counts, and how it is exported for Prometheus.

The step loop observes thousands of values per second, so histograms are plain lists filled by bisection and
are turned into Prometheus families only when somebody scrapes. Owned by one engine; no process-wide registry.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from aioengine.kv_connector import ConnectorStats

if TYPE_CHECKING:
    from aioengine.fastcore.scheduler import Scheduler

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LAG_INTERVAL_S = 0.01


class Histogram:
    """Counts of observed values per bucket, their sum and number."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds one value, seconds, seen so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self.counts)

    def family(self, name: str, help: str) -> HistogramMetricFamily:
        """The Prometheus form, with cumulative buckets."""
        cumulative, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            cumulative.append((bound, float(running)))
        family = HistogramMetricFamily(name, help)
        family.add_metric([], cumulative, self.total)
        return family


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What came of speculation so far."""

    num_drafts: int
    """How often a request got drafts in a step."""
    num_draft_tokens: int
    """Tokens in them."""
    num_accepted_tokens: int
    """Those that were what the model would have said."""

    @classmethod
    def of(cls, scheduler: Scheduler) -> DraftStats:
        """The counters of a scheduler."""
        return cls(scheduler.num_drafts_total, scheduler.num_draft_tokens_total, scheduler.num_accepted_tokens_total)

    def since(self, before: DraftStats | None) -> DraftStats:
        """What was added to an earlier state, or to nothing."""
        if before is None:
            return self
        return DraftStats(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
        )

    @property
    def acceptance(self) -> float | None:
        """Share of the tokens that were accepted; None without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def told(self) -> str:
        """The end of a log line; nothing if there were no drafts."""
        if self.acceptance is None:
            return ""
        return f", drafts accepted {100 * self.acceptance:.0f} % of {self.num_draft_tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of queues, cache and counters."""

    num_running: int
    num_waiting: int
    max_num_active_seqs: int
    """How many requests may run at once at present."""
    num_blocks: int
    num_free_blocks: int
    kv_cache_usage: float
    """Share of the blocks (without the null block) that some request holds."""
    prefix_queries_tokens: int
    prefix_hit_tokens: int
    num_evicted_blocks: int
    """Cached blocks that had to make room."""
    num_cached_blocks: int
    """Blocks that a request could hit."""
    num_pinned_blocks: int
    external_queries_tokens: int
    """Tokens that the pool's cache did not have and a connector was asked for."""
    external_hit_tokens: int
    """How many of those were loaded."""
    num_lost_blocks: int
    """Blocks that were to be loaded, were gone, and were computed instead."""
    connector: ConnectorStats | None
    """Blocks kept outside the pool, in host memory; None if none are."""
    num_preemptions: int
    num_urgent_preemptions: int
    """Those of them that made way for a more important request that waited."""
    num_steps: int
    drafts: DraftStats | None
    """What came of drafts; None without speculation."""
    step_cost: dict[str, float] | None
    """What the engine has learned about the time of its steps, seconds per unit; None without target_itl_ms."""
    prompt_tokens: int
    generation_tokens: int
    num_requests_finished: dict[str, int]
    """By finish reason."""
    loop_lag_p99_s: float | None
    """99th percentile of how late timers of the event loop fired while requests ran; None before any."""
    completion_poll_s: float = 0.0
    """Seconds that the loop was kept awake to ask the device for the end of a step."""


class EngineMetrics:
    """Counters and histograms of one engine; a Prometheus collector."""

    def __init__(self, read_stats: Callable[[], EngineStats], model_name: str) -> None:
        self._read_stats = read_stats
        self._model_name = model_name
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.requests_received = 0
        self.requests_rejected = 0
        self.finished: Counter[str] = Counter()
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.time_per_output_token = Histogram()
        self.queue_time = Histogram()
        self.request_latency = Histogram()
        self.step_time = Histogram()
        self.loop_lag = Histogram(LAG_BUCKETS_S)
        self.recent_lag_s: deque[float] = deque(maxlen=4096)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def loop_lag_p99_s(self) -> float | None:
        """99th percentile of the recent loop lag, seconds; None without samples."""
        if not self.recent_lag_s:
            return None
        ordered = sorted(self.recent_lag_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]

    def describe(self) -> Iterator[Metric]:
        """Lets the registry accept this collector without scraping it first."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families; called by the registry on a scrape."""
        stats = self._read_stats()
        yield self._gauge("num_requests_running", "Requests that hold a row of the batch", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the waiting queues", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", stats.kv_cache_usage)
        queried, hit = stats.prefix_queries_tokens, stats.prefix_hit_tokens
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queried)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", hit)
        yield self._gauge("prefix_cache_blocks", "KV blocks that a request could hit", stats.num_cached_blocks)
        yield self._gauge("kv_cache_pinned_blocks", "KV blocks with a pin or lease", stats.num_pinned_blocks)
        if stats.connector is not None:
            yield from self._connector(stats, stats.connector)
        evicted = stats.num_evicted_blocks
        yield self._counter("prefix_cache_evicted_blocks", "Cached KV blocks that had to make room", evicted)
        yield self._counter("num_preemptions", "Requests preempted, to be recomputed", stats.num_preemptions)
        yield self._counter(
            "num_urgent_preemptions", "Those preempted for a more important request", stats.num_urgent_preemptions
        )
        yield self._counter("steps", "Forward passes completed", stats.num_steps)
        if stats.drafts is not None:
            drafts = stats.drafts
            for name, help, count in (
                ("drafts", "How often a request got drafts in a step", drafts.num_drafts),
                ("draft_tokens", "Draft tokens verified", drafts.num_draft_tokens),
                ("accepted_tokens", "Draft tokens accepted", drafts.num_accepted_tokens),
            ):
                yield self._counter(f"spec_decode_num_{name}", help, count)
        for name, value in (stats.step_cost or {}).items():
            yield self._gauge(f"step_cost_{name}", "Learned model of step times, seconds per unit", value)
        polled_s = stats.completion_poll_s
        yield self._counter("completion_poll_seconds", "Time the loop was kept awake to ask the device", polled_s)
        yield self._counter("prompt_tokens", "Prompt tokens accepted", self.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", self.generation_tokens)
        yield self._counter("requests_received", "Requests accepted by intake", self.requests_received)
        yield self._counter("requests_rejected", "Requests refused by intake", self.requests_rejected)
        success = CounterMetricFamily(
            "aioengine_request_success", "Choices finished, by reason", labels=["finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric([reason], self.finished[reason])
        yield success
        for name, help, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token", self.time_to_first_token),
            ("inter_token_latency_seconds", "Time between two tokens of a choice", self.inter_token_latency),
            ("time_per_output_token_seconds", "Mean time per token after a choice's first", self.time_per_output_token),
            ("request_queue_time_seconds", "Arrival to first scheduling", self.queue_time),
            ("e2e_request_latency_seconds", "Arrival to end", self.request_latency),
            ("step_time_seconds", "Launch to completion of a forward pass", self.step_time),
            ("event_loop_lag_seconds", "How late timers of the event loop fire while requests run", self.loop_lag),
        ):
            yield histogram.family(f"aioengine_{name}", help)
        if stats.loop_lag_p99_s is not None:
            yield self._gauge("event_loop_lag_p99_seconds", "99th percentile of recent loop lag", stats.loop_lag_p99_s)
        info = GaugeMetricFamily("aioengine_model_info", "The model served", labels=["model_name"])
        info.add_metric([self._model_name], 1)
        yield info

    def _connector(self, stats: EngineStats, kept: ConnectorStats) -> Iterator[Metric]:
        """What a connector keeps, where there is one."""
        queried, hit = stats.external_queries_tokens, stats.external_hit_tokens
        yield self._counter("external_prefix_cache_queries", "Prompt tokens looked up outside the KV pool", queried)
        yield self._counter("external_prefix_cache_hits", "Prompt tokens loaded from outside the KV pool", hit)
        usage = kept.num_blocks / kept.max_blocks
        yield self._gauge("kv_offload_usage_perc", "Share of the memory behind the KV pool in use, 0 to 1", usage)
        for name, help, value in (
            ("stored", "KV blocks copied from the pool to the memory behind it", kept.num_stored_blocks),
            ("loaded", "KV blocks copied back into the pool", kept.num_loaded_blocks),
            ("evicted", "KV blocks that had to make room in the memory behind the pool", kept.num_evicted_blocks),
            ("lost", "KV blocks that were gone when they were to be loaded, and were computed", stats.num_lost_blocks),
        ):
            yield self._counter(f"kv_offload_{name}_blocks", help, value)

    @staticmethod
    def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"aioengine_{name}", help, value=value)

    @staticmethod
    def _counter(name: str, help: str, value: float) -> CounterMetricFamily:
        return CounterMetricFamily(f"aioengine_{name}", help, value=value)


class LagMonitor:
    """Measures how late the event loop's timers fire, only while there is work, so that idle stays idle."""

    def __init__(self, metrics: EngineMetrics, has_work: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._has_work = has_work
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins sampling; does nothing if it already does."""
        if self._timer is None:
            self._arm()

    def close(self) -> None:
        """Ends sampling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        due_s = time.monotonic() + LAG_INTERVAL_S
        self._timer = self._loop.call_later(LAG_INTERVAL_S, self._fire, due_s)

    def _fire(self, due_s: float) -> None:
        # Timers of uvloop count whole milliseconds, so one may fire slightly early.
        lag_s = max(0.0, time.monotonic() - due_s)
        self._metrics.loop_lag.observe(lag_s)
        self._metrics.recent_lag_s.append(lag_s)
        self._timer = None
        if self._has_work():
            self._arm()
