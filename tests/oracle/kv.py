"""Plain-Python twins of block pool, prefix map and KV manager: lists, dicts and exact keys, no speed.

A block's key is not a hash but the very content that a hash stands for, so the twin cannot collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[object, ...]


class NaivePool:
    """Owners per block, and the free blocks in order: unhashed, prewarmed, then cached by their last use."""

    def __init__(self, num_blocks: int, policy: str = "lru", block_size: int = 1, context_cost: float = 0.0) -> None:
        self.num_blocks = num_blocks
        self.num_refs = [0] * num_blocks
        self.free = list(range(1, num_blocks))
        self.key_of: dict[int, Key] = {}
        self.block_of: dict[Key, int] = {}
        self.children: dict[int, list[int]] = {0: []}  # of each indexed block and of the root, oldest first
        self.prewarmed: set[int] = set()
        self.num_evicted = 0
        # The policy cost: what each block is worth, and the clock that worth is counted from.
        self.policy, self.block_size, self.context_cost = policy, block_size, context_cost
        self.hits = [0] * num_blocks
        self.depth = [-1] * num_blocks
        self.rank: dict[int, tuple[float, int]] = {}
        self.clock, self.uses = 0.0, 0

    def goes_first(self, block_id: int) -> bool:
        return block_id not in self.key_of or block_id in self.prewarmed

    def candidates(self) -> list[int]:
        leaves = [b for b in self.free if not self.goes_first(b) and not self.children[b]]
        return sorted(leaves, key=lambda b: self.rank[b])

    def victim(self) -> int:
        if self.policy == "cost" and not self.goes_first(self.free[0]) and self.candidates():
            return self.candidates()[0]
        return self.free[0]

    def take(self) -> int:
        block_id = self.victim()
        if self.policy == "cost" and not self.goes_first(block_id) and self.candidates():
            self.clock = max(self.clock, self.rank[block_id][0])
        self.free.remove(block_id)
        self.num_refs[block_id] = 1
        self.num_evicted += self.forget(block_id)
        return block_id

    def acquire(self, block_id: int) -> None:
        if self.num_refs[block_id] == 0:
            self.free.remove(block_id)
        self.num_refs[block_id] += 1

    def hit(self, block_id: int) -> None:
        self.hits[block_id] = min(15, self.hits[block_id] + 1)
        self.prewarmed.discard(block_id)
        self.acquire(block_id)

    def release(self, block_id: int) -> None:
        self.num_refs[block_id] -= 1
        if self.num_refs[block_id] == 0:
            self.enlist(block_id)

    def enlist(self, block_id: int) -> None:
        if block_id not in self.key_of:
            self.free.insert(0, block_id)
        elif block_id in self.prewarmed:
            self.free.insert(sum(map(self.goes_first, self.free)), block_id)
        else:
            self.free.append(block_id)
            context = self.depth[block_id] * self.block_size
            value = self.block_size * (1.0 + self.context_cost * context) * (self.hits[block_id] + 1)
            self.uses += 1
            self.rank[block_id] = (self.clock + value, self.uses)

    def touch(self, block_id: int) -> None:
        self.prewarmed.discard(block_id)
        self.free.remove(block_id)
        self.enlist(block_id)

    def index(self, block_id: int, key: Key, parent: int = 0) -> bool:
        if key in self.block_of:
            return False
        self.block_of[key], self.key_of[block_id] = block_id, key
        self.children[parent].append(block_id)
        self.children[block_id] = []
        self.hits[block_id], self.depth[block_id] = 0, self.depth[parent] + 1
        return True

    def forget(self, block_id: int) -> int:
        """Takes a block and all below it out of the index; those without an owner become the next victims."""
        if block_id not in self.key_of:
            return 0
        count = 1 + sum(self.forget(child) for child in reversed(list(self.children[block_id])))
        del self.block_of[self.key_of.pop(block_id)], self.children[block_id]
        for siblings in self.children.values():
            if block_id in siblings:
                siblings.remove(block_id)
        self.prewarmed.discard(block_id)
        if block_id in self.free:
            self.free.remove(block_id)
            self.enlist(block_id)
        return count

    def clear(self) -> None:
        self.key_of, self.block_of, self.children, self.prewarmed = {}, {}, {0: []}, set()


@dataclass(eq=False)
class NaiveTable:
    """What the KV manager knows of a request."""

    tokens: list[int]
    extra_keys: bytes = b""
    cache_salt: bytes = b""
    reads_cache: bool = True
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    copy_source: int = 0


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class NaiveKV:
    """The twin of `KVManager`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        policy: str = "lru",
        context_cost: float = 0.0,
        enable_partial_block_reuse: bool = False,
    ) -> None:
        self.pool = NaivePool(num_blocks, policy, block_size, context_cost)
        self.partial = enable_partial_block_reuse and enable_prefix_caching
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.step = self.settled = 0
        self.step_of: dict[int, int] = {}
        """Which step computes what a block was offered with."""
        self.hides_fresh = False

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def key(self, table: NaiveTable, index: int) -> Key:
        prefix: Sequence[int] = table.tokens[: (index + 1) * self.block_size]
        return (table.extra_keys, table.cache_salt, *prefix)

    def match(self, table: NaiveTable) -> list[int]:
        hits: list[int] = []
        if self.caching and table.reads_cache:
            for i in range((len(table.tokens) - 1) // self.block_size):
                block_id = self.pool.block_of.get(self.key(table, i))
                if block_id is None or (self.hides_fresh and self.step_of[block_id] == self.step):
                    break
                hits.append(block_id)
        return hits

    def match_tail(self, table: NaiveTable, num_hits: int) -> tuple[int, int]:
        """(block, tokens): what is cached behind the hits and begins like the next block; (0, 0) if nothing is."""
        start = num_hits * self.block_size
        wanted = table.tokens[start:-1]
        best = (0, 0)
        if self.partial and table.reads_cache:
            parent = self.pool.block_of[self.key(table, num_hits - 1)] if num_hits else 0
            for block_id in reversed(self.pool.children[parent]):
                extra_keys, cache_salt, *tokens = self.pool.key_of[block_id]
                is_settled = self.step_of[block_id] <= self.settled
                if is_settled and (extra_keys, cache_salt) == (table.extra_keys, table.cache_salt):
                    common = num_common(tokens[start:], wanted)
                    best = max(best, (block_id, common), key=lambda found: found[1])
        return best

    def admit(self, table: NaiveTable, hits: list[int], num_tokens: int, copy_source: int = 0) -> bool:
        usable = [b for b in self.pool.free if b not in hits and b != copy_source]
        if self.blocks_for(num_tokens) - len(hits) > len(usable):
            return False
        for block_id in hits:
            self.pool.hit(block_id)
        if copy_source:
            self.pool.hit(copy_source)
            table.copy_source = copy_source
        table.blocks = list(hits)
        indexed = [block_id in self.pool.key_of for block_id in hits]
        table.num_published = [*indexed, False].index(False)
        return self.extend(table, num_tokens)

    def extend(self, table: NaiveTable, num_tokens: int) -> bool:
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing > len(self.pool.free):
            return False
        table.blocks += [self.pool.take() for _ in range(missing)]
        return True

    def end_copy(self, table: NaiveTable) -> None:
        if table.copy_source:
            self.pool.release(table.copy_source)
            table.copy_source = 0

    def publish(self, table: NaiveTable, num_computed: int, step: int | None = None) -> None:
        """Offers what is full with so many tokens; without a step, those computed it that are over."""
        while self.caching and table.num_published < num_computed // self.block_size:
            if table.blocks[table.num_published] not in self.pool.key_of:
                self.step_of[table.blocks[table.num_published]] = self.settled if step is None else step
                self.offer(table, table.num_published)
            table.num_published += 1

    def take_back(self, table: NaiveTable, num_computed: int) -> None:
        """Forgets what was to be computed behind so many tokens."""
        first = num_computed // self.block_size
        for block_id in table.blocks[first : table.num_published]:
            self.pool.forget(block_id)
        table.num_published = min(table.num_published, first)

    def offer(self, table: NaiveTable, i: int) -> None:
        parent = self.pool.block_of.get(self.key(table, i - 1)) if i else 0
        if parent is not None:
            self.pool.index(table.blocks[i], self.key(table, i), parent)

    def release(self, table: NaiveTable) -> None:
        for i in range(table.num_published):
            if self.pool.num_refs[table.blocks[i]] == 1 and table.blocks[i] not in self.pool.key_of:
                self.offer(table, i)
        for i in reversed(range(len(table.blocks))):
            self.pool.release(table.blocks[i])
            if i < table.num_published and table.blocks[i] not in self.pool.key_of:
                twin = self.pool.block_of.get(self.key(table, i))
                if twin in self.pool.free:
                    self.pool.touch(twin)
        table.blocks, table.num_published = [], 0

    def reset(self) -> bool:
        if len(self.pool.free) < self.pool.num_blocks - 1:
            return False
        self.pool.clear()
        return True
