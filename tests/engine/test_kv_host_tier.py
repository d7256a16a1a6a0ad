"""The host tier behind a pool too small for what is asked: loaded prefixes, equal answers, governance, memory."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from aioengine import loader
from aioengine.cli.info import collect_facts, shown_facts
from aioengine.cli.startup_report import startup_report
from aioengine.config import ServerConfig
from aioengine.engine import AsyncEngine
from aioengine.errors import InvalidConfig
from aioengine.kv_connector import Load
from aioengine.kv_host_tier import KVHostTier
from aioengine.types import RequestOutput, SamplingParams
from tests.engine.conftest import MakeEngine, engine_config
from tests.engine.reading import GREEDY, LETTERS, ask, ask_all, read
from tests.engine.test_metrics import samples

SYSTEM = "You are a helpful machine that answers in letters. "
FIRST, SECOND = SYSTEM + "The first document is about birds.", SYSTEM + "Another document, about fish and more."
SHORT = dataclasses.replace(GREEDY, max_tokens=3)
FLOOD = [f"{n} a flood of text that fills half the pool, with nothing shared and no end in sight {n}" for n in range(3)]
NO_TIER, TIER = {"num_gpu_blocks_override": 15}, {"num_gpu_blocks_override": 15, "kv_offloading_size": 0.01}
"""The pool holds one request of the greatest length and little more."""


async def cached(engine: AsyncEngine, prompt: str, salt: str | None = None) -> int:
    """Tokens found in full blocks."""
    return (await ask(engine, prompt, SHORT, cache_salt=salt)).usage.cached_tokens // 16 * 16


async def flood(engine: AsyncEngine) -> None:
    """Evicts whatever was cached."""
    for prompt in FLOOD:
        await ask(engine, prompt, SHORT)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
async def test_an_evicted_prefix_is_loaded_and_answers_are_equal(make_engine: MakeEngine, ahead: bool) -> None:
    async with make_engine(**NO_TIER, async_scheduling=ahead) as engine:
        answers = [(await ask(engine, prompt)).token_ids for prompt in (FIRST, SECOND)]
        await flood(engine)
        assert await cached(engine, FIRST) == 0, "the flood is no flood"
        assert engine.stats().connector is None and "external_prefix_cache_hits_total" not in samples(engine)
    async with make_engine(**TIER, async_scheduling=ahead) as engine:
        assert [(await ask(engine, prompt)).token_ids for prompt in (FIRST, SECOND)] == answers
        before = engine.stats()
        assert before.connector is not None and before.external_hit_tokens == before.connector.num_loaded_blocks == 0
        await flood(engine)
        again = [await ask(engine, prompt) for prompt in (FIRST, SECOND)]
        assert [answer.token_ids for answer in again] == answers
        assert again[0].usage.cached_tokens // 16 == len(FIRST) // 16
        stats = engine.stats()
        assert stats.connector is not None
        assert stats.external_hit_tokens == 16 * stats.connector.num_loaded_blocks >= 80
        assert stats.external_queries_tokens > stats.external_hit_tokens
        assert stats.connector.num_blocks == stats.connector.num_stored_blocks < stats.connector.max_blocks
        exported = samples(engine)
        assert exported["external_prefix_cache_hits_total"] == stats.external_hit_tokens
        assert exported["external_prefix_cache_queries_total"] == stats.external_queries_tokens
        assert exported["kv_offload_usage_perc"] == stats.connector.num_blocks / stats.connector.max_blocks
        assert exported["kv_offload_loaded_blocks_total"] == stats.connector.num_loaded_blocks
        assert exported["kv_offload_stored_blocks_total"] == stats.connector.num_stored_blocks
        check(engine)


def check(engine: AsyncEngine) -> None:
    """The tier's books agree."""
    tier = engine._loaded.runner.connector
    assert isinstance(tier, KVHostTier)
    tier.check()


