"""Hits that end inside a block: what is found, what is copied, what is never a candidate."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request
from tests.unit.test_scheduler import make_scheduler, scheduled, settle
from tests.unit.test_scheduler_async import SMALL, World, delays


def make_kv(num_blocks: int = 40, block_size: int = 4, **options: object) -> KVManager:
    return KVManager(num_blocks, block_size, **{"enable_partial_block_reuse": True, **options})  # type: ignore[arg-type]


def prompt(*ids: int, **options: object) -> Request:
    return Request("r", ids, max_tokens=1, **options)  # type: ignore[arg-type]


def cached(kv: KVManager, *ids: int, **options: object) -> list[int]:
    """Has a prompt computed and released; returns the blocks it had."""
    request = prompt(*ids, **options)
    assert kv.admit(request, kv.match(request), len(ids))
    kv.end_copy(request)
    kv.publish(request, len(ids))
    blocks = request.block_ids()
    kv.release(request)
    kv.check([])
    return blocks


def found(kv: KVManager, *ids: int, **options: object) -> tuple[int, int]:
    """(tokens, block to copy) of a prompt."""
    request = prompt(*ids, **options)
    kv.match(request)
    return request.num_matched, request.copy_source


def test_equal_beginning_of_the_next_block_is_found() -> None:
    kv = make_kv()
    first, second = cached(kv, 1, 2, 3, 4, 5, 6, 7, 8)
    assert found(kv, 1, 2, 3, 4, 5, 6, 9, 9, 9) == (6, second)
    assert found(kv, 1, 2, 9, 9, 9) == (2, first)
    assert found(kv, 1, 2, 3, 4, 9, 9) == (4, 0)
    assert found(kv, 9, 2, 3, 4) == (0, 0)


def test_last_token_is_never_found() -> None:
    kv = make_kv()
    first, second = cached(kv, 1, 2, 3, 4, 5, 6, 7, 8)
    assert found(kv, 1, 2, 3, 4, 5, 6, 7, 8) == (7, second)
    assert found(kv, 1, 2, 3, 4, 5) == (4, 0)
    assert found(kv, 1, 2) == (1, first)
    assert found(kv, 1) == (0, 0)


def test_longest_of_the_candidates_is_found_and_of_equals_the_newest() -> None:
    kv = make_kv()
    cached(kv, 1, 2, 8, 8)
    longest = cached(kv, 1, 2, 3, 9)[0]
    newest = cached(kv, 1, 2, 7, 7)[0]
    assert found(kv, 1, 2, 3, 4, 5) == (3, longest)
    assert found(kv, 1, 2, 5, 5, 5) == (2, newest)


def test_only_so_many_of_the_newest_candidates_are_compared() -> None:
    kv = make_kv(100)
    cached(kv, 1, 2, 3, 4)
    for i in range(63):
        cached(kv, 1, 50 + i, 0, 0)
    assert found(kv, 1, 2, 3, 9)[0] == 3
    cached(kv, 1, 49, 0, 0)
    assert found(kv, 1, 2, 3, 9)[0] == 1


@pytest.mark.parametrize("algo", ["xxh3_128", "sha256"])
@pytest.mark.parametrize("num_hits", [0, 1, 2])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": b"a"}, {"cache_salt": b"b"}),
        ({"cache_salt": b"a"}, {}),
        ({}, {"cache_salt": b"b"}),
        ({"extra_keys": b"a"}, {"extra_keys": b"b"}),
        ({"extra_keys": b"a"}, {"cache_salt": b"a"}),
    ],
)
def test_nothing_is_found_across_tenants(
    one: dict[str, bytes], other: dict[str, bytes], num_hits: int, algo: str
) -> None:
    """INV-13, B17: equal tokens are not enough to be copied."""
    kv = make_kv(14, hash_algo=algo)
    shared = list(range(4 * num_hits))
    cached(kv, *shared, 100, 101, 102, 103, **one)
    assert found(kv, *shared, 100, 101, 9, 9, **other) == (0, 0)
    assert found(kv, *shared, 100, 101, 9, 9, **one)[0] == 4 * num_hits + 2
    cached(kv, *shared, 100, 101, 102, 103, **other)
    assert found(kv, *shared, 100, 101, 9, 9, **other)[0] == 4 * num_hits + 2


def test_first_blocks_of_many_tenants_are_told_apart() -> None:
    kv = make_kv(14)  # so small a pool keeps the first blocks of all tenants in four lists
    for i in range(12):
        cached(kv, 1, 2, 3, 4, cache_salt=b"tenant %d" % i)
    for i in range(20):
        assert found(kv, 1, 2, 3, 9, cache_salt=b"stranger %d" % i) == (0, 0)
    assert found(kv, 1, 2, 3, 9, cache_salt=b"tenant 7")[0] == 3


def test_source_is_no_victim_of_its_own_admission() -> None:
    """INV-18: what is to be copied is held as a hit is."""
    kv = make_kv(4)
    first, second = cached(kv, 1, 2, 3, 4, 5, 6, 7, 8)
    request = prompt(1, 2, 3, 4, 5, 6, 9, 9)
    assert kv.match(request) == 1 and request.copy_source == second
    assert kv.admit(request, 1, 8)
    assert request.block_ids()[0] == first and request.copy_target == request.block_ids()[1] != second
    assert kv.pool.num_refs(second) == 1
    kv.end_copy(request)
    assert kv.pool.num_refs(second) == 0 and kv.pool.is_hashed(second)
    kv.check([request])


def test_without_room_for_the_source_nothing_changes() -> None:
    kv = make_kv(4)
    cached(kv, 1, 2, 3, 4, 5, 6, 7, 8)
    request = prompt(1, 2, 9, 9, 5, 6, 7, 8, 9, 10)
    assert kv.match(request) == 0 and request.copy_source
    free = kv.pool.free_ids()
    assert not kv.admit(request, 0, 10) and kv.pool.free_ids() == free
    assert request.block_ids() == [] and request.copy_target == 0


def test_release_before_the_step_is_packed_lets_go_of_the_source() -> None:
    kv = make_kv()
    cached(kv, 1, 2, 3, 4)
    request = prompt(1, 2, 9, 9)
    assert kv.admit(request, kv.match(request), 4)
    kv.release(request)
    assert kv.pool.num_free == 39
    kv.check([])


def test_requests_that_do_not_read_the_cache_find_nothing() -> None:
    kv = make_kv()
    cached(kv, 1, 2, 3, 4)
    assert found(kv, 1, 2, 9, skip_prefix_cache=True) == (0, 0)
    assert found(kv, 1, 2, 9, wants_prompt_logits=True) == (0, 0)
    for options in ({"enable_partial_block_reuse": False}, {"enable_prefix_caching": False}):
        kv = make_kv(**options)
        assert kv.block_tokens is None
        cached(kv, 1, 2, 3, 4)
        assert found(kv, 1, 2, 9) == (0, 0)


def test_quarantined_span_is_not_copied_from_a_block_that_begins_like_it() -> None:
    scheduler = make_scheduler(enable_partial_block_reuse=True)
    control, kv = CacheControl(scheduler), scheduler.kv
    cached(kv, 1, 2, 3, 4, 5, 6, 7, 8)
    assert found(kv, 1, 2, 3, 4, 5, 6, 7, 9)[0] == 7
    name = NamedPrefix(np.array([1, 2, 3, 4, 5, 6, 7, 9], np.int32), 4, start=5)
    assert control.bar(name)
    assert found(kv, 1, 2, 3, 4, 5, 6, 7, 9)[0] == 5
    assert found(kv, 1, 2, 3, 4, 5, 9, 9, 9)[0] == 5
    assert found(kv, 1, 2, 3, 9, 9)[0] == 3
    assert control.lift(name)
    assert found(kv, 1, 2, 3, 4, 5, 6, 7, 9)[0] == 7


@pytest.mark.parametrize("num_blocks", [1000, 1024, 1025, 4097, 65_536, 65_537])
def test_a_block_takes_at_most_128_bytes(num_blocks: int) -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kv = make_kv(num_blocks, 16)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kv.bytes_per_block <= 128
    assert 0 <= taken - kv.bytes_per_block * num_blocks < 4096


def test_step_starts_inside_the_copied_block() -> None:
    scheduler = make_scheduler(enable_partial_block_reuse=True)
    scheduler.add(Request("a", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1))
    settle(scheduler, scheduler.schedule())
    other = Request("b", [1, 2, 3, 4, 5, 6, 9, 9, 9], max_tokens=1)
    scheduler.add(other)
    plan = scheduler.schedule()
    assert scheduled(plan) == {"b": 3} and plan is not None
    assert plan.num_computed(0) == 6 and plan.num_copies == 1 and other.num_cached_tokens == 6
    assert scheduler.prefix_hit_tokens == 6
    settle(scheduler, plan)


def test_request_that_needs_the_whole_pool_still_runs() -> None:
    # The block to copy is one of the three that it needs: it is admitted without the copy.
    scheduler = make_scheduler(num_blocks=4, enable_partial_block_reuse=True)
    scheduler.add(Request("a", [1, 2, 3, 4], max_tokens=1))
    settle(scheduler, scheduler.schedule())
    whole = Request("b", [1, 2, *range(50, 60)], max_tokens=1)
    with pytest.raises(ValueError, match="can never run"):
        scheduler.add(whole)
    almost = Request("c", [1, 2, *range(50, 59)], max_tokens=1)
    scheduler.add(almost)
    plan = scheduler.schedule()
    assert scheduled(plan) == {"c": 11} and plan is not None and plan.num_copies == 0
    settle(scheduler, plan)


@delays
@pytest.mark.parametrize("num_blocks", [8, 30])
def test_outputs_are_those_without_it(num_blocks: int, delay: int) -> None:
    """INV-19, B19: hits of any length change no answer."""
    outputs = []
    for enabled in (True, False):
        world = World({**SMALL, "num_blocks": num_blocks, "enable_partial_block_reuse": enabled}, delay)
        requests = [
            world.add([1, 2, 3, 4, 5, 6, 7, 8, 9][:cut] + [20 + cut] * tail, 8)
            for cut in range(1, 10)
            for tail in (1, 4)
        ]
        world.run()
        outputs.append([r.output_ids_from(0) for r in requests])
        assert (world.device.num_copies > 0) == enabled
    assert outputs[0] == outputs[1]
