"""Media in prompts: a picture enters the blocks that it is in, with its place (B6, B7, INV-13, INV-14)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.fastcore.block_hash import BlockHasher
from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.key_tails import KeyTails, key_parts, key_tail
from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request, Siblings
from aioengine.fastcore.scheduler import Scheduler
from aioengine.kv_events import BlockStored, events_of
from tests.unit.test_kv_manager import media_of
from tests.unit.test_partial_blocks import cached, found, make_kv

IDS = list(range(1000, 1012))
Items = tuple[tuple[int, int, bytes], ...]
CAT, DOG = b"cat", b"dog"

# Of IDS in blocks of 4 with the root b"seed", under the keys b"adapter", b"tenant", and CAT at 2 to 7, DOG at 7 to 9.
GOLDEN = {
    "sha256": [
        "aa14cfad43d2838fdd5f9ecece74121a12b69bcbcea3c2d5e78dc19548347ff4",
        "7725230d47bfc102421b5105ec81aacada201d23f0a3e3b358d71392f6a4c3c0",
        "f831d7328f50bd60369c6682b952013d8633f1a7daba4cc40a324f0aab885b9b",
    ],
    "xxh3_128": [
        "1a678929f546d4abd288953b625b3016",
        "e9d2f017f5d24d4060d1f49b7c55912a",
        "4b751a3f483e3e1014b7c6f491187e63",
    ],
}


def hashes(media: Items = (), keys: bytes = b"", salt: bytes = b"", block_size: int = 4) -> list[bytes]:
    return BlockHasher("xxh3_128", b"seed").chain(IDS, block_size, keys, salt, media)


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    """Leading hashes in common; no other may be."""
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    assert set(one[count:]).isdisjoint(other)
    return count


@pytest.mark.parametrize("algo", ["sha256", "xxh3_128"])
def test_digests_with_media_are_those_of_every_version_and_machine(algo: str) -> None:
    hasher = BlockHasher(algo, None if algo == "sha256" else b"seed")  # type: ignore[arg-type]
    digests = hasher.chain(IDS, 4, b"adapter", b"tenant", [(2, 5, CAT), (7, 2, DOG)])
    assert [digest.hex() for digest in digests] == GOLDEN[algo]


def test_a_block_has_the_items_in_it_in_order_and_where_they_begin() -> None:
    tails = KeyTails(b"k", b"s", [(2, 5, CAT), (7, 1, DOG), (8, 9, CAT)])
    assert [key_parts(tails.tail(i, 4)) for i in range(6)] == [
        (b"k", b"s", [(CAT, 2)]),
        (b"k", b"", [(CAT, -2), (DOG, 3)]),
        (b"k", b"", [(CAT, 0)]),
        (b"k", b"", [(CAT, -4)]),
        (b"k", b"", [(CAT, -8)]),
        (b"k", b"", []),
    ]
    assert tails.tail(5, 4) == key_tail(b"k", b"")  # without an item, no byte more than ever
    with pytest.raises(ValueError, match="no block -1"):
        tails.tail(-1, 4)


def test_a_picture_changes_the_hashes_from_its_first_block_on() -> None:
    plain = hashes()
    assert [num_shared(plain, hashes(((at, 1, CAT),))) for at in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert num_shared(hashes(((5, 2, CAT),)), hashes(((5, 2, CAT), (9, 1, DOG)))) == 2
    assert num_shared(hashes(((1, 2, CAT), (9, 2, CAT))), hashes(((1, 2, CAT), (9, 2, DOG)))) == 2


def test_every_pair_of_keys_differs_from_where_it_must() -> None:
    """B6: adapter, salt, item, and the place of the item in its block."""
    media = [(), *(((at, 2, name),) for at in (4, 5, 6) for name in (CAT, DOG, b"adapter", b"salt"))]
    made = {
        key: hashes(key[2], key[0], key[1])
        for key in itertools.product((b"", b"adapter", b"salt"), (b"", b"adapter", b"salt"), media)
    }
    for (one, a), (other, b) in itertools.combinations(made.items(), 2):
        assert num_shared(a, b) == (one[:2] == other[:2])
    assert {key: hashes(key[2], key[0], key[1]) for key in made} == made


@given(
    keys=st.tuples(st.binary(max_size=6), st.binary(max_size=6)),
    items=st.lists(st.binary(min_size=1, max_size=12), max_size=3),
)
def test_a_tail_says_all_that_it_was_made_of(keys: tuple[bytes, bytes], items: list[bytes]) -> None:
    """So two tails are equal only if all of it is: no item reads as an adapter or a salt."""
    tail = KeyTails(*keys, [(i, 1, item) for i, item in enumerate(items)]).tail(0, 8)
    assert key_parts(tail) == (*keys, [(item, i) for i, item in enumerate(items)])


@given(data=st.data(), block_size=st.sampled_from([1, 2, 3, 5]), stops=st.sets(st.integers(1, 30)))
def test_hashing_that_resumes_inside_an_item_equals_hashing_at_once(
    data: st.DataObject, block_size: int, stops: set[int]
) -> None:
    """INV-12, INV-14: however the tokens arrive; and a request that was preempted goes on with what it has."""
    media = data.draw(media_of(30))
    ids = list(range(30))
    kv = KVManager(40, block_size)
    request = Request("r", ids, max_tokens=1, extra_keys=b"k", cache_salt=b"s", media=media)
    kv.extend(request, 30)
    assert kv.hasher is not None
    for computed in sorted({*stops, 30}):
        kv.publish(request, computed)
        whole = kv.hasher.chain(ids, block_size, b"k", b"s", media)
        assert kv.hashes_of(request) == whole[: computed // block_size]
    kv.release(request)
    assert kv.match(request) == 29 // block_size


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([(0, 2, b"")], "media item 0: the identifier must be non-empty bytes, not b''"),
        ([(0, 2, "cat")], "media item 0: the identifier must be non-empty bytes, not 'cat'"),
        ([(0, 1, CAT), (2, 0, DOG)], "media item 1 has 0 tokens"),
        ([(0, -1, CAT)], "media item 0 has -1 tokens"),
        ([(-1, 2, CAT)], "media item 0: 2 tokens from -1 are not within the 6 there are"),
        ([(5, 2, CAT)], "media item 0: 2 tokens from 5 are not within the 6 there are"),
        ([(2**62, 2**62, CAT)], "not within the 6"),
        ([(0, 3, CAT), (2, 1, DOG)], "media item 1 begins at 2, before the end of the one before it at 3"),
        ([(4, 1, CAT), (0, 1, DOG)], "media item 1 begins at 0, before"),
    ],
)
def test_bad_items_are_named(media: list[tuple[int, int, bytes]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request("r", [1] * 6, max_tokens=1, media=media)
    if "within" not in message:  # a name may end inside an item
        with pytest.raises(ValueError, match=message):
            NamedPrefix(np.ones(6, np.int32), 2, media=media)


def test_prompts_share_what_is_before_the_picture_that_differs() -> None:
    kv = KVManager(40, 4)
    cached(kv, *IDS, 0, media=((5, 2, CAT),))
    assert found(kv, *IDS, 0, media=((5, 2, CAT),)) == (12, 0)
    assert found(kv, *IDS, 0, media=((5, 2, CAT), (9, 1, DOG))) == (8, 0)
    for other in ((), ((5, 2, DOG),), ((6, 2, CAT),), ((4, 2, CAT),)):
        assert found(kv, *IDS, 0, media=other) == (4, 0)


def test_part_of_a_block_is_copied_only_where_the_pictures_are_the_same() -> None:
    kv = make_kv()
    first, second = cached(kv, 1, 2, 7, 7, 7, 7, 5, 6, media=((2, 4, CAT),))
    assert found(kv, 1, 2, 7, 7, 7, 7, 5, 9, 9, media=((2, 4, CAT),)) == (7, second)
    assert found(kv, 1, 2, 7, 7, 7, 7, 5, 9, 9, media=((2, 4, DOG),)) == (0, 0)
    assert found(kv, 1, 2, 7, 7, 7, 7, 5, 9, 9) == (0, 0)
    assert found(kv, 1, 2, 7, 9, 9, media=((2, 1, CAT),)) == (3, first)
    other = cached(kv, 1, 2, 7, 7, 7, 7, 5, 6, media=((2, 4, DOG),))
    assert found(kv, 1, 2, 7, 7, 7, 7, 9, 9, 9, media=((2, 4, DOG),)) == (6, other[1])


@pytest.mark.parametrize("keeps_tokens", [False, True])
def test_a_salt_alone_takes_first_blocks_with_pictures_too(keeps_tokens: bool) -> None:
    kv = make_kv(enable_partial_block_reuse=keeps_tokens)
    plain = cached(kv, *IDS[:4], cache_salt=b"a")
    size = kv.bytes_per_block
    pictures = [cached(kv, *IDS[:4], cache_salt=b"a", media=((1, 2, name),)) for name in (CAT, DOG)]
    other = cached(kv, *IDS[:4], cache_salt=b"b", media=((1, 2, CAT),))
    later = cached(kv, *IDS[:8], cache_salt=b"c", media=((5, 2, CAT),))
    assert sorted(kv.first_blocks(key_tail(b"", b"a"))) == sorted(sum(pictures, plain))
    assert kv.first_blocks(key_tail(b"", b"b")) == other
    assert kv.first_blocks(key_tail(b"", b"c")) == later[:1]
    assert kv.first_blocks(key_tail(b"", b"")) == []
    # Where tokens are kept, salts cost memory only once a picture stands in a first block.
    assert kv.bytes_per_block == size + 8 * keeps_tokens
    (reused,) = other
    kv.prefix_map.remove_id(reused)
    assert cached(kv, *IDS[:4], cache_salt=b"d") == [reused]
    assert kv.first_blocks(key_tail(b"", b"b")) == [] and kv.first_blocks(key_tail(b"", b"d")) == [reused]


class Cache:
    """A scheduler, its control, and prompts run through it."""

    def __init__(self, **options: object) -> None:
        self.scheduler = Scheduler(
            num_blocks=200,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=32,
            **options,  # type: ignore[arg-type]
        )
        self.control = CacheControl(self.scheduler)

    def serve(self, media: Items = (), salt: bytes = b"", **options: object) -> Request:
        request = Request("r", IDS, max_tokens=1, cache_salt=salt, media=media, ignore_eos=True, **options)  # type: ignore[arg-type]
        self.scheduler.add(request)
        while (plan := self.scheduler.schedule()) is not None:
            self.scheduler.update(plan, np.full(plan.num_samples, 9, np.int32))
            self.scheduler.check_invariants()
        return request

    def name(self, media: Items = (), count: int = 12, start: int = -1, salt: bytes = b"") -> NamedPrefix:
        return NamedPrefix(np.array(IDS[:count], np.int32), 4, cache_salt=salt, media=media, start=start)

    def hits(self, media: Items = (), salt: bytes = b"") -> int:
        return self.control.cached_blocks(self.name(media, salt=salt))


WITH_CAT, WITH_DOG, CAT_LATER = ((5, 4, CAT),), ((5, 4, DOG),), ((6, 4, CAT),)
LOOKS = (WITH_CAT, WITH_DOG, CAT_LATER, ())


def test_a_name_means_its_own_pictures() -> None:
    cache = Cache()
    for media in LOOKS:
        assert cache.serve(media).num_cached_tokens == (0 if media is WITH_CAT else 4)
    assert [cache.hits(media) for media in LOOKS] == [3, 3, 3, 3]
    assert cache.control.evict(cache.name(WITH_DOG, count=8), require_exact=True) == (True, 2, 0, 0, 0)
    assert [cache.hits(media) for media in LOOKS] == [3, 1, 3, 3]
    assert cache.control.evict(cache.name(WITH_CAT, start=3)) == (True, 7, 0, 0, 0)  # the block that all have
    assert [cache.hits(media) for media in LOOKS] == [0, 0, 0, 0]


def test_quarantine_of_a_span_with_a_picture_bars_that_picture_only() -> None:
    cache = Cache()
    name = cache.name(WITH_CAT, count=8)
    assert cache.control.bar(name)
    # The same name again: an item behind it, or where its last one ends, changes nothing.
    assert not cache.control.bar(cache.name((*WITH_CAT, (10, 1, DOG)), count=8))
    for media in LOOKS:
        cache.serve(media)
    assert [cache.hits(media) for media in LOOKS] == [1, 3, 3, 3]
    assert cache.control.lift(cache.name(((5, 3, CAT),), count=8)) and cache.control.num_barred == 0
    cache.serve(WITH_CAT)
    assert cache.hits(WITH_CAT) == 3


def test_a_running_request_with_the_picture_brings_no_evicted_span_back() -> None:
    cache = Cache()
    requests = [Request("r", IDS, max_tokens=9, media=media, ignore_eos=True) for media in (WITH_CAT, WITH_DOG)]
    for request in requests:
        cache.scheduler.add(request)
    plan = cache.scheduler.schedule()
    assert plan is not None
    cache.scheduler.update(plan, np.full(plan.num_samples, 9, np.int32))
    done = cache.control.evict(cache.name(WITH_CAT, count=8))
    assert done == (True, 2, 2, 1, 0)
    for request in requests:
        cache.scheduler.abort(request)
    assert [cache.hits(WITH_CAT), cache.hits(WITH_DOG)] == [1, 3]


@pytest.mark.parametrize("at", [0, 1])
def test_a_name_that_ends_before_a_picture_in_its_block_takes_it_and_says_that_it_may_take_more(at: int) -> None:
    """INV-70: which pictures such a block holds, nobody here knows; other tenants' it never takes."""
    cache = Cache(enable_partial_block_reuse=True)
    begin = 4 * at
    behind, inside = ((begin + 3, 1, CAT),), ((begin, 1, CAT),)
    for media in (behind, inside, ()):
        cache.serve(media)
        cache.serve(media, salt=b"other")
    name = cache.name(count=begin + 2)
    assert cache.control.evict(name, require_exact=True) is None
    assert [cache.hits(media) for media in (behind, inside, ())] == [3, 3, 3]
    done = cache.control.evict(name)
    assert done is not None and not done[0] and done[1] == 3 * (3 - at)
    assert [cache.hits(media) for media in (behind, inside, ())] == [at, at, at]
    assert [cache.hits(media, salt=b"other") for media in (behind, inside, ())] == [3, 3, 3]
    cache.serve(inside)
    cache.serve()
    # What has no picture at all is told from a name that has one.
    done = cache.control.evict(cache.name(inside, count=begin + 2), require_exact=True)
    assert done is not None and done[:2] == (True, 3 - at) and (cache.hits(inside), cache.hits()) == (at, 3)


