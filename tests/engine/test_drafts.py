"""Steps with drafts on the host: what is fed in, what is accepted, and where the steps behind a rejection compute."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from aioengine.batch import HostRows, HostStep
from aioengine.layers.context import StepContext
from aioengine.models import Model
from aioengine.runner import CpuRunner, StepResult
from aioengine.sampler import NOT_FINITE, OK
from aioengine.types import SamplingParams
from tests.engine.test_runner import BLOCK_SIZE, NUM_BLOCKS, reference_greedy, reference_logprobs, start_runner
from tests.models.plans import FakePlan, FakeRequest, Planner
from tests.models.tiny import VOCAB, make_checkpoint, random_prompt

MAX_ROWS = 8
POISON = -12345
GREEDY = SamplingParams(temperature=0.0)

Family = tuple[PreTrainedModel, Path]


@pytest.fixture
def planner() -> Planner:
    return Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_ROWS)


def poisoned_rows() -> HostRows:
    """Rows that nobody had yet: what is read of them without having been written shows."""
    rows = HostRows(MAX_ROWS, NUM_BLOCKS, [BLOCK_SIZE])
    rows._last_token.fill(POISON)
    rows._block_table.fill(-POISON)
    return rows


def accept(rows: HostRows, step: HostStep, sampled: list[int]) -> list[int]:
    token_ids = np.array(sampled, np.int32)
    rows.accept(step, token_ids, np.zeros_like(token_ids))
    return token_ids.tolist()


# ---- inputs ---------------------------------------------------------------------------------------------------------


def test_sampled_tokens_and_drafts_go_to_their_places(planner: Planner) -> None:
    """INV-41: with 2, 5 and 8 tokens up to each row's end and 1, 2 and 2 drafts, samples go to 0, 2 and 5."""
    rows = poisoned_rows()
    requests = [planner.request(random_prompt(n, seed=n)) for n in (5, 3, 4)]
    accept(rows, rows.unpack(planner.plan({r: len(r.prompt) for r in requests}).buffer), [70, 71, 72])
    plan = planner.plan(dict.fromkeys(requests, 1), dict(zip(requests, ([10], [20, 21], [30, 31]), strict=True)))
    step = rows.unpack(plan.buffer)
    assert step.attention[0].query_start_loc.tolist() == [0, 2, 5, 8]
    assert step.input_ids[[0, 2, 5]].tolist() == [70, 71, 72]
    assert step.input_ids[[1, 3, 4, 6, 7]].tolist() == [10, 20, 21, 30, 31]
    assert step.positions.tolist() == [5, 6, 3, 4, 5, 4, 5, 6]
    assert step.attention[0].seq_lens.tolist() == [7, 6, 7]
    assert step.sample_tokens.tolist() == list(range(8))
    assert step.sample_rows.tolist() == [requests[i].row for i in (0, 0, 1, 1, 1, 2, 2, 2)]
    assert step.sample_plan_rows.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert step.sample_num_outputs.tolist() == [1, 2, 1, 2, 3, 1, 2, 3]
    assert step.drafts is not None and step.drafts.ids.tolist() == [10, -1, 20, 21, -1, 30, 31, -1]
    for values in (step.sample_tokens, step.sample_rows, step.sample_plan_rows, step.sample_num_outputs):
        assert values.dtype == np.int32


def test_rows_with_and_without_drafts_share_a_step(planner: Planner) -> None:
    """A chunk that samples nothing, a prompt's last one, a row without drafts and one with some."""
    rows = poisoned_rows()
    chunk, prompt, plain, drafted = (planner.request(random_prompt(n, seed=n)) for n in (9, 6, 3, 4))
    accept(rows, rows.unpack(planner.plan({plain: 3, drafted: 4}).buffer), [70, 71])
    step = rows.unpack(planner.plan({chunk: 4, prompt: 6, drafted: 1, plain: 1}, {drafted: [5, 6]}).buffer)
    assert step.input_ids.tolist() == [*chunk.prompt[:4], *prompt.prompt, 71, 5, 6, 70]
    assert step.sample_tokens.tolist() == [9, 10, 11, 12, 13]
    assert step.sample_plan_rows.tolist() == [1, 2, 2, 2, 3]
    assert step.sample_num_outputs.tolist() == [0, 1, 2, 3, 1]
    assert step.drafts is not None and step.drafts.ids.tolist() == [-1, 5, 6, -1, -1]
    assert accept(rows, step, [80, 5, 81, 82, 83]) == [80, 5, 81, -1, 83]
    last = rows.unpack(planner.plan({plain: 1, drafted: 1, prompt: 1}).buffer)
    assert last.input_ids.tolist() == [83, 81, 80]
    assert last.positions.tolist() == [4, 6, 6] and last.drafts is None
    assert last.sample_num_outputs.tolist() == [2, 3, 1]


