"""Block hashes, and the map from hashes to blocks."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from aioengine.fastcore.block_hash import BlockHasher
from aioengine.fastcore.block_pool import BlockPool
from aioengine.fastcore.key_tails import key_tail
from aioengine.fastcore.prefix_map import PrefixMap

ALGORITHMS = ("xxh3_128", "sha256")
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


@pytest.mark.parametrize("algo", ALGORITHMS)
@given(ids=tokens, block_size=st.sampled_from([1, 2, 4, 16]), data=st.data())
def test_an_edit_changes_its_block_and_all_later_ones_only(
    algo: str, ids: list[int], block_size: int, data: st.DataObject
) -> None:
    """INV-11: what comes before the edit keeps its hashes."""
    hasher = BlockHasher(algo, b"seed")  # type: ignore[arg-type]
    at = data.draw(st.integers(0, len(ids) - 1))
    edited = [*ids[:at], (ids[at] + 1) % 2**31, *ids[at + 1 :]]
    before, after = hasher.chain(ids, block_size), hasher.chain(edited, block_size)
    assert len(before) == len(after) == len(ids) // block_size
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < at // block_size for i in range(len(before))]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_other_keys_or_salt_share_no_block(algo: str) -> None:
    """INV-13, B17: whatever the text, adapters and tenants never meet."""
    hasher = BlockHasher(algo)  # type: ignore[arg-type]
    ids = list(range(12))
    # The pairs (ab, c) and (a, bc) must differ as well, so the lengths take part.
    keys = [(b"", b""), (b"a", b""), (b"", b"a"), (b"ab", b"c"), (b"a", b"bc"), (b"abc", b"")]
    chains = {pair: hasher.chain(ids, 4, *pair) for pair in keys}
    assert all(len(set(chain)) == 3 for chain in chains.values())
    for one, other in itertools.combinations(keys, 2):
        assert not set(chains[one]) & set(chains[other]), (one, other)
    assert hasher.chain(ids, 4, b"ab", b"c") == chains[b"ab", b"c"]


def test_equal_blocks_at_different_places_differ() -> None:
    assert len(set(BlockHasher().chain([5, 5, 5, 5, 5, 5], 2))) == 3


def test_a_trailing_partial_block_has_no_hash() -> None:
    assert len(BlockHasher().chain(list(range(207)), 16)) == 12


@pytest.mark.parametrize(("algo", "size"), [("xxh3_128", 16), ("sha256", 32)])
def test_root_seed_decides_the_chain(algo: str, size: int) -> None:
    ids = [1, 2, 3, 4]
    one, same, other = (BlockHasher(algo, seed).chain(ids, 4) for seed in (b"x", b"x", b"y"))  # type: ignore[arg-type]
    assert one == same != other and len(one[0]) == size
    with pytest.raises(ValueError, match="hash_algo='md5'"):
        BlockHasher("md5")  # type: ignore[arg-type]


def test_processes_agree_with_sha256_and_differ_with_xxh3() -> None:
    code = (
        "from aioengine.fastcore.block_hash import BlockHasher\n"
        "for algo in ('sha256', 'xxh3_128'): print(BlockHasher(algo).chain([1, 2], 2)[0].hex())"
    )
    command = [sys.executable, "-c", code]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    (shared, random_a), (shared_again, random_b) = first.stdout.split(), second.stdout.split()
    assert shared == shared_again and random_a != random_b


# Of 1000 .. 1011 in blocks of 4, with the extra keys "adapter" and the salt "tenant", and without both.
GOLDEN = {
    "sha256": [
        "b1c01c667a8917a6b8aafdd4b3d8c491e9576c479fd032a6cdae8eb730056bd2",
        "e9d904226103d89f2e2ea0c772cdaa7af1e761e6e34879876528fabc0719c333",
        "080c255b4b675423c4b8cbc82e86c781e460525448f9ca64bf39c95219d16345",
        "bca7dc31fce126b31bc0399c92f77e1b85a54a1f0d21f1b467d3b90d42e9fea0",
        "4df552c38199338c0199725e9ab3b6f45d5318cf27a633582732b6fa67402907",
        "4ec031409439e5607244a77e33c0d2af3bb3ac8eeaa3c3dc41e88c3db875c203",
    ],
    "xxh3_128": [
        "73931d5e3f02935748d10c6b282b026e",
        "4b71a00a81aff6ef4c4082094c6624cb",
        "6e0edafb9a22b9952b7f685cb4f78708",
        "431748707e992c67119155843fd5a203",
        "3c43d0173abe821809dc7aa94b134bf4",
        "cc325e58947b7d2aedb62f2fa9d0630e",
    ],
}


@pytest.mark.parametrize(("algo", "seed"), [("sha256", None), ("xxh3_128", b"seed")])
def test_digests_are_those_of_every_version_and_machine(algo: str, seed: bytes | None) -> None:
    """B5: who shares a cache or reads its events finds the same names after an upgrade; other bytes, another root."""
    hasher = BlockHasher(algo, seed)  # type: ignore[arg-type]
    ids = list(range(1000, 1012))
    digests = [*hasher.chain(ids, 4, b"adapter", b"tenant"), *hasher.chain(ids, 4)]
    assert [digest.hex() for digest in digests] == GOLDEN[algo]


@given(ids=tokens, block_size=st.sampled_from([1, 2, 16, 40]), keys=st.binary(max_size=300))
def test_the_compiled_hash_is_the_one_of_the_module_xxhash(ids: list[int], block_size: int, keys: bytes) -> None:
    ids = ids * 3
    hasher, plain = BlockHasher("xxh3_128", b"seed"), BlockHasher("xxh3_128", b"seed", through_python=True)
    assert not plain.is_compiled and not BlockHasher("sha256").is_compiled
    expected, parent = [], xxhash.xxh3_128_digest(b"rootseed")
    for start in range(0, len(ids) - block_size + 1, block_size):
        block = b"".join(i.to_bytes(4, "little") for i in ids[start : start + block_size])
        parent = xxhash.xxh3_128_digest(parent + block + key_tail(keys, b"" if start else b"salt"))
        expected.append(parent)
    assert hasher.chain(ids, block_size, keys, b"salt") == expected == plain.chain(ids, block_size, keys, b"salt")


def test_xxh3_is_called_without_python() -> None:
    """If this fails, the installed xxhash hides its library: hashing is slower, and nothing else differs."""
    assert BlockHasher().is_compiled and BlockHasher().digest_size == 16


def digest(home: int, rest: int = 0) -> bytes:
    """A hash whose bucket is `home` in a map of 16, that is of 8 blocks; what is above, no bucket depends on."""
    return ((home % 16) << 28 | home // 16 << 32).to_bytes(8, "little") + rest.to_bytes(8, "little")


def test_there_are_two_buckets_per_block() -> None:
    for num_blocks in (2, 9, 1000):
        assert PrefixMap(BlockPool(num_blocks)).num_buckets == 2 * num_blocks


def test_second_block_with_an_equal_hash_stays_out() -> None:
    """B9: a hash stands for one block."""
    index = PrefixMap(BlockPool(8))
    assert index.insert_bytes(3, digest(1)) and not index.insert_bytes(4, digest(1))
    assert index.find_bytes(digest(1)) == 3 and index.num_entries == 1
    index.remove_id(3)
    assert index.find_bytes(digest(1)) == 0
    assert index.insert_bytes(4, digest(1)) and index.find_bytes(digest(1)) == 4


def test_hashes_that_share_a_bucket_are_told_apart() -> None:
    index = PrefixMap(BlockPool(8))
    for block_id in (1, 2, 3):
        index.insert_bytes(block_id, digest(7, rest=block_id))
    assert [index.find_bytes(digest(7, rest=i)) for i in range(5)] == [0, 1, 2, 3, 0]
    assert index.find_bytes(digest(7, rest=1) + bytes(15) + b"\1") == 0  # all 256 bits count


def test_a_map_keeps_hashes_as_long_as_its_algorithm_makes_them() -> None:
    short, long = (PrefixMap(BlockPool(1000), size) for size in (16, 32))
    assert long.num_bytes - short.num_bytes == 16 * 1000
    assert short.insert_bytes(1, digest(7, rest=1)) and short.find_bytes(digest(7, rest=1)) == 1
    assert short.find_bytes(digest(7, rest=2)) == 0
    with pytest.raises(ValueError, match="digest_size=20"):
        PrefixMap(BlockPool(8), 20)


def test_any_block_of_a_bucket_can_leave_it() -> None:
    homes = {1: 15, 2: 15, 3: 15, 4: 0, 5: 15, 6: 0}
    for order in itertools.permutations(homes, 3):
        index = PrefixMap(BlockPool(8))
        for block_id, home in homes.items():
            index.insert_bytes(block_id, digest(home, rest=block_id))
        for gone in order:
            index.remove_id(gone)
            index.check()
        for block_id, home in homes.items():
            assert index.find_bytes(digest(home, rest=block_id)) == (0 if block_id in order else block_id)


def test_a_path_ends_at_its_first_gap() -> None:
    """INV-17: what lies behind the gap is no hit."""
    hashes = [digest(home) for home in range(1, 101)]
    for gap in (0, 1, 7, 8, 15, 16, 17, 99, 100):
        index = PrefixMap(BlockPool(200))
        for block_id, key in enumerate(hashes, 1):
            if block_id != gap + 1:
                index.insert_bytes(block_id, key)
        for count in (0, 1, 8, 16, 17, 100):
            assert index.find_path_bytes(hashes[:count]) == list(range(1, min(gap, count) + 1))


@pytest.mark.parametrize("order", ["up", "down", "scattered", "in pieces"])
def test_a_path_is_found_wherever_its_blocks_lie(order: str) -> None:
    """Whether ids follow each other is a short cut, never a condition: nor is what a block was indexed under once."""
    ids = list(range(1, 200))  # both ends of the pool
    if order == "down":
        ids.reverse()
    elif order == "scattered":
        random.Random(1).shuffle(ids)
    elif order == "in pieces":
        pieces = [ids[:3], ids[3:70][::-1], ids[70:71], ids[71:150], ids[150:][::-1]]
        ids = [i for at in (3, 0, 4, 2, 1) for i in pieces[at]]
    hashes = [digest(home) for home in range(1, 200)]
    index = PrefixMap(BlockPool(200))
    for block_id, key in zip(ids, hashes, strict=True):
        index.insert_bytes(block_id, key)
    for count in (1, 2, 63, 64, 65, 66, 128, 130, 199):
        assert index.find_path_bytes(hashes[:count]) == ids[:count]
    for gap in range(198, -1, -1):  # it keeps its hash, of which nobody knows any more
        index.remove_id(ids[gap])
        assert index.find_path_bytes(hashes) == ids[:gap]
        assert index.find_path_bytes([*hashes[:gap], bytes(32)]) == ids[:gap]


def test_a_hash_that_begins_with_zeros_is_like_any_other() -> None:
    """Rows of blocks that are not indexed begin with zeros too."""
    index = PrefixMap(BlockPool(9))
    first, zeros = digest(3), digest(0, rest=5)
    assert index.find_path_bytes([first, zeros]) == []
    index.insert_bytes(1, first)
    index.insert_bytes(2, zeros, 1)
    assert index.find_path_bytes([first, zeros]) == [1, 2] and index.find_bytes(zeros) == 2
    index.remove_id(2)
    assert index.find_path_bytes([first, zeros]) == [1] and index.find_path_bytes([first, bytes(32)]) == [1]
    index.check()


def test_victims_are_taken_with_what_follows_them() -> None:
    """Victims come first by use, but what a victim takes along goes before all that is cached."""
    pool = BlockPool(50)
    index = PrefixMap(pool)
    taken, num_evicted = index.take_ids(40)
    assert (taken, num_evicted) == (list(range(1, 41)), 0)
    for block_id in taken:  # four paths of ten blocks
        index.insert_bytes(block_id, digest(block_id), 0 if block_id % 10 == 1 else block_id - 1)
    for block_id in (*range(1, 11), *range(20, 10, -1), *range(21, 31)):
        pool.release_id(block_id)
    with pytest.raises(ValueError, match="count=40 must lie between 0 and 39"):
        index.take_ids(40)
    # Blocks 41 to 49 were never used; block 1 takes the nine after it along, which are freed deepest first.
    assert index.take_ids(21) == ([*range(41, 50), 1, *range(2, 11), 20, 19], 12)
    index.check()
    pool.check()
    assert pool.free_ids() == [*range(18, 10, -1), *range(21, 31)] and index.num_entries == 28


def test_a_block_takes_all_below_it_along() -> None:
    pool = BlockPool(9)
    index = PrefixMap(pool)
    parents = {1: 0, 2: 1, 3: 2, 4: 2, 5: 1, 6: 0}
    for block_id, parent in parents.items():
        pool.acquire_id(block_id)
        index.insert_bytes(block_id, digest(block_id), parent)
    for block_id in (3, 2, 5, 1, 6):
        pool.release_id(block_id)
    assert index.tree.children_of(1) == [5, 2] and index.tree.parent_of(3) == 2
    assert index.remove_id(2) == 3
    index.check()
    assert [i for i in parents if index.find_bytes(digest(i))] == [1, 5, 6]
    assert index.tree.children_of(1) == [5] and index.tree.parent_of(2) is None
    # What nobody owns is the next victim, the parent first; block 4 still has its owner.
    assert pool.free_ids() == [2, 3, 7, 8, 5, 1, 6] and pool.num_refs(4) == 1
    assert index.remove_id(1) == 2 and index.num_entries == 1
    pool.check()


def test_a_block_joins_indexed_parents_only() -> None:
    index = PrefixMap(BlockPool(8))
    with pytest.raises(ValueError, match="block 3 is not indexed and can have no child"):
        index.insert_bytes(1, digest(1), 3)
    with pytest.raises(IndexError, match="block id 8"):
        index.insert_bytes(1, digest(1), 8)


def test_first_blocks_are_spread_over_lanes() -> None:
    tree = (index := PrefixMap(BlockPool(64))).tree
    assert tree.num_lanes == 16
    for block_id in range(1, 33):
        index.insert_bytes(block_id, digest(block_id), lane=block_id)
    assert [tree.children_of(0, lane) for lane in (0, 5)] == [[32, 16], [21, 5]]
    index.remove_id(21)
    index.remove_id(16)
    index.check()
    assert [tree.children_of(0, lane) for lane in (0, 5)] == [[32], [5]]


def test_churn_leaves_nothing_behind() -> None:
    rng = random.Random(5)
    index = PrefixMap(BlockPool(64))
    held: dict[int, bytes] = {}
    for _ in range(20_000):
        block_id = rng.randrange(1, 64)
        if block_id in held:
            index.remove_id(block_id)
            del held[block_id]
        else:
            key = digest(rng.randrange(256), rest=rng.randrange(2**60))
            if index.insert_bytes(block_id, key):
                held[block_id] = key
    index.check()
    assert index.num_entries == len(held)
    assert all(index.find_bytes(key) == block_id for block_id, key in held.items())
