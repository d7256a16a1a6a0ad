"""The GPU path: buckets and facts of steps, padded forward passes, completion, and the runner itself on a GPU.

Without a GPU the forward pass runs in Triton's interpreter, where a bucket is padded as on a device but never
captured.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from aioengine import AsyncEngine, EngineConfig, SamplingParams, graphs
from aioengine.buckets import Bucket, StepFacts, token_buckets
from aioengine.checkpoint import load_checkpoint
from aioengine.cuda_device import check_attention
from aioengine.errors import InvalidConfig
from aioengine.fastcore import native
from aioengine.graphs import StepForward
from aioengine.kernels import attention_plan
from aioengine.kernels.attention_plan import _rows_block, fill_plan, row_counts, tile_for
from aioengine.kernels.sampling import draw_ref
from aioengine.layers.ops_cuda import CudaOps
from aioengine.loader import load_model
from aioengine.sampler import Choice
from tests.kernels.triton_here import need_triton
from tests.models.plans import FakeRequest, Planner
from tests.models.tiny import (
    VOCAB,
    make_checkpoint,
    poison_given_back,
    poisoned_caches,
    random_prompt,
    resolve_for,
    tiny_layout,
)

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MAX_SEQS = 4, 40, 64, 4
TEMPERATURE, TOP_K, SEED = 5.0, 12, 123_456_789_012


def test_buckets_end_with_the_largest_step_and_pad_little() -> None:
    buckets = token_buckets(512, 8192)
    assert buckets[-1] == 8192 and 512 in buckets and len(buckets) < 70
    assert all((b - a) / b <= 0.5 for a, b in zip(buckets, buckets[1:], strict=False))
    assert all((b - a) / b <= 0.2 for a, b in zip(buckets, buckets[1:], strict=False) if a >= 64)
    assert all((b - a) / b <= 0.125 for a, b in zip(buckets, buckets[1:], strict=False) if a >= 512)
    assert token_buckets(4, 100)[-2:] == (96, 100)
    assert token_buckets(4, 513)[-2:] == (512, 513)
    assert token_buckets(4, 2048)[-2:] == (1920, 2048)
    assert token_buckets(3, 3) == (1, 2, 3) and token_buckets(1, 1) == (1,)


def test_facts_of_a_step_are_those_that_its_buffer_holds() -> None:
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    long, short = planner.request(range(20)), planner.request(range(3))
    planner.plan({long: 4})
    facts = StepFacts.of(planner.plan({long: 7, short: 3}).buffer)
    assert (facts.num_rows, facts.num_tokens, facts.num_samples, facts.max_query_len) == (2, 10, 1, 7)
    assert facts.sample_rows.tolist() == [short.row] and facts.sample_plan_rows.tolist() == [1]
    assert facts.prompt_spans == () and facts.long_rows == ()


def test_a_buffer_of_another_version_is_refused() -> None:
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    buffer = planner.plan({planner.request(range(3)): 3}).buffer
    buffer[0] += 1
    with pytest.raises(ValueError, match="version"):
        StepFacts.of(buffer)


async def test_signals_reach_the_loop_and_are_counted_once() -> None:
    completion = native.Completion()
    loop = asyncio.get_running_loop()
    counts: asyncio.Queue[int] = asyncio.Queue()
    loop.add_reader(completion.fileno(), lambda: counts.put_nowait(completion.take()))
    assert completion.take() == 0
    completion.signal()
    completion.signal()
    assert await counts.get() == 2
    completion.signal()
    assert await counts.get() == 1
    loop.remove_reader(completion.fileno())
    completion.close()
    completion.close()
    assert completion.fileno() == -1 and completion.take() == 0
    with pytest.raises(RuntimeError, match="closed"):
        completion.enqueue(0)


@pytest.mark.skipif(native.completion_unavailable() is None, reason="there is a CUDA driver")
def test_without_a_driver_enqueue_says_so() -> None:
    with pytest.raises(RuntimeError, match="CUDA driver cannot be opened"):
        native.Completion().enqueue(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
async def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(InvalidConfig, match="no CUDA device"):
        async with AsyncEngine(EngineConfig(model="shape:smollm2-135m", load_format="dummy", device="cuda")):
            pass


class Family(NamedTuple):
    reference: PreTrainedModel
    folder: Path


@pytest.fixture(scope="module", params=["llama-biases", "mistral-window", "qwen3-tied"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    return Family(make_checkpoint(request.param, folder), folder)


class OpsOnly:
    """As much of a device as loading a model needs."""

    def __init__(self, ops: CudaOps) -> None:
        self.ops = ops


@pytest.fixture
def small_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention launches of few programs: the interpreter runs them one after another."""

    def small(group: int, few_queries: bool, num_rows: int = 64) -> attention_plan.Tile:
        tile = tile_for(group, few_queries, num_rows)
        return dataclasses.replace(tile, block_m=min(tile.block_m, 32), target_programs=4)

    monkeypatch.setattr(attention_plan, "tile_for", small)


