"""Map from a block's prefix hash to the block's id."""

from collections.abc import Sequence
from typing import final

from aioengine.fastcore.block_pool import BlockPool
from aioengine.fastcore.prefix_tree import PrefixTree
from aioengine.fastcore.twins import Twins

@final
class PrefixMap:
    """A hash table over the blocks of a pool, one entry per hash, of fixed size.

    The engine reaches it through `KVManager`; the methods on bytes and ids serve tests.
    """

    num_entries: int
    tree: PrefixTree
    """Which indexed block continues which."""
    twins: Twins | None
    """What the other KV groups have cached; None for one group."""

    def __init__(self, pool: BlockPool, digest_size: int = 32) -> None: ...
    def rank_by_cost(self, block_size: int, context_cost: float = 0.0) -> None:
        """Makes the pool choose victims by what their loss costs (`CostOrder`).

        Raises:
            ValueError: the map is not empty, or `context_cost` is negative or absurd.
        """
    @property
    def num_buckets(self) -> int:
        """Buckets that the blocks are spread over: two for each."""
    def clear(self) -> None:
        """Forgets every entry; the blocks stay where they are."""
    @property
    def num_bytes(self) -> int:
        """Memory of buckets, hashes and tree."""
    def find_bytes(self, digest: bytes) -> int:
        """The block with this hash, or 0."""
    def insert_bytes(self, block_id: int, digest: bytes, parent: int = 0, lane: int = 0) -> bool:
        """Indexes a block that has no hash below an indexed one or the root (0).

        Returns:
            False if another block has this hash.

        Raises:
            ValueError: the block is indexed, or its parent is not.
        """
    def find_path_bytes(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the hashes up to the first that is not indexed."""
    def take_ids(self, count: int) -> tuple[list[int], int]:
        """Takes the next victims out of pool and map.

        Returns:
            Their ids, and how many blocks lost their prefix: victims, and what was computed after them.

        Raises:
            ValueError: so many are not free.
        """
    def remove_id(self, block_id: int) -> int:
        """Takes a block and all below it out of the index; returns how many; ValueError if it is not in it."""
    def check(self) -> None:
        """Raises AssertionError if entries and block records contradict each other."""