@pytest.mark.parametrize(
    ("before", "now"),
    [("", "abc"), ("abc", "abc"), ("abc", "cab"), ("abc", "bd"), ("ab", "dbea"), ("abc", "de")],
    ids=["no samples before", "same order", "permuted", "some gone, one new", "some new between", "no row of before"],
)
def test_every_input_is_written_however_the_rows_change(planner: Planner, before: str, now: str) -> None:
    """INV-41: rows of the step before take their token from it, the others from the host."""
    rows = poisoned_rows()
    names = {name: planner.request(random_prompt(3 + i, seed=i)) for i, name in enumerate("abcde")}
    sampled = {names[name]: 60 + i for i, name in enumerate(before)}
    if before:
        plan = planner.plan({request: len(request.prompt) for request in sampled})
        accept(rows, rows.unpack(plan.buffer), list(sampled.values()))
    requests = [names[name] for name in now]
    drafts = {r: [10 + i, 20 + i][: 1 + i % 2] for i, r in enumerate(requests)}
    step = rows.unpack(planner.plan({r: 1 if r in sampled else len(r.prompt) for r in requests}, drafts).buffer)
    expected = [([sampled[r]] if r in sampled else r.prompt) + drafts[r] for r in requests]
    assert step.input_ids.tolist() == sum(expected, [])
    starts = [len(r.prompt) if r in sampled else 0 for r in requests]
    positions = [range(start, start + len(ids)) for start, ids in zip(starts, expected, strict=True)]
    assert step.positions.tolist() == [position for part in positions for position in part]
    assert accept(rows, step, [40 + i for i in range(len(step.sample_rows))])