@pytest.fixture
def forward(family: Family, level: int, small_grids: None) -> StepForward:
    return make_forward(family.folder, level)


def make_forward(
    folder: Path, level: int, max_num_seqs: int = MAX_SEQS, *, num_drafts: int = 0, uses_cudnn: bool = True
) -> StepForward:
    """A checkpoint's forward pass in the interpreter, over a pool of NaN."""
    ops = CudaOps(torch.device("cpu"), torch.float32)
    if torch.cuda.is_available():
        pytest.skip("the interpreter's test; on a GPU the tests marked gpu run the whole engine")
    need_triton(ops.device)
    config, resolved = resolve_for(str(folder), MAX_LEN, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs)
    loaded = load_model(load_checkpoint(config.model), resolved, OpsOnly(ops))
    spec = loaded.spec
    layout = tiny_layout(spec, BLOCK_SIZE)
    return StepForward(
        loaded.model,
        spec,
        ops,
        poisoned_caches(layout, NUM_BLOCKS),
        layout=layout,
        max_num_seqs=max_num_seqs,
        max_blocks=MAX_LEN // BLOCK_SIZE,
        buffer_words=4096,
        buckets=token_buckets(max_num_seqs, 48) if level else (),
        num_speculative_tokens=num_drafts,
        uses_cudnn=uses_cudnn,
    )


def run_step(
    forward: StepForward, planner: Planner, chunks: dict[FakeRequest, int], drawn: FakeRequest | None = None
) -> None:
    """One step as the runner takes it: all rows greedy but for `drawn`."""
    plan = planner.plan(chunks)
    if drawn is not None:
        forward.draws.temperature[drawn.row], forward.draws.seeds[drawn.row] = TEMPERATURE, SEED
        forward.draws.top_p[drawn.row], forward.draws.top_k[drawn.row] = 1.0, TOP_K
    poison_given_back(planner, forward._kv_caches)
    forward.buffer[: len(plan.buffer)] = torch.from_numpy(plan.buffer)
    facts = StepFacts.of(plan.buffer)
    with torch.no_grad():
        output = forward.run(facts, choice=Choice.FILTERED)
        if facts.num_samples and not output.has_chosen:
            n, inputs = forward.buckets.sample_size(facts.num_samples), output.inputs
            rows = output.hidden[output.sample_indices[:n].long()]
            forward.choose(rows, inputs.sample_rows[:n], inputs.sample_num_outputs[:n], output.ctx, Choice.FILTERED)
    ids, status = forward.packed[:, : facts.num_samples].numpy().copy()
    assert not status.any()
    planner.update(plan, ids.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 2], ids=["eager", "buckets"])
