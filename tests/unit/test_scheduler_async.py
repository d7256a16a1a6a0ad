"""Scheduler, pool and packed steps together, with the device 0 to 3 steps behind.

The fake device computes each token from the whole context as it reads it back through blocks and rows, so
the expected output of a request is a plain function of its prompt, whatever the schedule was.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings

from aioengine.fastcore.request import Request, Siblings
from aioengine.fastcore.scheduler import Scheduler
from tests.oracle.device import FakeDevice, next_token

EOS = 7


def expected_output(prompt: list[int], max_tokens: int, min_tokens: int, max_total: int, seed: int = 0) -> list[int]:
    """What a request alone on a perfect machine generates."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens and len(tokens) < max_total:
        tokens.append(next_token(tokens, seed=seed))
        output.append(tokens[-1])
        if output[-1] == EOS and len(output) >= min_tokens:
            break
    return output


@dataclass
class World:
    """A scheduler, a device `delay` steps behind, and the check of every finished request."""

    options: dict[str, object]
    delay: int
    expected: dict[Request, list[int]] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(max_in_flight=self.delay + 1, **self.options)  # type: ignore[arg-type]
        self.device = FakeDevice(self.scheduler.num_blocks, self.scheduler.kv.block_size)

    def add(self, prompt: list[int], max_tokens: int, **options: object) -> Request:
        min_tokens = int(str(options.get("min_tokens", 0)))
        request = Request(
            str(len(self.expected)), prompt, max_tokens=max_tokens, eos_token_ids=[EOS], **options  # type: ignore[arg-type]
        )  # fmt: skip
        self.scheduler.add(request)
        seed = int(str(options.get("sampling", 0)))
        self.expected[request] = expected_output(prompt, max_tokens, min_tokens, self.scheduler.max_total, seed)
        return request

    def add_choices(self, count: int, prompt: list[int], max_tokens: int, **options: object) -> list[Request]:
        """Requests with one prompt that sample differently."""
        siblings = Siblings()
        return [
            self.add(prompt, max_tokens, siblings=siblings, sampling=seed, **options) for seed in range(1, count + 1)
        ]

    def step(self) -> None:
        """Launches as far ahead as allowed, then settles one step."""
        while self.scheduler.num_in_flight_steps <= self.delay:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
            self.device.launch(plan)
            self.scheduler.check_invariants()
        if self.device.launched:
            for request in self.scheduler.update(*self.device.finish()):
                self.check(request)
            self.scheduler.check_invariants()

    def check(self, request: Request) -> None:
        output = request.output_ids_from(0)
        if request.finish_reason in ("stop", "length"):
            assert output == self.expected[request], request
            self.ended[str(request.finish_reason)] += 1
        else:
            assert output == self.expected[request][: len(output)], request

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()
        assert self.scheduler.num_free_blocks == self.scheduler.num_blocks - 1


SMALL: dict[str, object] = {
    "num_blocks": 10,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 32,
}
delays = pytest.mark.parametrize("delay", [0, 1, 2, 3])


@delays
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 4])
def test_never_one_token_too_many(delay: int, max_tokens: int) -> None:
    """C13, INV-29: no step for a request whose last token is in flight."""
    world = World(SMALL, delay)
    request = world.add([1, 2, 3], max_tokens, ignore_eos=True)
    world.run()
    assert request.num_output_tokens == max_tokens and request.finish_reason == "length"
    # Each position once: the last token is sampled, never computed.
    assert [position for _, position in world.device.computed] == list(range(3 + max(0, max_tokens - 1)))


@delays
def test_late_stop_discards_the_tokens_behind_it(delay: int) -> None:
    world = World(SMALL, delay)
    prompts = ([i, j] for i in range(40) for j in range(40))
    prompt = next(ids for ids in prompts if EOS in expected_output(ids, 6, 0, 99)[2:5])
    request = world.add(prompt, 20)
    world.run()
    assert request.output_ids_from(0)[-1] == EOS and request.finish_reason == "stop"
    computed = [position for _, position in world.device.computed]
    assert len(computed) == request.num_tokens - 1 + delay  # what was launched before the stop was known


@delays
@pytest.mark.parametrize("stale_output", ["deliver", "drop"])
def test_preemption_at_any_moment_loses_and_repeats_nothing(delay: int, stale_output: str) -> None:
    """INV-32, INV-33: the text is that without preemption."""
    preempted = 0
    for num_blocks in range(5, 14):
        world = World({**SMALL, "num_blocks": num_blocks, "stale_output": stale_output}, delay)
        for start in range(3):
            world.add([start, 1, 2, 3], 12, ignore_eos=True, min_tokens=12)
        world.run()
        assert world.ended == {"length": 3}
        preempted += world.scheduler.num_preemptions_total
    assert preempted >= 5


def test_preemption_happens_with_samples_in_flight() -> None:
    """C19, INV-33: they are delivered once, and count for nothing else."""
    world = World({**SMALL, "num_blocks": 6}, 2)
    requests = [world.add([i, 1, 2, 3], 10, ignore_eos=True, min_tokens=10) for i in range(3)]
    seen = False
    while world.scheduler.has_work():
        world.step()
        seen = seen or any(r.status == "preempted" and r.num_in_flight for r in requests)
    assert seen and world.ended == {"length": 3}


