"""A KV block pool in plain Python, written the obvious way: what `bench core` measures ours against.

One object per block, an ordered dictionary as the free list (a block that is hit leaves from the middle; it is
compiled, and faster than a list linked in Python), a dictionary from hash to block. The same rules as `fastcore`:
unhashed blocks are taken first, then the least recently used. `NaiveManager` has the calls of `KVManager` that a
scheduler makes: a request goes in, its table comes out, and either all blocks it needs are there or nothing changes.
It does less: no parents and children, no partial blocks, no pins, no second eviction policy.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash


@dataclass(eq=False, slots=True)
class Block:
    """One block of the pool."""

    block_id: int
    num_refs: int = 0
    hash: bytes | None = None


class NaivePool:
    """One small method per thing that happens to a block, and one per list of blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free: OrderedDict[int, Block] = OrderedDict((block.block_id, block) for block in self.blocks[1:])
        self.by_hash: dict[bytes, Block] = {}

    def take(self) -> Block:
        """The next victim; what it cached is forgotten."""
        _, block = self.free.popitem(last=False)
        self.forget(block)
        block.num_refs = 1
        return block

    def forget(self, block: Block) -> None:
        """Its content is about to change."""
        if block.hash is not None:
            del self.by_hash[block.hash]
            block.hash = None

    def release(self, block: Block) -> None:
        """One owner less; without any it is free."""
        block.num_refs -= 1
        if block.num_refs == 0:
            self.free[block.block_id] = block
            if block.hash is None:
                self.free.move_to_end(block.block_id, last=False)

    def acquire(self, block: Block) -> None:
        """One owner more."""
        if block.num_refs == 0:
            del self.free[block.block_id]
        block.num_refs += 1

    def find(self, digest: bytes) -> Block | None:
        """The block with this hash."""
        return self.by_hash.get(digest)

    def index(self, block: Block, digest: bytes) -> None:
        """A full block can be found from now on, unless another with its content can."""
        if block.hash is None and digest not in self.by_hash:
            block.hash = digest
            self.by_hash[digest] = block

    def reset(self) -> bool:
        """Forgets all that is cached, if every block is free."""
        if len(self.free) < len(self.blocks) - 1:
            return False
        for block in self.blocks:
            self.forget(block)
        return True

    def allocate(self, count: int) -> list[Block]:
        """So many blocks."""
        if count > len(self.free):
            raise RuntimeError(f"{count} blocks are wanted, {len(self.free)} are free")
        return [self.take() for _ in range(count)]

    def release_all(self, blocks: Sequence[Block]) -> None:
        """The deepest block first, so that shared beginnings are evicted last."""
        for block in reversed(blocks):
            self.release(block)

    def touch(self, blocks: Sequence[Block]) -> None:
        """All of them are hit."""
        for block in blocks:
            self.acquire(block)

    def lookup(self, hashes: Sequence[bytes]) -> list[Block]:
        """The blocks of the longest known prefix."""
        found = []
        for digest in hashes:
            block = self.find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, blocks: Sequence[Block], hashes: Sequence[bytes]) -> None:
        """Gives full blocks their hashes."""
        for block, digest in zip(blocks, hashes, strict=True):
            self.index(block, digest)


@dataclass(eq=False, slots=True)
class NaiveRequest:
    """A sequence, its blocks, and the hashes of those that are full, once they were computed."""

    token_ids: list[int]
    table: list[Block] = field(default_factory=list)
    hashes: list[bytes] | None = None


class NaiveManager:
    """Gives blocks to requests and takes them back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = NaivePool(num_blocks)
        self.block_size = block_size

    def match(self, request: NaiveRequest) -> int:
        """Finds the longest cached prefix, the last token left out; returns its number of blocks."""
        most = (len(request.token_ids) - 1) // self.block_size
        request.table = self.pool.lookup(self.hashes_of(request)[:most])
        return len(request.table)

    def admit(self, request: NaiveRequest, num_hits: int, num_tokens: int) -> bool:
        """Takes what was just matched and new blocks up to `num_tokens`; False changes nothing."""
        num_new = -(-num_tokens // self.block_size) - num_hits
        hits = request.table
        num_free_hits = sum(block.num_refs == 0 for block in hits)
        if num_new + num_free_hits > len(self.pool.free):
            return False
        self.pool.touch(hits)
        hits.extend(self.pool.allocate(num_new))
        return True

    def publish(self, request: NaiveRequest, num_computed: int) -> None:
        """The blocks that are full with so many tokens can be found from now on."""
        full = num_computed // self.block_size
        self.pool.publish(request.table[:full], self.hashes_of(request)[:full])

    def release(self, request: NaiveRequest) -> None:
        """Gives all blocks back."""
        self.pool.release_all(request.table)
        request.table = []

    def reset(self) -> bool:
        """Forgets all that is cached, if every block is free."""
        return self.pool.reset()

    def hashes_of(self, request: NaiveRequest) -> list[bytes]:
        """The hashes of all full blocks, computed when they are asked for first."""
        if request.hashes is None:
            request.hashes = chain_hashes(request.token_ids, self.block_size)
        return request.hashes


def chain_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of all full blocks, each over its parent's and its tokens."""
    hashes, parent = [], b"root"
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = array("i", token_ids[start : start + block_size])
        parent = xxhash.xxh3_128_digest(parent + tokens.tobytes())
        hashes.append(parent)
    return hashes


def admit_all(kv: NaiveManager, requests: list[NaiveRequest], num_hits: int, num_tokens: int) -> None:
    """Admits each with what was matched."""
    for request in requests:
        kv.admit(request, num_hits, num_tokens)


def match_all(kv: NaiveManager, requests: list[NaiveRequest]) -> None:
    """Matches each."""
    for request in requests:
        kv.match(request)


def publish_all(kv: NaiveManager, requests: list[NaiveRequest], num_computed: int) -> None:
    """Offers the full blocks of each."""
    for request in requests:
        kv.publish(request, num_computed)


def release_all(kv: NaiveManager, requests: list[NaiveRequest]) -> None:
    """Gives back the blocks of each."""
    for request in requests:
        kv.release(request)
