"""What happens in one simulated run: options, a device's pace, and the events, all as plain values.

`kv_connector` stands for a `SimTier`: the share that it keeps, and that of loads that fail; `drafter` for a
`SimDrafter`: most drafts of a row, the share of them that is right, and the batch in which there are none any more.

A seed makes a script and a script makes a run, so a run can be cut down by dropping events and printed as a few
lines that anybody can paste. New options of the scheduler are one line in `OPTIONS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """A keyword of `Scheduler`: its values to draw from, the plainest one first."""

    values: Sequence[Any]
    needs: Callable[[Options], bool] = lambda _: True
    """Whether it may differ from its plainest value, given the options above it."""
    is_apart: bool = False
    """Drawn by a generator of its own, so that all else of a seed's script is as without it."""


FULL = ("full", 0, 1)

OPTIONS: Mapping[str, Option] = {
    "block_size": Option([4, 1, 2, 3, 5, 8, 16, 32]),
    "num_blocks": Option([64, 2, 3, 5, 8, 12, 16, 24, 40, 100, 200, 800]),
    "max_num_seqs": Option([4, 1, 2, 3, 6, 10, 16]),
    "max_model_len": Option([48, 10, 20, 33, 96, 200]),
    "max_num_batched_tokens": Option([256, 1, 2, 5, 8, 16, 24, 64]),
    "max_in_flight": Option([1, 2, 2, 3, 4]),
    "policy": Option(["fcfs", "fcfs", "priority"]),
    "enable_prefix_caching": Option([True, True, True, True, False]),
    "hash_algo": Option(["xxh3_128", "xxh3_128", "xxh3_128", "sha256"]),
    "kv_groups": Option(
        [
            (FULL,),
            (FULL,),
            (FULL,),
            (FULL, ("sliding", 5, 1)),
            (FULL, ("sliding", 1, 1)),
            (FULL, ("sliding", 17, 2)),
            (FULL, ("sliding", 3, 1), ("sliding", 24, 1)),
            (FULL, ("chunked", 6, 1)),
            (FULL, ("chunked", 16, 4), ("sliding", 9, 2)),
            (FULL, FULL, ("sliding", 8, 1), ("sliding", 8, 1)),
            (FULL, ("full", 0, 2), ("sliding", 11, 1)),
        ]
    ),
    "enable_partial_block_reuse": Option(
        [False, True, True], lambda o: o["enable_prefix_caching"] and len(o["kv_groups"]) == 1
    ),
    "eviction_policy": Option(["lru", "lru", "cost"], lambda o: o["enable_prefix_caching"]),
    "context_cost": Option([0.0, 0.01], lambda o: o["eviction_policy"] == "cost"),
    "enable_chunked_prefill": Option([True, True, False], lambda o: o["max_num_batched_tokens"] >= o["max_model_len"]),
    "long_prefill_token_threshold": Option([0, 0, 1, 3, 7], lambda o: o["enable_chunked_prefill"]),
    "adaptive_long_prefill_threshold": Option([False, False, True]),
    "max_num_partial_prefills": Option([0, 0, 0, 1, 2]),
    "max_long_partial_prefills": Option([0, 1], lambda o: o["long_prefill_token_threshold"] > 0),
    "max_num_active_seqs": Option([0, 0, 0, 0, 1, 2], lambda o: o["max_num_seqs"] > 1),
    "max_num_scheduled_tokens": Option(
        [0, 0, 1, 7], lambda o: o["enable_chunked_prefill"] and o["max_num_batched_tokens"] > 7
    ),
    "full_sequence_must_fit": Option([False, False, True]),
    "priority_ageing_s": Option([0.0, 0.0, 3.0, 50.0], lambda o: o["policy"] == "priority"),
    "target_itl_s": Option([0.0, 0.0, 0.5, 3.0], lambda o: o["enable_chunked_prefill"]),
    "watermark": Option([0.0, 0.0, 0.0, 0.1, 0.7]),
    "stale_output": Option(["deliver", "deliver", "drop"]),
    "kv_connector": Option(
        [None, None, (1.0, 0.0), (0.9, 0.3), (0.6, 0.05)],
        lambda o: o["enable_prefix_caching"] and len(o["kv_groups"]) == 1,
    ),
    "drafter": Option([None, None, (1, 0.8, 0), (3, 0.5, 0), (4, 1.0, 0), (4, 0.9, 2), (16, 0.7, 0)], is_apart=True),
}

