"""Plain-Python twins of block pool, prefix map and KV manager: lists, dicts and exact keys, no speed.

A block's key is not a hash but the very content that a hash stands for, so the twin cannot collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[object, ...]
Group = tuple[str, int, int]
"""Kind, window or chunk, scale; as `Scheduler(kv_groups=...)`."""

ONE_GROUP: tuple[Group, ...] = (("full", 0, 1),)


def first_read(group: Group, position: int) -> int:
    """The first position that a query at a position reads in a group."""
    kind, size, _ = group
    if kind == "sliding":
        return max(0, position - size + 1)
    return position - position % size if kind == "chunked" else 0


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
        self.twin_of: dict[tuple[int, Key], int] = {}  # cached blocks of the other groups, by group and content
        self.twin_key: dict[int, tuple[int, Key]] = {}
        self.num_evicted = 0
        # The policy cost: what each block is worth, and the clock that worth is counted from.
        self.policy, self.block_size, self.context_cost = policy, block_size, context_cost
        self.hits = [0] * num_blocks
        self.depth = [-1] * num_blocks
        self.rank: dict[int, tuple[float, int]] = {}
        self.clock, self.uses = 0.0, 0

    def goes_first(self, block_id: int) -> bool:
        return not self.is_hashed(block_id) or block_id in self.prewarmed

    def is_hashed(self, block_id: int) -> bool:
        return block_id in self.key_of or block_id in self.twin_key

    def candidates(self) -> list[int]:
        leaves = [b for b in self.free if not self.goes_first(b) and not self.children.get(b)]
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
        if not self.is_hashed(block_id):
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

    def index_twin(self, block_id: int, group: int, key: Key) -> None:
        """Caches another group's block, if its content is cached in the first group and not yet in its own."""
        if key in self.block_of and (group, key) not in self.twin_of:
            self.twin_of[group, key], self.twin_key[block_id] = block_id, (group, key)
            primary = self.block_of[key]
            self.hits[block_id], self.depth[block_id] = self.hits[primary], self.depth[primary]

    def forget_twin(self, block_id: int) -> int:
        del self.twin_of[self.twin_key.pop(block_id)]
        self.prewarmed.discard(block_id)
        if block_id in self.free:
            self.free.remove(block_id)
            self.enlist(block_id)
        return 1

    def forget(self, block_id: int) -> int:
        """Takes a block and all below it out of the index; those without an owner become the next victims."""
        if block_id in self.twin_key:
            return self.forget_twin(block_id)
        if block_id not in self.key_of:
            return 0
        count = 1 + sum(self.forget(child) for child in reversed(list(self.children[block_id])))
        key = self.key_of.pop(block_id)
        del self.block_of[key], self.children[block_id]
        for group, same in sorted(group_key for group_key in self.twin_of if group_key[1] == key):
            self.forget_twin(self.twin_of[group, same])
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
        self.twin_of, self.twin_key = {}, {}


@dataclass(eq=False)
class NaiveTable:
    """What the KV manager knows of a request."""

    tokens: list[int]
    extra_keys: bytes = b""
    cache_salt: bytes = b""
    reads_cache: bool = True
    media: tuple[tuple[int, int, bytes], ...] = ()
    """Start, length and identifier of items, in order; the identifier stands for the length too."""
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    copy_source: int = 0
    more: list[list[int]] = field(default_factory=list)
    """Tables of the groups behind the first one; 0 = fell out of the window."""
    more_published: list[int] = field(default_factory=list)

    def content(self) -> list[object]:
        """What stands at each position: a token, or a token with the item it belongs to and its place in that."""
        content: list[object] = list(self.tokens)
        for start, length, identifier in self.media:
            for i in range(start, start + length):
                content[i] = (self.tokens[i], identifier, i - start)
        return content


