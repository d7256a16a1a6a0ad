"""The governed cache through the library: replies, tenants, running requests, leases, the audit log."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable

import pytest

from aioengine.cache_admin import OFF, CacheAdmin
from aioengine.engine import AsyncEngine
from aioengine.errors import EngineClosed, InvalidRequest
from tests.engine.conftest import MakeEngine
from tests.engine.reading import GREEDY, ask, read
from tests.engine.test_metrics import samples

SYSTEM = "You are a helpful machine that answers in letters. "
FIRST, SECOND = SYSTEM + "The first document is about birds.", SYSTEM + "Another document, about fish and more."
SHORT = dataclasses.replace(GREEDY, max_tokens=3)


async def cached(engine: AsyncEngine, prompt: str, salt: str | None = None) -> int:
    return (await ask(engine, prompt, SHORT, cache_salt=salt)).usage.cached_tokens


async def test_a_span_goes_and_all_else_stays_with_equal_answers(make_engine: MakeEngine) -> None:
    """Q3: through the library."""
    async with make_engine() as engine:
        answers = [(await ask(engine, prompt)).token_ids for prompt in (FIRST, SECOND)]
        full = [len(prompt) - 1 for prompt in (FIRST, SECOND)]  # hits are as fine as tokens
        assert [await cached(engine, prompt) for prompt in (FIRST, SECOND)] == full
        reply = await engine.cache.evict(FIRST, start=len(SYSTEM))
        assert (reply.action, reply.status, reply.reason) == ("evict", "exact", None)
        assert reply.num_tokens == len(FIRST) and reply.num_blocks >= 2 and reply.num_requests == 0
        assert await cached(engine, SECOND) == full[1]
        assert await cached(engine, FIRST) == len(SYSTEM)  # up to the span, the last tokens from the second's block
        assert [(await ask(engine, prompt)).token_ids for prompt in (FIRST, SECOND)] == answers
        assert await cached(engine, FIRST) == full[0]


@pytest.mark.parametrize("operation", ["evict", "quarantine"])
@pytest.mark.parametrize(
    ("length", "start", "left"), [(70, None, 64), (64, None, 48), (64, 20, 16), (64, 0, 0), (10, None, 0)]
)
async def test_what_stays_of_a_name_is_said(
    make_engine: MakeEngine, operation: str, length: int, start: int | None, left: int
) -> None:
    """Q5: without a start its own beginning stays, which whoever names it may take for gone."""
    async with make_engine() as engine:
        await cached(engine, FIRST)
        reply = await getattr(engine.cache, operation)(FIRST[:length], start=start)
        assert (reply.status, reply.num_tokens, reply.num_blocks) == ("exact", length, 5 - left // 16)
        assert reply.num_cached_tokens == left == await cached(engine, FIRST[:length] + "?")
        if start is None and left:
            assert (reply.note or "").startswith(f"{left} tokens of it are still cached")
            assert "start=0 takes all of it" in (reply.note or "")
        else:
            assert reply.note is None


async def test_what_stays_is_said_of_what_was_refused(make_engine: MakeEngine) -> None:
    async with make_engine(enable_partial_block_reuse=False) as engine:
        await cached(engine, FIRST)
        reply = await engine.cache.evict(FIRST[:70], require_exact=True)
        assert (reply.status, reply.num_cached_tokens, reply.note) == ("refused", 64, None)
        assert (await engine.cache.lift(FIRST)).num_cached_tokens == 80


async def test_tenants_share_nothing_and_are_governed_apart(make_engine: MakeEngine) -> None:
    """Q4, B17: a quarantine is one tenant's."""
    async with make_engine() as engine:
        assert [await cached(engine, FIRST, salt) for salt in ("a", "b", None)] == [0, 0, 0]
        reply = await engine.cache.quarantine(FIRST, cache_salt="a", start=0)
        assert (reply.action, reply.status, reply.cache_salt) == ("quarantine", "exact", "a")
        assert reply.num_blocks == len(FIRST) // 16
        for _ in range(2):
            assert [await cached(engine, FIRST, salt) for salt in ("a", "b", None)] == [0, 80, 80]
        assert engine.cache.stats().num_quarantined == 1
        refused = await engine.cache.lift(FIRST, cache_salt="b", start=0)
        assert (refused.status, refused.reason) == ("refused", "no such span is in quarantine")
        assert (await engine.cache.lift(FIRST, cache_salt="a", start=0)).status == "exact"
        assert [await cached(engine, FIRST, "a") for _ in range(2)] == [0, 80]