UNBIASED = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "policy",
    "max_in_flight",
)
"""Options that have no usual value."""


@dataclass(frozen=True)
class Add:
    """A request arrives. Its prompt is `shared` tokens of another text, then tokens that only `name` has."""

    at: float
    name: str
    length: int
    max_tokens: int
    stem: int = 0
    shared: int = 0
    follows: str | None = None
    """Shares the beginning of that request's prompt and answer instead of the stem's."""
    label: str | None = None
    """What the caller calls it, if not by its name; another live one may have the same."""
    n: int = 1
    priority: int = 0
    salt: str = ""
    media: tuple[tuple[int, int, str], ...] = ()
    """Pictures in the prompt: first token, number of tokens, name (which tells the number)."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    stop_text: str = ""
    wants_prompt_logits: bool = False
    pace: float = 0.0
    """Seconds that its reader takes for every output."""
    leaves_after: int = 0
    """Its reader goes away after so many outputs; 0 = never."""
    fails_at: int = 0
    """The device reports a failure of its row at this output token; 0 = never."""


@dataclass(frozen=True)
class Abort:
    """Somebody aborts all requests with a label."""

    at: float
    label: str


@dataclass(frozen=True)
class Cancel:
    """The task that reads a request is cancelled."""

    at: float
    name: str


@dataclass(frozen=True)
class Reset:
    """Somebody resets the prefix cache."""

    at: float
    force: bool = False
    """Requests that run are preempted for it."""


@dataclass(frozen=True)
class Govern:
    """An operator does something to the cached prefix of a request's prompt and answer."""

    at: float
    name: str
    what: str
    """evict, quarantine or pin."""
    share: float
    """How much of the prompt and answer is meant; 0: everything under the request's salt, which nobody pins."""


@dataclass(frozen=True)
class Close:
    """The engine is closed; whatever lives ends with an error. The last event."""

    at: float


@dataclass(frozen=True)
class DeviceFails:
    """The device fails in the next step that it executes. The last event."""

    at: float


Event = Add | Abort | Cancel | Reset | Govern | Close | DeviceFails


@dataclass(frozen=True)
class Script:
    """One run."""

    options: Options
    events: tuple[Event, ...]
    step_seconds: tuple[float, ...] = (1.0,)
    """How long steps take, drawn anew for every step; 0 is done before `launch` returns."""
    seed: int = field(default=0)
    """Of the draws of step times."""

    def code(self) -> str:
        """Python lines that replay it."""
        kinds = sorted({type(event).__name__ for event in self.events})
        events = "".join(f"        {_plain(event)},\n" for event in self.events)
        return (
            f"from tests.simulation.script import {', '.join([*kinds, 'Script'])}\n"
            "from tests.simulation.world import run\n\n"
            f"run(Script(\n    {self.options},\n    (\n{events}    ),\n"
            f"    step_seconds={self.step_seconds}, seed={self.seed},\n))"
        )


def _plain(event: Event) -> str:
    """An event without the fields that have their default."""
    shown = [
        f"{name}={getattr(event, name)!r}"
        for name, spec in type(event).__dataclass_fields__.items()
        if getattr(event, name) != spec.default
    ]
    return f"{type(event).__name__}({', '.join(shown)})"


