"""The host tier's books: what is matched, what makes room, what is lost, and what goes when a prefix is governed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine import host_pages
from aioengine.cli.parser import gibibytes
from aioengine.config import EngineConfig, ResolvedConfig, resolve
from aioengine.errors import InvalidConfig
from aioengine.fastcore.block_facts import BlockFacts, facts_of, lineage
from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.host_pages import CpuPages
from aioengine.kv_host_tier import KVHostTier, num_host_blocks
from tests.unit.test_kv_layout import layout_for


class Pages:
    """Slots and a pool whose blocks hold one word each."""

    def __init__(self, num_slots: int, pool: dict[int, str]) -> None:
        self.slots: list[str | None] = [None] * num_slots
        self.pool = pool

    def load(self, slots: Sequence[int], block_ids: Sequence[int], /) -> None:
        for slot, block_id in zip(slots, block_ids, strict=True):
            held = self.slots[slot]
            assert held is not None
            self.pool[block_id] = held

    def store(self, block_ids: Sequence[int], slots: Sequence[int], /) -> None:
        assert len(set(slots)) == len(slots), "one copy over another"
        for block_id, slot in zip(block_ids, slots, strict=True):
            self.slots[slot] = self.pool[block_id]

    def blank(self, block_ids: Sequence[int], /) -> None:
        self.pool |= dict.fromkeys(block_ids, "0")

    def close(self) -> None:
        self.slots.clear()


class Tier:
    """A tier of words: a block is named by the path to it, `abc` is the third block behind `a` and `ab`."""

    def __init__(self, num_slots: int) -> None:
        self.pool: dict[int, str] = {}
        self.tier = KVHostTier(Pages(num_slots, self.pool), num_slots)

    def store(self, *paths: str) -> None:
        """Offers blocks as they are in a pool that has all of them."""
        blocks = []
        for path in paths:
            block_id = len(self.pool) + 1
            self.pool[block_id] = path
            blocks.append((BlockFacts(path.encode(), path[:-1].encode() or None), block_id))
        work = self.tier.store(blocks)
        if work is not None:
            work()
        self.tier.check()

    def store_path(self, path: str) -> None:
        self.store(*(path[: i + 1] for i in range(len(path))))

    def load(self, *paths: str) -> list[str]:
        """What the blocks hold after they were loaded; those that were lost hold 0."""
        ids = [1000 + i for i in range(len(paths))]
        lost = self.tier.load([(path.encode(), block_id) for path, block_id in zip(paths, ids, strict=True)])()
        self.tier.check()
        assert {i for i, block_id in enumerate(ids) if block_id in lost} == {
            i for i, block_id in enumerate(ids) if self.pool[block_id] == "0"
        }
        return [self.pool[block_id] for block_id in ids]

    def matched(self, path: str) -> int:
        return self.tier.num_matched([path[: i + 1].encode() for i in range(len(path))])

    def kept(self) -> set[str]:
        left = list(self.tier.children_of(None))
        for facts in left:  # grows while it is walked
            left += self.tier.children_of(facts.block_hash)
        return {facts.block_hash.decode() for facts in left}


def test_what_was_stored_is_matched_to_the_first_gap_and_loaded() -> None:
    tier = Tier(8)
    tier.store_path("abc")
    tier.store("abx")
    assert [tier.matched(path) for path in ("abc", "abcd", "abx", "abz", "z", "")] == [3, 3, 3, 2, 0, 0]
    assert tier.load("a", "ab", "abx") == ["a", "ab", "abx"]
    assert b"abc" in tier.tier and b"abcd" not in tier.tier
    stats = tier.tier.stats()
    assert (stats.num_blocks, stats.max_blocks, stats.num_stored_blocks, stats.num_loaded_blocks) == (4, 8, 4, 3)


def test_what_is_not_there_is_lost_and_never_wrong() -> None:
    tier = Tier(2)
    tier.store_path("ab")
    assert tier.load("a", "ax", "ab") == ["a", "0", "ab"]
    tier.tier.clear()
    assert tier.load("a") == ["0"]


def test_the_block_unused_longest_makes_room_and_none_before_its_children() -> None:
    tier = Tier(4)
    tier.store_path("ab")
    tier.store_path("xy")
    tier.load("a", "ab")
    tier.store("p")
    assert tier.kept() == {"a", "ab", "x", "p"}
    tier.store("q")
    assert tier.kept() == {"a", "ab", "p", "q"}  # x was a leaf by then
    tier.load("a", "ab")
    tier.store("r", "s")
    assert tier.kept() == {"a", "ab", "r", "s"}
    assert tier.tier.stats().num_evicted_blocks == 4


@pytest.mark.parametrize(("is_used", "left"), [(False, "d"), (True, "a")])
def test_a_parent_is_as_old_as_its_last_use_or_its_child_s(is_used: bool, left: str) -> None:
    tier = Tier(3)
    for path in ("a", "b", "ac", "d"):
        tier.store(path)
    assert tier.kept() == {"a", "ac", "d"}
    if is_used:
        tier.load("a")
    tier.store("e", "f")
    assert tier.kept() == {left, "e", "f"}


def test_offering_a_block_again_is_a_use() -> None:
    tier = Tier(2)
    tier.store("a")
    tier.store("b")
    tier.store("a")
    tier.store("c")
    assert tier.kept() == {"a", "c"}


def test_a_tier_smaller_than_a_prompt_keeps_its_beginning() -> None:
    tier = Tier(3)
    tier.store_path("abcdef")
    assert tier.matched("abcdef") == 3
    tier.store_path("uvwxyz")
    assert tier.matched("uvwxyz") == 3 and tier.kept() == {"u", "uv", "uvw"}
    tier.store("uvwx")  # its parent alone could make room for it
    assert tier.kept() == {"u", "uv", "uvw"}
    tier.store("nobody's child", "k")
    assert "nobody's child" not in tier.kept()


def test_a_slot_goes_to_another_block_only_behind_the_load_of_the_first() -> None:
    """The books are ahead of the device: work is done in the order in which it was given out."""
    tier = Tier(1)
    tier.store("a")
    load = tier.tier.load([(b"a", 7)])
    tier.pool[8] = "b"
    store = tier.tier.store([(BlockFacts(b"b"), 8)])
    assert store is not None and b"a" not in tier.tier
    assert list(load()) == []
    store()
    assert tier.pool[7] == "a" and tier.load("b") == ["b"]


def test_a_dropped_block_takes_what_is_below_it() -> None:
    tier = Tier(16)
    for path in ("abcd", "abx", "uv"):
        tier.store_path(path)
    assert tier.tier.forget([b"ab", b"abcd", b"never there"]) == 4
    assert tier.kept() == {"a", "u", "uv"}
    tier.tier.check()
    tier.store("ab")
    assert tier.matched("abcd") == 2
    assert tier.tier.clear() == 4 and tier.kept() == set()
    tier.tier.check()
    tier.tier.close()
    tier.tier.close()
    assert tier.matched("a") == 0


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.sampled_from(["store", "load", "forget"]), st.text("ab", min_size=1, max_size=5)), max_size=40
    ),
)
@settings(max_examples=150, deadline=None)
def test_whatever_happens_the_books_agree_and_contents_are_right(num_slots: int, script: list[tuple[str, str]]) -> None:
    tier = Tier(num_slots)
    for what, path in script:
        paths = [path[: i + 1] for i in range(len(path))]
        if what == "store":
            tier.store(*paths)
            assert tier.matched(path) >= min(num_slots, len(path))
        elif what == "load":
            matched = tier.matched(path)
            assert tier.load(*paths[:matched]) == paths[:matched]
        else:
            tier.tier.forget([path.encode()])
            assert not [kept for kept in tier.kept() if kept.startswith(path)]
        tier.tier.check()
        assert len(tier.kept()) == tier.tier.stats().num_blocks <= num_slots


# ---- governed by name: the tier beside a scheduler's cache ---------------------------------------------------


BLOCK_SIZE = 2
Ids = tuple[int, ...]


class Governed:
    """A scheduler's cache and a tier that has a copy of whatever was cached."""

    def __init__(self, **options: object) -> None:
        self.scheduler = Scheduler(
            num_blocks=64,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=24,
            **options,  # type: ignore[arg-type]
        )
        self.kv = self.scheduler.kv
        self.words = Tier(64)
        self.tier = self.words.tier
        self.control = CacheControl(self.scheduler, self.tier)

    def serve(self, *ids: int, salt: bytes = b"", media: tuple[tuple[int, int, bytes], ...] = ()) -> None:
        request = Request("r", ids, max_tokens=1, cache_salt=salt, ignore_eos=True, media=media)
        self.scheduler.add(request)
        while request.status != "finished":
            plan = self.scheduler.schedule()
            assert plan is not None
            self.scheduler.update(plan, np.full(plan.num_samples, 9, dtype=np.int32))
        hashes = self.kv.hashes_of(request)
        if hashes:
            blocks = lineage(self.kv, self.kv.prefix_map.find_bytes(hashes[-1]), self.tier.__contains__)
            self.words.pool |= {block_id: facts.block_hash.hex() for facts, block_id in blocks}
            work = self.tier.store(blocks)
            if work is not None:
                work()

    def empty_pool(self) -> None:
        """As if everything had been evicted from the pool."""
        assert self.scheduler.reset_prefix_cache()

    def name(self, *ids: int, salt: bytes = b"", start: int = -1) -> NamedPrefix:
        return NamedPrefix(np.array(ids, dtype=np.int32), BLOCK_SIZE, cache_salt=salt, start=start)

    def loadable(self, *ids: int, salt: bytes = b"") -> int:
        self.tier.check()
        return self.control.loadable_blocks(self.name(*ids, salt=salt))