class Churn:
    """Many requests whose prompts begin alike, in an order of their own, some of them several answers long."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        starts = [draw.choice("abcdefgh") * draw.randint(1, 60) for _ in range(5)]
        self.prompts = [draw.choice(starts) + "x" * draw.randint(0, 50) + draw.choice("yz") for _ in range(40)]
        self.params = [
            draw.choice([GREEDY, SHORT, LETTERS, dataclasses.replace(LETTERS, n=3, max_tokens=20, logprobs=2)])
            for _ in self.prompts
        ]

    async def run(self, engine: AsyncEngine) -> list[list[list[int]]]:
        """Token ids of every choice of every request."""
        gate = asyncio.Semaphore(6)

        async def one(prompt: str, params: SamplingParams) -> list[list[int]]:
            async with gate:
                return [answer.token_ids for answer in await read(await engine.submit(prompt, params))]

        return list(await asyncio.gather(*map(one, self.prompts, self.params)))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@pytest.mark.parametrize("num_blocks", [3, 20, 1000])
async def test_a_churn_of_requests_answers_as_with_a_pool_that_holds_all(
    make_engine: MakeEngine, tiny_block_bytes: int, num_blocks: int, ahead: bool
) -> None:
    """Also with a tier much smaller than what is evicted."""
    churn = Churn(num_blocks + ahead)
    async with make_engine(num_gpu_blocks_override=400) as engine:
        expected = await churn.run(engine)
    async with make_engine(
        num_gpu_blocks_override=20, kv_offloading_size=num_blocks * tiny_block_bytes / 2**30, async_scheduling=ahead
    ) as engine:
        assert await churn.run(engine) == expected
        assert await churn.run(engine) == expected
        stats = engine.stats().connector
        assert stats is not None and stats.max_blocks == num_blocks and (stats.num_loaded_blocks > 0 or num_blocks == 3)
        assert (stats.num_evicted_blocks > 0) == (num_blocks < 1000)
        check(engine)


@pytest.fixture(scope="session")
def tiny_block_bytes(tiny_folder: Path) -> int:
    return collect_facts(engine_config(tiny_folder))["run"]["kv_bytes_per_token"] * 16


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
async def test_what_is_gone_between_question_and_load_is_computed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """INV-65: nobody sees what was computed on blocks that did not come, and nobody hits them."""
    load = KVHostTier.load
    lost = 0

    def load_too_late(tier: KVHostTier, pairs: Sequence[tuple[bytes, int]], /) -> Load:
        nonlocal lost
        lost += len(pairs[1:])
        tier.forget([pairs[1][0]])
        return load(tier, pairs)

    prompts = [FIRST, FIRST + " More of it.", FIRST]
    async with make_engine(**NO_TIER, async_scheduling=ahead) as engine:
        answers = [answer.token_ids for answer in await ask_all(engine, prompts)]  # type: ignore[arg-type]
    async with make_engine(**TIER, async_scheduling=ahead) as engine:
        assert [answer.token_ids for answer in await ask_all(engine, prompts)] == answers  # type: ignore[arg-type]
        await flood(engine)
        with monkeypatch.context() as patch:
            patch.setattr(KVHostTier, "load", load_too_late)
            again = await ask_all(engine, prompts)  # type: ignore[arg-type]
        assert lost > 0 and [answer.token_ids for answer in again] == answers
        assert samples(engine)["kv_offload_lost_blocks_total"] == engine.stats().num_lost_blocks > 0
        assert [answer.token_ids for answer in await ask_all(engine, prompts)] == answers  # type: ignore[arg-type]
        await flood(engine)
        assert await cached(engine, FIRST) == 80  # what was computed again is kept again
        check(engine)


# ---- governed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["evict", "quarantine"])
@pytest.mark.parametrize("only_kept", [False, True], ids=["cached", "only in the tier"])
async def test_an_evicted_span_is_not_loaded_and_what_stays_is(
    make_engine: MakeEngine, operation: str, only_kept: bool
) -> None:
    """INV-70: exact is true of the tier, too."""
    async with make_engine(**TIER) as engine:
        answers = [(await ask(engine, prompt, SHORT)).token_ids for prompt in (FIRST, SECOND)]
        await cached(engine, FIRST, "other")
        if only_kept:
            await flood(engine)
        reply = await getattr(engine.cache, operation)(FIRST, start=len(SYSTEM))
        assert (reply.status, reply.num_offloaded_blocks) == ("exact", 2)
        assert reply.num_blocks == (0 if only_kept else 2) and reply.num_cached_tokens == 48
        await flood(engine)
        assert engine.cache.stats().num_offloaded_blocks > 0
        assert await cached(engine, SECOND) == 80
        assert await cached(engine, FIRST) == 48
        for _ in range(2):
            await flood(engine)
            assert await cached(engine, FIRST, "other") == 80
            assert (await ask(engine, FIRST, SHORT)).token_ids == answers[0]
            assert await cached(engine, FIRST) == (48 if operation == "quarantine" else 80)
        check(engine)


async def test_a_tenant_leaves_the_tier_and_nobody_else_does(make_engine: MakeEngine) -> None:
    async with make_engine(**TIER) as engine:
        for salt in ("a", "b"):
            await cached(engine, FIRST, salt)
            await cached(engine, SECOND, salt)
        await flood(engine)
        reply = await engine.cache.evict(cache_salt="a")
        assert (reply.status, reply.num_blocks, reply.num_offloaded_blocks) == ("exact", 0, 7)
        assert [await cached(engine, FIRST, salt) for salt in ("a", "b")] == [0, 80]


async def test_a_reset_empties_the_tier(make_engine: MakeEngine) -> None:
    async with make_engine(**TIER) as engine:
        await cached(engine, FIRST)
        await flood(engine)
        before = engine.cache.stats().num_offloaded_blocks
        reply = await engine.cache.reset()
        assert (reply.status, reply.num_offloaded_blocks) == ("exact", before) and before > 5
        assert await cached(engine, FIRST) == 0
        stats = engine.stats().connector
        assert stats is not None and stats.num_blocks == 5 and stats.num_loaded_blocks == 0


async def test_the_log_tells_what_was_loaded(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Else the tier seems to do nothing: hits of the pool are none then."""
    async with make_engine(**TIER, log_stats_interval_s=0.02) as engine:
        await cached(engine, FIRST)
        await flood(engine)
        await asyncio.sleep(0.1)
        with caplog.at_level(logging.INFO, "aioengine.engine"):
            assert await cached(engine, FIRST) == 80
            await asyncio.sleep(0.1)
    assert re.search(r"prefix hits 0 % and [1-9]\d % loaded", caplog.text)