# ---- acceptance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "told", "position"),
    [
        ([10, 11, 12], [10, 11, 12], 8),  # all accepted, and one token more
        ([10, 40, 12], [10, 40, -1], 7),
        ([40, 11, 12], [40, -1, -1], 6),  # what follows a rejected draft is rejected, even if it is the same
        ([40, 41, 42], [40, -1, -1], 6),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_was_not_sampled(
    planner: Planner, sampled: list[int], told: list[int], position: int
) -> None:
    rows = poisoned_rows()
    request, other = planner.request(random_prompt(5)), planner.request(random_prompt(3))
    accept(rows, rows.unpack(planner.plan({request: 5, other: 3}).buffer), [70, 71])
    step = rows.unpack(planner.plan({request: 1, other: 1}, {request: [10, 11], other: [15]}).buffer)
    assert accept(rows, step, [*sampled, 15, 16]) == [*told, 15, 16]
    after = rows.unpack(planner.plan({other: 1, request: 1}).buffer)
    assert after.input_ids.tolist() == [16, [token_id for token_id in told if token_id >= 0][-1]]
    assert after.positions.tolist() == [5, position]


def test_the_status_of_a_rejected_sample_means_nothing(planner: Planner) -> None:
    rows = poisoned_rows()
    request, other = planner.request(random_prompt(5)), planner.request(random_prompt(3))
    accept(rows, rows.unpack(planner.plan({request: 5, other: 3}).buffer), [70, 71])
    step = rows.unpack(planner.plan({request: 1, other: 1}, {request: [10, 11], other: [15]}).buffer)
    status = np.array([OK, NOT_FINITE, NOT_FINITE, OK, NOT_FINITE], np.int32)
    rows.accept(step, np.array([40, 11, 12, 15, 16], np.int32), status)
    assert status.tolist() == [OK, OK, OK, OK, NOT_FINITE]


def test_the_count_of_rejected_drafts_may_wrap(planner: Planner) -> None:
    rows = poisoned_rows()
    request = planner.request(random_prompt(5))
    rows._rejected.fill(2**31 - 1)
    planner.num_rejected = [2**31 - 1] * MAX_ROWS
    accept(rows, rows.unpack(planner.plan({request: 5}).buffer), [70])
    assert accept(rows, rows.unpack(planner.plan({request: 1}, {request: [10, 11]}).buffer), [9, 9, 9]) == [9, -1, -1]
    assert rows._rejected[request.row] == -(2**31) + 1
    assert rows.unpack(planner.plan({request: 1}).buffer).positions.tolist() == [6]


class Texts:
    """What the device has: the true text of each request, and whose token every slot holds."""

    def __init__(self, rows: HostRows, draw: random.Random) -> None:
        self.rows = rows
        self.draw = draw
        self.texts: dict[FakeRequest, list[int]] = {}
        self.slots: dict[int, int] = {}

    @staticmethod
    def following(text: list[int]) -> int:
        """What the model would say next."""
        return (sum(text[-3:]) * 7 + len(text)) % VOCAB

    def drafts(self, request: FakeRequest, count: int, acceptance: float) -> list[int]:
        text = list(self.texts[request])
        for _ in range(count):
            is_right = self.draw.random() < acceptance
            text.append(self.following(text) if is_right else (self.following(text) + 1) % VOCAB)
        return text[len(text) - count :]

    def run(self, plan: FakePlan) -> list[int]:
        """Runs a step and checks that it computes the true text at the true positions (INV-43, INV-60)."""
        step = self.rows.unpack(plan.buffer)
        meta = step.attention[0]
        bounds, ids, positions = meta.query_start_loc.tolist(), step.input_ids.tolist(), step.positions.tolist()
        self.slots.update(zip(meta.slot_mapping.tolist(), ids, strict=True))
        sampled = []
        for i, request in enumerate(plan.requests):
            text = self.texts.setdefault(request, list(request.prompt))
            new, first = ids[bounds[i] : bounds[i + 1]], positions[bounds[i]]
            assert positions[bounds[i] : bounds[i + 1]] == list(range(first, first + len(new)))
            whole = text[:first] + new
            samples = np.flatnonzero(step.sample_plan_rows == i)
            num_drafts = len(samples) - 1
            known = len(whole) - max(num_drafts, 0)
            assert whole[:known] == text[:known] and meta.seq_lens[i] == len(whole) <= meta.max_seq_len
            table = meta.block_table[i].tolist()
            held = [self.slots[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(len(whole))]
            assert held == whole, "a token's slot holds another one"
            for j, sample in enumerate(samples):
                assert known == len(text)
                assert step.sample_tokens[sample] == bounds[i + 1] - 1 - num_drafts + j
                assert step.sample_num_outputs[sample] == len(text) - len(request.prompt) + j
                assert step.sample_rows[sample] == request.row
                sampled.append(self.following(whole[: known + j]))
        told = accept(self.rows, step, sampled)
        for request, token_id in zip(plan.sample_requests, told, strict=True):
            if token_id >= 0:
                assert token_id == self.following(self.texts[request])
                self.texts[request].append(token_id)
        return told


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_steps_launched_before_a_rejection_was_known_compute_the_true_text(
    acceptance: float, depth: int, seed: int
) -> None:
    """INV-43: steps are packed as if the drafts in flight were accepted; what follows is where the text is."""
    draw = random.Random(seed)
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=500, max_num_seqs=MAX_ROWS, seed=seed)
    rows = HostRows(MAX_ROWS, 100, [BLOCK_SIZE])
    rows._last_token.fill(POISON)
    device = Texts(rows, draw)
    requests = [planner.request(random_prompt(draw.randint(1, 12), seed=seed * 10 + i)) for i in range(6)]
    in_flight: deque[tuple[FakePlan, list[int]]] = deque()
    num_told = num_rejected = 0
    for _ in range(60):
        chunks, drafts = {}, {}
        for request in draw.sample(requests, draw.randint(1, len(requests))):
            left = len(request.prompt) + len(request.outputs) + request.num_in_flight - request.num_computed
            chunks[request] = draw.randint(1, left)
            if chunks[request] == left == 1 and request.num_computed:
                drafts[request] = device.drafts(request, draw.randint(0, 4), acceptance)
        plan = planner.plan(chunks, drafts)
        in_flight.append((plan, device.run(plan)))
        if len(in_flight) == depth:
            done, told = in_flight.popleft()
            num_told, num_rejected = num_told + len(told), num_rejected + told.count(-1)
            planner.update(done, told)
    while in_flight:
        planner.update(*in_flight.popleft())
    for request in requests:
        assert request.prompt + request.outputs == device.texts[request]
    assert planner.num_rejected == rows._rejected.tolist()
    assert num_rejected == 0 if acceptance == 1.0 else 0 < num_rejected < num_told


# ---- the runner -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("llama")
    return make_checkpoint("llama3-scaling", folder), folder


@pytest.fixture
async def runner(checkpoint: Family) -> AsyncIterator[CpuRunner]:
    runner = start_runner(checkpoint[1], None)
    yield runner
    await runner.close()


async def step(
    runner: CpuRunner,
    planner: Planner,
    chunks: dict[FakeRequest, int],
    drafts: dict[FakeRequest, list[int]] | None = None,
) -> StepResult:
    plan = planner.plan(chunks, drafts)
    result = await runner.launch(plan)
    planner.update(plan, result.token_ids.tolist())
    return result


async def generate(
    runner: CpuRunner,
    planner: Planner,
    params: list[SamplingParams],
    truth: list[list[int]] | None = None,
    acceptance: float = 0.0,
    depth: int = 1,
    num_tokens: int = 16,
) -> list[list[int]]:
    """So many tokens of each request or more; drafts, if any, are the truth or differ from it."""
    draw = random.Random(7)
    requests = [planner.request(random_prompt(4 + 3 * i, seed=i), p) for i, p in enumerate(params)]
    in_flight: deque[tuple[FakePlan, asyncio.Future[StepResult]]] = deque()
    while in_flight or min(len(r.outputs) for r in requests) < num_tokens:
        if len(in_flight) < depth:
            chunks, drafts = {}, {}
            for i, request in enumerate(requests):
                num_outputs = len(request.outputs) + request.num_in_flight
                if len(request.outputs) < num_tokens and num_outputs < num_tokens + 6:
                    chunks[request] = len(request.prompt) + num_outputs - request.num_computed
                    if truth is not None and num_outputs:
                        right = truth[i][num_outputs : num_outputs + draw.randint(0, 3)]
                        drafts[request] = [t if draw.random() < acceptance else (t + 1) % VOCAB for t in right]
            if chunks:
                plan = planner.plan(chunks, drafts)
                in_flight.append((plan, runner.launch(plan)))
                continue
        plan, done = in_flight.popleft()
        planner.update(plan, (await done).token_ids.tolist())
    for request in requests:
        planner.leave(request)
    return [request.outputs for request in requests]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
async def test_drafts_do_not_change_what_is_said(
    runner: CpuRunner, planner: Planner, acceptance: float, depth: int
) -> None:
    """INV-59, on a processor in float32 for seeded draws too: each position has its own draw."""
    params = [GREEDY, SamplingParams(seed=1), SamplingParams(seed=2, top_k=20, top_p=0.9), GREEDY]
    truth = await generate(runner, planner, params, num_tokens=26)
    outputs = await generate(runner, planner, params, truth, acceptance, depth)
    for output, without in zip(outputs, truth, strict=True):
        assert len(output) >= 16 and output == without[: len(output)]
    if acceptance < 1.0:
        assert sum(planner.num_rejected) > 0
    else:
        assert sum(planner.num_rejected) == 0


async def test_logprobs_are_those_of_the_tokens_that_came(
    runner: CpuRunner, planner: Planner, checkpoint: Family
) -> None:
    plain = planner.request(random_prompt(6, seed=1))
    scored = planner.request(random_prompt(8, seed=2), SamplingParams(temperature=0.0, logprobs=3))
    truth = reference_greedy(checkpoint[0], scored.prompt, 6)
    await step(runner, planner, {plain: 6, scored: 8})
    wrong = (truth[3] + 1) % VOCAB
    result = await step(runner, planner, {plain: 1, scored: 1}, {plain: [5, 6], scored: [*truth[1:3], wrong, truth[4]]})
    assert result.token_ids[3:].tolist() == [*truth[1:4], -1, -1]
    assert result.logprobs is not None and list(result.logprobs) == [3, 4, 5]
    expected = reference_logprobs(checkpoint[0], scored.prompt + truth)[len(scored.prompt) :]
    for i, entry in enumerate(result.logprobs.values()):
        assert entry.token_id == truth[1 + i] and entry.rank == 1
        np.testing.assert_allclose(entry.top_logprobs, expected[i].topk(3).values.numpy(), atol=1e-4)


class BrokenAt:
    """A model whose scores of one sample are not numbers."""

    def __init__(self, model: Model, sample: int) -> None:
        self._model = model
        self.sample = sample

    def logits(self, hidden: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        logits = self._model.logits(hidden, ctx)
        logits[self.sample] = float("nan")
        return logits


@pytest.mark.parametrize(("sample", "fails"), [(0, False), (1, True), (2, True), (3, False), (4, False)])
async def test_broken_scores_fail_a_row_only_where_a_token_comes_from_them(
    runner: CpuRunner, planner: Planner, checkpoint: Family, sample: int, fails: bool
) -> None:
    """The row's samples are 1 to 4; its second draft is rejected, so that the third and fourth mean nothing."""
    other, request = planner.request(random_prompt(4, seed=3)), planner.request(random_prompt(6, seed=1))
    truth = reference_greedy(checkpoint[0], request.prompt, 5)
    await step(runner, planner, {other: 4, request: 6})
    work = runner._worker.work
    assert work is not None
    work.model = BrokenAt(work.model, sample)  # type: ignore[assignment]
    drafts = [truth[1], (truth[2] + 1) % VOCAB, truth[3]]
    result = await step(runner, planner, {other: 1, request: 1}, {request: drafts})
    if sample == 0:
        assert list(result.failures or ()) == [0]
        assert result.token_ids[1:].tolist() == [truth[1], truth[2], -1, -1]
    else:
        assert list(result.failures or ()) == ([1] if fails else [])
