"""Steps with drafts on a GPU: their buckets, the runner in Triton's interpreter, and the runner on a GPU itself.

Whatever is drafted, and however many steps are in flight, each request's tokens are those of steps without drafts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from aioengine import AsyncEngine
from aioengine.buckets import AT_START, Bucket, Buckets, StepFacts, token_buckets
from aioengine.checkpoint import load_checkpoint
from aioengine.config import resolve
from aioengine.cuda_device import CudaDevice
from aioengine.fastcore.drafts import Drafter
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan
from aioengine.graphs import StepForward
from aioengine.kernels.sampling import gumbel_ref, random_words_ref
from aioengine.kv_layout import layout_of
from aioengine.loader import load_model, make_runner
from aioengine.runner import Runner, StepResult
from aioengine.sampler import Choice, compile_sampling
from aioengine.speculation import Speculation
from aioengine.types import SamplingParams
from tests.engine.test_cuda_runner import BLOCK_SIZE, MAX_LEN, NUM_BLOCKS, gpu_config, make_forward, small_grids
from tests.models.plans import Planner
from tests.models.tiny import VOCAB, make_checkpoint, random_prompt
from tests.oracle.late_gpu import LateGpu

__all__ = ["small_grids"]

MAX_SEQS, NUM_TOKENS, TEMPERATURE = 4, 9, 3.0

# ---- buckets ------------------------------------------------------------------------------------------------

FACTS = StepFacts(
    num_rows=1,
    num_tokens=1,
    num_samples=1,
    num_drafts=0,
    max_query_len=1,
    query_lens=np.ones(1, np.int32),
    sample_rows=np.zeros(1, np.int32),
    sample_num_outputs=np.zeros(1, np.int32),
    sample_plan_rows=np.zeros(1, np.int32),
    prompt_spans=(),
    num_copies=0,
    long_rows=(),
)


def test_without_speculation_the_buckets_are_those_of_prompts_and_decodes() -> None:
    buckets = Buckets(token_buckets(64, 256), 64, 5, 0)
    assert buckets.max_samples == 64
    mixed = [Bucket(size, False, Choice.OTHER) for size in reversed(token_buckets(64, 256))]
    decodes = [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]
    likely = [size for size in decodes if size in AT_START]
    plain = [Bucket(size, True, Choice.PLAIN) for size in decodes]
    assert buckets.at_start() == [mixed[0], *(b for b in plain if b.num_tokens in likely)]
    rarer = [Bucket(size, True, choice) for choice in (Choice.FILTERED, Choice.OTHER) for size in likely]
    assert buckets.ahead() == [mixed[0], *plain, *mixed[1:], *rarer]


@pytest.mark.parametrize("num_drafts", [1, 4, 7], ids=lambda k: f"{k} drafts")
@pytest.mark.parametrize("max_num_seqs", [1, 16, 64, 200])
def test_every_plain_step_with_drafts_is_captured_ahead(max_num_seqs: int, num_drafts: int) -> None:
    sizes = token_buckets(max_num_seqs, 512)
    buckets = Buckets(sizes, max_num_seqs, 5, num_drafts)
    most = min(max_num_seqs * (1 + num_drafts), 512)
    assert buckets.max_samples == most
    ahead, at_start = buckets.ahead(), buckets.at_start()
    assert len(set(ahead)) == len(ahead) and set(at_start) <= set(ahead) and at_start[0] == ahead[0]
    with_drafts = [bucket for bucket in at_start if bucket.has_drafts]
    assert 0 < len(with_drafts) <= max(4, len(at_start) - 1 - len(with_drafts))
    alone = sizes[bisect_left(sizes, 1 + num_drafts)]
    assert alone in {bucket.num_tokens for bucket in with_drafts}
    for num_tokens in range(2, 513):
        for longest in {2, 1 + num_drafts, 33} if num_tokens <= most else {33}:
            step = dataclasses.replace(
                FACTS, num_tokens=num_tokens, num_samples=min(num_tokens, most), num_drafts=1, max_query_len=longest
            )
            bucket = buckets.of(step, Choice.PLAIN)
            assert bucket in ahead and bucket.has_drafts and not buckets.is_narrow(bucket)
            assert buckets.samples_of(bucket) >= step.num_samples
            assert (bucket.choice == Choice.PLAIN) == (bucket.num_tokens <= sizes[bisect_left(sizes, most)])
            assert buckets.of(dataclasses.replace(step, prompt_spans=((0, 0),)), Choice.PLAIN).choice == Choice.OTHER


def test_samples_of_drafts_are_multiplied_in_sizes_that_were_seen_at_start() -> None:
    buckets = Buckets(token_buckets(16, 512), 16, 5, 4)
    seen = {buckets.samples_of(bucket) for bucket in buckets.at_start() if bucket.choice}
    found = [buckets.sample_size(n) for n in range(81)]
    assert found[0] == 0 and all(n <= size for n, size in enumerate(found)) and found[80] == 80
    assert found[1:17] == [Buckets(token_buckets(16, 512), 16, 5, 0).sample_size(n) for n in range(1, 17)]
    assert set(found[1:]) <= seen | {80}


# ---- the forward pass, in the interpreter -------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("qwen3-tied")
    return make_checkpoint("qwen3-tied", folder), folder


def greedy_text(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What the model alone would say."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 2], ids=["eager", "buckets"])
@pytest.mark.parametrize("num_drafts", [3, 8])
def test_two_steps_in_flight_stand_where_the_accepted_drafts_end(
    checkpoint: tuple[PreTrainedModel, Path], small_grids: None, num_drafts: int, level: int
) -> None:
    """E14, INV-43, INV-60: the second step is laid out before anybody knows what the first rejects."""
    model, folder = checkpoint
    forward = make_forward(folder, level, num_drafts=num_drafts)
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_SEQS)
    first, second, third = requests = [planner.request(random_prompt(n, seed=n)) for n in (9, 14, 3)]
    texts = {request: greedy_text(model, request.prompt, 40) for request in requests}

    def drafts_of(request: Any, count: int, wrong_at: int | None) -> list[int]:
        """What the request will say behind its next token, if all drafts in flight are accepted."""
        start = len(request.outputs) + request.num_in_flight
        ids = texts[request][start : start + count]
        return [token_id + 1 if i == wrong_at else token_id for i, token_id in enumerate(ids)]

    def launch(chunks: dict[Any, int], wrong: Mapping[Any, tuple[int, int | None]]) -> tuple[Any, list[int]]:
        drafts = {request: drafts_of(request, *how) for request, how in wrong.items()}
        plan = planner.plan(chunks, drafts)
        forward.buffer[: len(plan.buffer)] = torch.from_numpy(plan.buffer)
        facts = StepFacts.of(plan.buffer)
        assert facts.num_drafts == sum(map(len, drafts.values()))
        output = forward.run(facts, choice=Choice.PLAIN)
        if facts.num_samples and not output.has_chosen:
            n, inputs = forward.buckets.sample_size(facts.num_samples), output.inputs
            rows = output.hidden[output.sample_indices[:n].long()]
            forward.choose(rows, inputs.sample_rows[:n], inputs.sample_num_outputs[:n], output.ctx, Choice.PLAIN)
            if facts.num_drafts:
                forward.accept(facts.num_rows)
        ids, status = forward.packed[:, : facts.num_samples].tolist()
        assert not any(status)
        return plan, ids

    most = num_drafts
    decodes = {first: 1, second: 1, third: 1}
    steps: list[tuple[dict[Any, int], dict[Any, tuple[int, int | None]]]] = [
        ({first: 9}, {}),
        ({first: 1, second: 10}, {first: (most, None)}),
        ({second: 4, first: 1, third: 3}, {first: (2, 1)}),
        (decodes, {first: (most, 0), third: (1, None)}),
        (decodes, {second: (most, 1), third: (2, 0)}),
        ({third: 1, second: 1}, {}),
        (decodes, {first: (1, 0), second: (3, 2), third: (most, None)}),
        (decodes, {second: (most, None)}),
    ]
    in_flight: deque[tuple[Any, list[int]]] = deque()
    with torch.no_grad(), np.errstate(all="ignore"):
        for chunks, wrong in steps:
            in_flight.append(launch(chunks, wrong))
            if len(in_flight) == 2:
                planner.update(*in_flight.popleft())
        planner.update(*in_flight.popleft())
    for request in requests:
        assert request.outputs == texts[request][: len(request.outputs)] and len(request.outputs) > 5
    assert forward.rejected.tolist() == planner.num_rejected and sum(planner.num_rejected) > 8


def test_more_samples_than_there_is_room_for_are_refused(
    checkpoint: tuple[PreTrainedModel, Path], small_grids: None
) -> None:
    forward = make_forward(checkpoint[1], 2, num_drafts=1)
    with pytest.raises(ValueError, match="9 samples, the most is 8"):
        forward.run(dataclasses.replace(FACTS, num_tokens=9, num_samples=9, num_drafts=8), choice=Choice.PLAIN)


# ---- the runner ---------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [random_prompt(n, seed=n) for n in (5, 19, 1, 11)]
PLAIN = [GREEDY, GREEDY, GREEDY, GREEDY]
DRAWN = [SamplingParams(temperature=TEMPERATURE, seed=seed) for seed in range(4)]
FILTERED = [GREEDY, SamplingParams(temperature=TEMPERATURE, top_k=9, seed=1), DRAWN[2], DRAWN[3]]
EDITED = [
    SamplingParams(temperature=TEMPERATURE, seed=0, logprobs=2),
    SamplingParams(temperature=TEMPERATURE, seed=1, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logprobs=0),
    DRAWN[3],
]


class Guesses(Drafter):
    """Drafts the texts that are to come, each token right with a probability."""

    def __init__(self, texts: Sequence[Sequence[int]], share: float) -> None:
        self._texts = texts
        self._share = share
        self._rng = random.Random(1)

    def propose(self, request: Request, most: int) -> Iterable[int]:
        text = self._texts[int(request.request_id)]
        start = request.num_tokens + request.num_in_flight - request.num_prompt_tokens
        wanted = text[start : start + self._rng.randint(0, most)]
        return [token_id if self._rng.random() < self._share else (token_id + 1) % VOCAB for token_id in wanted]


async def serve(
    runner: Runner,
    sampling: Sequence[SamplingParams],
    depth: int,
    *,
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    drafter: Drafter | None = None,
    num_drafts: int = 0,
    budget: int = 48,
    gpu: LateGpu | None = None,
) -> tuple[list[list[int]], list[list[Any]], Scheduler]:
    """Tokens of all prompts, run together, and the log-probabilities of those that asked; closes the runner."""
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
        max_in_flight=depth,
        drafter=drafter,
        num_speculative_tokens=num_drafts,
    )
    requests = []
    for i, (prompt, params) in enumerate(zip(PROMPTS, sampling, strict=True)):
        plan = compile_sampling(params, None, VOCAB, (), 0, 0)
        is_free = params.frequency_penalty == 0
        requests.append(Request(str(i), prompt, max_tokens=NUM_TOKENS, sampling=plan, takes_drafts=is_free))
        scheduler.add(requests[-1])
    logprobs: list[list[Any]] = [[] for _ in requests]
    launched: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
    while scheduler.has_work():
        while len(launched) < depth and (step := scheduler.schedule()) is not None:
            launched.append((step, runner.launch(step)))
        step, done = launched.popleft()
        if gpu is not None:
            gpu.finish_one()
        result = await done
        assert not result.failures
        for key, entry in (result.logprobs or {}).items():
            assert entry.token_id == result.token_ids[key]
            logprobs[requests.index(step.sample_requests[key])].append(entry)
        scheduler.update(step, result.token_ids)
        scheduler.check_invariants()
    await runner.close()
    return [request.output_ids_from(0) for request in requests], logprobs, scheduler


async def interpreted(
    folder: Path, level: int, sampling: Sequence[SamplingParams], depth: int, num_drafts: int = 0, **options: Any
) -> tuple[list[list[int]], list[list[Any]], Scheduler, torch.Tensor]:
    """`serve` with a runner in Triton's interpreter; and the device's count of rejected drafts."""
    forward = make_forward(folder, level, num_drafts=num_drafts)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        gpu = LateGpu(patch, NUM_BLOCKS, BLOCK_SIZE, puts_off=False)
        runner = gpu.runner(vocab_size=VOCAB, max_num_seqs=MAX_SEQS, max_in_flight=depth, forward=forward)
        served = await serve(runner, sampling, depth, num_drafts=num_drafts, gpu=gpu, **options)
    return *served, forward.rejected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "level", "depth", "share"),
    [(PLAIN, 2, 3, 0.0), (FILTERED, 2, 1, 1.0), (FILTERED, 2, 2, 0.7), (EDITED, 2, 2, 0.7), (EDITED, 0, 2, 0.8)],
    ids=["greedy, all wrong", "filtered, all right", "filtered", "edited", "edited, eager"],
)
async def test_tokens_are_those_of_steps_without_drafts(
    checkpoint: tuple[PreTrainedModel, Path],
    small_grids: None,
    sampling: list[SamplingParams],
    level: int,
    depth: int,
    share: float,
) -> None:
    """J3, J4, INV-59: greedy and seeded rows alike, beside rows that can have no drafts."""
    texts, entries, _, _ = await interpreted(checkpoint[1], 2, sampling, 1)
    drafter = Guesses(texts, share)
    found, scored, scheduler, rejected = await interpreted(
        checkpoint[1], level, sampling, depth, num_drafts=3, drafter=drafter, budget=16
    )
    assert found == texts
    for line, expected, params in zip(scored, entries, sampling, strict=True):
        assert len(line) == len(expected) == (0 if params.logprobs is None else NUM_TOKENS)
        for one, other in zip(line, expected, strict=True):
            assert one.token_id == other.token_id and one.logprob == pytest.approx(other.logprob, abs=1e-4)
    num_rejected = scheduler.num_draft_tokens_total - scheduler.num_accepted_tokens_total
    assert int(rejected.sum()) == num_rejected and scheduler.num_draft_tokens_total > 5
    assert (num_rejected == 0) == (share == 1.0)


# ---- on a GPU -----------------------------------------------------------------------------------------------


def check_text(
    model: PreTrainedModel,
    prompt: list[int],
    text: list[int],
    params: SamplingParams,
    seed: int = 0,
    count: int = NUM_TOKENS,
) -> None:
    """Each token is what the model alone would choose at its position, up to what 16 bits may swap."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].float()
    ids, score, best = torch.tensor(text)[:, None], logits, logits
    if params.temperature > 0:
        seeds, positions = torch.full((len(text),), seed), torch.arange(len(text))
        logits = logits / params.temperature
        least = logits.topk(params.top_k if params.top_k > 0 else VOCAB).values[:, -1:]
        noisy = logits + gumbel_ref(random_words_ref(seeds, positions, VOCAB))
        # Of what lies at the filter's edge nobody knows on which side 16 bits put it.
        score, best = (noisy.masked_fill(logits < least + edge, -torch.inf) for edge in (-0.03, 0.03))
    behind = best.max(-1).values - score.gather(1, ids)[:, 0]
    assert len(text) == count and bool((behind < 0.06).all()), behind


