"""The rows of the persistent batch."""

from typing import final

@final
class RowPool:
    """Free, fenced and taken rows; only the scheduler changes it."""

    num_rows: int
    num_free: int
    num_fenced: int
    """Rows that a step in flight still writes to."""

    def __init__(self, num_rows: int) -> None: ...
    def idle_rows(self) -> list[int]:
        """Rows that no request has: free or fenced."""
