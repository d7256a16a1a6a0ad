"""The groups of a KV cache: sizes of their blocks, and which blocks a query still reads."""

from collections.abc import Sequence
from typing import Literal, final

Group = tuple[Literal["full", "sliding", "chunked"], int, int]
"""Kind; window or chunk in tokens, 0 for full; block size of the group divided by that of the first one."""

@final
class KVGroups:
    """The groups of one cache.

    Args:
        kv_groups: 1 to 8 of them; the first one is full and of scale 1.
        block_size: tokens per block of the first group.
        max_step_tokens: most tokens of a request in one step.

    Raises:
        ValueError: a group that cannot be.
    """

    count: int
    block_size: int
    alignment: int
    """Tokens that fill whole blocks of every group: hits are multiples of it."""

    def __init__(self, kv_groups: Sequence[Group], block_size: int, max_step_tokens: int = ...) -> None: ...
    def capacity(self, num_blocks: int) -> int:
        """Tokens of the longest request for which so many blocks are enough for certain."""