async def on_gpu(
    folder: Path,
    sampling: Sequence[SamplingParams],
    depth: int,
    *,
    level: int = 2,
    captures: bool | None = None,
    **options: Any,
) -> tuple[list[list[int]], Scheduler, StepForward, list[int]]:
    """`serve` on the GPU itself; and its forward pass, with the counts of rejected drafts as they were at the end."""
    num_drafts = options.get("num_drafts", 0)
    config = gpu_config(str(folder), optimization_level=level)
    resolved = resolve(config, model_max_len=MAX_LEN, model_dtype="float16", cuda_available=True, num_cores=4)
    speculation = Speculation(num_drafts, lookup_max=5, lookup_min=3, batch_limit=0) if num_drafts else None
    resolved = dataclasses.replace(resolved, max_num_seqs=MAX_SEQS, async_scheduling=depth > 1, speculation=speculation)
    device = CudaDevice(resolved)
    loaded = load_model(load_checkpoint(config.model), resolved, device)
    runner: Any = make_runner(loaded, layout_of(loaded.spec, resolved), resolved, config.cache, device)
    forward: StepForward = runner._forward
    if captures is not None:
        forward.waits_for_idle_time = False  # each step takes its own bucket, captured or not
    if captures is False:
        forward._uses_graphs = False
        forward._entries.clear()
    counts: list[int] = []
    close = runner.close

    async def close_and_count() -> None:
        torch.cuda.synchronize()
        counts.extend(forward.rejected.tolist())
        counts.append(forward.num_graphs)
        await close()

    runner.close = close_and_count
    options |= {"num_blocks": runner.memory.num_blocks, "block_size": resolved.block_size}
    texts, _, scheduler = await serve(runner, sampling, depth, **options)
    return texts, scheduler, forward, counts


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [PLAIN, FILTERED, EDITED], ids=["greedy", "filtered", "edited"])
@pytest.mark.parametrize(("level", "depth", "share"), [(0, 1, 0.7), (2, 1, 0.7), (2, 2, 0.0), (2, 2, 0.7), (2, 2, 1.0)])
async def test_tokens_on_the_gpu_are_those_of_steps_without_drafts(
    checkpoint: tuple[PreTrainedModel, Path], sampling: list[SamplingParams], level: int, depth: int, share: float
) -> None:
    """INV-59, INV-43: seeded draws too, whose noise tells every position from every other."""
    model, folder = checkpoint
    texts, _, _, _ = await on_gpu(folder, sampling, 1)
    drafter = Guesses(texts, share)
    found, scheduler, _, counts = await on_gpu(
        folder, sampling, depth, level=level, drafter=drafter, num_drafts=3, budget=16
    )
    for prompt, params, *both in zip(PROMPTS, sampling, texts, found, strict=True):
        if params.frequency_penalty:
            continue
        for text in both:
            seed = compile_sampling(params, None, VOCAB, (), 0, 0).seed
            check_text(model, prompt, text, params, seed)
    num_rejected = scheduler.num_draft_tokens_total - scheduler.num_accepted_tokens_total
    assert sum(counts[:MAX_SEQS]) == num_rejected and scheduler.num_draft_tokens_total > 5
    assert share < 1.0 or num_rejected < scheduler.num_draft_tokens_total  # 16 bits may swap near ties
    assert (counts[MAX_SEQS] > 0) == (level > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["greedy", "filtered"])
