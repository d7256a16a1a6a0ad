"""Blocks of requests: prefix hits, allocation, publication, release."""

from collections.abc import Iterable, Sequence
from typing import Literal, final

from aioengine.fastcore.block_hash import BlockHasher
from aioengine.fastcore.block_pool import BlockPool
from aioengine.fastcore.block_tokens import BlockTokens
from aioengine.fastcore.group_tables import GroupTables
from aioengine.fastcore.groups import Group, KVGroups
from aioengine.fastcore.kv_journal import KVJournal
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.prefix_map import PrefixMap
from aioengine.fastcore.remote_kv import KVConnector, RemoteKV
from aioengine.fastcore.request import Request

@final
class KVManager:
    """Owns the block pool and the prefix map; the scheduler is its only caller.

    Raises:
        ValueError: a size that cannot work, an unknown hash algorithm, or a connector without prefix caching or with
            several groups.
    """

    pool: BlockPool
    prefix_map: PrefixMap
    block_size: int
    groups: KVGroups
    more: GroupTables | None
    """Tables of the groups behind the first one; None if there is one group."""
    hasher: BlockHasher | None
    """None while prefix caching is off."""
    block_tokens: BlockTokens | None
    """None while partial-block reuse is off."""
    remote: RemoteKV | None
    """None if there is no connector."""
    pin_counts: dict[int, int]
    """Pins per pinned block; `CacheControl` writes it."""
    barred: list[NamedPrefix]
    """Spans that are never cached; `CacheControl` writes it."""
    num_evicted_blocks: int
    """Blocks that lost their cached prefix to new content, those below them included."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_algo: Literal["xxh3_128", "sha256"] = "xxh3_128",
        root_seed: bytes | None = None,
        eviction_policy: Literal["lru", "cost"] = "lru",
        context_cost: float = 0.0,
        enable_partial_block_reuse: bool = False,
        kv_groups: Sequence[Group] = ...,
        max_step_tokens: int = ...,
        kv_connector: KVConnector | None = None,
    ) -> None: ...
    def match(self, request: Request) -> int:
        """Full blocks of the longest computed prefix of a request that has no blocks; takes nothing.

        `Request.num_matched` says how many tokens it has, `Request.copy_source` where those of the last, not full
        block are.
        """
    def admit(self, request: Request, num_hits: int, num_tokens: int) -> bool:
        """Takes what was just matched and new blocks to cover `num_tokens`; False changes nothing."""
    def end_copy(self, request: Request) -> int:
        """Lets go of the block that an admitted request copies from, once its step is packed."""
    def extend(self, request: Request, num_tokens: int, num_computed: int = 0) -> bool:
        """Takes new blocks until the tables cover `num_tokens` positions; False takes none.

        What the query at `num_computed`, the next one, and later ones do not read is given back first.
        """
    def publish(self, request: Request, num_computed: int) -> int:
        """Offers blocks that are full, and whose step is over, to the prefix map."""
    def hold_back(self, request: Request, until: int) -> int:
        """Keeps a request from offering its blocks from `until` on, and what follows them."""
    def release(self, request: Request) -> int:
        """Gives all blocks back, deepest first."""
    def first_blocks(self, first_tail: bytes) -> list[int]:
        """The cached first blocks of all prefixes under a salt and keys (`key_tail`), whatever their media."""
    @property
    def bytes_per_block(self) -> float:
        """Memory that a block takes here: record, hash, slots of the map, links of the tree, token ids."""
    def start_journal(self) -> KVJournal:
        """From now on the journal returned tells what is indexed and forgotten."""
    def reset(self) -> bool:
        """Forgets all cached prefixes; False, and nothing changes, while any block has an owner."""
    def forget(self, owners: Iterable[Request]) -> None:
        """Forgets all cached prefixes, and that those who own blocks have something to offer."""
    def hashes_of(self, request: Request) -> list[bytes]:
        """The block hashes computed so far for a request."""
    def check(self, owners: Iterable[Request]) -> None:
        """Raises AssertionError unless pool, map and the owners' tables agree."""
