"""An event loop without time or threads: it jumps to the next timer as soon as nothing is ready.

Everything that asyncio promises holds (tasks, futures, timers in order), but a second passes in no time, and the
same program takes the same turns every time. A loop that has nothing left to wait for would sleep for ever
in production; here it raises `Stalled`, which is how a lost wake-up shows.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Stalled(AssertionError):
    """Somebody waits, and nothing will ever happen again."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Time starts at zero and is counted in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock_resolution = 1e-9
        self._selector = self  # what the base class waits with

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Called by the base class when it is about to sleep."""
        if timeout is None:
            raise Stalled("nothing is ready and no timer is set, but somebody waits")
        self._now_s += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no descriptors."""

    def _write_to_self(self) -> None:
        raise RuntimeError("a thread called into the simulation")