def test_samples_in_flight_at_a_preemption_may_be_dropped() -> None:
    """C19, INV-33: they reach nobody, the request starts again without waiting for them, and its text is the same."""
    world = World({**SMALL, "num_blocks": 6, "stale_output": "drop"}, 2)
    requests = [world.add([i, 1, 2, 3], 10, ignore_eos=True, min_tokens=10) for i in range(3)]
    num_dropped, before = 0, dict.fromkeys(requests, 0)
    while world.scheduler.has_work():
        in_flight = list(world.device.launched)
        world.step()
        for plan in in_flight[:1]:  # the one that was settled now
            dropped = [plan.requests[i] for i in plan.dropped_rows]
            num_dropped += len(dropped)
            assert all(r.num_preemptions and r.num_output_tokens == before[r] for r in dropped)
        assert not any(r.status == "preempted" and r.num_in_flight for r in requests)
        before = {r: r.num_output_tokens for r in requests}
    assert num_dropped > 3 and world.ended == {"length": 3}


@pytest.mark.parametrize("stale_output", ["deliver", "drop"])
def test_a_forced_reset_drops_or_delivers_what_is_in_flight(stale_output: str) -> None:
    """C19, B18: with drop the preempted request runs again in the very next step."""
    world = World({**SMALL, "stale_output": stale_output}, 2)
    request = world.add([1, 2, 3], 6, ignore_eos=True, min_tokens=6)
    world.step()
    assert request.num_in_flight == 2
    assert world.scheduler.reset_prefix_cache(force=True)
    world.scheduler.check_invariants()
    plan = world.scheduler.schedule()
    if stale_output == "deliver":
        assert request.num_in_flight == 2 and plan is None
    else:
        assert plan is not None and plan.num_computed(0) == 0 and request.num_in_flight == 1
        world.device.launch(plan)
    world.run()
    assert world.ended == {"length": 1}


def test_what_becomes_of_stale_output_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="stale_output='keep' must be deliver or drop"):
        Scheduler(**SMALL, stale_output="keep")  # type: ignore[arg-type]


@delays
def test_cached_and_uncached_runs_agree(delay: int) -> None:
    """INV-19: prefixes that are found change no answer."""
    outputs = []
    for caching in (True, False):
        world = World({**SMALL, "num_blocks": 30, "enable_prefix_caching": caching}, delay)
        requests = [world.add([1, 2, 3, 4, 5, 6, 7, 8, 9, *range(i)], 8) for i in range(6)]
        world.run()
        outputs.append([r.output_ids_from(0) for r in requests])
        assert (world.scheduler.prefix_hit_tokens > 0) == caching
    assert outputs[0] == outputs[1]


def random_world(seed: int, delay: int) -> World:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    options: dict[str, object] = {
        "block_size": block_size,
        "num_blocks": max(4, rng.choice([16, 32, 48, 200]) // block_size),
        "max_num_seqs": rng.choice([1, 2, 4, 8]),
        "max_num_batched_tokens": rng.choice([3, 8, 20, 64]),
        "max_model_len": rng.choice([16, 40]),
        "policy": rng.choice(["fcfs", "priority"]),
        "enable_prefix_caching": rng.random() < 0.8,
        "long_prefill_token_threshold": rng.choice([0, 0, 3]),
    }
    world = World(options, delay)
    stems = [[rng.randrange(40) for _ in range(12)] for _ in range(3)]
    while len(world.expected) < 25:
        if world.scheduler.num_waiting < 4:
            stem = rng.choice(stems)[: rng.randint(1, 12)]
            prompt = stem + [rng.randrange(40) for _ in range(rng.choice([0, 0, 1, 3]))]
            if len(prompt) + 1 < world.scheduler.max_total:
                world.add_choices(
                    rng.choice([1, 1, 2, 5]), prompt, rng.choice([0, 1, 3, 10, 30]), min_tokens=rng.choice([0, 0, 5]),
                    priority=rng.randint(0, 2), cache_salt=rng.choice([b"", b"", b"tenant"]),
                    skip_prefix_cache=rng.random() < 0.1,
                )  # fmt: skip
        for _ in range(rng.randint(0, 3)):
            world.step()
        if rng.random() < 0.15 and world.expected:
            victim = rng.choice(list(world.expected))
            world.scheduler.finish(victim, rng.choice(["abort", "stop"]))
            world.scheduler.check_invariants()
            assert victim.output_ids_from(0) == world.expected[victim][: victim.num_output_tokens]
    world.run()
    for request, expected in world.expected.items():
        assert request.status == "finished"
        assert request.output_ids_from(0) == expected[: request.num_output_tokens]
    return world


@delays
def test_random_load_gives_each_request_its_own_text(delay: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(settings().max_examples):
        print(f"seed {seed}")  # shown if it fails; random_world(seed, delay) replays it
        world = random_world(seed, delay)
        totals += world.ended
        totals["preempted"] += world.scheduler.num_preemptions_total
        totals["hits"] += world.scheduler.prefix_hit_tokens
        totals["copies"] += world.device.num_copies
    for what in ("stop", "length", "preempted", "hits", "copies"):
        assert totals[what] > 10, f"the load no longer reaches {what}"


@pytest.mark.parametrize("seed", range(8))
def test_every_delay_gives_the_same_text_without_aborts(seed: int) -> None:
    outputs = []
    for delay in range(4):
        rng = random.Random(seed)
        world = World({**SMALL, "num_blocks": rng.choice([9, 12, 30])}, delay)
        prompts = [[rng.randrange(4) for _ in range(rng.randint(1, 12))] for _ in range(8)]
        requests = [world.add(prompt, rng.randint(1, 16)) for prompt in prompts]
        world.run()
        outputs.append([(r.output_ids_from(0), r.finish_reason) for r in requests])
    assert all(output == outputs[0] for output in outputs)