def test_what_a_failed_row_computed_is_taken_back_with_its_picture() -> None:
    cache = Cache()
    cache.serve(WITH_DOG)
    request = Request("r", IDS, max_tokens=2, media=WITH_CAT)
    cache.scheduler.add(request)
    plan = cache.scheduler.schedule()
    assert plan is not None and cache.hits(WITH_CAT) == 3
    assert cache.control.take_back(request) == (2, 0)
    assert (cache.hits(WITH_CAT), cache.hits(WITH_DOG)) == (1, 3)


def test_siblings_have_the_same_pictures() -> None:
    siblings = Siblings()
    first = Request("a", IDS, max_tokens=2, media=WITH_CAT, siblings=siblings)
    for media in LOOKS[1:]:
        with pytest.raises(ValueError, match="equal prompts and keys"):
            Request("b", IDS, max_tokens=1, media=media, siblings=siblings)
    second = Request("b", IDS, max_tokens=2, media=WITH_CAT, siblings=siblings)
    cache = Cache(enable_prefix_caching=False)
    for request in (first, second):
        cache.scheduler.add(request)
    while (plan := cache.scheduler.schedule()) is not None:
        cache.scheduler.update(plan, np.full(plan.num_samples, 9, np.int32))
    assert second.num_cached_tokens == 11


