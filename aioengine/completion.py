"""Tells in launch order that steps on a device have ended: by an eventfd, or sooner by asking while one is due.

A host callback behind each step writes the eventfd, which wakes the loop, but a sleeping processor wakes late: 0.1 ms
at the median, milliseconds at worst. So when the oldest step is due within `poll_us`, by what steps of its size
have taken, its event is asked once per turn of the loop, until it has ended or is overdue by as much again. A turn
runs everything else that is ready too, so polling delays nothing but sleep. Used by `cuda_runner.py`; all
methods run on the loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aioengine.fastcore import native

SMOOTHING = 0.25
"""Weight of the newest step in the estimate of its kind."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose end was not told yet."""

    is_done: Callable[[], bool]
    kind: int
    launched_s: float


class CompletionWatch:
    """Calls `on_done` once for every step, oldest first.

    Args:
        poll_us: how long before its estimated end a step is asked for, and how long after; 0 never asks.
        clock: seconds, monotonic.
    """

    def __init__(
        self, on_done: Callable[[], None], poll_us: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.polled_s = 0.0
        """Seconds that the loop was kept awake for asking."""
        self._on_done = on_done
        self._poll_s = poll_us * 1e-6
        self._clock = clock
        self._completion = native.Completion()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._launched: deque[_Launched] = deque()
        self._num_ahead = 0  # steps found done whose signal is still to come
        self._estimates: dict[int, float] = {}
        self._last_end_s = 0.0
        self._polling_since_s: float | None = None
        self._poll_until_s = 0.0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watches on this loop; does nothing if it already does."""
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._completion.fileno(), self._on_signal)

    def launched(self, stream: int, kind: int, is_done: Callable[[], bool]) -> None:
        """A step was launched, the last on `stream`.

        Args:
            kind: steps of one kind take about the same time.
            is_done: whether it has ended and its results have arrived; raises RuntimeError after a failure.
        """
        self._completion.enqueue(stream)
        self._launched.append(_Launched(is_done, kind, self._clock()))
        self._consider_polling()

    def forget(self) -> None:
        """Calls nobody any more for the steps launched so far: the device has failed."""
        self._launched.clear()
        self._stop_polling()

    def close(self) -> None:
        """Stops watching; may be called twice."""
        self.forget()
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._completion.fileno())
            self._loop = None
        self._completion.close()

    # ---- inside -----------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        for _ in range(self._completion.take()):
            if self._num_ahead:
                self._num_ahead -= 1
            elif self._launched:
                self._end_oldest()
        self._consider_polling()

    def _end_oldest(self) -> None:
        step, now_s = self._launched.popleft(), self._clock()
        took_s = now_s - max(step.launched_s, self._last_end_s)
        known_s = self._estimates.get(step.kind, took_s)
        self._estimates[step.kind] = known_s + SMOOTHING * (took_s - known_s)
        self._last_end_s = now_s
        self._stop_polling()
        self._on_done()

    def _consider_polling(self) -> None:
        """Begins to poll if the oldest step is due soon; a step of an unknown kind or long overdue is not."""
        if not self._poll_s or not self._launched or self._polling_since_s is not None or self._loop is None:
            return
        step, now_s = self._launched[0], self._clock()
        if step.kind not in self._estimates:
            return
        due_s = max(step.launched_s, self._last_end_s) + self._estimates[step.kind]
        if abs(due_s - now_s) <= self._poll_s:
            self._polling_since_s, self._poll_until_s = now_s, due_s + self._poll_s
            self._loop.call_soon(self._poll, step)

    def _poll(self, step: _Launched) -> None:
        if self._polling_since_s is None or not self._launched or self._launched[0] is not step:
            return  # it ended by its signal
        try:
            is_done = step.is_done()
        except RuntimeError:
            self._stop_polling()  # whoever checks the device will tell
            return
        if is_done:
            self._num_ahead += 1
            self._end_oldest()
            self._consider_polling()
        elif self._clock() > self._poll_until_s:
            self._stop_polling()
        else:
            assert self._loop is not None
            self._loop.call_soon(self._poll, step)

    def _stop_polling(self) -> None:
        if self._polling_since_s is not None:
            self.polled_s += self._clock() - self._polling_since_s
            self._polling_since_s = None
