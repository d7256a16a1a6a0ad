"""A tier of host memory behind the KV pool: evicted prefixes live on there and are loaded instead of recomputed.

`KVHostTier` is a connector (`kv_connector.py`): it knows which block is in which slot and which goes first; the bytes
are moved by `host_pages.py`, as work that the runner does in the device's order. The books are kept on the loop's
thread and are ahead of the device: a slot may be given to a new block while a load of the old one is still to be
done, because that load comes first on the device, too.

Blocks form a tree, as in the prefix map: a block is here only with all before it, so that whoever drops a block
finds all that was computed after it. Therefore only blocks without children make room, the one unused longest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aioengine.config import ResolvedConfig
from aioengine.errors import InvalidConfig
from aioengine.fastcore.block_facts import BlockFacts
from aioengine.kv_connector import ConnectorStats, Load, Store
from aioengine.kv_layout import KVLayout


def num_host_blocks(layout: KVLayout, resolved: ResolvedConfig) -> int:
    """Blocks that the host memory asked for holds; 0 if none was.

    Raises:
        InvalidConfig: it holds none, or the model's layers do not share one block table.
    """
    num_bytes = resolved.kv_offloading_bytes
    if num_bytes == 0:
        return 0
    if len(layout.groups) > 1:
        raise InvalidConfig(
            f"kv_offloading_size keeps prefixes of models whose layers all share one block table, and here are "
            f"{layout}; add --disable-hybrid-kv-cache-manager, which keeps everything in every layer",
            param="kv_offloading_size",
        )
    if num_bytes < layout.block_bytes:
        raise InvalidConfig(
            f"kv_offloading_size of {num_bytes} bytes holds no block of {layout.block_bytes} bytes; raise it",
            param="kv_offloading_size",
        )
    return num_bytes // layout.block_bytes


class HostPages(Protocol):
    """Slots of host memory, one block each, and copies between them and the pool."""

    def load(self, slots: Sequence[int], block_ids: Sequence[int], /) -> None:
        """Slot i into block i, behind all work before."""

    def store(self, block_ids: Sequence[int], slots: Sequence[int], /) -> None:
        """Block i into slot i, behind all work before. No slot is named twice."""

    def blank(self, block_ids: Sequence[int], /) -> None:
        """Zeros into blocks that cannot be loaded."""

    def close(self) -> None:
        """Gives the memory back once no copy uses it; idempotent."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A kept block."""

    facts: BlockFacts
    slot: int
    used: int
    """The call in which it was stored, loaded or offered last; or, if later, one below it."""
    children: dict[bytes, _Entry] = field(default_factory=dict)


