"""KV that a connector has: what is loaded, what becomes of what is lost, what is fenced, and what is stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from aioengine.cache_admin import CacheAdmin
from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request, Siblings
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan
from tests.oracle.device import FakeDevice
from tests.unit.test_scheduler import settle
from tests.unit.test_scheduler_async import expected_output

BLOCK = 4
PROMPT = list(range(1, 15))
"""Three full blocks and two tokens."""


@dataclass
class Tier:
    """A connector that has the blocks of `contents`, each with what the device had in its slots."""

    contents: dict[bytes, list[tuple[int, int] | None]] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    """How many blocks each question was about."""
    fails: set[bytes] = field(default_factory=set)
    """Hashes whose next load fails; it goes on saying that it has them."""

    def num_matched(self, block_hashes: list[bytes]) -> int:
        self.asked.append(len(block_hashes))
        return next((i for i, digest in enumerate(block_hashes) if digest not in self.contents), len(block_hashes))


class LoadingDevice(FakeDevice):
    """Does the loads of a step before everything else; a block that is lost holds tokens of no text."""

    def __init__(self, num_blocks: int, tier: Tier) -> None:
        super().__init__(num_blocks, BLOCK)
        self.tier = tier
        self.lost: list[int] = []

    def finish(self) -> tuple[StepPlan, npt.NDArray[np.int32]]:
        plan = self.launched[0]
        self.lost = []
        for digest, block_id in plan.loads:
            content = self.tier.contents.get(digest)
            assert content is not None
            if digest in self.tier.fails:
                self.lost.append(block_id)
                content = [(39, slot[1]) for slot in content if slot is not None]
            self.slots[block_id * BLOCK : (block_id + 1) * BLOCK] = content
        return super().finish()

    def store(self, stores: Iterable[tuple[bytes, int]]) -> None:
        for digest, block_id in stores:
            self.tier.contents[digest] = self.slots[block_id * BLOCK : (block_id + 1) * BLOCK]


class World:
    """A scheduler, a tier that keeps everything, and a device `delay` steps behind."""

    def __init__(self, delay: int = 0, tier: Tier | None = None, **options: object) -> None:
        self.tier = Tier() if tier is None else tier
        defaults: dict[str, object] = {
            "num_blocks": 40, "block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 64,
            "max_model_len": 64, "root_seed": b"tier", "max_in_flight": delay + 1,
            "enable_partial_block_reuse": True, "kv_connector": self.tier,
        }  # fmt: skip
        self.scheduler = Scheduler(**{**defaults, **options})  # type: ignore[arg-type]
        self.device = LoadingDevice(self.scheduler.num_blocks, self.tier)
        self.loads: list[tuple[bytes, int]] = []
        self.stored: list[bytes] = []
        self.requests: list[Request] = []

    def add(self, prompt: list[int], max_tokens: int = 5, seed: int = 0, **options: object) -> Request:
        name = f"r{len(self.requests)}"
        request = Request(name, prompt, max_tokens=max_tokens, sampling=seed, **options)  # type: ignore[arg-type]
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def launch(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.check_invariants()
        self.loads += plan.loads
        self.device.launch(plan)
        return plan

    def settle(self) -> list[Request]:
        plan, token_ids = self.device.finish()
        changed = self.scheduler.update(plan, token_ids, self.device.lost)
        self.scheduler.check_invariants()
        stores = self.scheduler.take_stores()
        self.stored += [digest for digest, _ in stores]
        self.device.store(stores)
        assert not {plan.requests[row] for row in plan.dropped_rows} & set(changed)
        return changed

    def step(self) -> None:
        while self.scheduler.num_in_flight_steps < self.scheduler.max_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.scheduler.check_invariants()
            self.loads += plan.loads
            self.device.launch(plan)
        if self.device.launched:
            self.settle()

    def run(self) -> None:
        """To the end; every request that was not aborted must have its own text."""
        for _ in range(300):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work()
        assert self.scheduler.num_free_blocks == self.scheduler.num_blocks - 1
        for request in self.requests:
            prompt = request.token_ids()[: request.num_prompt_tokens].tolist()
            assert isinstance(request.sampling, int)
            output = expected_output(prompt, request.max_tokens, 999, 999, request.sampling)
            known = request.output_ids_from(0)
            assert known == (output[: len(known)] if request.finish_reason == "abort" else output), request

    def cached(self, tokens: list[int]) -> int:
        """Full blocks of a prefix that the pool has cached."""
        return CacheControl(self.scheduler).cached_blocks(NamedPrefix(np.array(tokens, np.int32), BLOCK))

    def forget(self) -> None:
        """The pool loses all that nobody uses; the tier keeps it."""
        assert self.scheduler.reset_prefix_cache()


def warm(prompt: list[int] = PROMPT, **options: object) -> World:
    """A world whose tier alone has a prompt and its answer."""
    world = World(**options)  # type: ignore[arg-type]
    world.add(prompt)
    world.run()
    assert not world.loads
    world.forget()
    return world


def hashes_of(prompt: list[int]) -> list[bytes]:
    """Of the full blocks of a prompt."""
    world = World()
    request = world.add([*prompt, 0])
    world.launch()
    return world.scheduler.kv.hashes_of(request)[: len(prompt) // BLOCK]


@pytest.mark.parametrize("local_full", [0, 1, 2, 3])
@pytest.mark.parametrize("local_tail", [0, 1, 3])
@pytest.mark.parametrize("num_remote", [0, 1, 2, 3, 4])
def test_loads_only_what_reaches_further_than_local_hits_and_then_copies_no_tail(
    local_full: int, local_tail: int, num_remote: int
) -> None:
    """B15, INV-20. The prompt ends with its fourth block: the last token is computed in any case (INV-16)."""
    prompt = list(range(1, 17))
    local = local_full * BLOCK + local_tail
    hashes = hashes_of(prompt)
    contents: dict[bytes, list[tuple[int, int] | None]] = {
        digest: [(prompt[i], i) for i in range(BLOCK * at, BLOCK * at + BLOCK)]
        for at, digest in enumerate(hashes[:num_remote])
    }
    tier = Tier()
    world = World(tier=tier)
    if local:  # one that parts from the prompt there, and whose blocks are all full
        world.add([*prompt[:local], *[30] * (20 - local)])
        world.run()
        assert not world.loads
    tier.contents = contents
    tier.asked.clear()
    request = world.add(prompt)
    plan = world.launch()
    remote = min(num_remote, 3) * BLOCK
    if remote > local:
        first = local // BLOCK
        blocks = request.block_ids()[first : remote // BLOCK]
        assert plan.loads == list(zip(hashes[first : remote // BLOCK], blocks, strict=True))
        assert (plan.num_computed(0), plan.num_copies) == (remote, 0)
    else:
        assert plan.loads == []
        assert (plan.num_computed(0), plan.num_copies) == (local, local % BLOCK > 0)
    assert request.num_cached_tokens == plan.num_computed(0) == max(local, remote)
    assert world.scheduler.num_external_hit_tokens == sum(BLOCK for _ in plan.loads)
    assert tier.asked == ([3 - local // BLOCK] if local // BLOCK < 3 else [])
    world.run()


def test_what_is_loaded_is_not_computed_and_counts_as_cached() -> None:
    world = warm()
    num_hits = world.scheduler.prefix_hit_tokens
    request = world.add([*PROMPT, 20, 21, 22])
    plan = world.launch()
    # The tier has the answer too, but the prompt goes on otherwise.
    assert len(plan.loads) == 3 and plan.num_new(0) == 5
    world.run()
    assert request.num_cached_tokens == world.scheduler.num_external_hit_tokens == 12
    assert world.scheduler.num_external_query_tokens == 14 + 17
    assert world.scheduler.prefix_hit_tokens == num_hits


def test_others_of_the_same_step_hit_what_is_loaded() -> None:
    world = warm()
    first, second = world.add([*PROMPT, 20, 21]), world.add([*PROMPT, 30, 31])
    plan = world.launch()
    assert len(plan.loads) == 3 and second.block_ids()[:3] == first.block_ids()[:3]
    assert second.num_cached_tokens == 12
    world.run()


def test_nothing_is_asked_for_those_who_want_nothing_cached() -> None:
    world = warm()
    world.tier.asked.clear()
    for options in ({"skip_prefix_cache": True}, {"wants_prompt_logits": True}):
        world.add(PROMPT, **options)
    world.add([1, 2, 3, 4])  # one block, whose last token must be computed
    world.run()
    assert not world.loads and not world.tier.asked
    assert world.scheduler.num_external_query_tokens == 14 + 4  # the first one of all, and the last


def test_a_long_prompt_is_asked_for_in_pieces_until_one_is_missing() -> None:
    prompt = [i % 37 for i in range(600)]
    world = World(num_blocks=400, max_model_len=700, max_num_batched_tokens=700)
    world.add(prompt)
    world.run()
    world.forget()
    world.tier.asked.clear()
    request = world.add(prompt)
    world.run()
    assert world.tier.asked == [64, 64, 21] and request.num_cached_tokens == 596
    world.forget()
    world.tier.asked.clear()
    del world.tier.contents[world.scheduler.kv.hashes_of(request)[70]]
    request = world.add(prompt)
    world.run()
    assert world.tier.asked[:2] == [64, 64] and len(world.tier.asked) == 2 and request.num_cached_tokens == 280


@pytest.mark.parametrize("answer", [-1, 4, None, "3"])
def test_an_answer_that_cannot_be_is_refused(answer: object) -> None:
    world = World()
    world.tier.num_matched = lambda block_hashes: answer  # type: ignore[assignment,method-assign,return-value]
    world.add(PROMPT)
    with pytest.raises(ValueError, match="of 3 blocks can be fetched"):
        world.scheduler.schedule()


def test_a_connector_needs_prefix_caching_and_one_group_and_can_be_asked() -> None:
    with pytest.raises(ValueError, match="kv_connector needs prefix caching: it"):
        World(enable_prefix_caching=False, enable_partial_block_reuse=False)
    with pytest.raises(ValueError, match="prefix caching and one KV group, not 2"):
        World(kv_groups=(("full", 0, 1), ("sliding", 8, 1)), enable_partial_block_reuse=False)
    with pytest.raises(TypeError, match="has no num_matched"):
        World(kv_connector=object())


def test_a_connector_is_asked_anew_though_no_step_could_be_made_meanwhile() -> None:
    """I3: what it said in one call of schedule() may be untrue in the next, if nothing could run in between."""
    world = World(delay=1, num_blocks=7, max_model_len=24, enable_partial_block_reuse=False)
    world.add(PROMPT, max_tokens=1)
    world.run()
    world.forget()
    world.add([30] * 19, max_tokens=1)  # five blocks of six
    world.launch()
    request = world.add(PROMPT, max_tokens=4)
    assert world.scheduler.schedule() is None and world.tier.asked[-1] == 3
    world.settle()
    world.tier.contents.clear()
    assert world.launch().loads == [] and request.num_computed_tokens == len(PROMPT)


def test_what_is_barred_is_not_loaded() -> None:
    """INV-70: only what comes before the span, whatever the tier has."""
    world = warm()
    control = CacheControl(world.scheduler)
    name = NamedPrefix(np.array(PROMPT[:10], np.int32), BLOCK)
    assert control.bar(name) and name.span_block == 2
    request = world.add(PROMPT)
    world.run()
    assert request.num_cached_tokens == 8 and len(world.loads) == 2 and control.cached_blocks(name) == 2
    other = world.add([*PROMPT[:8], 30, 31, 32, 33, 34])  # as far as the span, another text
    world.run()
    assert other.num_cached_tokens == 8


def test_loaded_for_the_cache_alone_is_evicted_first() -> None:
    world = warm()
    world.add([40, 41, 42, 43, 44], max_tokens=0)
    world.add(PROMPT, max_tokens=0, prewarms=True)
    world.run()
    assert len(world.loads) == 3
    taken, _ = world.scheduler.kv.prefix_map.take_ids(world.scheduler.num_free_blocks - 1)
    assert world.cached(PROMPT) == 0 and world.cached([40, 41, 42, 43]) == 1
    for block_id in taken:
        world.scheduler.kv.pool.release_id(block_id)


# ---- lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("stale_output", ["deliver", "drop"])
def test_a_lost_block_is_computed_and_not_asked_for_again(delay: int, lost: int, stale_output: str) -> None:
    """I16."""
    world = warm(delay=delay, stale_output=stale_output)
    world.tier.fails = {hashes_of(PROMPT)[lost]}
    request = world.add(PROMPT)
    world.launch()
    while world.scheduler.num_in_flight_steps <= delay:
        world.launch()
    world.tier.asked.clear()
    assert world.settle() == []
    assert request.status == "preempted" and request.num_in_flight == request.num_output_tokens == 0
    assert request.num_cached_tokens == lost * BLOCK
    assert world.cached(PROMPT) == lost, "what was lost can be hit"
    world.run()
    assert not world.tier.asked and len(world.loads) == 3 and world.scheduler.num_lost_blocks == 1
    assert world.scheduler.num_load_preemptions_total == world.scheduler.num_preemptions_total == 1


@pytest.mark.parametrize("when", ["same step", "a step later", "two steps later"])
def test_whoever_hit_a_lost_block_computes_again(when: str) -> None:
    world = warm(delay=2)
    world.tier.fails = {hashes_of(PROMPT)[1]}
    first = world.add([*PROMPT, 20])
    bystander = world.add([33] * 9)
    prompt = [*PROMPT, 20, 21, 22, 23]
    if when == "same step":
        second = world.add(prompt)
    world.launch()
    if when == "a step later":
        second = world.add(prompt)
    world.launch()
    if when == "two steps later":
        second = world.add(prompt)
    plan = world.launch()
    assert second in plan.requests and second.num_cached_tokens >= 12
    world.settle()
    assert first.status == second.status == "preempted" and bystander.status == "running"
    assert second.num_in_flight == 0 and second.num_cached_tokens == BLOCK
    world.run()
    assert world.scheduler.num_load_preemptions_total == 2
    # The second one may ask, and the tier still says that it has the block; then it is the one who does not again.
    assert world.scheduler.num_lost_blocks <= 2


@pytest.mark.parametrize("delay", [0, 2])
def test_siblings_that_share_a_lost_block_compute_again(delay: int) -> None:
    world = warm(delay=delay)
    world.tier.fails = set(hashes_of(PROMPT)[:2])
    siblings = Siblings()
    choices = [world.add(PROMPT, seed=seed, siblings=siblings) for seed in range(3)]
    while world.scheduler.num_in_flight_steps <= delay:
        world.launch()
    world.settle()
    assert choices[0].status == "preempted" and all(c.num_output_tokens == 0 for c in choices)
    world.run()


def test_a_copy_of_a_tail_that_was_computed_on_a_lost_block_is_found() -> None:
    """INV-20: a sibling that hit all full blocks elsewhere still has the loader's in its table when it copies its tail.

    Whoever makes way hides what is computed in the same step, so the loader does not hit what `other` computes.
    """
    world = World(
        delay=1, policy="priority", max_num_active_seqs=3, max_num_batched_tokens=16, long_prefill_token_threshold=2,
        enable_partial_block_reuse=False,
    )  # fmt: skip
    prompt = PROMPT[:6]
    world.add(prompt, max_tokens=1)
    world.run()
    world.forget()
    for token in (30, 31):
        world.add([token] * 2, max_tokens=40, priority=5)
    for _ in range(3):
        world.step()
    world.tier.fails = set(world.tier.contents)
    other = world.add([*prompt[:4], *[20] * 8], max_tokens=3, wants_prompt_logits=True)
    while world.scheduler.num_in_flight_steps:
        world.settle()
    world.launch()
    siblings = Siblings()
    loader, copier = (world.add(prompt, max_tokens=8, priority=1, siblings=siblings) for _ in range(2))
    loaded = world.launch().loads
    assert loaded and other.block_ids()[0] != loader.block_ids()[0] == loaded[0][1]
    world.settle()
    assert world.launch().num_copies == 1 and copier.status == "running"
    world.settle()
    assert world.device.lost == [loaded[0][1]] and loader.status == copier.status == "preempted"
    world.run()


def test_a_request_that_ended_meanwhile_gives_its_lost_blocks_back() -> None:
    world = warm(delay=2)
    world.tier.fails = {hashes_of(PROMPT)[0]}
    request, other = world.add(PROMPT), world.add([*PROMPT, 20, 21])
    world.launch()
    world.launch()
    world.scheduler.abort(request)
    world.scheduler.check_invariants()
    world.settle()
    assert other.status == "preempted" and world.cached(PROMPT) == 0
    world.settle()
    assert world.scheduler.num_free_blocks == world.scheduler.num_blocks - 1
    world.run()


def test_a_preempted_request_is_told_nothing_of_what_it_read_before() -> None:
    """Its blocks are fenced, so its table still says that it has read the lost one."""
    world = warm(delay=2)
    world.tier.fails = {hashes_of(PROMPT)[0]}
    request = world.add(PROMPT)
    world.launch()
    world.launch()
    assert world.scheduler.reset_prefix_cache(force=True)
    assert request.status == "preempted" and request.num_in_flight == 2
    assert world.settle() == [] and request.num_in_flight == 0
    world.tier.asked.clear()
    world.run()
    assert not world.tier.asked


def test_ids_that_were_not_to_be_loaded_are_refused_and_nothing_changes() -> None:
    world = warm()
    request = world.add(PROMPT)
    plan = world.launch()
    hit = request.block_ids()[3]
    for lost in ([hit], [plan.loads[0][1], 99], [0]):
        with pytest.raises(ValueError, match="did not load the blocks"):
            world.scheduler.update(plan, np.array([9], np.int32), lost)
        world.scheduler.check_invariants()
    world.run()
    assert world.scheduler.num_lost_blocks == 0
    scheduler = World(kv_connector=None).scheduler
    scheduler.add(Request("plain", PROMPT, max_tokens=1))
    plain = scheduler.schedule()
    assert plain is not None and plain.loads == [] and scheduler.take_stores() == []
    with pytest.raises(ValueError, match=r"did not load the blocks \[1\]"):
        scheduler.update(plain, np.array([9], np.int32), [1])


def test_after_a_failure_of_the_device_nothing_is_left_of_loads() -> None:
    world = warm(delay=1)
    world.add(PROMPT)
    world.launch()
    world.launch()
    world.scheduler.fail_all()
    world.scheduler.check_invariants()
    assert world.scheduler.num_free_blocks == world.scheduler.num_blocks - 1
    assert world.scheduler.take_stores() == []


@pytest.mark.parametrize("is_hit", [False, True])
def test_a_sibling_copies_nothing_that_may_still_be_lost(is_hit: bool) -> None:
    """It would not be told: it comes a step after one that has the block of the prompt's end loaded, or hit it."""
    world = World(delay=1)
    siblings = Siblings()
    world.add(PROMPT, max_tokens=12, seed=1, siblings=siblings)
    world.run()
    world.forget()
    again = [world.add(PROMPT, max_tokens=12, seed=1, siblings=siblings) for _ in range(2)]
    while min(request.num_output_tokens for request in again) < 3:
        world.step()
    world.scheduler.reset_prefix_cache(force=True)
    while world.device.launched:
        world.settle()
    world.loads.clear()
    world.launch()
    assert [request.block_ids()[3] for request in again] == [world.loads[3][1]] * 2, "the prompt's end is loaded"
    if is_hit:
        world.scheduler.abort(again[0])
    other = world.add(PROMPT, max_tokens=12, seed=2, siblings=siblings)
    plan = world.launch()
    assert other in plan.requests and plan.num_copies == 0 and other.num_cached_tokens == 12
    world.run()