def test_padded_and_exact_steps_choose_what_transformers_would(
    forward: StepForward, family: Family, level: int
) -> None:
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_SEQS)
    first, second, third = (planner.request(random_prompt(n, seed=n)) for n in (5, 23, 1))
    with np.errstate(all="ignore"):
        run_step(forward, planner, {first: 5})
        run_step(forward, planner, {first: 1, second: 14})
        run_step(forward, planner, {second: 9, third: 1, first: 1}, drawn=third)
        run_step(forward, planner, dict.fromkeys((first, second, third), 1))
        run_step(forward, planner, {second: 1, first: 1})
        copied = planner.sibling(second, 22)
        run_step(forward, planner, {copied: 1, second: 1})
        run_step(forward, planner, {second: 1, copied: 1})
    assert forward.num_graphs == 0
    for request in (first, second, third, copied):
        ids = torch.tensor([request.prompt + request.outputs])
        with torch.no_grad():
            logits = family.reference(ids).logits[0, len(request.prompt) - 1 : -1]
        expected = logits.argmax(-1)
        if request is third:
            seeds, positions = torch.full((len(logits),), SEED), torch.arange(len(logits))
            z = logits / TEMPERATURE
            expected = draw_ref(z, z.topk(TOP_K).values[:, -1], seeds, positions)
            assert expected.tolist() != logits.argmax(-1).tolist()
        assert request.outputs == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 2], ids=["eager", "buckets"])
