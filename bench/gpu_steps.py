"""Where the time of each step goes on a GPU: the host's parts, the device's, and what lies idle between.

A `StepProbe` wraps the step loop, the scheduler and the runner of one running engine and keeps a `StepTimes` per
step. The device's clock is tied to the host's by one event that both saw. Used by `gpu_engine.py` only.
"""

from __future__ import annotations

import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from aioengine import AsyncEngine
from aioengine.bench.workloads import percentile

OFF_ROWS, NUM_COMPUTED = 5, 3
"""Where a step buffer says where its rows are, and a row how much of it was computed."""

SIZE_BOUNDS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class StepTimes:
    """One step; host times are seconds of `time.perf_counter`."""

    num_tokens: int
    num_rows: int
    context: int
    """Tokens of the first row that were computed before."""
    schedule_s: float
    launch_s: float = 0.0
    facts_s: float = 0.0
    forward_s: float = 0.0
    settle_s: float = 0.0
    update_s: float = 0.0
    settled_at: float = 0.0
    begun: Any = None
    """CUDA events before the step's first copy and after its last kernel."""
    ended: Any = None


class _TimedScheduler:
    """The scheduler, as the step loop and `LiveRequests` see it."""

    def __init__(self, scheduler: Any, probe: StepProbe) -> None:
        self._scheduler, self._probe = scheduler, probe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self) -> Any:
        begun = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan is not None:
            self._probe.planned(plan, time.perf_counter() - begun)
        return plan

    def update(self, plan: Any, token_ids: Any, lost_blocks: Any = ()) -> Any:
        begun = time.perf_counter()
        changed = self._scheduler.update(plan, token_ids, lost_blocks)
        self._probe.steps[plan.step_id].update_s = time.perf_counter() - begun
        return changed