def test_only_what_is_certain_to_be_there_is_pinned() -> None:
    world = warm(delay=1)
    control = CacheControl(world.scheduler)
    world.tier.fails = {hashes_of(PROMPT)[1]}
    world.add(PROMPT)
    world.launch()
    name = NamedPrefix(np.array(PROMPT, np.int32), BLOCK)
    assert (control.cached_blocks(name), control.pinnable_blocks(name), control.pin(name)) == (3, 0, None)
    world.settle()
    assert control.pin(name) == ("pin-1", 1)
    control.unpin("pin-1")
    world.run()
    assert (control.pin(name) or ("", 0))[1] == 3
    control.unpin("pin-2")


async def test_whoever_pins_what_a_step_in_flight_loads_is_told_so() -> None:
    world = warm(delay=1)
    world.add(PROMPT)
    world.launch()

    async def render(prompt: list[int], **_: object) -> list[int]:
        return prompt

    admin = CacheAdmin(world.scheduler, render, lambda *_: None, wake=lambda: None)  # type: ignore[arg-type]
    later = "settled: steps in flight compute or load them; ask again"
    for require_exact, words in ((True, "not all of the prefix is"), (False, "nothing of the prefix is")):
        reply = await admin.pin(PROMPT, require_exact=require_exact)
        assert (reply.status, reply.reason) == ("refused", f"{words} {later}")
    world.settle()
    reply = await admin.pin(PROMPT, require_exact=True)
    assert (reply.status, reply.num_blocks) == ("exact", 3)
    await admin.unpin(reply.pin_id or "")
    world.run()


