"""KV connectors: places outside the pool that keep the KV of full blocks by their hash, and what calls them.

The scheduler asks `num_matched` and says which blocks of a step are to be loaded (`plan.loads`); the runner has
`load` do that in front of the step; `StoreFeed` offers what completed steps have cached to `store`, through the
runner as well; `cache_control` governs what is kept. `kv_host_tier.py` is a connector.

All methods are called on the loop's thread. What they return is work for the device, which the runner does in the
order of its steps: a load before the copies and the rest of its step, a store behind all steps launched before it
and before any later one. A connector decides at the call what is where and moves bytes in the work alone, so that
place and content agree although the device is late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aioengine.fastcore.block_facts import BlockFacts, lineage

if TYPE_CHECKING:
    from aioengine.fastcore.scheduler import Scheduler

Load = Callable[[], Sequence[int]]
"""Fills blocks of the pool; returns the ids of those whose KV could not be had, and leaves zeros in them: what is
computed with them in view is thrown away, but must not be taken for a failure of the device (NaN)."""

Store = Callable[[], None]
"""Reads blocks of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorStats:
    """What a connector keeps and has moved, in blocks."""

    num_blocks: int
    """Kept now."""
    max_blocks: int
    num_stored_blocks: int
    """Taken from the pool so far."""
    num_loaded_blocks: int
    """Brought back into the pool so far."""
    num_evicted_blocks: int
    """That had to make room so far."""


class KVConnector(Protocol):
    """Keeps blocks of one engine outside its pool. Below a block is what was computed with it in view."""

    def num_matched(self, block_hashes: list[bytes], /) -> int:
        """How many of these blocks, from the first on without a gap, can be loaded now; changes nothing."""

    def load(self, pairs: Sequence[tuple[bytes, int]], /) -> Load:
        """Work that fills blocks of the pool, given as (hash, block id), in order of position."""

    def store(self, blocks: Sequence[tuple[BlockFacts, int]], /) -> Store | None:
        """Work that keeps blocks of the pool, parents first; None if there is nothing to do.

        What is kept already is skipped, and what finds no room.
        """

    def __contains__(self, block_hash: bytes, /) -> bool:
        """Whether a block is kept, and all before it."""

    def children_of(self, block_hash: bytes | None, /) -> Sequence[BlockFacts]:
        """The kept blocks that follow a block; first blocks of None."""

    def forget(self, roots: list[bytes], /) -> int:
        """Drops blocks and all below them; returns how many. None of them is loaded any more."""

    def clear(self) -> int:
        """Drops everything; returns how many blocks."""

    def stats(self) -> ConnectorStats:
        """What is kept and was moved."""

    def close(self) -> None:
        """Gives memory back. No work is done any more; idempotent."""


class StoreFeed:
    """Offers newly cached blocks to a connector after each step.

    Args:
        enqueue: has the device do the work in its place.
    """

    def __init__(self, scheduler: Scheduler, connector: KVConnector, enqueue: Callable[[Store], None]) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._enqueue = enqueue

    def offer(self) -> None:
        """Stores what the step that was just settled has added; before the next step is made.

        Until then no block that is indexed is given to anybody, and whoever gets one later writes to it in a later
        step, behind the copy.
        """
        stores = self._scheduler.take_stores()
        if not stores:
            return
        kv, connector = self._scheduler.kv, self._connector
        blocks: list[tuple[BlockFacts, int]] = []
        seen: set[bytes] = set()

        def is_known(block_hash: bytes) -> bool:
            return block_hash in seen or block_hash in connector

        for _, block_id in stores:
            # A parent may be cached in the pool alone: it was evicted from the connector, or found no room.
            found = lineage(kv, block_id, is_known)
            seen.update(facts.block_hash for facts, _ in found)
            blocks += found
        if blocks and (work := connector.store(blocks)) is not None:
            self._enqueue(work)
