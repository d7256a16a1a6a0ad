"""What an operator does to the prefix cache by name."""

from collections.abc import Sequence
from typing import Protocol, final

from aioengine.fastcore.block_facts import BlockFacts
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler

class KeptBlocks(Protocol):
    """What keeps blocks outside the pool, as far as it is governed. Below a block is what was computed after it."""

    def num_matched(self, block_hashes: list[bytes], /) -> int:
        """How many of these blocks, from the first on without a gap, are kept."""
    def children_of(self, block_hash: bytes | None, /) -> Sequence[BlockFacts]:
        """The kept blocks that follow a block; first blocks of None."""
    def forget(self, roots: list[bytes], /) -> int:
        """Drops these blocks and all below them, whether they are kept themselves or not; returns how many."""
    def clear(self) -> int:
        """Drops everything; returns how many blocks."""

@final
class CacheControl:
    """Evicts, bars, pins and resets between the steps of a scheduler that caches prefixes.

    Args:
        connector: keeps blocks outside the pool, which go when theirs go.
    """

    pins: dict[str, list[int]]
    """Blocks per pin, the first one of the prefix first; only this object changes it."""

    def __init__(self, scheduler: Scheduler, connector: KeptBlocks | None = None) -> None: ...
    def cached_blocks(self, name: NamedPrefix) -> int:
        """Full blocks of the named prefix that a request would hit: cached, from its beginning to the first gap."""
    def pinnable_blocks(self, name: NamedPrefix) -> int:
        """Those of them that a pin would hold: with a connector up to the first whose step is in flight."""
    def loadable_blocks(self, name: NamedPrefix) -> int:
        """Full blocks of the named prefix that the connector keeps behind those in the pool, to the first gap."""
    def whole_blocks(self, name: NamedPrefix) -> int:
        """As many as can be cached of a prefix: what fills whole blocks of every KV group."""
    def evict(self, name: NamedPrefix, *, require_exact: bool = False) -> tuple[bool, int, int, int, int] | None:
        """Takes a span and all computed after it out of the cache.

        Returns:
            Whether it was exact, blocks taken out, of those still in use, requests that go on with them, and
            pins broken; None if it cannot be done, or not exactly and has to be: then nothing changes. Inexact is
            a name that ends inside a block if tokens are not kept, or if media are there that it does not tell of.
        """
    def take_back(self, request: Request) -> tuple[int, int]:
        """Evicts what a request has computed since its last good token, because a row of it has failed.

        Called before the step is settled. Those who hit it already go on, but cache nothing of it.

        Returns:
            Blocks taken out and pins broken.
        """
    def bar(self, name: NamedPrefix) -> bool:
        """From now on the span is never cached; False if it is barred already."""
    def lift(self, name: NamedPrefix) -> bool:
        """Ends what `bar` began; False if the span is not barred."""
    @property
    def num_barred(self) -> int:
        """Spans that are barred."""
    @property
    def num_pinned_blocks(self) -> int:
        """Blocks with at least one pin."""
    @property
    def max_pinned_blocks(self) -> int:
        """So many may be pinned that a request of the greatest length still fits."""
    def pin(self, name: NamedPrefix) -> tuple[str, int] | None:
        """Holds the cached full blocks of a prefix; with a connector up to the first one whose step is in flight.

        Returns:
            The pin's id and its number of blocks, or None if nothing of it is cached.

        Raises:
            ValueError: more blocks would be pinned than may be.
        """
    def unpin(self, pin_id: str) -> int:
        """Lets the blocks of a pin go; returns their number in all groups, 0 if there is no such pin."""
    def reset(self, *, force: bool = False) -> int | None:
        """Forgets every cached prefix.

        Args:
            force: end pins and preempt running requests first.

        Returns:
            The number of blocks forgotten, or None if any is in use; then nothing changes.
        """
    def check(self) -> None:
        """Raises AssertionError unless pins and counts of pinned blocks agree."""
