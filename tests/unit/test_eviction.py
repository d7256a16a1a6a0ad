"""The eviction policy cost: what it values, and that without differences it is LRU to the letter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.request import Request

BLOCK_SIZE = 2


def make(policy: str, num_blocks: int = 9, context_cost: float = 0.0) -> KVManager:
    return KVManager(
        num_blocks,
        BLOCK_SIZE,
        root_seed=b"x",
        eviction_policy=policy,  # type: ignore[arg-type]
        context_cost=context_cost,
    )


def serve(kv: KVManager, *ids: int, prewarms: bool = False) -> int:
    """One request from admission to its end; returns how many blocks it found."""
    request = Request("r", ids, max_tokens=1, prewarms=prewarms)
    hits = kv.match(request)
    assert kv.admit(request, hits, len(ids))
    kv.publish(request, len(ids))
    kv.release(request)
    kv.pool.check()
    kv.prefix_map.check()
    return hits


def cached(kv: KVManager, *ids: int) -> int:
    """Leading blocks of a prompt that are cached."""
    return kv.match(Request("probe", [*ids, 0], max_tokens=1))


def test_a_prefix_asked_for_again_outlives_a_flood_of_new_ones() -> None:
    """Q1: hits are what LRU does not count."""
    survivors = {}
    for policy in ("lru", "cost"):
        kv = make(policy)
        for _ in range(3):
            serve(kv, 1, 2, 3, 4, 5)
        for flood in range(6):
            serve(kv, *range(100 + 10 * flood, 104 + 10 * flood))
        survivors[policy] = cached(kv, 1, 2, 3, 4)
    assert survivors == {"lru": 0, "cost": 2}


def test_to_prewarm_is_not_to_ask() -> None:
    """Q1, Q6: only a real hit says that others may ask again."""
    kv = make("cost")
    serve(kv, 1, 2, 3, 4, 5)
    for _ in range(3):
        assert serve(kv, 1, 2, 3, 4, 5, prewarms=True) == 2
    for flood in range(6):
        serve(kv, *range(100 + 10 * flood, 104 + 10 * flood))
    assert cached(kv, 1, 2, 3, 4) == 0


def test_a_conversation_that_goes_on_is_worth_no_more_than_another() -> None:
    kv = make("cost", num_blocks=12)
    turns = [1, 2, 3]
    for turn in range(3):
        serve(kv, *turns)
        turns += [10 + turn, 20 + turn, 30 + turn]
    for flood in range(6):
        serve(kv, *range(100 + 10 * flood, 104 + 10 * flood))
    assert cached(kv, 1, 2) == 0  # as under LRU, though it was hit twice


def test_a_prefix_that_others_continue_in_other_ways_is_kept() -> None:
    kv = make("cost", num_blocks=12)
    for question in range(4):
        serve(kv, 1, 2, 3, 4, 10 * question, 5, 6)
    for flood in range(6):
        serve(kv, *range(100 + 10 * flood, 104 + 10 * flood))
    assert cached(kv, 1, 2, 3, 4) == 2


def test_a_hot_prefix_that_nobody_asks_for_any_more_goes_in_the_end() -> None:
    kv = make("cost")
    for _ in range(200):
        serve(kv, 1, 2, 3)
    floods = 0
    while cached(kv, 1, 2):
        serve(kv, 1000 + floods, 7)
        floods += 1
    # One clock turn per 8 blocks; at most 15 hits are worth more than a new block's none.
    assert 8 * 14 < floods < 8 * 18


def test_a_block_with_much_before_it_outlives_a_first_block() -> None:
    """Q1: it costs more to compute again."""
    kv = make("cost", num_blocks=6, context_cost=1.0)
    serve(kv, 1, 2, 3, 4, 5, 6)
    serve(kv, 8, 9)
    serve(kv, 20, 21, 22, 23)
    assert (cached(kv, 1, 2, 3, 4, 5, 6), cached(kv, 8, 9)) == (3, 0)  # LRU would have evicted 5 6


def test_leaves_go_before_their_parents_however_often_they_were_hit() -> None:
    kv = make("cost", num_blocks=6)
    serve(kv, 1, 2)
    for _ in range(4):
        serve(kv, 1, 2, 3, 4, 5, 6)
        cached(kv, 1, 2)
    serve(kv, 30, 31, 32, 33, 34, 35)
    assert cached(kv, 1, 2, 3, 4, 5, 6) == 2


def test_owned_blocks_are_never_chosen() -> None:
    """Q1, INV-69: whatever they are worth."""
    kv = make("cost", num_blocks=6)
    held = Request("held", [1, 2, 3, 4], max_tokens=1)
    assert kv.admit(held, 0, 4)
    kv.publish(held, 4)
    for i in range(20):
        serve(kv, 100 + i, 5, 6, 7)
    kv.check([held])
    assert cached(kv, 1, 2, 3, 4) == 2


@given(
    num_blocks=st.integers(4, 12),
    prompts=st.lists(st.integers(1, 6), min_size=1, max_size=60),
)
def test_without_differences_cost_is_lru(num_blocks: int, prompts: list[int]) -> None:
    """No prompt comes twice and context costs nothing, so all values are equal (INV-69)."""
    lru, cost = make("lru", num_blocks), make("cost", num_blocks)
    for number, length in enumerate(prompts):
        ids = [number * 100 + i for i in range(min(length, num_blocks - 1) * BLOCK_SIZE)]
        for kv in (lru, cost):
            assert serve(kv, *ids) == 0
        assert lru.pool.free_ids() == cost.pool.free_ids()
        assert [i for i in range(1, num_blocks) if lru.pool.is_hashed(i)] == [
            i for i in range(1, num_blocks) if cost.pool.is_hashed(i)
        ]


@given(
    num_blocks=st.integers(6, 14),
    prompts=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=60),
)
def test_with_equal_hits_cost_is_lru_on_branching_prompts(num_blocks: int, prompts: list[tuple[int, int, int]]) -> None:
    """Prefixes are shared between requests that run together, so that nothing is ever hit (INV-69)."""
    lru, cost = make("lru", num_blocks), make("cost", num_blocks)
    running: list[tuple[KVManager, Request]] = []
    batch = 0
    for number, (root, branch, length) in enumerate(prompts):
        size = BLOCK_SIZE * 2 + length
        if lru.pool.num_free < -(-size // BLOCK_SIZE):
            for kv, request in running:
                kv.release(request)
            running.clear()
            batch += 1  # what was cached is not asked for again
        ids = [100 * batch, root, 10 + branch, 10, *range(1000 * number, 1000 * number + length)]
        for kv in (lru, cost):
            request = Request("r", ids, max_tokens=1, skip_prefix_cache=True)
            assert kv.admit(request, 0, size)
            kv.publish(request, size)
            running.append((kv, request))
        assert lru.pool.free_ids() == cost.pool.free_ids()
    lru.check([request for kv, request in running if kv is lru])
    cost.check([request for kv, request in running if kv is cost])


def test_bad_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="eviction_policy='fifo' must be lru or cost"):
        make("fifo")
    with pytest.raises(ValueError, match="context_cost=-1.0"):
        make("cost", context_cost=-1.0)
    kv = make("lru")
    serve(kv, 1, 2)
    with pytest.raises(ValueError, match="1 blocks are cached already"):
        kv.prefix_map.rank_by_cost(BLOCK_SIZE)