class KVHostTier:
    """Keeps blocks in host memory, the most recently used ones.

    Args:
        num_blocks: slots of `pages`.
    """

    def __init__(self, pages: HostPages, num_blocks: int) -> None:
        self._pages = pages
        self._num_slots = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the first ones first: neighbours are copied as one piece
        self._entries: dict[bytes, _Entry] = {}
        self._first: dict[bytes, _Entry] = {}
        """First blocks of prefixes."""
        self._leaves: list[tuple[int, int, bytes]] = []
        """A heap of (used, order, hash); true of the entries that have no children and were not used since."""
        self._num_pushed = 0
        self._call = 0
        self._num_stored = self._num_loaded = self._num_evicted = 0

    def num_matched(self, block_hashes: list[bytes], /) -> int:
        """As `KVConnector.num_matched`; the order of eviction does not change either."""
        count = 0
        for block_hash in block_hashes:
            if block_hash not in self._entries:
                break
            count += 1
        return count

    def load(self, pairs: Sequence[tuple[bytes, int]], /) -> Load:
        """As `KVConnector.load`; a block that is not here any more is lost."""
        self._call += 1
        slots, targets, lost = [], [], []
        for block_hash, block_id in pairs:
            entry = self._entries.get(block_hash)
            if entry is None:
                lost.append(block_id)
                continue
            self._use(entry)
            slots.append(entry.slot)
            targets.append(block_id)
        self._num_loaded += len(slots)

        def work() -> Sequence[int]:
            if slots:
                self._pages.load(slots, targets)
            if lost:
                self._pages.blank(lost)
            return lost

        return work

    def store(self, blocks: Sequence[tuple[BlockFacts, int]], /) -> Store | None:
        """As `KVConnector.store`. What was stored or offered in one call makes no room for another block of it."""
        self._call += 1
        sources, slots = [], []
        for facts, block_id in blocks:
            entry = self._entries.get(facts.block_hash)
            if entry is not None:
                self._use(entry)
                continue
            slot = self._slot_behind(facts.parent_hash)
            if slot is not None:
                self._keep(facts, slot)
                sources.append(block_id)
                slots.append(slot)
        self._num_stored += len(slots)
        return (lambda: self._pages.store(sources, slots)) if slots else None

    def __contains__(self, block_hash: bytes, /) -> bool:
        return block_hash in self._entries

    def children_of(self, block_hash: bytes | None, /) -> Sequence[BlockFacts]:
        """As `KVConnector.children_of`."""
        if block_hash is None:
            return [entry.facts for entry in self._first.values()]
        parent = self._entries.get(block_hash)
        return [] if parent is None else [entry.facts for entry in parent.children.values()]

    def forget(self, roots: list[bytes], /) -> int:
        """As `KVConnector.forget`."""
        gone = [entry for root in roots if (entry := self._entries.get(root)) is not None]
        for entry in gone:  # grows while it is walked
            gone += entry.children.values()
            entry.children.clear()
        for entry in gone:
            if entry.facts.block_hash in self._entries:  # else it was named, and is below another one
                self._drop(entry)
        return len(set(map(id, gone)))

    def clear(self) -> int:
        """As `KVConnector.clear`."""
        count = len(self._entries)
        self._free += (entry.slot for entry in self._entries.values())
        self._entries.clear()
        self._first.clear()
        self._leaves.clear()
        return count

    def stats(self) -> ConnectorStats:
        """As `KVConnector.stats`."""
        return ConnectorStats(
            num_blocks=len(self._entries),
            max_blocks=self._num_slots,
            num_stored_blocks=self._num_stored,
            num_loaded_blocks=self._num_loaded,
            num_evicted_blocks=self._num_evicted,
        )

    def close(self) -> None:
        """As `KVConnector.close`; nothing is matched from now on."""
        self.clear()
        self._free.clear()
        self._pages.close()

    def check(self) -> None:
        """Raises AssertionError unless the books agree."""
        slots = [entry.slot for entry in self._entries.values()]
        assert sorted(slots + self._free) == list(range(self._num_slots)), "a slot is lost or given out twice"
        below = [entry for _, entry in self._walk(self._first)]
        assert {id(entry) for entry in below} == {id(entry) for entry in self._entries.values()}, "not one tree"
        assert len(below) == len(self._entries)
        leaves = {block_hash for used, _, block_hash in self._leaves if self._is_leaf(block_hash, used)}
        assert leaves == {entry.facts.block_hash for entry in below if not entry.children}, "a leaf is not in the heap"

    # ---- inside -----------------------------------------------------------------------------------------

    def _walk(self, children: dict[bytes, _Entry]) -> Iterator[tuple[bytes, _Entry]]:
        left = list(children.items())
        for block_hash, entry in left:  # grows while it is walked
            assert block_hash == entry.facts.block_hash
            left += entry.children.items()
            yield block_hash, entry

    def _siblings(self, facts: BlockFacts) -> dict[bytes, _Entry]:
        return self._first if facts.parent_hash is None else self._entries[facts.parent_hash].children

    def _use(self, entry: _Entry) -> None:
        entry.used = self._call
        if not entry.children:
            self._push(entry)

    def _push(self, entry: _Entry) -> None:
        """Says when a block without children was used last; what was said before is found untrue when it is read."""
        if len(self._leaves) > 2 * self._num_slots + 64:
            self._leaves = [leaf for leaf in self._leaves if self._is_leaf(leaf[2], leaf[0])]
            heapq.heapify(self._leaves)
        self._num_pushed += 1
        heapq.heappush(self._leaves, (entry.used, self._num_pushed, entry.facts.block_hash))

    def _is_leaf(self, block_hash: bytes, used: int) -> bool:
        entry = self._entries.get(block_hash)
        return entry is not None and not entry.children and entry.used == used

    def _slot_behind(self, parent_hash: bytes | None) -> int | None:
        """A slot for a block behind another one; None if that is not here, or nothing may make room."""
        if parent_hash is not None:
            parent = self._entries.get(parent_hash)
            if parent is None:
                return None
            if parent.used != self._call:
                self._use(parent)  # it makes no room for its own child
        if not self._free:
            self._evict_one()
        return self._free.pop() if self._free else None

    def _evict_one(self) -> None:
        while self._leaves and self._leaves[0][0] < self._call:
            used, _, block_hash = heapq.heappop(self._leaves)
            if self._is_leaf(block_hash, used):
                self._num_evicted += 1
                self._drop(self._entries[block_hash])
                return

    def _keep(self, facts: BlockFacts, slot: int) -> None:
        entry = _Entry(facts, slot, self._call)
        self._siblings(facts)[facts.block_hash] = entry
        self._entries[facts.block_hash] = entry
        self._push(entry)

    def _drop(self, entry: _Entry) -> None:
        """Takes out a block without children; the one before it may be the next to go."""
        facts = entry.facts
        del self._entries[facts.block_hash]
        self._free.append(entry.slot)
        if facts.parent_hash is None:
            del self._first[facts.block_hash]
        elif (parent := self._entries.get(facts.parent_hash)) is not None:
            parent.children.pop(facts.block_hash, None)
            if not parent.children:
                parent.used = max(parent.used, entry.used)
                self._push(parent)
