"""The step loop: schedule -> launch -> await -> update -> outputs, for as long as the engine lives.

This is the file to read first. Each turn asks the scheduler (`fastcore/scheduler`) who runs, hands the
packed plan to the runner (`runner.py`), which returns a future at once, and settles the oldest step when its
future is done: new tokens go into the requests, then as text into their streams (`outputs.py`).

It owns the steps in flight and nothing else: requests belong to the scheduler, streams to their readers, and
`engine.py` starts and ends this loop. With a depth of two the next step is scheduled and launched while one
runs, so that the device never waits for Python.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioengine.fastcore.scheduler import Scheduler
    from aioengine.fastcore.step_buffer import StepPlan
    from aioengine.runner import Runner, StepResult

logger = logging.getLogger(__name__)

MAX_HOLD_S = 0.001
"""So long the loop goes on with a device that is always ready before other tasks get their turn."""
MAX_HELD_STEPS = 16
"""And so many steps at most."""
IDLE_PAUSE_S = 0.05
"""How long nothing must have happened before a piece of idle work, and between two of them."""


@dataclass(slots=True)
class InFlight:
    """A launched step: its plan, the future of its result, and when it was launched."""

    plan: StepPlan
    done: asyncio.Future[StepResult]
    launched_s: float


class StepLoop:
    """Runs steps until it is stopped or the device fails.

    Args:
        settle: called on the loop with each completed step, in launch order.
        observe_step_s: called with each step's time from launch to settlement, seconds.
        max_in_flight: steps launched and not yet settled at most (1: synchronous, 2: one step ahead).
        use_idle_time: does a piece of work that can wait, returns whether there may be more; called now and then
            while there is nothing else to do.
        clock: seconds that only go forward; of another kind in tests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        settle: Callable[[StepPlan, StepResult], None],
        *,
        observe_step_s: Callable[[float], None] = lambda _: None,
        max_in_flight: int = 1,
        use_idle_time: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._settle = settle
        self._observe_step_s = observe_step_s
        self._max_in_flight = max_in_flight
        self._use_idle_time = use_idle_time
        self._may_have_idle_work = True
        self._clock = clock
        self._in_flight: deque[InFlight] = deque()
        self._bell = asyncio.Event()
        self._yielded_s = -math.inf
        self._num_held = 0
        self._stopping = False
        self._rests = asyncio.Event()
        self._has_ended = False
        self.num_steps = 0
        self.last_progress_s = self._clock()

    @property
    def is_idle(self) -> bool:
        """Whether there is neither a step in flight nor a request to run."""
        return not self._in_flight and not self._scheduler.has_work()

    def wake(self) -> None:
        """Says that something changed: a request came or went. Called on the loop's thread."""
        self._bell.set()

    def stop(self) -> None:
        """Ends `run()` once the steps in flight are settled; no further step is launched."""
        self._stopping = True
        self._bell.set()

    async def wait_idle(self) -> None:
        """Until there is neither a step in flight nor a request to run, or the loop has ended."""
        while not (self.is_idle or self._has_ended):
            self._rests.clear()
            await self._rests.wait()

    async def run(self) -> None:
        """The loop. Returns after `stop()`; raises what the device raised."""
        try:
            await self._run()
        finally:
            self._has_ended = True
            self._rests.set()

    async def _run(self) -> None:
        while True:
            self._bell.clear()
            plan = None
            if not self._stopping and len(self._in_flight) < self._max_in_flight:
                plan = self._scheduler.schedule()
            if plan is not None:
                self._launch(plan)
                if len(self._in_flight) < self._max_in_flight:
                    continue
            elif not self._in_flight:
                if self._stopping:
                    return
                self._rests.set()
                await self._rest()
                self.last_progress_s = self._clock()
                continue
            await self._settle_oldest()

    async def _rest(self) -> None:
        """Nothing to do until submit(), abort() or stop() ring, but what can wait for such a time."""
        while self._may_have_idle_work:
            try:
                async with asyncio.timeout(IDLE_PAUSE_S):
                    await self._bell.wait()
                return
            except TimeoutError:
                self._may_have_idle_work = self._use_idle_time()
        await self._bell.wait()

    def _launch(self, plan: StepPlan) -> None:
        done = self._runner.launch(plan)
        done.add_done_callback(self._ring)
        self._in_flight.append(InFlight(plan, done, self._clock()))

    def _ring(self, _done: object) -> None:
        self._bell.set()

    async def _settle_oldest(self) -> None:
        """Waits for the oldest step; returns early if a request arrived that could still be launched."""
        oldest = self._in_flight[0]
        if not oldest.done.done():
            if len(self._in_flight) < self._max_in_flight:
                await self._bell.wait()
            else:
                await asyncio.wait((oldest.done,))
            self._num_held, self._yielded_s = 0, self._clock()
        elif self._num_held >= MAX_HELD_STEPS or self.last_progress_s - self._yielded_s >= MAX_HOLD_S:
            # A device that is always ready must not starve the other tasks; several steps share one turn of
            # theirs, in which what they read joins.
            await asyncio.sleep(0)
            self._num_held, self._yielded_s = 0, self._clock()
        self._num_held += 1
        if not oldest.done.done():
            return
        result = oldest.done.result()
        self._in_flight.popleft()
        self.num_steps += 1
        before_s, self.last_progress_s = self.last_progress_s, self._clock()
        self._observe_step_s(self.last_progress_s - oldest.launched_s)
        # From settlement to settlement is what a reader waits, whether steps overlap or not.
        self._scheduler.observe_step(oldest.plan, self.last_progress_s - before_s)
        self._settle(oldest.plan, result)

    async def abandon(self) -> None:
        """After a failure: waits until no launched step can touch memory any more, ignoring the results."""
        while self._in_flight:
            done = self._in_flight.popleft().done
            await asyncio.wait((done,))
            if not done.cancelled() and done.exception() is not None:
                logger.debug("a step in flight failed as well: %s", done.exception())