# ---- fences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_connector", [True, False])
def test_blocks_of_a_victim_are_handed_out_after_the_last_step_that_may_use_them(with_connector: bool) -> None:
    """C21, INV-36."""
    world = World(delay=2) if with_connector else World(delay=2, kv_connector=None)
    request = world.add(PROMPT)
    world.launch()
    world.launch()
    world.scheduler.reset_prefix_cache(force=True)
    for num_left in (2, 1):
        world.scheduler.check_invariants()
        assert world.scheduler.num_free_blocks == 39 - 4 * with_connector, num_left
        assert len(request.block_ids()) == 4 * with_connector
        assert world.scheduler.schedule() is None
        world.settle()
    assert world.scheduler.num_free_blocks == 39
    world.run()


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_that_ends_or_fails_behind_its_fence_gives_everything_back(ends: bool) -> None:
    world = World(delay=2)
    request = world.add(PROMPT)
    world.launch()
    world.scheduler.reset_prefix_cache(force=True)
    if ends:
        world.scheduler.abort(request)
        world.scheduler.check_invariants()
        assert world.scheduler.num_free_blocks == 35
        world.settle()
    else:
        world.scheduler.fail_all()
    world.scheduler.check_invariants()
    assert world.scheduler.num_free_blocks == 39


def test_a_request_that_lacks_blocks_waits_for_a_fence_instead_of_taking_more_victims() -> None:
    world = World(delay=1, num_blocks=9, max_model_len=32)
    for start in range(4):
        world.add([start * 5 + i for i in range(7)], max_tokens=20)
    seen = 0
    while world.scheduler.has_work():
        before = world.scheduler.num_preemptions_total
        world.step()
        assert world.scheduler.num_preemptions_total - before <= 2  # a step makes at most two plans
        seen = max(seen, world.scheduler.num_preemptions_total)
    assert seen > 2
    world.run()