def test_facts_are_of_cached_blocks_only() -> None:
    cache = Governed()
    cache.serve(1, 2, 3, 4, 5)
    first, second = (cache.kv.prefix_map.find_bytes(h) for h in cache.kv.hasher.chain([1, 2, 3, 4], BLOCK_SIZE))  # type: ignore[union-attr]
    assert facts_of(cache.kv, first).parent_hash is None
    assert facts_of(cache.kv, second).parent_hash == facts_of(cache.kv, first).block_hash
    assert lineage(cache.kv, second, lambda _: True) == []
    assert [block_id for _, block_id in lineage(cache.kv, second, lambda _: False)] == [first, second]
    for block_id in (0, -1, 64, 63):
        with pytest.raises(ValueError, match="not in the prefix map"):
            facts_of(cache.kv, block_id)
        with pytest.raises(ValueError, match="not in the prefix map"):
            lineage(cache.kv, block_id, lambda _: False)


@pytest.mark.parametrize("in_pool", [True, False], ids=["cached", "only in the tier"])
@pytest.mark.parametrize("partial", [True, False], ids=["tokens kept", "no tokens"])
def test_an_evicted_span_leaves_the_tier_with_its_subtree_alone(in_pool: bool, partial: bool) -> None:
    """INV-70: also where the pool has forgotten the span."""
    cache = Governed(enable_partial_block_reuse=partial)
    for tail in ((3, 4, 5, 6), (3, 4, 7, 8), (5, 6), (3, 9)):
        cache.serve(1, 2, *tail)
    cache.serve(1, 2, 3, 4, 5, 6, salt=b"other")
    if not in_pool:
        cache.empty_pool()
    done = cache.control.evict(cache.name(1, 2, 3, 4))
    assert done == (True, 3 if in_pool else 0, 0, 0, 0)
    cache.empty_pool()
    assert [cache.loadable(1, 2, *tail) for tail in ((3, 4, 5, 6), (3, 4, 7, 8), (5, 6), (3, 9))] == [1, 1, 2, 2]
    assert cache.loadable(1, 2, 3, 4, 5, 6, salt=b"other") == 3
    cache.serve(1, 2, 3, 4)  # computed again: what was behind it stays gone
    cache.empty_pool()
    assert cache.loadable(1, 2, 3, 4, 5, 6) == 2


