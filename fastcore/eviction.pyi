"""The order of eviction under the cost policy."""

from typing import final

from aioengine.fastcore.prefix_tree import PrefixTree

@final
class CostOrder:
    """Ranks cached blocks by what their loss would cost; `BlockPool` and `PrefixMap` keep it up to date.

    Args:
        context_cost: what one token of context adds to the cost of computing a token, the cost without
            context being 1.

    Raises:
        ValueError: a negative or absurd `context_cost`.
    """

    num_heaped: int
    """Blocks that may be chosen now."""
    context_cost: float

    def __init__(self, tree: PrefixTree, block_size: int, context_cost: float = 0.0) -> None: ...
    @property
    def num_bytes(self) -> int:
        """Memory of values and heap."""
    def candidates(self) -> list[int]:
        """The blocks that may be chosen, first victim first."""
    def key_of(self, block_id: int) -> tuple[float, int]:
        """What blocks are ordered by."""
    def check(self) -> None:
        """Raises AssertionError if the heap is broken."""
