"""The queue of waiting requests."""

from typing import final

from aioengine.fastcore.request import Request

@final
class WaitQueue:
    """Requests in the order in which they are to be admitted; only the scheduler changes it."""

    by_priority: bool

    def __init__(self, by_priority: bool) -> None: ...
    def __len__(self) -> int: ...
    def in_order(self) -> list[Request]:
        """The requests, next one first."""
    def check(self) -> None:
        """Raises AssertionError if the heap is broken."""
