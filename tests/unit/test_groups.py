"""KV groups: numbers and refusals, hits of all groups, windows that give blocks back, twins that leave together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioengine.fastcore import step_buffer as layout
from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.groups import KVGroups
from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request, Siblings
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan
from aioengine.fastcore.token_ids import pack_token_ids
from tests.oracle.kv import Group, NaiveKV, NaiveTable, first_read

FULL: Group = ("full", 0, 1)
WINDOW_6: tuple[Group, ...] = (FULL, ("sliding", 6, 1))
GROUP_SETS: tuple[tuple[Group, ...], ...] = (
    WINDOW_6,
    (FULL, ("sliding", 1, 1)),
    (FULL, ("sliding", 3, 1), ("sliding", 8, 1)),
    (FULL, ("sliding", 5, 2)),
    (FULL, ("chunked", 5, 1)),
    (FULL, ("chunked", 4, 4), ("sliding", 2, 2)),
    (FULL, ("full", 0, 2), ("sliding", 2, 1)),
)


def scheduler_of(kv_groups: tuple[Group, ...] = WINDOW_6, **options: object) -> Scheduler:
    defaults: dict[str, object] = {
        "num_blocks": 200, "block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128,
    }  # fmt: skip
    return Scheduler(kv_groups=kv_groups, **{**defaults, **options})  # type: ignore[arg-type]


def step(scheduler: Scheduler, token_id: int = 7) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, np.full(plan.num_samples, token_id, np.int32))
    scheduler.check_invariants()
    return plan


def cached(kv: KVManager, ids: list[int], group: int = 1) -> list[int]:
    """The blocks of a cached text: the first group's and those that hang on them."""
    assert kv.hasher is not None and kv.prefix_map.twins is not None
    primaries = [kv.prefix_map.find_bytes(digest) for digest in kv.hasher.chain(ids, kv.block_size)]
    return [*primaries, *(kv.prefix_map.twins.twin(primary, group) for primary in primaries)]