def draw_script(seed: int, num_steps: int) -> Script:
    """The script of a seed, which keeps an engine busy for very roughly `num_steps` steps."""
    rng = random.Random(seed)
    options = draw_options(rng)
    for name in (name for name, option in OPTIONS.items() if option.is_apart):
        options[name] = random.Random(f"{name} {seed}").choice(OPTIONS[name].values)
    step_seconds = rng.choice([(1.0,), (0.0,), (0.0, 1.0), (0.2, 1.0, 4.0), (0.5, 0.5, 0.5, 20.0)])
    traffic = _Traffic(rng, options, seed)
    if rng.random() < 0.6:  # a pool that a few requests fill
        num_tokens = traffic.typical_tokens() * rng.choice([1.0, 1.5, 2.5, 4.0])
        options["num_blocks"] = 2 + int(num_tokens / options["block_size"]) * len(options["kv_groups"])
    events = _draw_events(rng, traffic, num_steps)
    return Script(options, tuple(events), step_seconds, seed)


def draw_options(rng: random.Random) -> Options:
    """Options that may stand together; in half of all runs few of them are unusual."""
    unusual = rng.choice([0.2, 1.0])
    options: Options = {}
    for name, option in OPTIONS.items():
        if option.is_apart:
            options[name] = option.values[0]
            continue
        value = rng.choice(option.values)
        is_free = option.needs(options) and (name in UNBIASED or rng.random() < unusual)
        options[name] = value if is_free else option.values[0]
    return options


def _draw_events(rng: random.Random, traffic: _Traffic, num_steps: int) -> list[Event]:
    events: list[Event] = []
    now, work = 0.0, 0.0
    while work < num_steps:
        add = traffic.arrive(now)
        events += [add, *traffic.disturb(add), *traffic.forget(add)]
        steps = traffic.steps_of(add)
        work += steps
        if rng.random() > traffic.burst:
            now += rng.expovariate(traffic.load) * steps
        if rng.random() < 0.02:
            now += 60 * rng.random()  # a pause in which everything may come to rest
    if rng.random() < 0.1:
        ends = Close if rng.random() < 0.5 else DeviceFails
        return [event for event in _in_order(events) if event.at < now] + [ends(now)]
    return _in_order(events)


def _in_order(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.at)