def items_in(content: Sequence[object], start: int, end: int) -> list[tuple[bytes, int]]:
    """The media items between two positions, and where they begin."""
    places = enumerate(content[start:end], start=start)
    marks = {(what[1], at - what[2]) for at, what in places if isinstance(what, tuple)}
    return sorted(marks, key=lambda mark: mark[1])


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
        kv_groups: tuple[Group, ...] = ONE_GROUP,
        max_step_tokens: int = 1 << 30,
    ) -> None:
        self.groups, self.max_step_tokens = kv_groups, max_step_tokens
        self.pool = NaivePool(num_blocks, policy, block_size, context_cost)
        self.partial = enable_partial_block_reuse and enable_prefix_caching
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.step = self.settled = 0
        self.step_of: dict[int, int] = {}
        """Which step computes what a block was offered with."""
        self.hides_fresh = False

    @property
    def others(self) -> range:
        """The groups behind the first one."""
        return range(1, len(self.groups))

    def size(self, group: int) -> int:
        """Tokens per block."""
        return self.block_size * self.groups[group][2]

    def blocks_for(self, num_tokens: int, group: int = 0) -> int:
        return -(-num_tokens // self.size(group))

    def num_out(self, group: int, num_computed: int) -> int:
        """Leading blocks that the next query and all later ones do not read."""
        return first_read(self.groups[group], num_computed) // self.size(group)

    def most_held(self, group: int) -> int:
        """Blocks that a request has at most at a time: those its window and its step can touch."""
        kind, size, _ = self.groups[group]
        return 1 << 30 if kind == "full" else -(-(size - 1 + self.max_step_tokens) // self.size(group)) + 1

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks of all groups that are enough for a request on its way to so many tokens."""
        return sum(min(self.blocks_for(num_tokens, g), self.most_held(g)) for g in range(len(self.groups)))

    def key(self, table: NaiveTable, index: int, group: int = 0) -> Key:
        prefix = table.content()[: (index + 1) * self.size(group)]
        return (table.extra_keys, table.cache_salt, *prefix)

    def twin_hits(self, table: NaiveTable, group: int, num_hits: int) -> list[int | None]:
        """What a group has cached of what the queries behind a hit read."""
        num_tokens = num_hits * self.block_size
        found = [
            self.pool.twin_of.get((group, self.key(table, i, group)))
            for i in range(self.num_out(group, num_tokens), num_tokens // self.size(group))
        ]
        return [None if b and self.hides_fresh and self.step_of[b] == self.step else b for b in found]

    def all_have(self, table: NaiveTable, num_hits: int) -> bool:
        """Whether a hit of the first group is one of all groups."""
        return all(
            num_hits * self.block_size % self.size(g) == 0 and None not in self.twin_hits(table, g, num_hits)
            for g in self.others
        )

    def match(self, table: NaiveTable) -> list[int]:
        hits: list[int] = []
        if self.caching and table.reads_cache:
            for i in range((len(table.tokens) - 1) // self.block_size):
                block_id = self.pool.block_of.get(self.key(table, i))
                if block_id is None or (self.hides_fresh and self.step_of[block_id] == self.step):
                    break
                hits.append(block_id)
        while not self.all_have(table, len(hits)):
            hits.pop()
        return hits

    def match_tail(self, table: NaiveTable, num_hits: int) -> tuple[int, int]:
        """(block, tokens): what is cached behind the hits and begins like the next block; (0, 0) if nothing is."""
        start = num_hits * self.block_size
        content = table.content()
        items = items_in(content, start, start + self.block_size)
        best = (0, 0)
        if self.partial and table.reads_cache:
            parent = self.pool.block_of[self.key(table, num_hits - 1)] if num_hits else 0
            for block_id in reversed(self.pool.children[parent]):
                extra_keys, cache_salt, *cached = self.pool.key_of[block_id]
                is_settled = self.step_of[block_id] <= self.settled
                is_alike = (extra_keys, cache_salt) == (table.extra_keys, table.cache_salt)
                if is_settled and is_alike and items_in(cached, start, len(cached)) == items:
                    common = num_common(cached[start:], content[start:-1])
                    best = max(best, (block_id, common), key=lambda found: found[1])
        return best

    def admit(self, table: NaiveTable, hits: list[int], num_tokens: int, copy_source: int = 0) -> bool:
        more = [self.twin_hits(table, g, len(hits)) for g in self.others]
        all_hits = [*hits, *sum(more, [])]
        usable = [b for b in self.pool.free if b not in all_hits and b != copy_source]
        wanted = sum(self.blocks_for(num_tokens, g) - len(hits) // self.groups[g][2] for g in range(len(self.groups)))
        if wanted > len(usable):
            return False
        for block_id in all_hits:
            assert block_id is not None
            self.pool.hit(block_id)
        table.more = [
            [0] * self.num_out(g, len(hits) * self.block_size) + [b or 0 for b in more[g - 1]] for g in self.others
        ]
        table.more_published = [len(blocks) for blocks in table.more]
        if copy_source:
            self.pool.hit(copy_source)
            table.copy_source = copy_source
        table.blocks = list(hits)
        indexed = [block_id in self.pool.key_of for block_id in hits]
        table.num_published = [*indexed, False].index(False)
        return self.extend(table, num_tokens)

    def extend(self, table: NaiveTable, num_tokens: int, num_computed: int = 0) -> bool:
        """What the next query, at `num_computed`, and later ones do not read is given back first."""
        missing = [self.blocks_for(num_tokens) - len(table.blocks)]
        if missing[0] <= 0:
            return True
        table.more = table.more or [[] for _ in self.others]
        table.more_published = table.more_published or [0 for _ in self.others]
        for g, blocks in enumerate(table.more, start=1):
            for i in range(self.num_out(g, num_computed)):
                if blocks[i]:
                    self.pool.release(blocks[i])
                    blocks[i] = 0
            missing.append(max(0, self.blocks_for(num_tokens, g) - len(blocks)))
        if sum(missing) > len(self.pool.free):
            return False
        for blocks, count in zip([table.blocks, *table.more], missing, strict=True):
            blocks += [self.pool.take() for _ in range(count)]
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
        for g, blocks in enumerate(table.more, start=1):
            while self.caching and table.more_published[g - 1] < num_computed // self.size(g):
                i = table.more_published[g - 1]
                if blocks[i] and not self.pool.is_hashed(blocks[i]):
                    self.step_of[blocks[i]] = self.settled if step is None else step
                    self.pool.index_twin(blocks[i], g, self.key(table, i, g))
                table.more_published[g - 1] += 1

    def take_back(self, table: NaiveTable, num_computed: int) -> None:
        """Forgets what was to be computed behind so many tokens."""
        first = num_computed // self.block_size
        for block_id in table.blocks[first : table.num_published]:
            self.pool.forget(block_id)
        table.num_published = min(table.num_published, first)
        for g, blocks in enumerate(table.more, start=1):
            first = num_computed // self.size(g)
            for block_id in blocks[first : table.more_published[g - 1]]:
                self.pool.forget(block_id)
            table.more_published[g - 1] = min(table.more_published[g - 1], first)

    def first_blocks(self, extra_keys: bytes, cache_salt: bytes) -> list[int]:
        """Where the cached prefixes under a salt and extra keys begin."""
        keys = (extra_keys, cache_salt)
        return [block_id for block_id in self.pool.children[0] if self.pool.key_of[block_id][:2] == keys]

    def offer(self, table: NaiveTable, i: int) -> None:
        parent = self.pool.block_of.get(self.key(table, i - 1)) if i else 0
        if parent is not None:
            self.pool.index(table.blocks[i], self.key(table, i), parent)

    def release(self, table: NaiveTable) -> None:
        for i in range(table.num_published):
            if self.pool.num_refs[table.blocks[i]] == 1 and table.blocks[i] not in self.pool.key_of:
                self.offer(table, i)
        for g, blocks in enumerate(table.more, start=1):
            for i, block_id in enumerate(blocks[: table.more_published[g - 1]]):
                if block_id and self.pool.num_refs[block_id] == 1 and not self.pool.is_hashed(block_id):
                    self.pool.index_twin(block_id, g, self.key(table, i, g))
        for block_id in [block_id for blocks in table.more for block_id in reversed(blocks) if block_id]:
            self.pool.release(block_id)
        for i in reversed(range(len(table.blocks))):
            self.pool.release(table.blocks[i])
            if i < table.num_published and table.blocks[i] not in self.pool.key_of:
                twin = self.pool.block_of.get(self.key(table, i))
                if twin in self.pool.free:
                    self.pool.touch(twin)
        table.blocks, table.num_published, table.more, table.more_published = [], 0, [], []

    def reset(self) -> bool:
        if len(self.pool.free) < self.pool.num_blocks - 1:
            return False
        self.pool.clear()
        return True
