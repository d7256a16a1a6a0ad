"""Streams of a GPU without a device: work waits on each of them and is done in any order that the streams allow.

Inside `torch.cuda.stream(...)` a `Tensor.copy_` is put off and so is whatever `enqueue` is given; memory is read when
the work is done. A stream does its own work in order; beyond that, only events hold one stream up for another.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class Streams:
    """All streams of a device, and the names in torch that lead to them."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._draw = random.Random(seed)
        self._all: list[Any] = []
        self._current: list[Any] = []
        streams = self

        class Event:
            """A record of a stream's work so far; waiting for one that was never recorded holds nobody up."""

            def __init__(self) -> None:
                self.num_recorded = self.num_reached = 0

            def record(self, stream: Any) -> None:
                self.num_recorded += 1
                number = self.num_recorded

                def reach() -> None:
                    self.num_reached = number

                stream.queue.append((lambda: True, reach))

        class Stream:
            device = torch.device("cpu")

            def __init__(self, device: object = None) -> None:
                self.queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
                streams._all.append(self)

            def wait_event(self, event: Event) -> None:
                number = event.num_recorded
                self.queue.append((lambda: event.num_reached >= number, lambda: None))

            def synchronize(self) -> None:
                streams.run_all()

        @contextlib.contextmanager
        def stream_context(stream: Any) -> Iterator[None]:
            self._current.append(stream)
            with _PutOff(self):
                yield
            self._current.pop()

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", stream_context)

    def stream(self) -> Any:
        """Another stream."""
        return torch.cuda.Stream()

    def enqueue(self, work: Callable[[], object]) -> None:
        """Puts work on the current stream."""
        self._current[-1].queue.append((lambda: True, work))

    def run_some(self, count: int) -> None:
        """Does up to so many pieces of work that may be done, of streams chosen at random."""
        for _ in range(count):
            ready = [stream for stream in self._all if stream.queue and stream.queue[0][0]()]
            if not ready:
                assert not any(stream.queue for stream in self._all), "streams wait for each other"
                return
            self._draw.choice(ready).queue.popleft()[1]()

    def run_all(self) -> None:
        """Does all work there is."""
        while any(stream.queue for stream in self._all):
            self.run_some(1)


class _PutOff(TorchFunctionMode):
    """Copies become work of the current stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            self._streams.enqueue(lambda: torch.Tensor.copy_(*args))
            return args[0]
        return function(*args, **(kwargs or {}))
