"""Map from a block's prefix hash to the block's id."""

from typing import final

from aioengine.fastcore.block_pool import BlockPool
from aioengine.fastcore.prefix_tree import PrefixTree

@final
class PrefixMap:
    """Open addressing over the blocks of a pool, one entry per hash, of fixed capacity.

    The engine reaches it through `KVManager`; the methods on bytes and ids serve tests.
    """

    num_entries: int
    tree: PrefixTree
    """Which indexed block continues which."""

    def __init__(self, pool: BlockPool, digest_size: int = 32) -> None: ...
    def rank_by_cost(self, block_size: int, context_cost: float = 0.0) -> None:
        """Makes the pool choose victims by what their loss costs (`CostOrder`).

        Raises:
            ValueError: the map is not empty, or `context_cost` is negative or absurd.
        """
    @property
    def capacity(self) -> int:
        """Slots of the table: one and a half times the number of blocks."""
    def clear(self) -> None:
        """Forgets every entry; the blocks stay where they are."""
    @property
    def num_bytes(self) -> int:
        """Memory of slots, hashes and tree."""
    def find_bytes(self, digest: bytes) -> int:
        """The block with this hash, or 0."""
    def insert_bytes(self, block_id: int, digest: bytes, parent: int = 0, lane: int = 0) -> bool:
        """Indexes a block that has no hash below an indexed one or the root (0).

        Returns:
            False if another block has this hash.

        Raises:
            ValueError: the block is indexed, or its parent is not.
        """
    def remove_id(self, block_id: int) -> int:
        """Takes a block and all below it out of the index; returns how many; ValueError if it is not in it."""
    def check(self) -> None:
        """Raises AssertionError if entries and block records contradict each other."""