@pytest.mark.parametrize("in_pool", [True, False], ids=["cached", "only in the tier"])
@pytest.mark.parametrize("partial", [True, False], ids=["tokens kept", "no tokens"])
def test_a_tenant_leaves_the_tier(in_pool: bool, partial: bool) -> None:
    cache = Governed(enable_partial_block_reuse=partial)
    for salt in (b"a", b"b", b""):
        cache.serve(1, 2, 3, 4, salt=salt)
        cache.serve(5, 6, salt=salt, media=((0, 1, b"picture"),))
    if not in_pool:
        cache.empty_pool()
    assert cache.control.evict(cache.name(salt=b"a")) == (True, 3 if in_pool else 0, 0, 0, 0)
    cache.empty_pool()
    assert [cache.loadable(1, 2, 3, 4, salt=salt) for salt in (b"a", b"b", b"")] == [0, 2, 2]
    assert cache.tier.stats().num_blocks == 6


@pytest.mark.parametrize("in_pool", [True, False], ids=["cached", "only in the tier"])
def test_a_name_that_ends_inside_a_block_takes_those_that_begin_so(in_pool: bool) -> None:
    cache = Governed(enable_partial_block_reuse=True)
    for ids in ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 6, 7), (8, 9), (8, 1)):
        cache.serve(*ids)
        cache.serve(*ids, salt=b"other")
    if not in_pool:
        cache.empty_pool()
    assert (cache.control.evict(cache.name(1, 2, 3)) or ())[0] is True
    assert (cache.control.evict(cache.name(8)) or ())[0] is True
    cache.empty_pool()
    names = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 6, 7), (8, 9), (8, 1)]
    assert [cache.loadable(*ids) for ids in names] == [1, 1, 2, 0, 0]
    assert [cache.loadable(*ids, salt=b"other") for ids in names] == [2, 2, 2, 1, 1]


