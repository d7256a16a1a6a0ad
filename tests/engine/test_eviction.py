"""The eviction policies behind a running engine: the same answers, other survivors."""

from __future__ import annotations

import dataclasses

import pytest

from aioengine.errors import InvalidConfig
from tests.engine.conftest import MakeEngine
from tests.engine.reading import GREEDY, ask
from tests.engine.test_metrics import samples

SHARED = "You are a helpful machine that answers in letters. "


async def test_the_policy_decides_who_stays_and_never_what_is_answered(make_engine: MakeEngine) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=2)
    answers, hits = {}, {}
    for policy in ("lru", "cost"):
        async with make_engine(eviction_policy=policy, num_gpu_blocks_override=14, max_model_len=96) as engine:
            for n in range(3):
                await ask(engine, SHARED + str(n), params)
            for n in range(8):
                await ask(engine, f"{n} comes once and fills two whole blocks", params)
            before = engine.stats().prefix_hit_tokens
            answers[policy] = (await ask(engine, SHARED + "again", GREEDY)).token_ids
            hits[policy] = engine.stats().prefix_hit_tokens - before
            assert samples(engine)["prefix_cache_evicted_blocks_total"] == engine.stats().num_evicted_blocks > 5
    assert answers["lru"] == answers["cost"]
    assert hits == {"lru": 0, "cost": 48}


async def test_an_unknown_policy_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidConfig, match="eviction_policy='fifo' must be one of lru, cost"):
        async with make_engine(eviction_policy="fifo"):
            pass