def run(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work():
        step(scheduler)


def prompt(name: str, ids: list[int], max_tokens: int = 1, **options: object) -> Request:
    return Request(name, ids, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


# ---- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_groups", "message"),
    [
        ((), "has 0 groups"),
        ((FULL,) * 9, "has 9 groups"),
        ((("sliding", 8, 1),), "must begin with"),
        ((("full", 0, 2),), "must begin with"),
        ((FULL, ("half", 0, 1)), "'half'"),
        ((FULL, ("sliding", 0, 1)), "size=0"),
        ((FULL, ("chunked", -4, 1)), "size=-4"),
        ((FULL, ("full", 8, 1)), "size=8"),
        ((FULL, ("sliding", 8, 0)), "scale=0"),
        ((FULL, ("sliding", 8, 257), ("sliding", 8, 256)), "common multiple"),
        ((FULL, ("sliding", 8)), "a group is"),
    ],
)
def test_groups_that_cannot_be_are_refused(kv_groups: tuple[Group, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler_of(kv_groups)


def test_partial_blocks_are_not_reused_in_groups() -> None:
    with pytest.raises(ValueError, match="needs one KV group, not 2"):
        scheduler_of(enable_partial_block_reuse=True)


@given(
    group=st.sampled_from([("sliding", 1, 1), ("sliding", 6, 1), ("sliding", 7, 2), ("chunked", 6, 1), ("full", 0, 2)]),
    computed=st.integers(0, 60),
    new=st.integers(1, 9),
)
def test_a_request_never_has_more_blocks_than_is_counted_for_it(group: Group, computed: int, new: int) -> None:
    """What the first query of a step reads, and the step itself, by looking at every position."""
    block_size = 2 * group[2]
    held = {p // block_size for p in range(first_read(group, computed), computed + new)}
    twin = NaiveKV(2, 2, kv_groups=(FULL, group), max_step_tokens=9)
    fine = -(-(computed + new) // 2)
    assert fine + len(held) <= twin.most_blocks(computed + new)
    capacity = KVGroups((FULL, group), 2, 9).capacity(twin.most_blocks(computed + new))
    assert capacity >= computed + new
    assert twin.most_blocks(capacity) <= twin.most_blocks(computed + new) < twin.most_blocks(capacity + 1)


def test_what_can_never_fit_is_refused_with_the_blocks_of_all_groups() -> None:
    scheduler = scheduler_of(num_blocks=40, max_num_batched_tokens=8)
    # 31 blocks for 61 tokens, and ceil((5 + 8) / 2) + 1 = 8 for the window and a step.
    scheduler.add(prompt("fits", [1] * 61, 1))
    assert scheduler.max_total == 63
    with pytest.raises(ValueError, match="needs 40 blocks of 2 tokens at most, in 2 groups, the pool has 39"):
        scheduler.add(prompt("a", [1] * 63, 1))


def test_a_request_that_just_fits_starts_behind_a_cached_prefix_too() -> None:
    """Its window is in the cache and falls out again: no more is kept for it than without any hit."""
    scheduler = scheduler_of(num_blocks=28, max_num_batched_tokens=4, full_sequence_must_fit=True)
    run(scheduler, prompt("a", list(range(18))))
    long = prompt("b", list(range(40)))
    run(scheduler, long)
    assert long.status == "finished" and long.num_cached_tokens == 18
    assert scheduler.num_free_blocks == 27


# ---- windows ------------------------------------------------------------------------------------------------


def test_a_long_decode_keeps_no_more_than_its_window() -> None:
    scheduler = scheduler_of(num_blocks=80, max_model_len=128)
    scheduler.add(prompt("a", [1, 2, 3], 100, ignore_eos=True))
    most = 0
    while scheduler.has_work():
        request = step(scheduler).requests[0]
        held = [block_id for block_id in request.block_ids(1) if block_id]
        most = max(most, len(held))
        computed = request.num_computed_tokens
        assert request.status == "finished" or len(held) >= -(-computed // 2) - first_read(WINDOW_6[1], computed) // 2
    assert most == 4  # 6 tokens at any place, and a new one
    assert scheduler.num_free_blocks == 79


def test_blocks_leave_before_new_ones_are_taken() -> None:
    """With all other blocks taken, the window moves on over the block that it gives back in the same step."""
    scheduler = scheduler_of(((FULL), ("sliding", 2, 1)), num_blocks=12, max_num_batched_tokens=2)
    request = prompt("a", [1], 12, ignore_eos=True)
    run(scheduler, request)
    assert request.num_tokens == 13 and request.num_preemptions == 0 and scheduler.num_preemptions_total == 0


def test_a_joined_row_sends_each_group_from_its_window_on() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=40)
    ids = list(range(20))
    run(scheduler, prompt("a", ids))
    again = prompt("b", [*ids, 50, 51])
    scheduler.add(again)
    words = step(scheduler).buffer
    blocks = words[words[layout.HEADER_OFF_BLOCKS] : words[layout.HEADER_OFF_COPIES]].reshape(-1, 3).tolist()
    assert words[layout.HEADER_VERSION] == layout.VERSION == 4 and again.num_cached_tokens == 20
    # The query at 20 reads 15 .. 20 in the second group: blocks from the 7th on. Its rows begin at max_num_seqs.
    assert [(row, at) for row, at, _ in blocks] == [*((0, i) for i in range(11)), *((4, i) for i in range(7, 11))]


# ---- hits ---------------------------------------------------------------------------------------------------


def test_a_hit_ends_where_every_group_has_its_window() -> None:
    """A long answer leaves its prompt's end cached in the first group; its window went and was overwritten."""
    kv = KVManager(30, 2, kv_groups=WINDOW_6)
    first = prompt("a", list(range(16)))
    assert kv.admit(first, kv.match(first), 16)
    kv.publish(first, 16)
    assert kv.match(prompt("b", [*range(16), 99])) == 8
    assert kv.match(prompt("b", [*range(10), 98, 99])) == 5  # still there: nothing was overwritten
    twins = kv.prefix_map.twins
    assert twins is not None and twins.num_entries == 8
    kv.prefix_map.remove_id(first.block_ids(1)[4])  # tokens 8, 9
    assert twins.num_entries == 7 and kv.prefix_map.num_entries == 8
    assert kv.match(prompt("b", [*range(16), 99])) == 8  # the query at 16 reads from 11 on
    assert kv.match(prompt("b", [*range(14), 98, 99])) == 4  # that at 14 reads from 9 on, and so do all down to 10
    kv.check([first])


def test_a_coarse_group_is_hit_in_whole_blocks() -> None:
    """B10, INV-15: a coarse block goes by the hash of the last fine one in it."""
    kv = KVManager(60, 2, kv_groups=(FULL, ("sliding", 5, 4)))
    first = prompt("a", list(range(23)))
    assert kv.admit(first, kv.match(first), 23)
    kv.publish(first, 23)
    twins = kv.prefix_map.twins
    assert twins is not None
    fine, coarse = first.block_ids(), first.block_ids(1)
    assert [twins.twin(fine[i], 1) for i in range(11)] == [0, 0, 0, coarse[0], 0, 0, 0, coarse[1], 0, 0, 0]
    assert kv.match(prompt("b", list(range(23)))) == 8
    assert kv.match(prompt("b", list(range(15)))) == 4


def test_a_twin_is_not_found_by_the_hash_it_had_as_a_primary() -> None:
    kv = KVManager(7, 2, kv_groups=(FULL, ("full", 0, 1)))
    ids = list(range(6))
    first = prompt("a", ids)
    assert kv.admit(first, kv.match(first), 6) and first.block_ids() == [1, 2, 3]
    kv.publish(first, 6)
    kv.prefix_map.remove_id(1)  # and all that follows
    kv.hold_back(first, 0)
    kv.release(first)
    assert kv.pool.free_ids()[:3] == [1, 2, 3]
    again = prompt("b", ids[:2])
    assert kv.admit(again, kv.match(again), 2) and [again.block_ids(g) for g in (0, 1)] == [[1], [2]]
    kv.publish(again, 2)
    assert kv.hasher is not None and kv.pool.is_hashed(2)
    assert kv.prefix_map.find_path_bytes(kv.hasher.chain(ids, 2)) == [1]


def test_what_leaves_the_first_group_leaves_all() -> None:
    """B8, INV-15: each group has a block of its own under one hash."""
    kv = KVManager(60, 2, kv_groups=(FULL, ("sliding", 100, 1), ("chunked", 100, 2)))
    first = prompt("a", list(range(12)))
    assert kv.admit(first, kv.match(first), 12)
    kv.publish(first, 12)
    twins = kv.prefix_map.twins
    assert twins is not None and twins.num_entries == 9
    kv.prefix_map.remove_id(first.block_ids()[3])  # and all that follows
    assert kv.prefix_map.num_entries == 3 and twins.num_entries == 4
    kv.check([first])
    kv.release(first)
    # Not indexed any more when they were released, so they are offered again: nothing was named.
    assert kv.prefix_map.num_entries == 6 and twins.num_entries == 9


def test_a_lost_window_comes_back_under_the_first_group_of_another() -> None:
    """The prefix is in use, its window is gone: whoever computes it again makes it whole."""
    kv = KVManager(60, 2, kv_groups=WINDOW_6)
    first, second = prompt("a", list(range(10))), prompt("b", list(range(10)))
    assert kv.admit(first, kv.match(first), 10)
    kv.publish(first, 10)
    for block_id in first.block_ids(1):
        kv.prefix_map.remove_id(block_id)
    assert kv.match(second) == 0 and kv.admit(second, 0, 10)
    kv.publish(second, 10)
    assert not any(map(kv.pool.is_hashed, second.block_ids())) and all(map(kv.pool.is_hashed, second.block_ids(1)))
    third = prompt("c", list(range(11)))
    hits = kv.match(third)
    assert hits == 5 and kv.admit(third, hits, 11)
    assert third.block_ids()[:5] == first.block_ids() and third.block_ids(1)[2:5] == second.block_ids(1)[2:]
    kv.check([first, second, third])


def test_siblings_compute_their_prompt_once() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16)
    siblings = Siblings()
    choices = [prompt(str(i), list(range(21)), 5, ignore_eos=True, siblings=siblings) for i in range(3)]
    for request in choices:
        scheduler.add(request)
    tokens = 0
    while scheduler.has_work():
        tokens += step(scheduler).num_tokens
    assert [request.num_cached_tokens for request in choices] == [0, 20, 20]
    assert tokens == 21 + 1 + 1 + 3 * 4


def test_siblings_without_a_cache_do_not_wait_for_each_other() -> None:
    scheduler = scheduler_of(enable_prefix_caching=False)
    siblings = Siblings()
    for i in range(3):
        scheduler.add(prompt(str(i), list(range(21)), 5, siblings=siblings))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_rows == 3


# ---- making way ---------------------------------------------------------------------------------------------


def test_a_newcomer_leaves_what_a_running_prompt_still_needs_in_other_groups() -> None:
    options = {"num_blocks": 44, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 4}
    scheduler = scheduler_of((FULL, FULL), full_sequence_must_fit=True, **options)
    scheduler.add(prompt("long", list(range(40)), 1))
    scheduler.add(prompt("short", list(range(100, 104)), 1))
    assert step(scheduler).num_rows == 1  # of 43 blocks the first needs 40, the second 4
    run(scheduler)


def test_a_victim_takes_back_what_it_hung_on_the_blocks_of_others() -> None:
    """What it was to compute in the step that preempts it is never computed, so nobody may find it."""
    scheduler = scheduler_of(max_num_batched_tokens=6, max_num_active_seqs=1, policy="priority")
    kv, ids = scheduler.kv, list(range(12))
    run(scheduler, prompt("old", ids))
    primaries, twins = cached(kv, ids)[:6], cached(kv, ids)[6:]
    for block_id in twins:  # the window is lost
        kv.prefix_map.remove_id(block_id)
    victim = prompt("victim", [*ids, 99], priority=5)
    scheduler.add(victim)
    step(scheduler)
    assert cached(kv, ids) == [*primaries, *victim.block_ids(1), 0, 0, 0]
    urgent = prompt("urgent", [*ids, 98])
    scheduler.add(urgent)
    plan = step(scheduler)  # the victim had the next six tokens of it
    assert plan.requests == [urgent] and victim.num_preemptions == 1 and urgent.num_cached_tokens == 6
    assert cached(kv, ids)[9:] == urgent.block_ids(1)[3:6]
    run(scheduler)


# ---- governance ---------------------------------------------------------------------------------------------


def named(ids: list[int], **options: object) -> NamedPrefix:
    return NamedPrefix(pack_token_ids(ids, 1000), 2, **options)  # type: ignore[arg-type]


def test_an_evicted_span_is_hit_through_no_group() -> None:
    scheduler = scheduler_of()
    control, ids = CacheControl(scheduler), list(range(20))
    run(scheduler, prompt("a", ids))
    assert control.cached_blocks(named(ids)) == 10
    assert control.evict(named(ids, start=12)) is not None
    twins = scheduler.kv.prefix_map.twins
    assert twins is not None and (scheduler.kv.prefix_map.num_entries, twins.num_entries) == (6, 6)
    assert scheduler.kv.match(prompt("b", [*ids, 99])) == 6


def test_a_running_request_hangs_nothing_on_what_was_evicted_by_name() -> None:
    """Somebody else computes the span anew; what saw the evicted one must not come along (INV-70)."""
    scheduler = scheduler_of((FULL, ("sliding", 6, 2)))
    control, ids = CacheControl(scheduler), list(range(20))
    first = prompt("a", ids, 30, ignore_eos=True)
    scheduler.add(first)
    step(scheduler)
    control.evict(named(ids, start=9))
    scheduler.add(prompt("b", ids, 30, ignore_eos=True))
    for _ in range(4):
        step(scheduler)
    twins = scheduler.kv.prefix_map.twins
    assert twins is not None
    hung = [twins.twin(b, 1) for b in scheduler.running_requests()[1].block_ids() if scheduler.kv.pool.is_hashed(b)]
    assert any(hung) and not set(filter(None, hung[5:])) & set(first.block_ids(1))
    scheduler.abort(first)
    scheduler.check_invariants()


def test_a_quarantined_span_is_cached_in_no_group() -> None:
    scheduler = scheduler_of()
    control, ids = CacheControl(scheduler), list(range(20))
    control.bar(named(ids, start=8))
    run(scheduler, prompt("a", ids))
    twins = scheduler.kv.prefix_map.twins
    assert twins is not None and (scheduler.kv.prefix_map.num_entries, twins.num_entries) == (4, 4)


def test_a_pin_holds_the_window_behind_the_prefix() -> None:
    scheduler = scheduler_of(num_blocks=40, max_model_len=30, max_num_batched_tokens=4)
    control, ids = CacheControl(scheduler), list(range(12))
    run(scheduler, prompt("a", ids))
    pin = control.pin(named(ids))
    assert pin is not None and pin[1] == 6 and control.num_pinned_blocks == 6 + 3  # it reads from 7 on
    for i in range(20):  # overwrites everything else
        run(scheduler, prompt(str(i), list(range(100 * i + 100, 100 * i + 120))))
    again = prompt("b", [*ids, 99])
    run(scheduler, again)
    assert again.num_cached_tokens == 12
    assert control.unpin(pin[0]) == 9
    control.check()
    assert scheduler.num_free_blocks == 39


def test_pins_leave_room_for_the_longest_request_in_all_groups() -> None:
    scheduler = scheduler_of(num_blocks=40, max_model_len=30, max_num_batched_tokens=4)
    # 16 blocks for 31 tokens, ceil((5 + 4) / 2) + 1 = 6 for the window.
    assert CacheControl(scheduler).max_pinned_blocks == 39 - 16 - 6


def test_a_forced_reset_forgets_all_groups() -> None:
    scheduler = scheduler_of()
    ids = list(range(20))
    scheduler.add(prompt("a", ids, 30))
    step(scheduler)
    assert scheduler.reset_prefix_cache(force=True)
    twins = scheduler.kv.prefix_map.twins
    assert twins is not None and (scheduler.kv.prefix_map.num_entries, twins.num_entries) == (0, 0)
    run(scheduler)
    scheduler.check_invariants()


def test_prewarmed_blocks_of_all_groups_go_first() -> None:
    scheduler = scheduler_of(num_blocks=60, max_model_len=30)
    run(scheduler, prompt("kept", list(range(12))))
    run(scheduler, prompt("warm", list(range(50, 62)), prewarms=True))
    kv = scheduler.kv
    assert kv.match(prompt("b", [*range(50, 62), 99])) == 6
    order = [kv.pool.free_ids().index(b) for b in cached(kv, list(range(50, 62))) + cached(kv, list(range(12)))]
    assert len(order) == 24 and max(order[:12]) < min(order[12:])
    fillers = kv.pool.num_free - 2 * 12
    other = prompt("c", list(range(200, 200 + 2 * (fillers // 2 + 2))))
    assert kv.extend(other, other.num_tokens)
    assert kv.match(prompt("b", [*range(50, 62), 99])) < 6 and kv.match(prompt("d", [*range(12), 99])) == 6


def test_a_hit_ends_the_prewarming_of_what_it_reads_in_all_groups() -> None:
    """Q6: from then on it is worth as much as anything that was used."""
    scheduler = scheduler_of(num_blocks=60, max_model_len=30)
    run(scheduler, prompt("kept", list(range(12))))
    run(scheduler, prompt("warm", list(range(50, 62)), prewarms=True))
    run(scheduler, prompt("hit", [*range(50, 62), 99]))
    warm, free = cached(scheduler.kv, list(range(50, 62))), scheduler.kv.pool.free_ids()
    read = warm[:6] + warm[6 + 3 :]  # the query at 12 reads from 7 on
    assert min(map(free.index, read)) > max(map(free.index, cached(scheduler.kv, list(range(12)))))


# ---- against a twin of lists and dicts -------------------------------------------------------------------------


class GroupMachine(RuleBasedStateMachine):
    """Several requests over a small pool; every table, hit and free list equals the twin's."""

    @initialize(
        num_blocks=st.integers(4, 30),
        block_size=st.sampled_from([1, 2, 3]),
        kv_groups=st.sampled_from(GROUP_SETS),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks: int, block_size: int, kv_groups: tuple[Group, ...], caching: bool) -> None:
        self.kv = KVManager(num_blocks, block_size, caching, kv_groups=kv_groups)
        self.twin = NaiveKV(num_blocks, block_size, caching, kv_groups=kv_groups)
        self.live: list[tuple[Request, NaiveTable, int, int]] = []
        """Request, twin, tokens covered, tokens computed."""

    @rule(
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        skip=st.sampled_from([False, False, False, True]),
        data=st.data(),
    )
    def admit(self, ids: list[int], skip: bool, data: st.DataObject) -> None:
        request = Request("r", ids, max_tokens=1, skip_prefix_cache=skip)
        table = NaiveTable(list(ids), reads_cache=not skip)
        hits = self.twin.match(table)
        assert self.kv.match(request) == len(hits)
        start = len(hits) * self.twin.block_size
        assert request.num_matched == start < len(ids)
        until = data.draw(st.integers(start + 1, len(ids)))
        admitted = self.twin.admit(table, hits, until)
        assert self.kv.admit(request, len(hits), until) == admitted
        if admitted:
            self.live.append((request, table, until, start))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.live) - 1))
        request, table, covered, computed = self.live[at]
        computed = data.draw(st.integers(computed, covered))
        until = data.draw(st.integers(covered, len(table.tokens)))
        extended = self.twin.extend(table, until, computed)
        assert self.kv.extend(request, until, computed) == extended
        self.live[at] = (request, table, until if extended else covered, computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        request, table, covered, _ = data.draw(st.sampled_from(self.live))
        computed = data.draw(st.integers(0, covered))
        self.kv.publish(request, computed)
        self.twin.publish(table, computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request, table, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.kv.release(request)
        self.twin.release(table)
        assert request.block_ids() == request.block_ids(1) == []

    @precondition(lambda self: self.twin.pool.key_of or self.twin.pool.twin_key)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Takes some block out of the index, with all that hangs on it."""
        block_id = data.draw(st.sampled_from(sorted([*self.twin.pool.key_of, *self.twin.pool.twin_key])))
        assert self.kv.prefix_map.remove_id(block_id) == self.twin.pool.forget(block_id)

    @rule()
    def reset(self) -> None:
        assert self.kv.reset() == self.twin.reset()

    @invariant()
    def agrees_with_the_twin(self) -> None:
        if not hasattr(self, "live"):
            return
        self.kv.check([request for request, _, _, _ in self.live])
        assert self.kv.pool.free_ids() == self.twin.pool.free
        assert self.kv.num_evicted_blocks == self.twin.pool.num_evicted
        for request, table, _, _ in self.live:
            assert request.block_ids() == table.blocks
            assert [request.block_ids(g) for g in self.twin.others] == table.more
        indexed = {i for i in range(1, self.twin.pool.num_blocks) if self.kv.pool.is_hashed(i)}
        assert indexed == {*self.twin.pool.key_of, *self.twin.pool.twin_key}


TestGroupMachine = GroupMachine.TestCase