@dataclass(slots=True)
class StepProbe:
    """Collects while it is entered; the engine must be idle then and at the end."""

    engine: AsyncEngine
    steps: dict[int, StepTimes] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _anchor: Any = None
    _anchor_s: float = 0.0

    def __enter__(self) -> StepProbe:
        runner: Any = self.engine._loaded.runner  # of a GPU: the engine was asked for one
        module = sys.modules[type(runner).__module__]
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_s = time.perf_counter()
        loop, live = self.engine._steps, self.engine._live
        timed = _TimedScheduler(loop._scheduler, self)
        self._replace(loop, "_scheduler", timed)
        self._replace(live, "_scheduler", timed)
        self._replace(loop, "_settle", self._timed_settle(loop._settle))
        self._replace(runner, "_launch", self._timed_launch(runner._launch, runner._compute))
        self._replace(runner._forward, "run", self._timed("forward_s", runner._forward.run))
        facts = type("TimedFacts", (), {"of": self._timed("facts_s", module.StepFacts.of)})
        self._replace(module, "StepFacts", facts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in reversed(self._undo):
            undo()
        torch.cuda.synchronize()

    def planned(self, plan: Any, seconds: float) -> None:
        words = plan.buffer
        context = int(words[int(words[OFF_ROWS]) + NUM_COMPUTED])
        self.steps[plan.step_id] = StepTimes(plan.num_tokens, plan.num_rows, context, seconds)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _timed(self, name: str, function: Callable[..., Any]) -> Any:
        """`function`, its time kept in that field of the step that is being launched: the newest."""

        def timed(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args, **options)
            newest = next(reversed(self.steps.values()))
            setattr(newest, name, time.perf_counter() - begun)
            return result

        return staticmethod(timed) if name == "facts_s" else timed

    def _timed_launch(self, launch: Callable[..., Any], stream: torch.cuda.Stream) -> Callable[..., Any]:
        def timed(plan: Any, done: Any) -> Any:
            step = self.steps[plan.step_id]
            step.begun, step.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun = time.perf_counter()
            step.begun.record(stream)
            pending = launch(plan, done)
            step.ended.record(stream)
            step.launch_s = time.perf_counter() - begun
            return pending

        return timed

    def _timed_settle(self, settle: Callable[..., None]) -> Callable[..., None]:
        def timed(plan: Any, result: Any) -> None:
            step = self.steps[plan.step_id]
            step.settled_at = time.perf_counter()
            settle(plan, result)
            step.settle_s = time.perf_counter() - step.settled_at

        return timed

    # ---- what it amounts to -----------------------------------------------------------------------------

    def breakdown(self, is_wanted: Callable[[StepTimes], bool] = lambda _: True) -> dict[str, float]:
        """Medians of one kind of step, in microseconds, and the device's idle share over all of them."""
        steps = [step for step in self.steps.values() if step.settled_at]
        idle_us, busy_us, late_us, walls_us = [], [], [], []
        chosen = []
        for before, step in zip(steps, steps[1:], strict=False):
            if not (is_wanted(before) and is_wanted(step)):
                continue
            chosen.append(step)
            idle_us.append(1000 * before.ended.elapsed_time(step.begun))
            busy_us.append(1000 * step.begun.elapsed_time(step.ended))
            late_us.append(1e6 * (step.settled_at - self._anchor_s) - 1000 * self._anchor.elapsed_time(step.ended))
            walls_us.append(1e6 * (step.settled_at - before.settled_at))
        if not chosen:
            return {}

        def median_us(values: Iterable[float]) -> float:
            return round(1e6 * statistics.median(values), 1)

        host = [s.schedule_s + s.launch_s + s.settle_s for s in chosen]
        return {
            "steps": len(chosen),
            "host_us": median_us(host),
            "schedule_us": median_us(s.schedule_s for s in chosen),
            "launch_us": median_us(s.launch_s for s in chosen),
            "of_launch_facts_us": median_us(s.facts_s for s in chosen),
            "of_launch_forward_us": median_us(s.forward_s for s in chosen),
            "settle_us": median_us(s.settle_s for s in chosen),
            "of_settle_update_us": median_us(s.update_s for s in chosen),
            "wall_us": round(statistics.median(walls_us), 1),
            "device_us": round(statistics.median(busy_us), 1),
            "device_mean_us": round(statistics.mean(busy_us), 1),
            "idle_us": round(statistics.median(idle_us), 1),
            "idle_share": round(sum(idle_us) / (sum(idle_us) + sum(busy_us)), 4),
            "late_p50_us": round(percentile(late_us, 50) or 0.0, 1),
            "late_p99_us": round(percentile(late_us, 99) or 0.0, 1),
        }

    def decodes_of(self, num_rows: int) -> dict[str, float]:
        """The breakdown of steps in which so many rows decode and nobody else runs."""
        return self.breakdown(lambda step: step.num_tokens == step.num_rows == num_rows)

    def each(self) -> list[dict[str, float]]:
        """Every step."""
        return [
            {
                "tokens": step.num_tokens,
                "rows": step.num_rows,
                "context": step.context,
                "device_ms": round(step.begun.elapsed_time(step.ended), 3),
            }
            for step in self.steps.values()
            if step.settled_at
        ]

    def by_size(self) -> list[dict[str, float]]:
        """Steps grouped by their number of tokens: how many, and what they took on the device and in all."""
        groups: dict[int, list[tuple[StepTimes, float]]] = {}
        steps = [step for step in self.steps.values() if step.settled_at]
        for before, step in zip([None, *steps], steps, strict=False):
            wall = 0.0 if before is None else step.settled_at - before.settled_at
            groups.setdefault(bisect_left(SIZE_BOUNDS, step.num_tokens), []).append((step, wall))
        rows = []
        for index, group in sorted(groups.items()):
            device = [step.begun.elapsed_time(step.ended) for step, _ in group]
            num_tokens = sum(step.num_tokens for step, _ in group)
            rows.append(
                {
                    "up_to_tokens": SIZE_BOUNDS[min(index, len(SIZE_BOUNDS) - 1)],
                    "steps": len(group),
                    "mean_tokens": round(num_tokens / len(group), 1),
                    "mean_rows": round(sum(step.num_rows for step, _ in group) / len(group), 1),
                    "device_ms": round(sum(device), 2),
                    "device_ms_per_step": round(sum(device) / len(group), 3),
                    "device_ms_max": round(max(device), 3),
                    "wall_ms": round(1000 * sum(wall for _, wall in group), 2),
                }
            )
        return rows