def test_coarse_groups_part_where_the_fine_ones_do() -> None:
    """B10: their blocks go by the fine hashes."""
    cache = Cache(kv_groups=(("full", 0, 1), ("full", 0, 2)))
    assert [cache.serve(media).num_cached_tokens for media in LOOKS] == [0, 0, 0, 0]
    assert [cache.serve(media).num_cached_tokens for media in LOOKS] == [8, 8, 8, 8]


def test_events_tell_the_pictures_of_blocks_and_not_the_salt() -> None:
    cache = Cache()
    journal = cache.scheduler.kv.start_journal()
    cache.serve(((5, 4, CAT), (9, 1, DOG)), salt=b"secret", extra_keys=b"adapter")
    cache.serve(salt=b"secret", extra_keys=b"adapter")
    plain, pictures, others = events_of(journal.take(), 4)
    assert isinstance(plain, BlockStored) and isinstance(pictures, BlockStored) and isinstance(others, BlockStored)
    assert plain.media is None and plain.token_ids == IDS[:4]
    assert pictures.media == [[(CAT, 1)], [(CAT, -3), (DOG, 1)]] and pictures.token_ids == IDS[4:]
    assert pictures.parent_block_hash == others.parent_block_hash == plain.block_hashes[0]
    assert others.media is None and {plain.extra_keys, pictures.extra_keys, others.extra_keys} == {b"adapter"}