@pytest.mark.parametrize("num_drafts", [3, 8])
async def test_captured_steps_with_drafts_choose_what_eager_ones_do(
    checkpoint: tuple[PreTrainedModel, Path], sampling: list[SamplingParams], num_drafts: int
) -> None:
    """Padded alike, token by token; also with more drafts than the decode tile has queries."""
    texts, _, _, _ = await on_gpu(checkpoint[1], sampling, 1)
    found = []
    for captures in (True, False):
        options: dict[str, Any] = {"drafter": Guesses(texts, 0.8), "num_drafts": num_drafts}
        text, _, _, counts = await on_gpu(checkpoint[1], sampling, 2, captures=captures, **options)
        found.append((text, counts[:MAX_SEQS]))
        assert (counts[MAX_SEQS] > 0) == captures
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
async def test_an_engine_on_the_gpu_drafts_from_its_own_text(
    checkpoint: tuple[PreTrainedModel, Path], ahead: bool
) -> None:
    """Long enough for a random model to repeat itself; half of the requests want log-probabilities."""
    model, folder = checkpoint
    prompts = [[*random_prompt(n, seed=n), *random_prompt(n, seed=n)] for n in (5, 23, 40, 11)]

    async def one(engine: AsyncEngine, i: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2 if i % 2 else None)
        outputs = [output async for output in await engine.submit(prompts[i], params)]
        entries = [entry.chosen.token_id for output in outputs for entry in output.delta_logprobs or ()]
        assert entries == (outputs[-1].token_ids if i % 2 else [])
        return outputs[-1].token_ids

    asked = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    config = gpu_config(str(folder), async_scheduling=ahead, speculative_config=json.dumps(asked))
    async with AsyncEngine(config) as engine:
        texts = [*await asyncio.gather(*(one(engine, i) for i in (0, 2))), await one(engine, 0)]
        texts += await asyncio.gather(*(one(engine, i) for i in range(4)))
        drafts = engine.stats().drafts
    assert drafts is not None and 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    for i, text in zip((0, 2, 0, 0, 1, 2, 3), texts, strict=True):
        check_text(model, prompts[i], text, GREEDY, count=60)
