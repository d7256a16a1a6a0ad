"""What the engine counts and exports adds up to what was asked and answered."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aioengine.engine import AsyncEngine
from aioengine.errors import InvalidRequest
from tests.engine.conftest import MakeEngine, wait_idle
from tests.engine.reading import GREEDY, LETTERS, ask, ask_all, read


def samples(engine: AsyncEngine) -> dict[str, float]:
    """Exported values by name without the prefix, labels in braces."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(engine.metrics_text().decode()):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            name = sample.name.removeprefix("aioengine_")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


async def test_counters_add_up(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        assert samples(engine)["requests_received_total"] == 0
        prompt = "p" * 40
        answers = [await ask(engine, prompt), await ask(engine, prompt)]
        answers += await ask_all(engine, [f"more {n}" for n in range(5)], dataclasses.replace(GREEDY, max_tokens=3))
        answers += await read(await engine.submit("choices", dataclasses.replace(LETTERS, n=3)))
        whole = answers[-1].text
        answers.append(await ask(engine, "choices", dataclasses.replace(LETTERS, stop=answers[7].text[4:8])))
        unscored = await ask(engine, "no output", dataclasses.replace(GREEDY, max_tokens=0))
        stream = await engine.submit("left", dataclasses.replace(GREEDY, max_tokens=100))
        await anext(stream)
        await stream.abort()
        with pytest.raises(InvalidRequest):
            await engine.submit("", GREEDY)
        await wait_idle(engine)

        found, stats = samples(engine), engine.stats()
        prompts = [prompt, prompt, *(f"more {n}" for n in range(5)), "choices", "choices", "no output", "left"]
        assert whole and unscored.token_ids == []
        assert found["requests_received_total"] == len(prompts)
        assert found["requests_rejected_total"] == 1
        assert found["prompt_tokens_total"] == sum(map(len, prompts)) == stats.prompt_tokens
        num_left = found["generation_tokens_total"] - sum(len(a.token_ids) for a in answers)
        assert 1 <= num_left < 100
        by_reason = {r: found[f"request_success_total{{{r}}}"] for r in ("stop", "length", "abort", "error")}
        assert by_reason == {"stop": 1, "length": len(answers), "abort": 1, "error": 0}
        num_ended = sum(by_reason.values())
        num_with_tokens = num_ended - 1
        assert found["e2e_request_latency_seconds_count"] == num_ended
        assert found["time_to_first_token_seconds_count"] == num_with_tokens
        assert found["request_queue_time_seconds_count"] == num_with_tokens
        assert found["inter_token_latency_seconds_count"] == found["generation_tokens_total"] - num_with_tokens
        assert found["step_time_seconds_count"] == found["steps_total"] == stats.num_steps > 0
        assert found["prefix_cache_hits_total"] == stats.prefix_hit_tokens >= 32
        assert found["prefix_cache_queries_total"] == sum(map(len, prompts)) + 2 * len("choices")
        assert found["num_requests_running"] == found["num_requests_waiting"] == found["kv_cache_usage_perc"] == 0


async def test_there_is_no_ratio_of_hits_and_nothing_that_was_not_measured(make_engine: MakeEngine) -> None:
    """N3: an all-time ratio drifts to 1 under repeats, and an absent value is no 0."""
    async with make_engine() as engine:
        idle = samples(engine)
        assert "event_loop_lag_p99_seconds" not in idle and engine.stats().loop_lag_p99_s is None
        for _ in range(2):
            await ask(engine, "p" * 40)
        found = samples(engine)
    assert found["prefix_cache_hits_total"] > 0 and found["prefix_cache_queries_total"] == 80
    cache = {"queries_total", "hits_total", "blocks", "evicted_blocks_total"}
    for values in (idle, found):
        assert {name for name in values if name.startswith("prefix_cache")} == {
            f"prefix_cache_{name}" for name in cache
        }
        assert not [name for name in values if {"ratio", "rate"} & set(name.split("_")) or name.startswith("step_cost")]


async def test_preemptions_are_counted(make_engine: MakeEngine) -> None:
    async with make_engine(num_gpu_blocks_override=14) as engine:
        await ask_all(engine, [f"{n} crowd" for n in range(12)], dataclasses.replace(GREEDY, max_tokens=80))
        assert samples(engine)["num_preemptions_total"] == engine.stats().num_preemptions > 0


@pytest.mark.parametrize("stale_output", ["deliver", "drop"])
async def test_preempted_one_step_ahead_answers_and_their_logprobs_stay_the_same(
    make_engine: MakeEngine, stale_output: str
) -> None:
    """C19: a token that is dropped is told to nobody, and neither are its log-probabilities."""
    prompts = [f"{n} crowd" for n in range(12)]
    params = dataclasses.replace(GREEDY, max_tokens=80, logprobs=2)
    async with make_engine(num_gpu_blocks_override=100) as engine:
        plain = await ask_all(engine, prompts, params)
        assert engine.stats().num_preemptions == 0
    options = {"num_gpu_blocks_override": 14, "async_scheduling": True, "stale_output": stale_output}
    async with make_engine(**options) as engine:
        crowded = await ask_all(engine, prompts, params)
        assert engine.stats().num_preemptions > 0
        assert samples(engine)["generation_tokens_total"] == sum(len(answer.token_ids) for answer in crowded)
    assert [a.token_ids for a in crowded] == [a.token_ids for a in plain]
    for answer in crowded:
        told = [position for output in answer.outputs for position in output.delta_logprobs or ()]
        assert [position.chosen.token_id for position in told] == answer.token_ids


async def test_running_and_waiting_show_while_it_runs(make_engine: MakeEngine) -> None:
    async with make_engine(max_num_seqs=2) as engine:
        streams = [await engine.submit(f"r{n}", GREEDY) for n in range(5)]
        await anext(streams[0])
        found = samples(engine)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (2, 3)
        assert found["kv_cache_usage_perc"] == pytest.approx(2 / 64)
        await asyncio.gather(*(read(stream) for stream in streams[1:]))


async def test_the_lag_of_the_loop_is_measured_while_requests_run(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        assert engine.stats().loop_lag_p99_s is None
        assert samples(engine)["event_loop_lag_seconds_count"] == 0
        while engine.stats().loop_lag_p99_s is None:
            await ask(engine, "busy", dataclasses.replace(GREEDY, max_tokens=100))
        assert engine.stats().loop_lag_p99_s >= 0
        found = samples(engine)
        assert found["event_loop_lag_seconds_count"] > 0
        assert found["event_loop_lag_p99_seconds"] == engine.stats().loop_lag_p99_s


async def test_the_learned_time_of_steps_is_shown_and_answers_stay_the_same(make_engine: MakeEngine) -> None:
    prompts = [f"{n}: " + "abcdefgh" * (n % 20) for n in range(12)]
    async with make_engine() as engine:
        assert engine.stats().step_cost is None
        plain = await ask_all(engine, prompts)
    async with make_engine(target_itl_ms=2.0, max_num_batched_tokens=64, async_scheduling=True) as engine:
        paced = await ask_all(engine, prompts)
        stats, found = engine.stats(), samples(engine)
        assert stats.step_cost is not None and stats.step_cost["num_observed"] == stats.num_steps > 0
        assert found["step_cost_target_s"] == 0.002
        assert found["step_cost_per_prompt_token_s"] == pytest.approx(stats.step_cost["per_prompt_token_s"])
    assert [a.token_ids for a in paced] == [a.token_ids for a in plain]