class _Traffic:
    """The habits of one run's callers."""

    def __init__(self, rng: random.Random, options: Options, seed: int) -> None:
        self.rng = rng
        self.max_len = options["max_model_len"]
        self.priorities = rng.choice([0, 1, 3]) if options["policy"] == "priority" else 0
        self.budget = options["max_num_batched_tokens"]
        self.options = options
        self.max_num_seqs = options["max_num_seqs"]
        self.burst = rng.choice([0.0, 0.3, 0.8])
        self.load = rng.choice([0.5, 1.2, 2.0, 5.0])
        self.disturbance = rng.choice([0.0, 0.1, 0.1, 0.4])
        self.num_stems = rng.choice([1, 2, 5, 50])
        self.salts = rng.choice([[""], ["", "", "a"], ["a", "b", "c"]])
        self.lengths = rng.choice([(1, 6), (1, 30), (10, 40), (20, 120)])
        self.outputs = rng.choice([(1, 4), (1, 20), (10, 60), (20, 60)])
        self.names: list[str] = []
        self.media: dict[str, tuple[tuple[int, int, str], ...]] = {}
        self.losses = random.Random(f"tier {seed}")
        self.forgets = self.losses.choice([0.0, 0.1, 0.5])
        self.looks = random.Random(f"media {seed}")  # its own, so that all else of a seed's script is as without
        start, size = self.looks.choice([0, 1, 4, 9]), self.looks.randint(1, 9)
        a, b = f"a{size}", f"b{size}"
        # So alike that prompts differ in nothing else: another picture, another place, one more behind it.
        self.pictures = self.looks.choice(
            [[()]] * 3
            + [
                [
                    (),
                    ((start, size, a),),
                    ((start + 1, size, a),),
                    ((start, size, b),),
                    ((start, size, a), (start + size, size, b)),
                ]
            ]
        )

    def arrive(self, now: float) -> Add:
        rng = self.rng
        name = f"r{len(self.names)}"
        follows = rng.choice(self.names[-8:]) if self.names and rng.random() < 0.3 else None
        self.names.append(name)
        most = self.max_len if rng.random() < 0.02 else self.max_len - 1  # sometimes one that cannot fit
        length = min(rng.randint(*self.lengths), most)
        max_tokens = 0 if rng.random() < 0.02 else min(rng.randint(*self.outputs), self.max_len - length)
        quirk = rng.random() < 0.3
        media = self.media[follows] if follows and self.looks.random() < 0.7 else self.looks.choice(self.pictures)
        self.media[name] = media = tuple(item for item in media if item[0] + item[1] <= length)
        return Add(
            round(now, 3),
            name,
            length,
            max_tokens,
            stem=rng.randrange(self.num_stems),
            shared=rng.choice([0, length // 2, length - 1, length, rng.randint(0, length)]),
            follows=follows,
            n=rng.choice([2, 3]) if rng.random() < 0.1 else 1,
            priority=rng.randint(-self.priorities, self.priorities),
            salt=rng.choice(self.salts),
            media=media,
            min_tokens=rng.randint(0, max_tokens) if quirk and rng.random() < 0.3 else 0,
            ignore_eos=rng.random() < 0.5,
            stop_ids=(rng.randrange(1, 9),) if quirk and rng.random() < 0.3 else (),
            stop_text=chr(48 + rng.randrange(1, 64)) if quirk and rng.random() < 0.3 else "",
            wants_prompt_logits=quirk and rng.random() < 0.1,
            pace=rng.choice([0.5, 3.0, 30.0]) if rng.random() < 0.15 else 0.0,
        )

    def disturb(self, add: Add) -> list[Event]:
        """What goes wrong soon after an arrival."""
        rng = self.rng
        if rng.random() >= self.disturbance:
            return []
        later = round(add.at + rng.choice([0.0, 0.5, 3.0, 10.0, 40.0]) * rng.random(), 3)
        what = rng.randrange(10)
        if what == 0:
            return [Abort(later, add.name)]
        if what == 1:
            return [Cancel(later, add.name)]
        if what == 2:
            return [Reset(later)]
        if what == 6:
            return [Reset(later, force=True)]
        if what in (7, 8):
            doing = rng.choice(["evict", "quarantine", "pin", "pin"])
            return [
                Govern(later, add.name, doing, rng.choice([0.3, 0.7, 1.0] if doing == "pin" else [0.0, 0.3, 0.7, 1.0]))
            ]
        again = f"{add.name}b"
        if what == 3:  # the same label again in the same tick, with another prompt
            return [Abort(later, add.name), Add(later, again, add.length, 5, stem=add.stem + 1, label=add.name)]
        if what == 4:
            return [Add(later, again, add.length, add.max_tokens, leaves_after=rng.randint(1, 4))]
        fails = replace(add, at=later, name=again, fails_at=rng.choice([1, 1, 1, 4]))
        hits = replace(
            Add(later, f"{again}h", add.length, add.max_tokens, follows=again, shared=add.length),
            salt=add.salt,
            media=add.media,
        )
        return [fails, hits, *(replace(hits, at=later + i, name=f"{again}h{i}") for i in (0, 1, 2))]

    def forget(self, add: Add) -> list[Event]:
        """With a connector, the pool loses now and then what the connector may still have."""
        if self.options["kv_connector"] is None or self.losses.random() > self.forgets:
            return []
        later = round(add.at + self.losses.choice([0.5, 3.0, 10.0, 40.0]) * self.losses.random(), 3)
        if self.losses.random() < 0.2:
            return [Reset(later, force=True)]
        return [Govern(later, add.name, "evict", self.losses.choice([0.0, 0.0, 0.3, 0.7]))]

    def typical_tokens(self) -> float:
        """Prompt and output of a common request."""
        return min(self.max_len, (sum(self.lengths) + sum(self.outputs)) / 2)

    def steps_of(self, add: Add) -> float:
        """About how many steps a request costs while others share them."""
        tokens = add.length + add.max_tokens
        pool_tokens = (self.options["num_blocks"] - 1) * self.options["block_size"]
        at_once = max(1.0, min(self.max_num_seqs, pool_tokens / tokens, self.budget))
        return add.n * max(add.max_tokens / at_once, tokens / self.budget, 0.3)