async def test_a_tenant_leaves_and_all_others_stay(make_engine: MakeEngine) -> None:
    long = dataclasses.replace(GREEDY, max_tokens=60)
    for options in ({}, {"enable_partial_block_reuse": False}):
        async with make_engine(**options) as engine:
            expected = (await ask(engine, FIRST, long)).token_ids
            for salt in ("a", "b"):
                for prompt in (FIRST, SECOND):
                    await cached(engine, prompt, salt)
            await engine.cache.pin(SECOND, cache_salt="a")
            reading = aiter(await engine.submit(FIRST, long, cache_salt="a"))
            await anext(reading)
            reply = await engine.cache.evict(cache_salt="a", require_exact=True)
            assert (reply.action, reply.status, reply.cache_salt, reply.num_tokens) == ("evict", "exact", "a", 0)
            assert reply.num_requests == 1 == reply.num_pins_broken and reply.num_blocks >= 7
            assert reply.num_blocks_in_use >= 5
            assert [await cached(engine, FIRST, salt) // 16 for salt in ("a", "b", None)] == [0, 5, 5]
            assert [output async for output in reading][-1].token_ids == expected
            reply = await engine.cache.quarantine(cache_salt="a")
            assert reply.status == "exact" and engine.cache.stats().num_quarantined == 1
            for _ in range(2):
                assert [await cached(engine, FIRST, salt) // 16 for salt in ("a", "b", None)] == [0, 5, 5]
            assert (await engine.cache.lift(cache_salt="b")).status == "refused"
            assert (await engine.cache.lift(cache_salt="a")).status == "exact"
            assert [await cached(engine, FIRST, "a") // 16 for _ in range(2)] == [0, 5]


async def test_a_running_request_goes_on_and_shares_no_more(make_engine: MakeEngine) -> None:
    long = dataclasses.replace(GREEDY, max_tokens=100)
    async with make_engine() as engine:
        expected = (await ask(engine, FIRST, long)).token_ids
        await engine.cache.reset()
        stream = await engine.submit(FIRST, long)
        reading = aiter(stream)
        await anext(reading)
        reply = await engine.cache.evict(FIRST, start=0)
        assert reply.status == "exact" and reply.num_requests == 1 and reply.num_blocks_in_use == reply.num_blocks >= 5
        assert await cached(engine, FIRST) == 0
        last = [output async for output in reading][-1]
        assert last.token_ids == expected


async def test_a_forced_reset_changes_no_answer(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    long = dataclasses.replace(GREEDY, max_tokens=60)
    for options in ({}, {"async_scheduling": True}):
        async with make_engine(**options) as engine:
            expected = [(await ask(engine, prompt, long)).token_ids for prompt in (FIRST, SECOND)]
            streams = [await engine.submit(prompt, long) for prompt in (FIRST, SECOND)]
            reading = [asyncio.create_task(read(stream)) for stream in streams]
            num_resets = 0
            while not all(task.done() for task in reading):
                await asyncio.sleep(0.005)
                if engine.stats().num_running:
                    refused = await engine.cache.reset()
                    assert refused.status == "refused" and "in use by" in (refused.reason or "")
                    reply = await engine.cache.reset(force=True)
                    assert reply.status == "exact" and reply.num_requests > 0
                    assert engine.stats().num_cached_blocks == 0
                    num_resets += 1
                    await asyncio.sleep(0.02)
            assert [(await task)[0].token_ids for task in reading] == expected
            assert num_resets > 0 and engine.stats().num_preemptions > 0
    assert "the KV pool is full" not in caplog.text


async def test_pins_and_leases_hold_against_a_flood(make_engine: MakeEngine) -> None:
    now = 1000.0
    async with make_engine(num_gpu_blocks_override=14, max_model_len=96) as engine:
        engine._cache = cache = CacheAdmin(
            engine._scheduler, engine.render, engine._prewarm, wake=engine._steps.wake, clock=lambda: now
        )
        nothing = await cache.pin(FIRST)
        assert (nothing.status, nothing.reason) == ("refused", "nothing of the prefix is cached; prewarm it first")
        assert (await cache.prewarm(FIRST)).num_blocks == 5
        pinned = await cache.pin(FIRST)
        assert (pinned.status, pinned.num_tokens, pinned.num_blocks) == ("exact", len(FIRST), 5)
        assert pinned.num_held_tokens == pinned.num_cached_tokens == 80
        leased = await cache.lease(FIRST[:70], 60)
        assert (leased.status, leased.num_blocks, leased.expires_in_s) == ("exact", 4, 60.0)
        assert samples(engine)["kv_cache_pinned_blocks"] == cache.stats().num_pinned_blocks == 5
        partly = await cache.pin(FIRST + " and so on.")
        assert (partly.status, partly.num_blocks) == ("degraded", 5)
        assert partly.reason == "1 of its 6 blocks are not cached; prewarm it first"
        whole = await cache.pin(FIRST + " and so on.", require_exact=True)
        assert whole.status == "refused"
        for n in range(8):
            await ask(engine, f"{n} a flood that fills three blocks of the pool", GREEDY)
        assert await cached(engine, FIRST) == 80
        full = await cache.prewarm(SECOND)
        refused = await cache.pin(SECOND)
        assert full.status == "exact" and refused.status == "refused"
        assert "leave too few for a request of the greatest length" in (refused.reason or "")
        for pin_id in (pinned.pin_id, partly.pin_id):
            assert (await cache.unpin(pin_id or "")).num_blocks == 5
        assert cache.stats().num_pinned_blocks == 4 and cache.stats().leases == {leased.pin_id: 60.0}
        now += 60.5
        assert cache.expire() == 1 and cache.stats().num_pinned_blocks == 0 and cache.stats().pins == {}
        assert cache.audit()[-1].action == "expire"
        again = await cache.unpin(leased.pin_id or "")
        assert (again.status, again.reason) == ("refused", f"there is no pin {leased.pin_id}")
        cache.close()


async def test_a_timer_ends_a_lease(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        await engine.cache.prewarm(FIRST)
        await engine.cache.lease(FIRST, 3600)
        await engine.cache.lease(FIRST, 0.01)
        async with asyncio.timeout(60):
            while engine.cache.audit()[-1].action != "expire":  # noqa: ASYNC110  its timer tells nobody
                await asyncio.sleep(0.005)
        assert len(engine.cache.stats().pins) == 1
        assert (await engine.cache.reset(force=True)).num_pins_broken == 1
        assert engine.cache.stats().leases == {}


async def test_a_prewarmed_prefix_is_hit_by_the_first_request(make_engine: MakeEngine) -> None:
    """Q6: as if somebody had sent it before."""
    async with make_engine() as engine:
        expected = (await ask(engine, FIRST, SHORT)).token_ids
        await engine.cache.reset()
        reply = await engine.cache.prewarm(FIRST)
        assert (reply.status, reply.num_tokens, reply.num_blocks) == ("exact", len(FIRST), 5)
        assert reply.num_cached_tokens == 80 and reply.num_held_tokens == 0
        assert (await engine.cache.prewarm(FIRST)).num_blocks == 0
        answer = await ask(engine, FIRST, SHORT)
        assert answer.usage.cached_tokens == 80 and answer.token_ids == expected
        short = await engine.cache.prewarm("tiny")
        assert (short.status, short.reason) == ("refused", "4 tokens fill no block of 16")


async def test_chat_messages_name_what_a_conversation_goes_on_from(make_engine: MakeEngine) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
    async with make_engine() as engine:
        answer = await ask(engine, messages, SHORT)
        length = len(await engine.render(messages))
        again = await ask(engine, messages, SHORT)
        assert again.usage.cached_tokens == length // 16 * 16
        assert (await engine.cache.evict(messages[:1], start=0)).num_blocks == length // 16
        assert (await ask(engine, messages, SHORT)).usage.cached_tokens == 0 and answer.token_ids == again.token_ids


async def test_a_name_inside_a_block_is_exact_unless_tokens_are_not_kept(make_engine: MakeEngine) -> None:
    """Q5: exact, degraded with the reason, or refused."""
    prompts = [SYSTEM + end for end in ("one, and on to the next block", "two, and on to the next block")]
    async with make_engine() as engine:
        for prompt in prompts:
            await ask(engine, prompt, SHORT)
        reply = await engine.cache.evict(SYSTEM + "on", require_exact=True)
        assert reply.status == "exact" and reply.num_blocks >= 2
        assert [await cached(engine, prompt) // 16 for prompt in prompts] == [3, 4]
    async with make_engine(enable_partial_block_reuse=False) as engine:
        for prompt in prompts:
            await ask(engine, prompt, SHORT)
        strict = await engine.cache.evict(SYSTEM + "on", require_exact=True)
        assert strict.status == "refused" and "the name ends inside a block" in (strict.reason or "")
        loose = await engine.cache.evict(SYSTEM + "on")
        assert loose.status == "degraded" and "every block that continues the same prefix" in (loose.reason or "")
        assert [await cached(engine, prompt) // 16 for prompt in prompts] == [3, 3]
        assert (await engine.cache.evict("You")).status == "refused"


async def test_without_prefix_caching_everything_is_refused(make_engine: MakeEngine) -> None:
    """Q5: with the reason."""
    async with make_engine(enable_prefix_caching=False) as engine:
        cache = engine.cache
        for reply in (
            await cache.evict(FIRST),
            await cache.quarantine(FIRST),
            await cache.evict(cache_salt="a"),
            await cache.quarantine(cache_salt="a"),
            await cache.pin(FIRST),
            await cache.lease(FIRST, 5),
            await cache.prewarm(FIRST),
            await cache.reset(force=True),
        ):
            assert (reply.status, reply.reason) == ("refused", OFF)
        assert not cache.stats().enabled


async def test_a_refused_quarantine_holds_nothing_back(make_engine: MakeEngine) -> None:
    """Q4, Q5: what could not be done is not half done."""
    async with make_engine(enable_partial_block_reuse=False) as engine:
        assert await cached(engine, FIRST) == 0
        for name, options in ((FIRST[:3], {}), (FIRST[:53], {"require_exact": True})):
            assert (await engine.cache.quarantine(name, **options)).status == "refused"
        assert engine.cache.stats().num_quarantined == 0
        await engine.cache.reset()
        assert [await cached(engine, FIRST) for _ in range(2)] == [0, 80]


async def test_a_request_that_comes_later_goes_before_a_prewarming(make_engine: MakeEngine) -> None:
    """Q6: under the priority policy nobody waits for what nobody has asked for."""
    ended: list[str] = []
    async with make_engine(max_num_seqs=1, scheduling_policy="priority") as engine:

        async def note(name: str, work: Awaitable[object]) -> None:
            await work
            ended.append(name)

        async with asyncio.TaskGroup() as group, asyncio.timeout(60):
            first = await engine.submit("first", dataclasses.replace(GREEDY, max_tokens=60))
            group.create_task(note("first", read(first)))
            group.create_task(note("prewarming", engine.cache.prewarm(SECOND)))
            while engine.stats().num_waiting < 1:  # noqa: ASYNC110  nobody is told that somebody waits
                await asyncio.sleep(0)
            group.create_task(note("later", ask(engine, "later", SHORT, priority=1000)))
    assert ended == ["first", "later", "prewarming"]


async def test_every_operation_is_on_record(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Q4: refused ones too."""
    caplog.set_level(logging.INFO, "aioengine.cache_admin")
    async with make_engine() as engine:
        await engine.cache.prewarm(FIRST)
        for n in range(1005):
            await engine.cache.unpin(f"none-{n}")
        records = engine.cache.audit()
        assert len(records) == 1000 and [r.audit_id for r in records] == list(range(7, 1007))
        assert engine.cache.audit(2) == records[-2:] and engine.cache.audit(0) == []
        assert records[-1].pin_id == "none-1004" and records[-1].at_s > 1e9
        assert "'action': 'prewarm'" in caplog.text
        caplog.clear()
        await engine.cache.unpin("x" * 10**6)
        reply = await engine.cache.lift("abc", cache_salt="s" * 10**6)
        assert reply.cache_salt == "s" * 200 + "... (1000000 characters)" and len(caplog.text) < 5000


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda cache: cache.evict(""), "prompt"),
        (lambda cache: cache.evict([1, 10**6]), "prompt"),
        (lambda cache: cache.evict("abc", start=3), "start"),
        (lambda cache: cache.evict("abc", start=-1), "start"),
        (lambda cache: cache.evict("abc", start=2**40), "start"),
        (lambda cache: cache.evict("a" * 20_000), "prompt"),
        (lambda cache: cache.quarantine("abc", start=True), "start"),
        (lambda cache: cache.evict(), "prompt"),
        (lambda cache: cache.quarantine(cache_salt=""), "prompt"),
        (lambda cache: cache.evict(cache_salt=7), "cache_salt"),
        (lambda cache: cache.lift(cache_salt="a", start=0), "start"),
        (lambda cache: cache.evict(cache_salt="a", add_generation_prompt=True), "prompt"),
        (lambda cache: cache.pin("abc", cache_salt=7), "cache_salt"),
        (lambda cache: cache.lease("abc", 0), "ttl_s"),
        (lambda cache: cache.lease("abc", float("nan")), "ttl_s"),
    ],
)
async def test_bad_names_are_refused_and_leave_no_record(make_engine: MakeEngine, call: object, param: str) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequest) as caught:
            await call(engine.cache)  # type: ignore[operator]
        assert caught.value.param == param
        assert engine.cache.audit() == []


async def test_an_engine_that_was_not_started_has_no_cache() -> None:
    engine = AsyncEngine()
    with pytest.raises(EngineClosed):
        _ = engine.cache