def test_where_tokens_are_not_kept_a_partial_name_is_degraded_in_the_tier_too() -> None:
    cache = Governed()
    for ids in ((1, 2, 3, 4), (1, 2, 6, 7), (5, 6)):
        cache.serve(*ids)
    cache.empty_pool()
    assert cache.control.evict(cache.name(1, 2, 3), require_exact=True) is None
    assert cache.control.evict(cache.name(1)) is None  # tenants cannot be told apart
    assert cache.tier.stats().num_blocks == 4
    assert (cache.control.evict(cache.name(1, 2, 3)) or ())[0] is False
    assert [cache.loadable(*ids) for ids in ((1, 2, 3, 4), (1, 2, 6, 7), (5, 6))] == [1, 1, 1]


def test_media_that_a_name_does_not_tell_of_make_it_inexact_in_the_tier_too() -> None:
    cache = Governed(enable_partial_block_reuse=True)
    cache.serve(1, 2, 3, 4, media=((3, 1, b"picture"),))
    cache.serve(1, 2, 3, 5)
    cache.empty_pool()
    assert cache.control.evict(cache.name(1, 2, 3), require_exact=True) is None
    assert (cache.control.evict(cache.name(1, 2, 3)) or ())[0] is False
    assert cache.tier.stats().num_blocks == 1


def test_what_a_failed_row_computed_leaves_the_tier() -> None:
    """Its chunks may have been stored before the sample that failed."""
    cache = Governed()
    request = Request("r", (1, 2, 3, 4, 5), max_tokens=4, ignore_eos=True)
    cache.scheduler.add(request)
    plan = cache.scheduler.schedule()
    assert plan is not None
    hashes = cache.kv.hasher.chain([1, 2, 3, 4], BLOCK_SIZE)  # type: ignore[union-attr]
    blocks = [(facts_of(cache.kv, cache.kv.prefix_map.find_bytes(h)), i) for i, h in enumerate(hashes)]
    cache.tier.store(blocks)
    assert cache.loadable(1, 2, 3, 4) == 0 and cache.tier.stats().num_blocks == 2  # the pool has them
    cache.control.take_back(request)
    assert cache.tier.stats().num_blocks == 0
    cache.scheduler.abort(request)
    cache.scheduler.update(plan, np.full(plan.num_samples, 9, dtype=np.int32))


