"""The block pool alone: order of the free list, reference counts, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioengine.fastcore.block_pool import BlockPool
from aioengine.fastcore.prefix_map import PrefixMap
from tests.oracle.kv import NaivePool


def test_blocks_are_taken_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(4)
    assert [pool.take_id() for _ in range(4)] == [1, 2, 3, 0]
    assert pool.num_free == 0
    pool.check()


def test_freed_block_without_hash_is_the_next_victim() -> None:
    pool = BlockPool(5)
    taken = [pool.take_id() for _ in range(3)]
    for block_id in taken:
        pool.release_id(block_id)
    assert pool.free_ids() == [3, 2, 1, 4]


def test_freed_block_with_hash_is_the_last_victim() -> None:
    pool = BlockPool(5)
    index = PrefixMap(pool)
    for block_id in (pool.take_id(), pool.take_id()):
        index.insert_bytes(block_id, bytes([block_id] * 16))
        pool.release_id(block_id)
    assert pool.free_ids() == [3, 4, 1, 2]


def test_touched_block_leaves_the_free_list_from_anywhere() -> None:
    pool = BlockPool(6)
    for block_id in (3, 1, 5):
        pool.acquire_id(block_id)
    assert pool.free_ids() == [2, 4]
    pool.acquire_id(3)
    pool.release_id(3)
    assert pool.num_refs(3) == 1 and pool.free_ids() == [2, 4]
    pool.check()


def test_bad_ids_are_refused() -> None:
    pool = BlockPool(3)
    with pytest.raises(IndexError, match="block id 0 is not between 1 and 2"):
        pool.acquire_id(0)
    with pytest.raises(IndexError, match="block id 3"):
        pool.release_id(3)
    with pytest.raises(ValueError, match="block 1 has no owner"):
        pool.release_id(1)
    with pytest.raises(ValueError, match="num_blocks=1 must be at least 2"):
        BlockPool(1)


# Hashes that share buckets on purpose: their 32 lowest bits are the bucket as a fraction of all.
DIGESTS = [
    (fraction | above << 32).to_bytes(8, "little") + rest.to_bytes(8, "little")
    for fraction in (0, 1, 1 << 31, (1 << 31) + 1, 3 << 30, (1 << 32) - 1)
    for above in (0, 1)
    for rest in (0, 1)
]


class PoolMachine(RuleBasedStateMachine):
    """Pool and prefix map against lists and dicts, under any order of operations (INV-21 to INV-24).

    Under the policy cost the twin works the values out anew for every victim (Q1, INV-69); prewarmed blocks go first
    under both (Q6).
    """

    @initialize(
        num_blocks=st.integers(2, 24),
        policy=st.sampled_from(["lru", "cost"]),
        context_cost=st.sampled_from([0.0, 0.1, 1.0]),
    )
    def start(self, num_blocks: int, policy: str, context_cost: float) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixMap(self.pool)
        if policy == "cost":
            self.index.rank_by_cost(4, context_cost)
        self.twin = NaivePool(num_blocks, policy, 4, context_cost)

    def pick(self, data: st.DataObject, owned: bool) -> int:
        ids = [i for i in range(1, self.twin.num_blocks) if (self.twin.num_refs[i] > 0) == owned]
        return data.draw(st.sampled_from(ids))

    def has(self, owned: bool) -> bool:
        return any((refs > 0) == owned for refs in self.twin.num_refs[1:])

    @rule()
    def take(self) -> None:
        if not self.twin.free:
            assert self.pool.take_id() == 0
            return
        victim = self.twin.victim()
        is_indexed = victim in self.twin.key_of
        assert self.pool.take_id() == self.twin.take() == victim
        if is_indexed:
            self.index.remove_id(victim)

    @rule(data=st.data())
    def take_many(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.twin.free)))
        expected, num_evicted = [], 0
        for _ in range(count):
            victim = self.twin.victim()
            num_cached = len(self.twin.key_of)
            expected.append(self.twin.take())
            num_evicted += num_cached - len(self.twin.key_of)
            assert expected[-1] == victim
        assert self.index.take_ids(count) == (expected, num_evicted)

    @precondition(lambda self: self.has(owned=True))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = self.pick(data, owned=True)
        self.pool.release_id(block_id)
        self.twin.release(block_id)

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(1, self.twin.num_blocks - 1))
        self.pool.acquire_id(block_id)
        self.twin.acquire(block_id)

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        if self.twin.key_of:
            block_id = data.draw(st.sampled_from(sorted(self.twin.key_of)))
            self.pool.hit_id(block_id)
            self.twin.hit(block_id)

    @rule(data=st.data())
    def prewarm(self, data: st.DataObject) -> None:
        if owned := [b for b in sorted(self.twin.key_of) if self.twin.num_refs[b]]:
            block_id = data.draw(st.sampled_from(owned))
            self.pool.set_prewarmed(block_id)
            self.twin.prewarmed.add(block_id)

    @precondition(lambda self: self.has(owned=True))
    @rule(data=st.data(), digest=st.sampled_from(DIGESTS))
    def insert(self, data: st.DataObject, digest: bytes) -> None:
        block_id = self.pick(data, owned=True)
        if block_id in self.twin.key_of:
            with pytest.raises(ValueError, match="cannot be indexed"):
                self.index.insert_bytes(block_id, digest)
        else:
            parent = data.draw(st.sampled_from([0, *sorted(self.twin.key_of)]))
            inserted = self.twin.index(block_id, (digest,), parent)
            assert self.index.insert_bytes(block_id, digest, parent) == inserted

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.twin.key_of:
            block_id = data.draw(st.sampled_from(sorted(self.twin.key_of)))
            assert self.index.remove_id(block_id) == self.twin.forget(block_id)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.twin.clear()

    @invariant()
    def agrees_with_the_twin(self) -> None:
        if not hasattr(self, "twin"):
            return
        self.pool.check()
        self.index.check()
        assert self.pool.free_ids() == self.twin.free
        assert self.pool.num_free == len(self.twin.free)
        assert self.pool.candidates() == (self.twin.candidates() if self.twin.policy == "cost" else None)
        for block_id in range(1, self.twin.num_blocks):
            assert self.pool.num_refs(block_id) == self.twin.num_refs[block_id]
            assert self.pool.is_hashed(block_id) == (block_id in self.twin.key_of)
            children = self.twin.children.get(block_id, [])
            assert self.index.tree.children_of(block_id) == children[::-1]
        assert self.index.tree.children_of(0) == self.twin.children[0][::-1]  # all in lane 0
        for digest in DIGESTS:
            assert self.index.find_bytes(digest) == self.twin.block_of.get((digest,), 0)


TestPoolMachine = PoolMachine.TestCase
