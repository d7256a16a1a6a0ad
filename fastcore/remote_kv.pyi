"""What a store outside the pool has of prefixes: asked, loaded from, given what is new."""

from typing import Protocol, final

from aioengine.fastcore.block_hash import BlockHasher

class KVConnector(Protocol):
    """What the scheduler asks of a store of KV outside the pool."""

    def num_matched(self, block_hashes: list[bytes]) -> int:
        """How many of these blocks, from the first one on without a gap, can be fetched now.

        Called in `Scheduler.schedule` only, with the hashes of at most 64 blocks that follow each other in a
        prompt, and again with the next ones as long as all can be fetched.
        """

@final
class RemoteKV:
    """The scheduler's side of a connector; made by `KVManager`.

    Raises:
        TypeError: the connector cannot be asked.
    """

    connector: KVConnector
    num_query_tokens: int
    """Tokens that requests looked for behind their local hits, counted once per request."""
    num_hit_tokens: int
    """How many of those were loaded."""
    num_lost_blocks: int
    """Blocks whose load failed."""

    def __init__(self, connector: KVConnector, hasher: BlockHasher) -> None: ...
