"""What requests get from a running engine: limits, stops, choices, scores, joined deltas."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from transformers import PreTrainedModel

from aioengine.errors import InvalidConfig
from aioengine.types import SamplingParams
from tests.engine.conftest import EOS, MAX_LEN, MakeEngine, prompt_logprobs, teacher_forced
from tests.engine.reading import GREEDY, LETTERS, PRINTABLE, ask, ask_all, read

PROMPTS = [f"prompt {n}: " + "abcdefgh"[: n % 9] * (1 + n % 5) for n in range(64)]
SCORED = "The quick brown fox jumps over the lazy dog."


async def test_greedy_answers_equal_transformers(make_engine: MakeEngine, tiny_model: PreTrainedModel) -> None:
    async with make_engine() as engine:
        answers = await ask_all(engine, PROMPTS[:6])
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            ids = await engine.render(prompt)
            best = teacher_forced(tiny_model, ids + answer.token_ids[:-1]).argmax(-1).tolist()
            assert answer.token_ids == best[len(ids) - 1 :]


async def test_sixty_four_streams_complete(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        alone = [await ask(engine, prompt) for prompt in PROMPTS[::16]]
        together = await ask_all(engine, PROMPTS)
        assert {len(answer.token_ids) for answer in together} == {16}
        assert {answer.last.finish_reason for answer in together} == {"length"}
        assert [a.token_ids for a in together[::16]] == [a.token_ids for a in alone]


async def test_a_slow_reader_gets_joined_deltas_and_delays_nobody(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        slow = await engine.submit("slow", dataclasses.replace(GREEDY, max_tokens=20))
        quick = await ask(engine, "quick", dataclasses.replace(GREEDY, max_tokens=60))
        assert len(quick.token_ids) == 60 and len(quick.outputs) > 1
        (answer,) = await read(slow)
        assert len(answer.outputs) == 1 and len(answer.last.delta_token_ids) == 20


@pytest.mark.slow
async def test_choices_differ_and_a_seed_repeats_them(make_engine: MakeEngine) -> None:
    async with make_engine(max_num_seqs=3) as engine:
        params = dataclasses.replace(LETTERS, n=5)
        first = await read(await engine.submit("story", params))
        assert len({answer.text for answer in first}) == 5
        stream = await engine.submit("story", params)
        await ask_all(engine, PROMPTS[:5], LETTERS)
        assert [answer.text for answer in await read(stream)] == [answer.text for answer in first]
        assert (await ask(engine, "story", LETTERS)).text == first[0].text
        other = dataclasses.replace(LETTERS, seed=4)
        assert (await ask(engine, "story", other)).text != first[0].text


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
async def test_choices_share_their_prompt_and_nothing_else(make_engine: MakeEngine, caching: bool, ahead: bool) -> None:
    prompt, params = "once upon a time, in a land of tiny models", dataclasses.replace(LETTERS, n=4)
    apart = dataclasses.replace(params, prompt_logprobs=0)  # each computes all positions by itself
    async with make_engine(enable_prefix_caching=caching, async_scheduling=ahead) as engine:
        together = await read(await engine.submit(prompt, params))
        assert together[-1].usage.prompt_tokens == len(prompt)
        assert together[-1].usage.completion_tokens == 4 * 40
        assert together[-1].usage.cached_tokens == 0  # computed for this very request
        alone = await read(await engine.submit(prompt, apart))
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        assert len({answer.text for answer in together}) == 4
        half_way = await engine.submit(prompt, params)
        await anext(half_way)
        await half_way.abort()


async def test_without_a_seed_answers_differ(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        params = dataclasses.replace(LETTERS, seed=None)
        assert (await ask(engine, "x", params)).text != (await ask(engine, "x", params)).text


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_stop_text_across_tokens_cuts_the_answer(make_engine: MakeEngine, is_kept: bool) -> None:
    async with make_engine() as engine:
        whole = (await ask(engine, "x", LETTERS)).text
        stop = whole[7:11]
        start = whole.index(stop)
        params = dataclasses.replace(LETTERS, stop=("???", stop), include_stop_str_in_output=is_kept)
        answer = await ask(engine, "x", params)
        assert answer.text == whole[: start + 4 * is_kept]
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)
        assert len(answer.token_ids) == start + 4


async def test_a_stop_text_waits_for_min_tokens(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        params = dataclasses.replace(LETTERS, allowed_token_ids=PRINTABLE[:1], stop=("aa",), min_tokens=9)
        answer = await ask(engine, "x", params)
        assert answer.last.finish_reason == "stop" and len(answer.token_ids) >= 9


BENT_ON_EOS = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={EOS: 100.0}, skip_special_tokens=False)


async def test_the_end_token_ends_the_answer_without_text(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        answer = await ask(engine, "x", BENT_ON_EOS)
        assert (answer.token_ids, answer.text) == ([EOS], "")
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", None)
        assert answer.usage.completion_tokens == 1


async def test_min_tokens_holds_the_end_token_back(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        answer = await ask(engine, "x", dataclasses.replace(BENT_ON_EOS, min_tokens=5))
        assert len(answer.token_ids) == 6 and answer.token_ids.index(EOS) == 5
        assert "</s>" not in answer.text


async def test_ignore_eos_goes_on(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        answer = await ask(engine, "x", dataclasses.replace(BENT_ON_EOS, ignore_eos=True))
        assert answer.token_ids == [EOS] * 12 and answer.last.finish_reason == "length"
        assert answer.text == "</s>" * 12


async def test_a_stop_token_is_named_as_the_reason(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        letter = PRINTABLE[5]
        params = SamplingParams(temperature=0.0, logit_bias={letter: 100.0}, stop_token_ids=(letter,))
        answer = await ask(engine, "x", params)
        assert (answer.token_ids, answer.text) == ([letter], "")
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", letter)
        kept = await ask(engine, "x", dataclasses.replace(params, include_stop_str_in_output=True))
        assert kept.text == "f"


async def test_without_max_tokens_the_context_is_filled(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        prompt_ids = await engine.render("filled to the brim")
        answer = await ask(engine, prompt_ids, dataclasses.replace(GREEDY, max_tokens=None))
        assert len(prompt_ids) + len(answer.token_ids) == MAX_LEN
        assert answer.last.finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 14, "max_model_len": 80, "async_scheduling": True},
    ],
    ids=["plain", "chunked", "ahead", "preempted"],
)
@pytest.mark.parametrize("max_tokens", [0, 30])
async def test_prompt_logprobs_equal_transformers(
    make_engine: MakeEngine, tiny_model: PreTrainedModel, options: dict[str, object], max_tokens: int
) -> None:
    prompts = [SCORED[start:] for start in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True)
    async with make_engine(**options) as engine:
        for _ in range(2):  # the second time the prefix cache holds it all and must not be read
            answers = await ask_all(engine, prompts, params)
            for prompt, answer in zip(prompts, answers, strict=True):
                ids = await engine.render(prompt)
                first, *rest = answer.prompt_logprobs
                assert first is None and [p.chosen.token_id for p in rest if p] == ids[1:]
                assert all(p and len(p.top) == 2 for p in rest)
                found = [p.chosen.logprob for p in rest if p]
                assert found == pytest.approx(prompt_logprobs(tiny_model, ids), abs=1e-3)
                assert len(answer.token_ids) == max_tokens and answer.last.finish_reason == "length"
        if "num_gpu_blocks_override" in options and max_tokens:
            assert engine.stats().num_preemptions > 0


async def test_the_prefix_cache_is_used_and_salts_part_it(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        prompt = "x" * 50
        cold = await ask(engine, prompt)
        warm = await ask(engine, prompt)
        salted = await ask(engine, prompt, cache_salt="\udc80 mine")
        assert [a.usage.cached_tokens for a in (cold, warm, salted)] == [0, 49, 0]
        assert cold.token_ids == warm.token_ids == salted.token_ids


async def test_priorities_go_first(make_engine: MakeEngine) -> None:
    async with make_engine(max_num_seqs=1, scheduling_policy="priority") as engine:
        streams = [await engine.submit(f"p{n}", GREEDY, priority=-n) for n in range(4)]
        ends = [(await read(stream))[0].last.timing.finished_s for stream in streams]
        assert ends == sorted(ends, reverse=True)


async def test_messages_are_rendered_with_the_template(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
        assert await engine.render(messages) == await engine.render("<user>hi\n<assistant>ho\n")
        assert (await ask(engine, messages)).usage.prompt_tokens == len("<user>hi\n<assistant>ho\n")


async def test_the_number_of_running_requests_changes_while_they_run(make_engine: MakeEngine) -> None:
    async with make_engine(max_num_seqs=8, max_num_active_seqs=1) as engine:
        most = []
        for limit in (1, 3):
            engine.set_max_num_active_seqs(limit)
            tasks = [asyncio.create_task(ask(engine, f"prompt {n}")) for n in range(6)]
            seen = 0
            while not all(task.done() for task in tasks):
                seen = max(seen, engine.stats().num_running)
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)
            most.append(seen)
        assert most == [1, 3] and engine.stats().max_num_active_seqs == 3
        for wrong in (0, 9, True, 1.5):
            with pytest.raises(InvalidConfig, match="must lie between 1 and max_num_seqs=8"):
                engine.set_max_num_active_seqs(wrong)  # type: ignore[arg-type]
