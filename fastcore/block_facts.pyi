"""What tells a cached block apart wherever its KV is kept."""

from collections.abc import Callable
from typing import final

from aioengine.fastcore.kv_manager import KVManager

@final
class BlockFacts:
    """A cached block's hash, its parent's, its tokens and its salt; immutable.

    Args:
        parent_hash: of the block before it; None for a first block.
        tokens: its token ids as int32 in the machine's order; None if they are not kept.
        tail_hash: 64 bits of a first block's salt and extra keys; None where its tokens tell them.
    """

    block_hash: bytes
    parent_hash: bytes | None

    def __init__(
        self,
        block_hash: bytes,
        parent_hash: bytes | None = None,
        *,
        tokens: bytes | None = None,
        tail_hash: int | None = None,
    ) -> None: ...

def facts_of(kv: KVManager, block_id: int) -> BlockFacts:
    """The facts of a block of the pool.

    Raises:
        ValueError: it is not in the prefix map.
    """

def lineage(kv: KVManager, block_id: int, has: Callable[[bytes], bool]) -> list[tuple[BlockFacts, int]]:
    """A cached block and those before it with their ids, the first one first, back to the first whose hash `has` knows.

    Empty while a step that computes or loads one of them is in flight: what is cached ahead of it may be taken back.

    Raises:
        ValueError: the block is not in the prefix map.
    """
