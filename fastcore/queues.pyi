"""The queue of waiting requests."""

from typing import final

from aioengine.fastcore.request import Request

@final
class WaitQueue:
    """Requests in the order in which they are to be admitted; only the scheduler changes it.

    Args:
        long_tokens: prompts of more tokens can be passed over together; 0 = none is long.
    """

    def __init__(self, long_tokens: int = 0) -> None: ...
    def __len__(self) -> int: ...
    def in_order(self) -> list[Request]:
        """The requests, next one first."""
    def check(self) -> None:
        """Raises AssertionError if a heap is broken."""
