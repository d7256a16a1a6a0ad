"""The tree of cached blocks."""

from typing import final

@final
class PrefixTree:
    """Parent and children of every cached block; `PrefixMap` changes it, the methods here serve tests."""

    num_blocks: int

    def __init__(self, num_blocks: int) -> None: ...
    @property
    def num_bytes(self) -> int:
        """Memory of links and lanes."""
    @property
    def num_lanes(self) -> int:
        """Lists that the root's children are spread over."""
    def parent_of(self, block_id: int) -> int | None:
        """The parent, 0 for a first block, None for a block that is not in the tree."""
    def children_of(self, block_id: int, lane: int = 0) -> list[int]:
        """Cached children of a block, or of the root (0) in one lane; the newest first."""
    def check(self) -> None:
        """Raises AssertionError if any two links contradict each other."""
