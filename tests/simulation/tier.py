"""A store of KV outside the pool, behind the scheduler's connector, that keeps some and loses some.

What it is given it copies from the device as it is then: so a block that is handed out too early, or one that is
stored before it is computed, is loaded as another text's. It may lose a block between the scheduler's question and
the load, and then the device has nothing to load.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

LARGEST_QUESTION = 64


class SimTier:
    """Keeps a share of what it is given; a share of all loads fails."""

    def __init__(self, keeps: float, loses: float, seed: int) -> None:
        self._keeps, self._loses = keeps, loses
        self._rng = random.Random(f"tier {seed}")
        self._contents: dict[bytes, list[int]] = {}
        self.is_scheduling = False
        """Written by the world: it may be asked."""

    def num_matched(self, block_hashes: list[bytes]) -> int:
        """As the scheduler wants it."""
        assert self.is_scheduling, "the connector is asked while no step is made"
        assert 0 < len(block_hashes) <= LARGEST_QUESTION
        count = 0
        while count < len(block_hashes) and block_hashes[count] in self._contents:
            count += 1
        return count

    def store(self, block_hash: bytes, content: Sequence[int]) -> None:
        """Keeps what a block holds, or does not."""
        if self._rng.random() < self._keeps:
            self._contents[block_hash] = list(content)

    def load(self, block_hash: bytes) -> list[int] | None:
        """What a block holds; None: it is lost."""
        if self._rng.random() < self._loses:
            self._contents.pop(block_hash, None)
        content = self._contents.get(block_hash)
        return None if content is None else content.copy()
