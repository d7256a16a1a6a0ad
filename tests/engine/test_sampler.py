"""The sampler: its chain against a plain oracle, independence of rows, state over steps, failed rows.

Every test runs over the C++ of the CPU and over the torch path of other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aioengine.sampler import NOT_FINITE, NOTHING_ALLOWED, OK, Choice, RowLogprobs, Sampler, SamplingPlan
from aioengine.sampling_backend import REFERENCES, DeviceBackend
from aioengine.types import SamplingParams
from tests.oracle import sampling_chain as oracle

MakeSampler = Callable[..., Sampler]

MAKERS: dict[str, MakeSampler] = {
    "native": lambda vocab_size, rows=16: Sampler(vocab_size, rows),
    "torch": lambda vocab_size, rows=16: Sampler(
        vocab_size, rows, backend=DeviceBackend(vocab_size, torch.device("cpu"), REFERENCES)
    ),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> MakeSampler:
    return MAKERS[request.param]


def plan_of(row: oracle.Row, vocab_size: int, **params: Any) -> SamplingPlan:
    """The plan of an oracle row; token ids of constraints are given directly."""
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    given = {name: getattr(row, name) for name in (*names, "repetition_penalty", "min_tokens")}
    return SamplingPlan(
        params=SamplingParams(**given, logit_bias=row.logit_bias or None, **params),
        vocab_size=vocab_size,
        seed=row.seed,
        bad_words=tuple(tuple(word) for word in row.bad_words),
        stop_ids=tuple(row.stop_ids),
        allowed_ids=None if row.allowed is None else tuple(row.allowed),
    )


def plan_for(vocab_size: int, **params: Any) -> SamplingPlan:
    return SamplingPlan(SamplingParams(**params), vocab_size, seed=params.get("seed", 0))


def sample_one(sampler: Sampler, row: oracle.Row, logits: np.ndarray, **params: Any) -> int:
    """The token that the sampler takes for a row in the middle of its life; -1 if it has none."""
    sampler.join(3, plan_of(row, len(logits), **params), row.prompt, row.output)
    step = sampler.sample(torch.from_numpy(logits)[None], [3], [len(row.output)])
    status = int(step.status[0])
    assert status in (OK, NOTHING_ALLOWED)
    return int(step.token_ids[0]) if status == OK else -1


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# ---- the chain --------------------------------------------------------------------------------------------

LN = np.log(floats(0.4, 0.3, 0.2, 0.1))

SWAPS = {  # two neighbouring or distant steps, a row and logits for which their order matters
    "allowed, greedy": (oracle.Row(temperature=0, allowed=[1, 2]), floats(3, 1, 2)),
    "bad_words, greedy": (oracle.Row(temperature=0, bad_words=[[4, 0]], output=[4]), floats(3, 1, 2, 0, 0)),
    "min_tokens, greedy": (oracle.Row(temperature=0, min_tokens=1, stop_ids=[0]), floats(3, 1, 2)),
    "bias, greedy": (oracle.Row(temperature=0, logit_bias={1: 5.0}), floats(3, 1, 2)),
    "repetition, greedy": (oracle.Row(temperature=0, repetition_penalty=2, prompt=[0]), floats(3, 1, 2)),
    "frequency, greedy": (oracle.Row(temperature=0, frequency_penalty=1, output=[0, 0]), floats(3, 1, 2)),
    "presence, greedy": (oracle.Row(temperature=0, presence_penalty=2, output=[0]), floats(3, 1, 2)),
    "bias, repetition": (
        oracle.Row(temperature=0, logit_bias={0: -2}, repetition_penalty=2, prompt=[0]),
        floats(1, -1.75),
    ),
    "repetition, frequency": (
        oracle.Row(temperature=0, repetition_penalty=2, frequency_penalty=2, output=[0]),
        floats(1, -1.75),
    ),
    "repetition, presence": (
        oracle.Row(temperature=0, repetition_penalty=2, presence_penalty=2, output=[0]),
        floats(1, -1.75),
    ),
    "bias, temperature": (oracle.Row(temperature=2, logit_bias={0: 1}, min_p=0.6), floats(0, 0)),
    "presence, temperature": (
        oracle.Row(temperature=2, presence_penalty=1, output=[0], min_p=0.6),
        floats(3, 2.5),
    ),
    "temperature, min_p": (oracle.Row(temperature=2, min_p=0.5), floats(0, -1)),
    "temperature, top_p": (oracle.Row(temperature=4, top_p=0.7), floats(2, 0, 0)),
    "top_k, top_p": (oracle.Row(top_k=2, top_p=0.565), LN),
    "min_p, top_p": (oracle.Row(min_p=0.6, top_p=0.565), LN),
    "allowed, top_k": (oracle.Row(top_k=1, allowed=[1, 2, 3]), LN),
    "bad_words, top_p": (oracle.Row(top_p=0.3, bad_words=[[0]]), LN),
}


@pytest.mark.parametrize("name", SWAPS)
def test_order_of_the_chain_is_kept(make: MakeSampler, name: str) -> None:
    row, logits = SWAPS[name]
    first, second = name.split(", ")
    order = list(oracle.CHAIN)
    i, j = order.index(first), order.index(second)
    order[i], order[j] = order[j], order[i]
    sampler = make(len(logits))
    right, swapped, seen = set(), set(), set()
    for seed in range(60):
        row.seed = seed
        right.add(oracle.choose(row, logits))
        swapped.add(oracle.choose(row, logits, order))
        seen.add(sample_one(sampler, row, logits))
    assert right != swapped, "the vector does not tell the two orders apart"
    assert seen == right


token_lists = st.lists(st.integers(0, 11), max_size=8)
rows = st.builds(
    oracle.Row,
    temperature=st.sampled_from([0.0, 9e-6, 1e-5, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2]),
    top_k=st.sampled_from([0, -1, 1, 3, 12, 50]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, -1.5, 3.0]), max_size=3),
    allowed=st.none() | st.sets(st.integers(0, 11), min_size=1),
    bad_words=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3), max_size=4),
    stop_ids=st.sets(st.integers(0, 11), max_size=2).map(sorted),
    min_tokens=st.integers(0, 6),
    seed=st.integers(-(2**63), 2**63 - 1),
    prompt=token_lists,
    output=token_lists,
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", MAKERS)
@settings(max_examples=200, deadline=None)
@given(row=rows, quarters=st.lists(st.integers(-16, 16), min_size=12, max_size=12))
def test_any_settings_give_the_oracles_token(backend: str, row: oracle.Row, quarters: list[int]) -> None:
    logits = np.array(quarters, np.float32) / 4
    assume(row.temperature < 1e-5 or oracle.is_top_p_clear(row, logits))
    assert sample_one(MAKERS[backend](12), row, logits) == oracle.choose(row, logits)


LARGE_CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 2.0},
    {"top_p": 1e-4},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 4000},
    {"min_p": 0.02},
    {"min_p": 0.001, "top_k": 500, "top_p": 0.95},
]


@pytest.mark.slow
@pytest.mark.parametrize("params", LARGE_CASES)
def test_both_backends_agree_on_a_real_vocabulary(params: dict[str, Any]) -> None:
    vocab_size, num_rows = 49_157, 6
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * torch.tensor([[1.0], [3], [3], [6], [6], [12]])
    chosen = []
    for make in MAKERS.values():
        sampler = make(vocab_size)
        for row in range(num_rows):
            sampler.join(row, plan_for(vocab_size, seed=row, **params), [], [])
        steps = [sampler.sample(logits, range(num_rows), [n] * num_rows) for n in (0, 1)]
        chosen.append(torch.stack([step.packed for step in steps]))
    assert torch.equal(chosen[0], chosen[1])


def test_lowest_id_wins_a_tie_of_greedy_rows(make: MakeSampler) -> None:
    logits = torch.zeros(1, 300)
    logits[0, [70, 71, 250]] = 2.0
    sampler = make(300)
    sampler.join(0, plan_for(300, temperature=0), [], [])
    assert sampler.sample(logits, [0], [0]).token_ids.tolist() == [70]


def test_a_choice_serves_all_rows_of_a_step(make: MakeSampler) -> None:
    sampler, plans = make(VOCAB), mixed_plans()
    for choice, plan in enumerate(plans):
        sampler.join(choice, plan, PROMPTS[choice], [])
    for choice in (3, 4, 5, 9):
        sampler.leave(choice)
    assert [c for c in range(len(plans)) if sampler.choice([c], [0])] == [0, 2, 3, 4, 5, 9]
    assert [c for c in range(len(plans)) if sampler.choice([c], [3])] == [0, 2, 3, 4, 5, 8, 9]
    assert sampler.choice([0, 2], [0, 0]) == Choice.PLAIN and sampler.choice([0, 8], [0, 0]) == Choice.OTHER
    sampler.leave(8)
    assert sampler.choice([0, 8], [0, 0]) == Choice.PLAIN
    sampler.join(3, plans[4], [], [])
    assert sampler.choice([0, 3], [0, 0]) == Choice.FILTERED


def test_greedy_rows_ignore_the_filters(make: MakeSampler) -> None:
    sampler = make(4)
    row = oracle.Row(temperature=5e-6, top_k=1, top_p=0.1, min_p=1.0)
    assert sample_one(sampler, row, floats(1, 1, 3, 2)) == 2


def test_logits_are_widened_before_anything_is_added(make: MakeSampler) -> None:
    sampler = make(2)
    sampler.join(0, plan_for(2, temperature=0, logit_bias={1: 0.1}), [], [])
    logits = torch.tensor([[100.0, 100.0]], dtype=torch.bfloat16)
    assert sampler.sample(logits, [0], [0]).token_ids.tolist() == [1]


def test_logits_are_never_changed(make: MakeSampler) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sampler = make(40)
    for row in (0, 1):
        sampler.join(row, plan_for(40, repetition_penalty=2, logit_bias={1: 3}, top_p=0.5), [1, 2], [3])
    sampler.sample(logits, [0, 1], [1, 1])
    assert torch.equal(logits, before)


def test_draws_follow_the_filtered_softmax(make: MakeSampler) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])
    sampler = make(5, 400)
    for row in range(400):
        sampler.join(row, plan_for(5, top_k=4, temperature=1.5, seed=row), [], [])
    steps = [sampler.sample(logits.expand(400, -1), range(400), [n] * 400) for n in range(10)]
    observed = np.bincount(torch.cat([step.token_ids for step in steps]), minlength=5)
    kept = [0, 1, 2, 4]
    weights = np.exp(np.array([2.0, 1.0, 0.0, 0.5]) / 1.5)
    expected = weights / weights.sum() * 4000
    assert observed[3] == 0
    assert ((observed[kept] - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, p = 0.001


# ---- rows do not see each other ---------------------------------------------------------------------------

VOCAB = 333
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 4},
    {"seed": 1},
    {"seed": 2, "top_p": 0.8, "logprobs": 0},
    {"seed": 3, "top_k": 7},
    {"seed": 4, "min_p": 0.1, "temperature": 1.7},
    {"seed": 5, "repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": -1},
    {"temperature": 0.0, "frequency_penalty": 1.1},
    {"temperature": 0.0, "min_tokens": 3},
    {"seed": 6, "logit_bias": {5: 4.0, 6: -3.0}, "top_p": 0.9},
    {"seed": 7, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 1},
]
EXTRAS: dict[int, dict[str, Any]] = {
    8: {"stop_ids": (1, 2, 3)},
    10: {"allowed_ids": tuple(range(0, VOCAB, 3))},
    11: {"bad_words": ((1, 2), (9,), (4, 5, 6))},
}
PROMPTS = [[i, i + 1, 40 + i] for i in range(len(MIXED))]


def mixed_plans() -> list[SamplingPlan]:
    return [
        SamplingPlan(SamplingParams(**params), VOCAB, params.get("seed", 0), **EXTRAS.get(i, {}))
        for i, params in enumerate(MIXED)
    ]


def logits_of(choice: int, position: int) -> torch.Tensor:
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * choice + position))


@pytest.mark.parametrize(
    ("params", "choice"),
    [
        ({"temperature": 0.7}, Choice.PLAIN),
        ({"temperature": 0.7, "top_k": VOCAB}, Choice.PLAIN),
        ({"temperature": 0.7, "top_k": VOCAB - 1}, Choice.FILTERED),
        ({"temperature": 0.7, "top_p": 0.99}, Choice.FILTERED),
        ({"temperature": 0.7, "min_p": 0.01}, Choice.FILTERED),
        ({"temperature": 0.7, "logprobs": 1}, Choice.OTHER),
        ({"temperature": 0.7, "top_p": 0.9, "presence_penalty": 1.0}, Choice.OTHER),
        ({"temperature": 0.0, "top_p": 0.5}, Choice.PLAIN),
    ],
)
def test_draws_are_chosen_on_the_device_unless_edited(params: dict[str, Any], choice: Choice) -> None:
    sampler = Sampler(VOCAB, 4)
    sampler.join(2, plan_for(VOCAB, seed=5, **params), [], [])
    assert sampler.choice([2], [0]) == choice
    changed = sampler.changed_draws()
    if params["temperature"] == 0:
        assert changed is None
        return
    assert changed is not None
    temperature, top_p, min_p, top_k, seeds = changed
    assert temperature[2] == np.float32(params["temperature"]) and seeds[2] == 5
    assert top_p[2] == np.float32(params.get("top_p", 1)) and min_p[2] == np.float32(params.get("min_p", 0))
    assert top_k[2] == params.get("top_k", VOCAB)
    assert sampler.changed_draws() is None


def test_a_row_that_drew_is_told_of_until_it_takes_the_greatest_logit() -> None:
    sampler = Sampler(VOCAB, 4)
    sampler.join(2, plan_for(VOCAB, temperature=0.7), [], [])
    assert sampler.changed_draws() is not None
    sampler.leave(2)
    sampler.join(1, plan_for(VOCAB, temperature=0.0), [], [])
    assert sampler.changed_draws() is None  # nobody has row 2
    sampler.join(2, plan_for(VOCAB, temperature=0.0), [], [])
    changed = sampler.changed_draws()
    assert changed is not None and not changed[0].any() and sampler.choice([1, 2], [0, 0]) == Choice.PLAIN
    sampler.join(2, plan_for(VOCAB, temperature=0.0), [], [])
    assert sampler.changed_draws() is None


def entry_of(logprobs: RowLogprobs | None) -> tuple[object, ...]:
    assert logprobs is not None
    scalars = (logprobs.token_id, logprobs.logprob, logprobs.rank)
    return (*scalars, logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist())


def run_alone(make: MakeSampler, choice: int, length: int) -> list[object]:
    sampler, results = make(VOCAB), []
    sampler.join(0, mixed_plans()[choice], PROMPTS[choice], [])
    for n in range(length):
        step = sampler.sample(logits_of(choice, n)[None], [0], [n])
        token = int(step.token_ids[0])
        results.append((token, entry_of(step.logprobs.resolve()[0]) if step.logprobs else None))
    return results


def test_mixed_batch_equals_single_runs_bitwise(make: MakeSampler) -> None:
    length, random = 6, np.random.default_rng(5)
    sampler, plans = make(VOCAB), mixed_plans()
    rows = random.permutation(16)[: len(plans)].tolist()
    for choice, plan in enumerate(plans):
        sampler.join(rows[choice], plan, PROMPTS[choice], [])
    done: list[list[object]] = [[] for _ in plans]
    while live := [c for c in range(len(plans)) if len(done[c]) < length]:
        batch = [c for c in random.permutation(live).tolist() if random.random() < 0.7] or live[:1]
        positions = [len(done[c]) for c in batch]
        logits = torch.stack([logits_of(c, n) for c, n in zip(batch, positions, strict=True)])
        step = sampler.sample(logits, [rows[c] for c in batch], positions)
        entries = step.logprobs.resolve() if step.logprobs else {}
        for i, c in enumerate(batch):
            done[c].append((int(step.token_ids[i]), entry_of(entries[i]) if i in entries else None))
    for choice in range(len(plans)):
        assert done[choice] == run_alone(make, choice, length), MIXED[choice]


@pytest.mark.parametrize("choice", range(len(MIXED)))
def test_resumed_row_continues_as_if_never_preempted(make: MakeSampler, choice: int) -> None:
    expected = [token for token, _ in run_alone(make, choice, 8)]
    sampler, plan, output = make(VOCAB), mixed_plans()[choice], []
    sampler.join(2, plan, PROMPTS[choice], [])
    for n in range(8):
        if n == 4:  # another request has the row meanwhile
            sampler.leave(2)
            sampler.join(2, mixed_plans()[6], [250, 251], [252])
            sampler.join(7, plan, PROMPTS[choice], output)
        row = 2 if n < 4 else 7
        output.append(int(sampler.sample(logits_of(choice, n)[None], [row], [n]).token_ids[0]))
    assert output == expected


def test_same_seed_gives_other_tokens_at_other_positions(make: MakeSampler) -> None:
    sampler = make(1000)
    sampler.join(0, plan_for(1000, seed=1), [], [])
    flat = torch.zeros(1, 1000)
    tokens = [int(sampler.sample(flat, [0], [n]).token_ids[0]) for n in range(20)]
    assert len(set(tokens)) > 15
    sampler.join(0, plan_for(1000, seed=2), [], [])
    assert tokens != [int(sampler.sample(flat, [0], [n]).token_ids[0]) for n in range(20)]


@pytest.mark.parametrize("is_edited", [False, True])
def test_positions_of_the_device_stand_for_those_of_the_host(make: MakeSampler, is_edited: bool) -> None:
    """The host counts drafts in flight as accepted; a row may then be in a step several times."""
    vocab_size, true, told = 300, [4, 5, 6, 2, 9], [6, 7, 8, 2, 11]
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0))
    found = []
    for num_outputs, positions in ((true, None), (told, true), (told, None)):
        sampler = make(vocab_size)
        sampler.join(1, plan_for(vocab_size, temperature=3.0, seed=5), [1], [2] * 4)
        edits = {"frequency_penalty": 0.5, "logit_bias": {3: 2.0}} if is_edited else {}
        sampler.join(2, plan_for(vocab_size, temperature=3.0, seed=6, **edits), [1], [2] * 2)
        sampler.join(0, plan_for(vocab_size, temperature=3.0, seed=7, top_k=50), [1], [2] * 9)
        on_device = None if positions is None else torch.tensor(positions, dtype=torch.int32)
        step = sampler.sample(logits, [1, 1, 1, 2, 0], num_outputs, on_device)
        found.append(step.token_ids.tolist())
    assert found[0] == found[1] and found[0][3] == found[2][3]
    assert all(a != b for i, (a, b) in enumerate(zip(found[0], found[2], strict=True)) if i != 3)


def test_rows_that_come_and_go_leave_nothing_behind(make: MakeSampler) -> None:
    sampler = make(20)
    for round_ in range(3):
        for row in range(12):  # more than the tables hold at first
            stale = oracle.Row(repetition_penalty=5, allowed=[1], bad_words=[[3, 4, 5, 1]], logit_bias={2: 9})
            sampler.join(row, plan_of(stale, 20), range(20), [3, 4, 5])
        for row in range(12):
            sampler.leave(row)
        fresh = oracle.Row(
            temperature=0,
            repetition_penalty=3,
            prompt=[7],
            allowed=range(5, 20),
            bad_words=[[6, 9]],
            output=[6],
        )
        logits = np.linspace(1, 2, 20, dtype=np.float32)
        logits[[9, 7]] = 5, 4
        assert sample_one(sampler, fresh, logits) == oracle.choose(fresh, logits) == 19, round_


def test_longer_bad_words_of_another_row_do_not_disturb_those_before(make: MakeSampler) -> None:
    sampler, logits = make(9), torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 7, 8]])
    short = oracle.Row(temperature=0, bad_words=[[8, 8], [7, 7]])
    long = oracle.Row(temperature=0, bad_words=[[1, 2, 3, 8], [4, 8, 8]], output=[1, 4, 8])
    sampler.join(0, plan_of(short, 9), [], [])
    assert sampler.sample(logits, [0], [0]).token_ids.tolist() == [8]
    sampler.join(1, plan_of(long, 9), [], long.output)
    assert sampler.sample(logits.expand(2, -1), [1, 0], [3, 1]).token_ids.tolist() == [7, 7]
    assert sampler.sample(logits.expand(2, -1), [0, 1], [2, 4]).token_ids.tolist() == [8, 8]


def test_plan_of_another_vocabulary_is_refused(make: MakeSampler) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        make(10).join(0, plan_for(11), [], [])


# ---- failed rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("broken", range(len(MIXED)))
def test_row_with_broken_logits_fails_alone(make: MakeSampler, poison: float, broken: int) -> None:
    def run(poisoned: Sequence[int]) -> tuple[list[int], list[int], dict[int, object]]:
        sampler, plans = make(VOCAB), mixed_plans()
        logits = torch.stack([logits_of(c, 0) for c in range(len(plans))])
        logits[list(poisoned), 30] = poison
        for choice, plan in enumerate(plans):
            sampler.join(choice, plan, PROMPTS[choice], [])
        step = sampler.sample(logits, range(len(plans)), [0] * len(plans))
        assert step.logprobs is not None
        entries = step.logprobs.resolve()
        return (
            step.token_ids.tolist(),
            step.status.tolist(),
            {i: e if e is None else entry_of(e) for i, e in entries.items()},
        )

    whole_tokens, whole_status, whole_entries = run([])
    tokens, status, entries = run([broken])
    assert whole_status == [OK] * len(MIXED)
    assert [s == OK for s in status] == [c != broken for c in range(len(MIXED))]
    assert status[broken] == NOT_FINITE
    assert 0 <= tokens[broken] < VOCAB
    if broken in entries:
        assert entries.pop(broken) is None
        del whole_entries[broken]
    assert entries == whole_entries
    del tokens[broken], whole_tokens[broken]
    assert tokens == whole_tokens


def test_row_whose_constraints_leave_no_token_says_so(make: MakeSampler) -> None:
    sampler = make(8)
    row = oracle.Row(allowed=[2, 3], bad_words=[[2, 2], [2, 3]], output=[2], seed=1)
    for temperature in (0.0, 1.0):
        row.temperature = temperature
        sampler.join(0, plan_of(row, 8), [], row.output)
        step = sampler.sample(torch.zeros(1, 8), [0], [1])
        assert step.status.tolist() == [NOTHING_ALLOWED]
        assert 0 <= int(step.token_ids[0]) < 8


# ---- log-probabilities ------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits(make: MakeSampler) -> None:
    logits = torch.randn(1, 90, generator=torch.Generator().manual_seed(3)) * 4
    expected = logits[0].double().log_softmax(-1).numpy()
    best = np.argsort(-expected)[:5]
    edits: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 1},
        {"temperature": 0.0, "logit_bias": {50: 100.0}, "repetition_penalty": 2.0},
        {"top_k": 1, "frequency_penalty": 2.0, "min_p": 0.5},
    ]
    for params in edits:
        sampler = make(90)
        sampler.join(0, plan_for(90, logprobs=5, **params), [1, 2], [int(best[0])])
        step = sampler.sample(logits, [0], [1])
        assert step.logprobs is not None
        entry = step.logprobs.resolve()[0]
        assert entry is not None
        assert entry.token_id == int(step.token_ids[0])
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
        assert entry.rank == 1 + int((expected > expected[entry.token_id]).sum())
        assert entry.top_ids.tolist() == best.tolist()
        np.testing.assert_allclose(entry.top_logprobs, expected[best], atol=1e-5)
        assert (entry.top_ids.dtype, entry.top_logprobs.dtype) == (np.int32, np.float32)


def test_number_of_logprobs_is_what_was_asked_for(make: MakeSampler) -> None:
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(3))
    sampler = make(70)
    for row, count in enumerate([0, -1, None, 70]):
        sampler.join(row, plan_for(70, logprobs=count, temperature=0), [], [])
    step = sampler.sample(logits, range(4), [0] * 4)
    assert step.logprobs is not None
    entries = step.logprobs.resolve()
    assert sorted(entries) == [0, 1, 3]
    none, whole, sorted_whole = entries[0], entries[1], entries[3]
    assert none and whole and sorted_whole
    assert none.rank == 1 and len(none.top_ids) == len(none.top_logprobs) == 0
    assert whole.top_ids.tolist() == list(range(70))
    np.testing.assert_allclose(whole.top_logprobs, logits[1].log_softmax(-1), atol=1e-5)
    assert np.all(np.diff(sorted_whole.top_logprobs) <= 0)


def test_ties_of_logprobs_go_to_the_lowest_id_and_share_a_rank(make: MakeSampler) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 1.0]])
    entries = make(6).prompt_logprobs(logits.expand(6, -1), range(6), 4).resolve()
    for entry in entries.values():
        assert entry is not None and entry.top_ids.tolist() == [1, 3, 4, 2]
    assert [entries[i].rank for i in range(6)] == [6, 1, 4, 1, 1, 4]  # type: ignore[union-attr]


def test_impossible_tokens_have_a_finite_logprob(make: MakeSampler) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -1e30]])
    entry = make(4).prompt_logprobs(logits, [1], 4).resolve()[0]
    assert entry is not None
    assert entry.logprob == -9999.0 and entry.rank == 4
    assert entry.top_ids.tolist() == [0, 2, 1, 3]
    assert np.isfinite(entry.top_logprobs).all()


@pytest.mark.parametrize("count", [0, 3, -1])
def test_prompt_logprobs_of_a_long_prompt(make: MakeSampler, count: int) -> None:
    logits = torch.randn(75, 130, generator=torch.Generator().manual_seed(9)) * 3
    logits[40, 7] = torch.nan
    targets = (np.arange(75) * 37) % 130
    entries = make(130).prompt_logprobs(logits, targets, count).resolve()
    assert list(entries) == list(range(75))
    values = logits.log_softmax(-1)
    for i, entry in entries.items():
        if i == 40:
            assert entry is None
            continue
        assert entry is not None and entry.token_id == targets[i]
        assert entry.logprob == pytest.approx(float(values[i, targets[i]]), abs=1e-5)
        if count == 3:
            assert entry.top_ids.tolist() == values[i].topk(3).indices.tolist()
        if count == -1:
            np.testing.assert_allclose(entry.top_logprobs, values[i], atol=1e-5)


def test_no_prompt_positions_give_no_entries(make: MakeSampler) -> None:
    assert make(5).prompt_logprobs(torch.empty(0, 5), [], 2).resolve() == {}