@pytest.mark.parametrize("family", ["mistral-window"], indirect=True)
def test_the_last_layer_computes_what_is_read_and_no_more(forward: StepForward, level: int) -> None:
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_SEQS)
    first, second = planner.request(random_prompt(23, seed=1)), planner.request(random_prompt(9, seed=2))
    with np.errstate(all="ignore"), torch.no_grad():
        run_step(forward, planner, {first: 4})
        plan = planner.plan({first: 12, second: 9})
        forward.buffer[: len(plan.buffer)] = torch.from_numpy(plan.buffer)
        facts = StepFacts.of(plan.buffer)
        spared = forward.run(facts, choice=Choice.PLAIN)
        last, at = spared.hidden[:2].clone(), int(spared.sample_indices[0])
        scored = forward.run(dataclasses.replace(facts, prompt_spans=((0, 0),)), choice=Choice.PLAIN)
    assert len(spared.hidden) <= MAX_SEQS and at == 1
    assert len(scored.hidden) == 21 and int(scored.sample_indices[0]) == 20
    torch.testing.assert_close(last, scored.hidden[[11, 20]], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("level", [2])
def test_preparing_a_bucket_leaves_no_trace(forward: StepForward, level: int) -> None:
    before = [t.clone() for t in (forward.block_table, forward.last_token, *forward._kv_caches)]
    with torch.no_grad(), np.errstate(all="ignore"):
        forward.prepare(Bucket(2, few_queries=True, choice=Choice.PLAIN))
    after = (forward.block_table, forward.last_token, *forward._kv_caches)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("level", [2])
def test_every_bucket_of_prompts_and_decodes_is_captured_ahead(forward: StepForward, level: int) -> None:
    ahead = forward.buckets.ahead()
    assert len(set(ahead)) == len(ahead) and ahead[0].num_tokens == forward.buckets.sizes[-1]
    assert set(forward.buckets.at_start()) <= set(ahead) and forward.buckets.at_start()[0] == ahead[0]
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    step = StepFacts.of(planner.plan({planner.request(range(3)): 3}).buffer)
    for num_tokens in range(1, forward.buckets.sizes[-1] + 1):
        for choice in Choice:
            longest = [33] if num_tokens > MAX_SEQS else [1, 33]
            for max_query_len in longest:
                facts = dataclasses.replace(step, num_tokens=num_tokens, max_query_len=max_query_len)
                assert forward.buckets.of(facts, choice) in ahead


@pytest.mark.slow
@pytest.mark.parametrize("level", [2])
def test_lists_beside_long_chunks_are_made_ahead_of_rows_without_tokens(
    forward: StepForward, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(graphs, "fill_plan", lambda plan, *rows: (made.append(plan), fill_plan(plan, *rows)))
    assert len(list(forward.warm_rests())) == len(made) >= 1
    for plan in made:
        assert len(plan.lists) == 2 and all(bool((work.items[:, 0] == -1).all()) for work in plan.lists)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-biases", "mistral-window"], indirect=True)
@pytest.mark.parametrize("level", [2])
def test_why_long_chunks_stay_with_the_paged_kernel_is_told(
    family: Family, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4, F5: by the flag, or by what the device and the model's layers want; the flag for cuDNN is no wish."""
    monkeypatch.setattr(graphs, "unsupported_reason", lambda *_, window=0: "windows" if window else None)
    served = make_forward(family.folder, level)
    windowed = family.folder.name.startswith("mistral")
    assert served.cudnn_refusal == ("windows" if windowed else None)
    check_attention("auto", served.cudnn_refusal)
    check_attention("cudnn", None)
    with pytest.raises(InvalidConfig, match="attention_backend=cudnn cannot be had: windows"):
        check_attention("cudnn", "windows")
    switched_off = make_forward(family.folder, level, uses_cudnn=False)
    assert "--attention-backend triton" in (switched_off.cudnn_refusal or "")


def test_every_number_of_rows_is_listed_by_a_kernel_that_was_made_ahead() -> None:
    for most in (1, 16, 17, 128, 129, 300, 1000):
        assert {_rows_block(n) for n in range(1, most + 1)} == {_rows_block(n) for n in row_counts(most)}


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 2])
def test_samples_are_multiplied_in_sizes_that_were_seen_at_start(forward: StepForward, level: int) -> None:
    """A size seen first keeps the loop waiting for the device."""
    sizes = [forward.buckets.sample_size(n) for n in range(MAX_SEQS + 1)]
    if level == 0:
        assert sizes == list(range(MAX_SEQS + 1))
        return
    seen = {bucket.num_tokens for bucket in forward.buckets.at_start() if bucket.choice}
    assert sizes[0] == 0 and set(sizes[1:]) <= seen and sizes[1:] == [1, 2, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("level", [2])
def test_a_larger_bucket_makes_up_for_one_that_waits_for_idle_time(
    forward: StepForward, family: Family, level: int
) -> None:
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_SEQS)
    first, second = planner.request(random_prompt(12, seed=1)), planner.request(random_prompt(15, seed=2))
    of_16, of_24 = (Bucket(size, few_queries=False, choice=Choice.OTHER) for size in (16, 24))
    forward.waits_for_idle_time = True
    with torch.no_grad(), np.errstate(all="ignore"):
        forward.prepare(of_24)
        run_step(forward, planner, {first: 12})
        assert forward.is_prepared(of_16)  # half of 24 would have been padding
        del forward._entries[of_16]
        run_step(forward, planner, {second: 15, first: 1})
        assert not forward.is_prepared(of_16)
    for request in (first, second):
        with torch.no_grad():
            logits = family.reference(torch.tensor([request.prompt + request.outputs])).logits[0]
        assert request.outputs == logits.argmax(-1)[len(request.prompt) - 1 : -1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("level", [2])
def test_without_memory_for_one_more_graph_steps_run_eagerly(
    forward: StepForward, family: Family, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[str] = []

    class Graph:
        def capture_begin(self, **options: object) -> None:
            captures.append("begun")

        def capture_end(self) -> None:
            captures.append("ended")

    def out_of_memory(*args: object) -> torch.Tensor:
        if captures and captures[-1] == "begun":
            raise torch.OutOfMemoryError("no room")
        return compute(*args)

    compute = forward._model.forward
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(forward._model, "forward", out_of_memory)
    forward._uses_graphs = True
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_SEQS)
    request = planner.request(random_prompt(5, seed=1))
    with np.errstate(all="ignore"):
        for num_new in (5, 1, 1):
            run_step(forward, planner, {request: num_new})
    assert captures == ["begun", "ended"] and forward.num_graphs == 0
    with torch.no_grad():
        logits = family.reference(torch.tensor([request.prompt + request.outputs])).logits[0]
    assert request.outputs == logits.argmax(-1)[4:-1].tolist()


@pytest.mark.slow
def test_prompts_are_scored_from_all_tokens_whatever_bucket_is_at_hand(family: Family, small_grids: None) -> None:
    """A larger bucket than the step's own may spare its last layer what the step's own would not."""
    forward = make_forward(family.folder, 2, max_num_seqs=16)
    planner = Planner(vocab_size=VOCAB, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=16)
    request = planner.request(random_prompt(23, seed=1), SamplingParams(temperature=0.0, prompt_logprobs=0))
    forward.waits_for_idle_time = True
    with torch.no_grad(), np.errstate(all="ignore"):
        forward.prepare(Bucket(32, few_queries=False, choice=Choice.OTHER))
        plan = planner.plan({request: 23})
        forward.buffer[: len(plan.buffer)] = torch.from_numpy(plan.buffer)
        facts = StepFacts.of(plan.buffer)
        assert facts.prompt_spans == ((0, 0),)
        output = forward.run(facts, choice=Choice.PLAIN)
        logits = forward._model.logits(output.hidden[:23], output.ctx)
        expected = family.reference(torch.tensor([request.prompt])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


# ---- on a GPU -----------------------------------------------------------------------------------------------


def gpu_config(folder: str, **options: object) -> EngineConfig:
    """A small engine in a type whose near-ties are few."""
    return EngineConfig(
        model=folder,
        device="cuda",
        dtype="float16",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        **{"num_gpu_blocks_override": 200, **options},
    )


async def generate(folder: str, prompts: list[list[int]], params: SamplingParams, **options: object) -> list[list[int]]:
    """Tokens of all prompts, run together; choices one after the other."""

    async def one(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        found: list[list[int]] = [[] for _ in range(params.n)]
        async for output in await engine.submit(prompt, params):
            found[output.index] += output.delta_token_ids
        return [token_id for choice in found for token_id in choice]

    async with AsyncEngine(gpu_config(folder, **options)) as engine:
        return await asyncio.gather(*(one(engine, prompt) for prompt in prompts))


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("ahead", [False, True])
async def test_tokens_on_the_gpu_are_those_of_the_model_alone(family: Family, level: int, ahead: bool) -> None:
    prompts = [random_prompt(n, seed=n) for n in (5, 23, 90, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = await generate(str(family.folder), prompts, params, optimization_level=level, async_scheduling=ahead)
    model = family.reference
    for prompt, outputs in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + outputs])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(outputs)[:, None])[:, 0]
        # float16 may swap near-ties
        assert len(outputs) == 12 and bool((logits.max(-1).values - chosen < 0.03).all())


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
async def test_who_is_greedy_on_the_gpu_draws_nothing_whoever_had_the_row_before(family: Family, ahead: bool) -> None:
    prompts = [random_prompt(n, seed=n) for n in (5, 23, 90, 40, 11, 8, 60)]
    draws = SamplingParams(temperature=5.0, max_tokens=9, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)

    async def one(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
        outputs = [output async for output in await engine.submit(prompt, params)]
        return outputs[-1].token_ids

    async with AsyncEngine(gpu_config(str(family.folder), async_scheduling=ahead)) as engine:
        await asyncio.gather(*(one(engine, prompt, draws) for prompt in [*prompts, prompts[0]]))
        found = await asyncio.gather(one(engine, prompts[0], draws), *(one(engine, ids, greedy) for ids in prompts))
    for prompt, outputs in zip(prompts, found[1:], strict=True):
        with torch.no_grad():
            logits = family.reference(torch.tensor([prompt + outputs])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(outputs)[:, None])[:, 0]
        assert bool((logits.max(-1).values - chosen < 0.03).all())


@pytest.mark.gpu
async def test_seeded_draws_on_the_gpu_are_repeatable_with_edits_and_logprobs(family: Family) -> None:
    prompts = [random_prompt(n, seed=n) for n in (5, 23)]
    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=12, ignore_eos=True, frequency_penalty=0.5, logprobs=2
    )
    both = await generate(str(family.folder), prompts, params)
    alone = [(await generate(str(family.folder), [prompt], params))[0] for prompt in prompts]
    assert both == alone


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
async def test_logprobs_on_the_gpu_are_those_of_the_model_alone(family: Family, ahead: bool) -> None:
    """Of rows that ask for different numbers, beside rows that ask for none, with penalties and without."""
    prompts = [random_prompt(n, seed=n) for n in (5, 23, 90, 40, 11)]
    wanted = [0, 2, None, 7, -1]

    async def one(engine: AsyncEngine, prompt: list[int], count: int | None) -> list[Any]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=9,
            ignore_eos=True,
            logprobs=count,
            prompt_logprobs=None if count is None else max(count, 0),
            frequency_penalty=0.5 if count == 7 else 0.0,
        )
        return [output async for output in await engine.submit(prompt, params)]

    async with AsyncEngine(gpu_config(str(family.folder), async_scheduling=ahead, max_logprobs=-1)) as engine:
        found = await asyncio.gather(*map(one, [engine] * 5, prompts, wanted))
    for prompt, count, outputs in zip(prompts, wanted, found, strict=True):
        ids = prompt + outputs[-1].token_ids
        with torch.no_grad():
            values = family.reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        positions = [entry for output in outputs for entry in output.delta_logprobs or ()]
        if count is None:
            assert not positions and outputs[0].prompt_logprobs is None
            continue
        assert len(positions) == 9 and outputs[0].prompt_logprobs[0] is None
        scored = [*outputs[0].prompt_logprobs[1:], *positions]
        assert len(scored) == len(ids) - 1
        for at, entry in enumerate(scored, 1):
            expected = values[at - 1]
            width = count if at < len(prompt) else VOCAB if count == -1 else count
            assert entry.chosen.token_id == ids[at] and len(entry.top) == max(width, 0)
            assert entry.chosen.logprob == pytest.approx(float(expected[ids[at]]), abs=0.05)
            for top in entry.top:
                assert top.logprob == pytest.approx(float(expected[top.token_id]), abs=0.05)
            best = expected.topk(len(entry.top)).values.tolist() if count != -1 else []
            assert [top.logprob for top in entry.top if count != -1] == pytest.approx(best, abs=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
async def test_choices_on_the_gpu_continue_from_copied_blocks(family: Family, ahead: bool) -> None:
    prompt = random_prompt(37, seed=37)
    params = SamplingParams(temperature=0.0, n=4, max_tokens=12, ignore_eos=True)
    both = await generate(str(family.folder), [prompt] * 4, params, async_scheduling=ahead)
    with torch.no_grad():
        for ids in both:
            for at in range(0, 48, 12):
                outputs = ids[at : at + 12]
                logits = family.reference(torch.tensor([prompt + outputs])).logits[0, len(prompt) - 1 : -1]
                chosen = logits.gather(1, torch.tensor(outputs)[:, None])[:, 0]
                assert bool((logits.max(-1).values - chosen < 0.03).all())


@pytest.mark.gpu
async def test_closing_gives_the_memory_back(family: Family) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    await generate(str(family.folder), [random_prompt(5)], params)
    before = torch.cuda.memory_reserved()
    await generate(str(family.folder), [random_prompt(5)], params)
    assert torch.cuda.memory_reserved() <= before