async def test_prewarming_loads_what_the_tier_has(make_engine: MakeEngine) -> None:
    """A pin is of the pool alone, so that what only the tier has must come back first."""
    async with make_engine(**{**TIER, "num_gpu_blocks_override": 20}) as engine:
        await cached(engine, FIRST)
        for _ in range(2):
            await flood(engine)
        assert (await engine.cache.pin(FIRST, require_exact=True)).status == "refused"
        before = engine.stats().external_hit_tokens
        reply = await engine.cache.prewarm(FIRST)
        assert (reply.status, reply.num_cached_tokens) == ("exact", 80)
        assert engine.stats().external_hit_tokens > before
        pinned = await engine.cache.pin(FIRST)
        assert (pinned.status, pinned.num_blocks) == ("exact", 5)
        await flood(engine)
        assert await cached(engine, FIRST) == 80
        await engine.cache.unpin(pinned.pin_id or "")


async def test_routers_are_told_what_comes_back(make_engine: MakeEngine) -> None:
    """A loaded block is in the pool's cache as any other is."""
    async with make_engine(**TIER, kv_events_config='{"enable_kv_cache_events": true}') as engine:

        def count(kind: str) -> Counter[bytes]:
            assert engine.kv_events is not None
            events = [event for _, batch in engine.kv_events.recent(0) for event in batch.events]
            return Counter(h for event in events if type(event).__name__ == kind for h in event.block_hashes)

        await cached(engine, FIRST)
        first = set(count("BlockStored"))
        assert len(first) == 5
        await flood(engine)
        assert first & set(count("BlockRemoved")) and engine.stats().external_hit_tokens == 0
        assert await cached(engine, FIRST) == 80 and engine.stats().external_hit_tokens > 0
        stored, removed = count("BlockStored"), count("BlockRemoved")
        assert {h: stored[h] - removed[h] for h in first} == dict.fromkeys(first, 1)


async def test_evicting_while_requests_run_brings_nothing_back(make_engine: MakeEngine) -> None:
    """A request that runs on an evicted prefix goes on; neither it nor its blocks are offered to the tier."""
    async with make_engine(**TIER, async_scheduling=True) as engine:
        stream = await engine.submit(FIRST, dataclasses.replace(GREEDY, max_tokens=60))
        outputs: list[RequestOutput] = [await anext(stream)]
        reply = await engine.cache.evict(FIRST, start=0)
        assert (reply.status, reply.num_requests, reply.num_offloaded_blocks) == ("exact", 1, 5)
        outputs += [output async for output in stream]
        await flood(engine)
        assert await cached(engine, FIRST) == 0
        assert (await ask(engine, FIRST, dataclasses.replace(GREEDY, max_tokens=60))).token_ids == outputs[-1].token_ids


# ---- memory and reports -------------------------------------------------------------------------------------


async def test_closing_gives_the_memory_back(make_engine: MakeEngine) -> None:
    async with make_engine(**TIER) as engine:
        await cached(engine, FIRST)
        tier = engine._loaded.runner.connector
        assert isinstance(tier, KVHostTier)
    assert tier._pages._memory.numel() == 0 and tier._pages._pool == []  # type: ignore[attr-defined]
    assert tier.stats().num_blocks == 0


async def test_what_does_not_fit_is_refused_before_loading(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "load_model", lambda *_: pytest.fail("weights are loaded"))
    for size, message in [(1e-6, "holds no block"), (2**20, "1073741824 MiB of host memory cannot be had")]:
        with pytest.raises(InvalidConfig, match=message):
            async with make_engine(kv_offloading_size=size):
                pass


async def test_reports_say_how_much_fits(make_engine: MakeEngine, tiny_folder: Path, tiny_block_bytes: int) -> None:
    options = {**TIER, "kv_offloading_size": 20.5 * tiny_block_bytes / 2**30}
    async with make_engine(**options) as engine:
        assert engine.memory_report.num_host_tokens == 320
        report = startup_report(engine, ServerConfig(), "http://here", 0.0)
        assert "host tier" in report and "320 tokens fit" in report
    facts = collect_facts(engine_config(tiny_folder, **options))
    assert facts["run"]["num_host_tokens"] == 320
    assert shown_facts(facts)["as it would run"]["host tier"] == "320 tokens"
    async with make_engine() as engine:
        assert "host tier" not in startup_report(engine, ServerConfig(), "http://here", 0.0)
    assert shown_facts(collect_facts(engine_config(tiny_folder)))["as it would run"]["host tier"] == "none"
