"""The KV manager: hits, allocation, publication and release, against a twin made of lists and dicts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioengine.fastcore.key_tails import key_tail
from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.request import Request
from tests.oracle.kv import NaiveKV, NaiveTable, items_in, num_common


def compute(kv: KVManager, request: Request, num_tokens: int | None = None) -> int:
    """Admits a request, computes and publishes it; returns the number of hit blocks."""
    num_tokens = request.num_tokens if num_tokens is None else num_tokens
    hits = kv.match(request)
    assert kv.admit(request, hits, num_tokens)
    kv.publish(request, num_tokens)
    kv.check([request])
    return hits


def prompt(*ids: int, name: str = "r", **options: object) -> Request:
    return Request(name, ids, max_tokens=1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
def test_tokens_take_as_many_blocks_as_they_fill(block_size: int) -> None:
    for num_tokens in (1, block_size, block_size + 1, 3 * block_size):
        kv = KVManager(200, block_size)
        request = Request("r", range(num_tokens), max_tokens=1)
        assert kv.extend(request, num_tokens)
        assert len(request.block_ids()) == -(-num_tokens // block_size)


def test_207_tokens_give_192_reusable_ones() -> None:
    kv = KVManager(40, 16)
    first = Request("a", range(207), max_tokens=1)
    compute(kv, first)
    assert kv.match(Request("b", range(207), max_tokens=1)) == 12


def test_hit_leaves_at_least_one_token() -> None:
    kv = KVManager(40, 4)
    compute(kv, prompt(*range(8)))
    assert kv.match(prompt(*range(8))) == 1
    assert kv.match(prompt(*range(9))) == 2


def test_lookup_ends_at_the_first_gap() -> None:
    """INV-17: blocks behind a gap do not count, though they are there."""
    kv = KVManager(5, 2)
    request = prompt(*range(8))
    compute(kv, request)
    middle = request.block_ids()[1]
    kv.prefix_map.remove_id(middle)
    assert kv.match(prompt(*range(9))) == 1


def test_publication_waits_for_the_computed_position() -> None:
    kv = KVManager(10, 2)
    request = prompt(*range(6))
    kv.admit(request, 0, 6)
    for computed, hits in [(0, 0), (1, 0), (2, 1), (5, 2), (6, 3)]:
        kv.publish(request, computed)
        assert kv.match(prompt(*range(7))) == hits


def test_own_hits_are_neither_victims_nor_counted_as_free() -> None:
    """INV-18: hits are taken before new blocks are."""
    kv = KVManager(4, 2)
    first = prompt(*range(6))
    compute(kv, first)
    table = first.block_ids()
    kv.release(first)
    longer = prompt(*range(10))
    hits = kv.match(longer)
    assert hits == 3 and kv.pool.num_free == 3
    assert not kv.admit(longer, hits, 10)  # the three free blocks are the hits themselves
    assert longer.block_ids() == [] and kv.pool.num_free == 3
    kv.check([])
    shorter = prompt(0, 1, 2, 3, 50, 51)
    assert kv.admit(shorter, kv.match(shorter), 6)
    assert shorter.block_ids()[:2] == table[:2]
    kv.check([shorter])


def test_victim_leaves_the_index_before_it_is_reused() -> None:
    """INV-22: nobody finds a block under what it held before."""
    kv = KVManager(3, 2)
    first = prompt(0, 1, 2, 3)
    compute(kv, first)
    kv.release(first)
    other = prompt(9, 8)
    kv.admit(other, 0, 2)
    assert kv.match(prompt(0, 1, 2, 3, 4)) == 1  # the deepest block went first
    kv.release(other)
    kv.extend(prompt(5, 6, 7, 8), 4)
    assert kv.match(prompt(0, 1, 2, 3, 4)) == 0 and kv.prefix_map.num_entries == 0


def test_golden_eviction_order_of_two_interleaved_requests() -> None:
    """INV-23: no content first, then the deepest blocks."""
    kv = KVManager(9, 2)
    a, b = prompt(0, 1, 2, 3, 4), prompt(10, 11, 12, 13, 14)
    kv.extend(a, 2)  # 1
    kv.extend(b, 4)  # 2 3
    kv.extend(a, 5)  # 4 5, the last one half full
    kv.extend(b, 5)  # 6
    kv.publish(a, 5)
    kv.publish(b, 5)
    assert (a.block_ids(), b.block_ids()) == ([1, 4, 5], [2, 3, 6])
    kv.release(a)
    kv.release(b)
    # Half-full blocks first, the newest in front; then never used ones; then a and b, each from its end.
    assert kv.pool.free_ids() == [6, 5, 7, 8, 4, 1, 3, 2]


def test_duplicate_takes_the_place_of_its_evicted_twin() -> None:
    """B9: the index has one block of two, and the other in its place later."""
    kv = KVManager(4, 2)
    first, twin = prompt(0, 1), prompt(0, 1)
    for request in (first, twin):
        kv.admit(request, 0, 2)
    for request in (first, twin):
        kv.publish(request, 2)
    assert first.block_ids() != twin.block_ids() and kv.prefix_map.num_entries == 1
    kv.release(first)
    other = prompt(7, 7, 7, 7)
    kv.extend(other, 4)
    assert kv.match(prompt(0, 1, 2)) == 0  # evicted; the duplicate is not indexed yet
    kept = twin.block_ids()
    kv.release(twin)
    again = prompt(0, 1, 2)
    assert kv.match(again) == 1 and kv.admit(again, 1, 2) and again.block_ids() == kept
    kv.check([again, other])


def test_blocks_below_an_evicted_twin_come_back_with_the_duplicate() -> None:
    kv = KVManager(7, 2)
    first, twin = prompt(0, 1), prompt(0, 1, 2, 3)
    for request in (first, twin):
        kv.admit(request, 0, request.num_tokens)
    for request in (first, twin):
        kv.publish(request, request.num_tokens)
    (root,), (copy, child) = first.block_ids(), twin.block_ids()
    assert kv.prefix_map.tree.parent_of(child) == root and not kv.pool.is_hashed(copy)
    kv.release(first)
    other = prompt(*range(7, 15))
    kv.extend(other, 8)  # takes the root
    assert kv.prefix_map.num_entries == 0  # the child cannot be reached any more, so it went along
    kv.check([twin, other])
    kv.release(twin)
    assert kv.match(prompt(0, 1, 2, 3, 4)) == 2 and kv.prefix_map.tree.parent_of(child) == copy
    kv.check([other])


def test_use_of_a_duplicate_is_use_of_its_twin() -> None:
    kv = KVManager(8, 2)
    first, twin, newer = prompt(0, 1), prompt(0, 1, 2, 3), prompt(8, 9)
    for request in (first, twin, newer):
        kv.admit(request, 0, request.num_tokens)
    for request in (first, twin, newer):
        kv.publish(request, request.num_tokens)
    (root,), (_, child), (block,) = first.block_ids(), twin.block_ids(), newer.block_ids()
    for request in (first, newer, twin):
        kv.release(request)
    assert kv.pool.free_ids()[-3:] == [block, child, root]


def test_stepwise_hashes_equal_hashes_at_once() -> None:
    """INV-12: however the tokens arrive."""
    kv = KVManager(20, 4)
    ids = list(range(100, 130))
    request = Request("r", ids, max_tokens=1, extra_keys=b"x", cache_salt=b"y")
    kv.extend(request, 30)
    for computed in (3, 4, 5, 11, 19, 29, 30):
        kv.publish(request, computed)
        assert kv.hasher is not None
        assert kv.hashes_of(request) == kv.hasher.chain(ids, 4, b"x", b"y")[: computed // 4]


def test_nothing_is_hashed_or_found_with_caching_off() -> None:
    """INV-17: a lookup is empty where nothing is cached."""
    kv = KVManager(10, 2, enable_prefix_caching=False)
    request = prompt(0, 1, 2, 3)
    assert compute(kv, request) == 0
    kv.release(request)
    assert kv.hasher is None and kv.prefix_map.num_entries == 0 and kv.match(prompt(0, 1, 2)) == 0


def test_reset_is_refused_while_blocks_are_owned() -> None:
    kv = KVManager(10, 2)
    request = prompt(0, 1, 2, 3)
    compute(kv, request)
    assert not kv.reset() and kv.match(prompt(0, 1, 2)) == 1
    kv.release(request)
    assert kv.reset() and kv.match(prompt(0, 1, 2)) == 0
    kv.check([])


@st.composite
def media_of(draw: st.DrawFn, num_tokens: int) -> tuple[tuple[int, int, bytes], ...]:
    """A few items within so many tokens; of equal identifiers the lengths are equal."""
    items, at = [], 0
    for gap, length, kind in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=3)):
        if at + gap + length <= num_tokens:
            items.append((at + gap, length, b"%d %d" % (kind, length)))
            at += gap + length
    return tuple(items)


class KVMachine(RuleBasedStateMachine):
    """Several requests over a small pool; every table, count and free list equals the twin's.

    B19: the hits are those of a search through all that is cached.
    """

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 3]),
        caching=st.sampled_from([True, True, True, False]),
        algo=st.sampled_from(["xxh3_128", "sha256"]),
        policy=st.sampled_from(["lru", "cost"]),
        context_cost=st.sampled_from([0.0, 0.3]),
        partial=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        algo: str,
        policy: str,
        context_cost: float,
        partial: bool,
    ) -> None:
        self.kv = KVManager(
            num_blocks,
            block_size,
            caching,
            algo,  # type: ignore[arg-type]
            eviction_policy=policy,  # type: ignore[arg-type]
            context_cost=context_cost,
            enable_partial_block_reuse=partial,
        )
        self.twin = NaiveKV(num_blocks, block_size, caching, policy, context_cost, partial)
        self.live: list[tuple[Request, NaiveTable, int]] = []

    @rule(
        # Few tokens and few keys, so that prefixes are shared often.
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        keys=st.sampled_from([(b"", b""), (b"", b""), (b"k", b""), (b"", b"k"), (b"k", b"k")]),
        skip=st.sampled_from([False, False, False, True]),
        has_media=st.sampled_from([False, False, True]),
        data=st.data(),
    )
    def admit(
        self, ids: list[int], keys: tuple[bytes, bytes], skip: bool, has_media: bool, data: st.DataObject
    ) -> None:
        media = data.draw(media_of(len(ids))) if has_media else ()
        request = Request(
            "r", ids, max_tokens=1, extra_keys=keys[0], cache_salt=keys[1], media=media, skip_prefix_cache=skip
        )
        table = NaiveTable(list(ids), *keys, reads_cache=not skip, media=media)
        hits = self.twin.match(table)
        assert self.kv.match(request) == len(hits)
        source, num_common = self.twin.match_tail(table, len(hits))
        start = len(hits) * self.twin.block_size + num_common
        assert (request.copy_source, request.num_matched) == (source, start)
        assert start == self.longest_cached_prefix(table)
        assert start < len(ids)
        until = data.draw(st.integers(start + 1, len(ids)))
        admitted = self.twin.admit(table, hits, until, source)
        assert self.kv.admit(request, len(hits), until) == admitted
        if admitted:
            assert source not in request.block_ids()
            assert not source or request.copy_target == table.blocks[len(hits)]
            self.kv.end_copy(request)
            self.twin.end_copy(table)
            self.live.append((request, table, until))

    def longest_cached_prefix(self, table: NaiveTable) -> int:
        """By looking at every cached block."""
        if not (self.twin.caching and table.reads_cache):
            return 0
        keys = [key for key in self.twin.pool.block_of if key[:2] == (table.extra_keys, table.cache_salt)]
        content, size, longest = table.content(), self.twin.block_size, 0
        for key in keys:
            common = num_common(key[2:], content[:-1])
            whole = common // size * size
            is_copied = items_in(key[2:], whole, whole + size) == items_in(content, whole, whole + size)
            longest = max(longest, common if self.twin.partial and is_copied else whole)
        return longest

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.live) - 1))
        request, table, until = self.live[at]
        until = data.draw(st.integers(until, len(table.tokens)))
        extended = self.twin.extend(table, until)
        assert self.kv.extend(request, until) == extended
        if extended:
            self.live[at] = (request, table, until)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        request, table, until = data.draw(st.sampled_from(self.live))
        computed = data.draw(st.integers(0, until))
        self.kv.publish(request, computed)
        self.twin.publish(table, computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request, table, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.kv.release(request)
        self.twin.release(table)
        assert request.block_ids() == []

    @rule(keys=st.sampled_from([(b"", b""), (b"k", b""), (b"", b"k"), (b"k", b"k"), (b"", b"nobody's")]))
    def forget_a_salt(self, keys: tuple[bytes, bytes]) -> None:
        first = self.kv.first_blocks(key_tail(*keys)) if self.twin.caching else []
        assert sorted(first) == sorted(self.twin.first_blocks(*keys))
        for block_id in first:
            self.kv.prefix_map.remove_id(block_id)
            self.twin.pool.forget(block_id)

    @rule()
    def reset(self) -> None:
        assert self.kv.reset() == self.twin.reset()

    @invariant()
    def agrees_with_the_twin(self) -> None:
        if not hasattr(self, "live"):
            return
        self.kv.check([request for request, _, _ in self.live])
        assert self.kv.pool.free_ids() == self.twin.pool.free
        assert self.kv.num_evicted_blocks == self.twin.pool.num_evicted
        for request, table, _ in self.live:
            assert request.block_ids() == table.blocks
        order = {block_id: at for at, block_id in enumerate(self.kv.pool.free_ids())}
        for block_id in order:  # a leaf goes before its parent, so that nothing unreachable lingers
            parent = self.kv.prefix_map.tree.parent_of(block_id)
            assert not parent or order.get(parent, len(order)) > order[block_id]
        indexed = {i for i in range(1, self.twin.pool.num_blocks) if self.kv.pool.is_hashed(i)}
        assert indexed == set(self.twin.pool.key_of)


TestKVMachine = KVMachine.TestCase