def test_a_reset_empties_the_tier_unless_it_is_refused() -> None:
    cache = Governed()
    cache.serve(1, 2, 3, 4)
    running = Request("r", (5, 6, 7), max_tokens=4, ignore_eos=True)
    cache.scheduler.add(running)
    plan = cache.scheduler.schedule()
    assert plan is not None and cache.control.reset() is None
    assert cache.tier.stats().num_blocks == 2
    assert cache.control.reset(force=True) is not None
    assert cache.tier.stats().num_blocks == 0
    cache.scheduler.update(plan, np.full(plan.num_samples, 9, dtype=np.int32))
    cache.scheduler.abort(running)


# ---- memory and sizes ---------------------------------------------------------------------------------------


def offloading(size: object, **options: object) -> ResolvedConfig:
    config = EngineConfig(device="cpu", kv_offloading_size=size, **options)
    return resolve(config, model_max_len=4096, model_dtype="float32", cuda_available=False, num_cores=2)


def test_cpu_pages_bring_every_layer_of_a_block_back() -> None:
    layout = layout_for("FFF")
    pool = [torch.randn((6, *layout.page_shape(layer))) for layer in range(3)]
    before = [layer.clone() for layer in pool]
    pages = CpuPages(layout, 4, pool)
    pages.store([5, 2], [3, 0])
    for layer in pool:
        layer[2:] = -1.0
    pages.load([0, 3], [4, 1])
    pages.blank([3])
    for now, then in zip(pool, before, strict=True):
        assert torch.equal(now[4], then[2]) and torch.equal(now[1], then[5])
        assert torch.equal(now[0], then[0]) and (now[2] == -1).all() and (now[3] == 0).all() and (now[5] == -1).all()
    pages.close()
    pages.close()


def test_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_for("FF")
    pool = [torch.empty((4, *layout.page_shape(layer))) for layer in range(2)]
    monkeypatch.setattr(host_pages, "available_memory_bytes", lambda: 10 * layout.block_bytes)
    CpuPages(layout, 6, pool).close()
    with pytest.raises(InvalidConfig, match="cannot be had, 0 MiB are free; lower --kv-offloading-size"):
        CpuPages(layout, 7, pool)  # the pool's four are promised


def test_a_size_is_whole_blocks_of_models_with_one_table() -> None:
    layout = layout_for("FF")
    assert num_host_blocks(layout, offloading(None)) == 0
    assert num_host_blocks(layout, offloading(2.5 * layout.block_bytes / 2**30)) == 2
    with pytest.raises(InvalidConfig, match=f"holds no block of {layout.block_bytes} bytes; raise it"):
        num_host_blocks(layout, offloading(0.9 * layout.block_bytes / 2**30))
    windows = layout_for("WFWF")
    assert num_host_blocks(windows, offloading(None)) == 0
    with pytest.raises(InvalidConfig, match="here are 2 groups.*--disable-hybrid-kv-cache-manager"):
        num_host_blocks(windows, offloading(1))
    assert num_host_blocks(layout_for("WFWF", hybrid=False), offloading(1)) > 0


@pytest.mark.parametrize("size", [0, -1, 1e-7, float("nan"), float("inf"), 2**20 + 1, "4", True])
def test_sizes_that_make_no_sense_are_refused(size: object) -> None:
    with pytest.raises(InvalidConfig, match="kv_offloading_size"):
        offloading(size)


def test_options_that_a_tier_contradicts_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="kv_offloading_size=4 keeps cached prefixes, and prefix caching is off"):
        offloading(4, enable_prefix_caching=False)
    with pytest.raises(InvalidConfig, match="kv_offloading_size=4 .*determinism=offline promises the same steps"):
        offloading(4, determinism="offline")
    assert offloading(4, determinism="batch-invariant").kv_offloading_bytes == 4 << 30
    assert offloading(None).kv_offloading_bytes == 0


@pytest.mark.parametrize(
    ("text", "gib"), [("4", 4.0), ("0.5", 0.5), ("512M", 0.5), ("3G", 3.0), ("1.5T", 1536.0), ("4g", 4e9 / 2**30)]
)
def test_a_flag_s_size_is_in_gib_or_has_a_unit(text: str, gib: float) -> None:
    assert gibibytes(text) == pytest.approx(gib)


@pytest.mark.parametrize("text", ["", "x", "4 apples", "4Gi"])
def test_a_flag_s_size_is_a_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write 8 .GiB., 512M or 8G"):
        gibibytes(text)
