"""Governing the cache by name: what goes, what stays, and that nothing evicted comes back (INV-70)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.drafts import Drafter
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request, Siblings
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan

BLOCK_SIZE = 2
Ids = tuple[int, ...]


class Cache:
    """A scheduler, its control, and requests run through it with made-up answers."""

    def __init__(self, num_blocks: int = 64, max_model_len: int = 24, **options: object) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            **options,  # type: ignore[arg-type]
        )
        self.control = CacheControl(self.scheduler)
        self.kv = self.scheduler.kv

    def start(self, *ids: int, salt: bytes = b"", max_tokens: int = 20) -> Request:
        """A request that runs on with its prompt computed."""
        request = Request("r", ids, max_tokens=max_tokens, cache_salt=salt, ignore_eos=True, prewarms=False)
        self.scheduler.add(request)
        self.step()
        return request

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.update(plan, np.full(plan.num_samples, 9, dtype=np.int32))
        self.check()
        return plan

    def serve(self, *ids: int, salt: bytes = b"") -> int:
        """A request from admission to its end; returns the tokens it found cached."""
        request = self.start(*ids, salt=salt, max_tokens=1)
        assert request.status == "finished"
        return request.num_cached_tokens

    def serve_all(self, served: list[tuple[tuple[bytes, Ids], bool]]) -> list[Request]:
        """Requests of a salt and ids each, one after the other; returns those that are said to stay."""
        running = []
        for (salt, ids), stays in served:
            if stays:
                running.append(self.start(*ids, salt=salt))
            else:
                self.serve(*ids, salt=salt)
        return running

    def name(self, *ids: int, salt: bytes = b"", start: int = -1) -> NamedPrefix:
        return NamedPrefix(np.array(ids, dtype=np.int32), BLOCK_SIZE, cache_salt=salt, start=start)

    def hits(self, *ids: int, salt: bytes = b"") -> int:
        """Full blocks of a prefix that are cached."""
        return self.control.cached_blocks(self.name(*ids, salt=salt))

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.control.check()


def test_a_middle_node_goes_with_its_subtree_and_nothing_else() -> None:
    """Q3: other prefixes and other tenants keep theirs."""
    cache = Cache()
    for tail in ((3, 4, 5, 6), (3, 4, 7, 8), (5, 6), (3, 9)):
        cache.serve(1, 2, *tail)
    cache.serve(1, 2, 3, 4, 5, 6, salt=b"other")
    assert cache.control.evict(cache.name(1, 2, 3, 4)) == (True, 3, 0, 0, 0)
    assert [cache.hits(1, 2, *tail) for tail in ((3, 4, 5, 6), (3, 4, 7, 8), (5, 6), (3, 9))] == [1, 1, 2, 2]
    assert cache.hits(1, 2, 3, 4, 5, 6, salt=b"other") == 3
    assert cache.serve(1, 2, 3, 4, 5, 6) == 2  # computed again, cached again
    assert cache.hits(1, 2, 3, 4, 5, 6) == 3


def test_start_says_where_the_span_begins() -> None:
    cache = Cache()
    cache.serve(1, 2, 3, 4, 5, 6, 7, 8)
    assert cache.control.evict(cache.name(1, 2, 3, 4, 5, 6, 7, 8, start=3)) == (True, 3, 0, 0, 0)
    assert cache.hits(1, 2, 3, 4, 5, 6, 7, 8) == 1
    assert cache.control.evict(cache.name(1, 2, 3, 4, 5, 6, 7, 8, start=3)) == (True, 0, 0, 0, 0)


def test_running_requests_keep_what_they_read_and_bring_nothing_back() -> None:
    cache = Cache()
    running = cache.start(1, 2, 3, 4, 5)
    cache.serve(1, 2, 3, 4, 6, 7)
    assert cache.control.evict(cache.name(1, 2, 3, 4)) == (True, 3, 2, 1, 0)
    cache.check()
    assert cache.hits(1, 2, 3, 4) == 1
    before = running.block_ids()
    for _ in range(6):
        cache.step()
    assert running.block_ids()[: len(before)] == before and cache.hits(*running.token_ids().tolist()) == 1
    cache.scheduler.abort(running)
    cache.check()
    assert cache.hits(*running.token_ids().tolist()) == 1
    assert cache.serve(1, 2, 3, 4, 5) == 2


def test_an_unpublished_duplicate_of_the_span_is_kept_back_too() -> None:
    cache = Cache()
    one = Request("one", [1, 2, 3, 4, 5], max_tokens=9, ignore_eos=True)
    two = Request("two", [1, 2, 3, 4, 5], max_tokens=9, ignore_eos=True, skip_prefix_cache=True)
    for request in (one, two):
        cache.scheduler.add(request)
    cache.step()
    assert not set(one.block_ids()) & set(two.block_ids())
    assert cache.control.evict(cache.name(1, 2)) == (True, 2, 2, 2, 0)
    for request in (one, two):
        cache.scheduler.abort(request)
        cache.check()
    assert cache.kv.prefix_map.num_entries == 0


def test_a_step_in_flight_publishes_no_evicted_span() -> None:
    cache = Cache(max_in_flight=2)
    request = Request("r", [1, 2, 3, 4, 5], max_tokens=9, ignore_eos=True)
    cache.scheduler.add(request)
    plan = cache.scheduler.schedule()
    assert plan is not None
    assert cache.control.evict(cache.name(1, 2, 3, 4)) == (True, 1, 1, 1, 0)
    cache.scheduler.update(plan, np.array([9], dtype=np.int32))
    assert cache.hits(1, 2, 3, 4) == 1
    ended = cache.scheduler.schedule()
    cache.scheduler.abort(request)  # its blocks are still written: deferred
    assert cache.control.evict(cache.name(1, 2)) == (True, 1, 1, 1, 0)
    assert ended is not None
    cache.scheduler.update(ended, np.array([9], dtype=np.int32))
    cache.check()
    assert cache.kv.prefix_map.num_entries == 0


def test_what_a_failed_row_computed_is_hit_by_nobody_else() -> None:
    cache = Cache(max_in_flight=2)
    cache.serve(1, 2, 9)
    bad = Request("bad", [1, 2, 3, 4, 5], max_tokens=9, ignore_eos=True)
    hitter = Request("hitter", [1, 2, 3, 4, 6, 7, 8], max_tokens=9, ignore_eos=True)
    later = Request("later", [1, 2, 3, 4, 6, 8, 8], max_tokens=9, ignore_eos=True)
    for request in (bad, hitter):
        cache.scheduler.add(request)
    first = cache.scheduler.schedule()
    cache.scheduler.add(later)
    second = cache.scheduler.schedule()
    assert first is not None and second is not None
    assert (bad.num_cached_tokens, hitter.num_cached_tokens, later.num_cached_tokens) == (2, 4, 4)
    assert cache.control.pin(cache.name(1, 2, 3, 4)) is not None
    assert cache.control.take_back(bad) == (3, 1)  # its own, and those of the others behind it
    cache.check()
    for plan in (first, second):
        cache.scheduler.update(plan, np.full(plan.num_samples, 9, dtype=np.int32))
    cache.scheduler.finish(bad, "error")
    for _ in range(4):
        cache.step()
    for request in (hitter, later):  # they go on, and keep for themselves what they compute
        assert cache.hits(*request.token_ids().tolist()) == 1
        cache.scheduler.abort(request)
        cache.check()
        assert cache.hits(*request.token_ids().tolist()) == 1
    assert cache.serve(1, 2, 3, 4, 5) == 2  # computed anew, and well this time
    assert cache.hits(1, 2, 3, 4) == 2


def test_a_row_that_fails_after_a_good_token_loses_what_came_since() -> None:
    cache = Cache()
    request = cache.start(1, 2, 3, 4, 5)
    for _ in range(3):
        cache.step()
    assert cache.control.take_back(request) == (0, 0)  # eight tokens are computed and proven
    assert cache.hits(1, 2, 3, 4, 5, 9, 9, 9) == 4


class Nines(Drafter):
    """Drafts what `Cache.step` answers."""

    def propose(self, request: Request, most: int) -> list[int]:
        return [9] * most


def test_drafts_accepted_in_the_step_of_a_failed_row_are_not_cached() -> None:
    cache = Cache(drafter=Nines(), num_speculative_tokens=4)
    request = cache.start(1, 2)
    plan = cache.scheduler.schedule()  # computes one token that is known and four that are not
    assert plan is not None and plan.num_drafts == 4
    assert cache.control.take_back(request) == (0, 0)
    cache.scheduler.update(plan, np.full(plan.num_samples, 9, dtype=np.int32))
    cache.scheduler.finish(request, "error")
    cache.check()
    assert cache.hits(1, 2, 9, 9, 9, 9, 9) == 1
    assert cache.serve(1, 2, 9, 9, 9, 9, 9) == 2
    assert cache.hits(1, 2, 9, 9, 9, 9, 9) == 3, "what is computed anew is cached"


def test_a_row_that_fails_after_its_request_was_aborted_is_taken_back_too() -> None:
    cache = Cache(max_in_flight=2)
    request = Request("r", [1, 2, 3, 4, 5], max_tokens=9, ignore_eos=True)
    cache.scheduler.add(request)
    plan = cache.scheduler.schedule()
    assert plan is not None
    cache.scheduler.abort(request)
    assert cache.hits(1, 2, 3, 4) == 2
    assert cache.control.take_back(request) == (2, 0)
    cache.scheduler.update(plan, np.array([9], dtype=np.int32))
    cache.check()
    assert cache.kv.prefix_map.num_entries == 0


def test_a_failed_row_without_a_cache_has_nothing_to_take_back() -> None:
    cache = Cache(enable_prefix_caching=False)
    assert cache.control.take_back(cache.start(1, 2, 3, 4, 5)) == (0, 0)


def test_siblings_do_not_hand_an_evicted_span_on() -> None:
    cache = Cache()
    siblings = Siblings()
    one, two = (
        Request(n, [1, 2, 3, 4, 5, 6, 7], max_tokens=9, ignore_eos=True, siblings=siblings) for n in ("one", "two")
    )
    for request in (one, two):
        cache.scheduler.add(request, ready=request is one)
    cache.step()
    cache.control.evict(cache.name(1, 2, 3, 4))
    cache.scheduler.set_ready(two)
    plan = cache.step()
    assert plan is not None and two in plan.joined and plan.num_copies == 0
    assert two.num_cached_tokens == 2 and two.block_ids()[0] == one.block_ids()[0]
    assert not set(two.block_ids()[1:]) & set(one.block_ids())
    for request in (one, two):
        cache.scheduler.abort(request)
        cache.check()
    assert cache.hits(1, 2, 3, 4, 5, 6) == 3  # by what the second one computed


def test_after_a_preemption_what_is_computed_again_may_be_cached() -> None:
    cache = Cache()
    request = cache.start(1, 2, 3, 4, 5)
    cache.control.evict(cache.name(1, 2))
    assert cache.control.reset(force=True) == 0
    assert request.status == "preempted"
    cache.step()
    assert cache.hits(1, 2, 3, 4) == 2


def test_a_name_that_ends_inside_a_block_is_exact_where_tokens_are_kept() -> None:
    cache = Cache(enable_partial_block_reuse=True)
    for salt in (b"", b"t"):
        for ids in ((1, 2, 3, 5), (1, 2, 3, 6), (1, 2, 4, 5), (1, 8, 3, 5)):
            cache.serve(*ids, salt=salt)
    assert cache.control.evict(cache.name(1, 2, 3), require_exact=True) == (True, 2, 0, 0, 0)
    hits = [cache.hits(*ids) for ids in ((1, 2, 3, 5), (1, 2, 3, 6), (1, 2, 4, 5), (1, 8, 3, 5))]
    assert hits == [1, 1, 2, 2]
    assert cache.control.evict(cache.name(1), require_exact=True) == (True, 4, 0, 0, 0)
    assert cache.kv.prefix_map.num_entries == 6 and cache.hits(1, 2, 3, 5, salt=b"t") == 2


def test_a_name_that_ends_inside_a_block_is_degraded_or_refused_where_they_are_not() -> None:
    """Q5: more goes than was named, or nothing if that must not be."""
    cache = Cache()
    for last in (3, 4):
        cache.serve(1, 2, last, 5)
    name = cache.name(1, 2, 3)
    assert cache.control.evict(name, require_exact=True) is None
    assert cache.hits(1, 2, 3, 5) == 2
    assert cache.control.evict(name) == (False, 2, 0, 0, 0)
    assert (cache.hits(1, 2, 3, 5), cache.hits(1, 2, 4, 5)) == (1, 1)
    assert cache.control.evict(cache.name(1)) is None  # first blocks are of all tenants


def test_quarantine_lasts_until_it_is_lifted() -> None:
    """Q4: however often the span is sent, and for one tenant only."""
    cache = Cache()
    cache.serve(1, 2, 3, 4, 5, 6)
    name = cache.name(1, 2, 3, 4, 5, start=2)
    cache.control.evict(name)
    assert cache.control.bar(name) and not cache.control.bar(cache.name(1, 2, 3, 4, start=3))
    for _ in range(2):
        assert cache.serve(1, 2, 3, 4, 5, 6) == 2
    assert cache.serve(1, 2, 7, 4, 5, 6) == 2 and cache.hits(1, 2, 7, 4, 5, 6) == 3
    assert cache.serve(1, 2, 3, 4, 5, 6, salt=b"x") == 0 and cache.hits(1, 2, 3, 4, 5, 6, salt=b"x") == 3
    assert cache.control.lift(name) and not cache.control.lift(name)
    cache.serve(1, 2, 3, 4, 5, 6)
    assert cache.hits(1, 2, 3, 4, 5, 6) == 3


def test_a_salt_alone_names_all_of_its_tenant() -> None:
    for options in ({}, {"enable_partial_block_reuse": True}):
        cache = Cache(**options)
        mine = [(1, 2, 3, 4), (1, 2, 5, 6), (1, 9, 3, 4), (7, 8)]
        for salt in (b"", b"t", b"other"):
            for ids in mine:
                cache.serve(*ids, salt=salt)
        pins = [cache.control.pin(cache.name(1, 2, 3, 4, salt=salt)) for salt in (b"t", b"other")]
        running = cache.start(1, 2, 3, 4, 5, 6, salt=b"t")
        name = cache.name(salt=b"t")
        assert cache.control.evict(name, require_exact=True) == (True, 7, 3, 1, 1)
        cache.check()
        assert [cache.hits(*ids, salt=b"t") for ids in mine] == [0, 0, 0, 0]
        assert all([cache.hits(*ids, salt=salt) for ids in mine] == [2, 2, 2, 1] for salt in (b"", b"other"))
        assert pins[1] is not None and list(cache.control.pins) == [pins[1][0]]
        cache.scheduler.abort(running)
        cache.check()
        assert cache.control.evict(name) == (True, 0, 0, 0, 0)
        assert cache.serve(1, 2, 3, 4, salt=b"t") == 0 and cache.hits(1, 2, 3, 4, salt=b"t") == 2


def test_a_salt_in_quarantine_caches_nothing_until_it_is_lifted() -> None:
    cache = Cache(enable_partial_block_reuse=True)
    name = cache.name(salt=b"t")
    assert cache.control.bar(name) and not cache.control.bar(cache.name(salt=b"t"))
    for _ in range(2):
        assert cache.serve(1, 2, 3, 4, salt=b"t") == 0 == cache.hits(1, 2, 3, 4, salt=b"t")
    cache.serve(1, 2, 3, 4, salt=b"u")
    assert cache.hits(1, 2, 3, 4, salt=b"u") == 2
    assert not cache.control.lift(cache.name(salt=b"u")) and cache.control.lift(name)
    cache.serve(1, 2, 3, 4, salt=b"t")
    assert cache.hits(1, 2, 3, 4, salt=b"t") == 2


def test_pinned_blocks_outlive_any_flood_and_leave_room_for_one_request() -> None:
    cache = Cache(num_blocks=20, max_model_len=24)
    assert cache.control.max_pinned_blocks == 19 - 13
    cache.serve(1, 2, 3, 4, 5, 6, 7, 8)
    pin_id, count = cache.control.pin(cache.name(1, 2, 3, 4, 5, 6, 7, 8))  # type: ignore[misc]
    assert count == 4 == cache.control.num_pinned_blocks
    for i in range(20):
        cache.serve(100 + i, *range(20))
    assert cache.hits(1, 2, 3, 4, 5, 6, 7, 8) == 4
    cache.serve(1, 2, 3, 4, 8, 8, 9, 9, 10, 10)
    with pytest.raises(ValueError, match="pinning 3 more blocks .* 4 are pinned, 6 may be"):
        cache.control.pin(cache.name(1, 2, 3, 4, 8, 8, 9, 9, 10, 10))
    longest = cache.start(*range(40, 62), max_tokens=2)
    while longest.status != "finished":
        assert cache.step() is not None
    assert cache.control.unpin(pin_id) == 4 and cache.control.unpin(pin_id) == 0
    assert cache.control.num_pinned_blocks == 0 and cache.kv.pool.num_free == 19


def test_pins_overlap_and_eviction_breaks_them() -> None:
    cache = Cache()
    cache.serve(1, 2, 3, 4, 5, 6)
    cache.serve(1, 2, 7, 8)
    pins = [cache.control.pin(cache.name(*ids)) for ids in ((1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 7, 8))]
    assert [pin[1] for pin in pins if pin] == [2, 3, 2] and cache.control.num_pinned_blocks == 4
    assert cache.control.evict(cache.name(1, 2, 3, 4)) == (True, 2, 0, 0, 2)
    cache.check()
    assert list(cache.control.pins) == ["pin-3"] and cache.control.num_pinned_blocks == 2
    assert cache.control.pin(cache.name(50, 51)) is None
    assert cache.control.reset() is None and cache.control.reset(force=True) == 2
    cache.check()
    assert cache.control.pins == {}


def test_a_forced_reset_changes_no_answer() -> None:
    """Requests are preempted, compute everything again and go on where they were (B18, INV-38)."""
    for max_in_flight in (1, 2):
        cache = Cache(max_in_flight=max_in_flight)
        requests = [Request(str(i), [i, 2, 3, 4, 5], max_tokens=9, ignore_eos=True) for i in range(3)]
        for request in requests:
            cache.scheduler.add(request)
        in_flight: list[StepPlan] = []
        for turn in range(200):
            if turn % 7 == 5:
                assert cache.control.reset(force=True) is not None
                assert cache.kv.prefix_map.num_entries == 0
                cache.check()
            if len(in_flight) < max_in_flight and (plan := cache.scheduler.schedule()) is not None:
                assert all(plan.num_computed(i) == 0 for i, r in enumerate(plan.requests) if r in plan.joined)
                in_flight.append(plan)
            elif in_flight:
                plan = in_flight.pop(0)
                # The answer is a function of what is known so far, as a model's would be.
                ids = [100 + int(r.num_tokens) for r in plan.sample_requests]
                cache.scheduler.update(plan, np.array(ids, dtype=np.int32))
            cache.check()
        for request in requests:
            assert request.status == "finished" and request.num_preemptions > 0
            assert request.output_ids_from(0) == [100 + 5 + i for i in range(9)]


def test_a_forced_reset_forgets_what_a_step_in_flight_still_computes() -> None:
    """B18: neither who was aborted and waits for that step nor who was preempted brings anything back."""
    cache = Cache(max_in_flight=2)
    ended, preempted = (Request(n, [i, 2, 3, 4, 5], max_tokens=9) for i, n in enumerate(("ended", "preempted")))
    for request in (ended, preempted):
        cache.scheduler.add(request)
    plan = cache.scheduler.schedule()
    assert plan is not None and cache.kv.prefix_map.num_entries == 4
    cache.scheduler.abort(ended)
    assert cache.control.reset(force=True) is not None and preempted.status == "preempted"
    cache.scheduler.update(plan, np.array([8, 8], dtype=np.int32))
    cache.check()
    assert cache.kv.prefix_map.num_entries == 0 and ended.block_ids() == []


def test_prewarmed_blocks_go_first_until_somebody_hits_them() -> None:
    """Q6: what was used once outlives them."""
    cache = Cache(num_blocks=14)
    for ids in ((1, 2, 3, 4), (5, 6, 7, 8)):
        cache.scheduler.add(Request("w", ids, max_tokens=0, prewarms=True))
        cache.step()
    assert cache.serve(1, 2, 3, 4, 5) == 4
    cache.serve(50, 51, 52, 53)
    cache.serve(*range(60, 74))  # takes 7: what was never used (13 - 6) ...
    assert (cache.hits(1, 2, 3, 4), cache.hits(5, 6, 7, 8), cache.hits(50, 51, 52, 53)) == (2, 2, 2)
    cache.serve(80, 81, 82, 83)  # ... and then the prewarmed ones that nobody hit
    assert (cache.hits(1, 2, 3, 4), cache.hits(5, 6, 7, 8), cache.hits(50, 51, 52, 53)) == (2, 0, 2)


def test_prewarming_what_is_cached_changes_nobody_s_rank() -> None:
    cache = Cache(num_blocks=14)
    cache.serve(1, 2, 3, 4)
    for _ in range(2):
        cache.scheduler.add(Request("w", [1, 2, 3, 4, 5, 6], max_tokens=0, prewarms=True))
        cache.step()
    cache.serve(*range(60, 80))
    cache.serve(80, 81)
    assert cache.hits(1, 2, 3, 4, 5, 6) == 2  # only what prewarming added was the first to go


def test_what_prewarming_found_cached_was_held_like_by_any_owner() -> None:
    """Q6: what it inserts is the lowest class; what others had cached keeps its own, and its place is the newest."""
    cache = Cache(num_blocks=14)
    cache.serve(1, 2, 3, 4)
    cache.serve(50, 51, 52, 53)
    cache.scheduler.add(Request("w", [1, 2, 3, 4, 5, 6], max_tokens=0, prewarms=True))
    cache.step()
    assert cache.hits(1, 2, 3, 4, 5, 6) == 3
    cache.serve(*range(60, 80))  # takes 10: what was never used (13 - 5), the prewarmed one, and the oldest
    assert (cache.hits(1, 2, 3, 4, 5, 6), cache.hits(50, 51, 52, 53)) == (2, 1)


@pytest.mark.parametrize("start", [-2, 4])
def test_a_span_begins_inside_its_name(start: int) -> None:
    with pytest.raises(ValueError, match=f"start={start} is not a token of a prefix of 4 tokens"):
        Cache().name(1, 2, 3, 4, start=start)


prompts = st.tuples(st.sampled_from([b"", b"t"]), st.lists(st.integers(1, 2), min_size=1, max_size=9).map(tuple))


@settings(deadline=None)
@given(
    served=st.lists(st.tuples(prompts, st.booleans()), min_size=1, max_size=7),
    named=prompts,
    data=st.data(),
    quarantine=st.booleans(),
    keeps_tokens=st.booleans(),
)
def test_exactly_the_span_and_what_saw_it_goes(
    served: list[tuple[tuple[bytes, Ids], bool]],
    named: tuple[bytes, Ids],
    data: st.DataObject,
    quarantine: bool,
    keeps_tokens: bool,
) -> None:
    """Q3, Q4: a random tree of prefixes, some of them in use, against what the names themselves say."""
    cache = Cache(num_blocks=1000, enable_partial_block_reuse=keeps_tokens)
    running = cache.serve_all(served)
    salt, ids = named
    start = data.draw(st.integers(0, len(ids) - 1))
    name = cache.name(*ids, salt=salt, start=start)
    at = start // BLOCK_SIZE
    is_exact = keeps_tokens or len(ids) >= (at + 1) * BLOCK_SIZE
    telling = min(len(ids), (at + 1) * BLOCK_SIZE) if is_exact else at * BLOCK_SIZE

    def saw(other_salt: bytes, other: Ids) -> bool:
        """Whether the last block of a prefix holds the span or comes after it."""
        return other_salt == salt and len(other) > at * BLOCK_SIZE and other[:telling] == ids[:telling]

    prefixes = [
        (other_salt, other)
        for other_salt in (b"", b"t")
        for length in (2, 4, 6, 8)
        for other in itertools.product((1, 2), repeat=length)
    ]

    def cached() -> set[tuple[bytes, Ids]]:
        return {(s, p) for s, p in prefixes if cache.hits(*p, salt=s) == len(p) // BLOCK_SIZE}

    before = cached()
    done = cache.control.evict(name)
    if quarantine:
        cache.control.bar(name)
    cache.check()
    after = cached()
    assert (done is None) == (not is_exact and at == 0)
    if done is None:
        assert after == before
        return
    assert done[0] >= is_exact and done[1] >= len(before) - len(after)
    assert after == {(s, p) for s, p in before if not saw(s, p)}
    for request in running:
        cache.scheduler.abort(request)
        cache.check()
    if is_exact:
        assert not any(saw(s, p) for s, p in cached())
    if is_exact and quarantine:
        for s, p in prefixes[::7]:
            cache.serve(*p, 1, salt=s)
        assert not any(saw(s, p) for s, p in cached())
        assert all((s, p) in cached() for s, p in prefixes[::7] if not saw(s, p))


@settings(deadline=None)
@given(
    served=st.lists(st.tuples(prompts, st.booleans()), min_size=1, max_size=7),
    quarantine=st.booleans(),
    keeps_tokens=st.booleans(),
    max_in_flight=st.sampled_from([1, 2]),
)
def test_exactly_what_is_under_a_salt_goes(
    served: list[tuple[tuple[bytes, Ids], bool]], quarantine: bool, keeps_tokens: bool, max_in_flight: int
) -> None:
    """A random tree of prefixes of two tenants, some of them in use and one in flight, of whom one leaves."""
    cache = Cache(num_blocks=1000, enable_partial_block_reuse=keeps_tokens, max_in_flight=max_in_flight)
    running = cache.serve_all(served)
    in_flight = cache.scheduler.schedule()
    prefixes = [ids for length in (2, 4, 6, 8) for ids in itertools.product((1, 2), repeat=length)]

    def cached(salt: bytes) -> set[Ids]:
        return {ids for ids in prefixes if cache.hits(*ids, salt=salt) == len(ids) // BLOCK_SIZE}

    kept, num_cached = cached(b""), cache.kv.prefix_map.num_entries
    num_running = sum(salt == b"t" for (salt, _), stays in served if stays)
    done = cache.control.evict(cache.name(salt=b"t"), require_exact=True)
    if quarantine:
        cache.control.bar(cache.name(salt=b"t"))
    assert done is not None and done[0] and done[3] == num_running
    assert done[1] == num_cached - cache.kv.prefix_map.num_entries
    assert cached(b"t") == set() and cached(b"") == kept
    if in_flight is not None:
        cache.scheduler.update(in_flight, np.full(in_flight.num_samples, 9, dtype=np.int32))
    cache.check()
    for request in running:
        cache.scheduler.abort(request)
        cache.check()
    assert cached(b"t") == set() and cached(b"") >= kept
    cache.serve(1, 2, 1, salt=b"t")
    assert cached(b"t") == (set() if quarantine else {(1, 2)})