# ---- stores ----------------------------------------------------------------------------------------------


def test_what_was_computed_and_is_over_is_stored_once() -> None:
    world = World(delay=1)
    request = world.add(PROMPT, max_tokens=7)
    world.launch()
    assert world.scheduler.take_stores() == [], "its step is in flight"
    plan, token_ids = world.device.finish()
    world.scheduler.update(plan, token_ids)
    stores = world.scheduler.take_stores()
    assert stores == list(zip(hashes_of(PROMPT), request.block_ids(), strict=False))
    assert world.scheduler.take_stores() == []
    world.device.store(stores)
    world.run()
    assert len(world.tier.contents) == 5  # of 14 + 7 tokens the last one is never computed
    world.forget()
    before = dict(world.tier.contents)
    world.tier.contents = {digest: before[digest] for digest in hashes_of(PROMPT)[:2]}
    world.stored.clear()
    world.add(PROMPT, max_tokens=7)
    world.run()
    assert len(world.loads) == 2 and world.tier.contents == before
    assert world.stored == list(before)[2:], "loaded blocks are not stored, all others are, once"


def test_what_left_the_index_before_it_was_asked_for_is_not_stored() -> None:
    world = World()
    world.add(PROMPT, max_tokens=1)
    plan = world.launch()
    world.scheduler.update(plan, np.array([9], np.int32))
    CacheControl(world.scheduler).evict(NamedPrefix(np.array(PROMPT[:5], np.int32), BLOCK))
    assert [digest for digest, _ in world.scheduler.take_stores()] == hashes_of(PROMPT)[:1]


def test_without_a_connector_plans_load_nothing_and_nothing_is_stored() -> None:
    scheduler = World(kv_connector=None).scheduler
    scheduler.add(Request("a", PROMPT, max_tokens=3))
    plan = scheduler.schedule()
    assert plan is not None and plan.loads == []
    settle(scheduler, plan)
    assert scheduler.take_stores() == [] and scheduler.num_external_query_tokens == 0
