"""N8: who a request is for and how urgent it is, over HTTP on a real engine with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from aioengine.engine import AsyncEngine
from tests.api.conftest import running_server
from tests.engine.conftest import MakeEngine, make_engine, tiny_folder, tiny_model

__all__ = ["make_engine", "tiny_folder", "tiny_model"]

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a prompt that fills a few blocks of sixteen tokens each"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a message that fills a few blocks as well"}]},
}
routes = pytest.mark.parametrize("url", BODIES)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOENGINE_API_KEY", raising=False)


@asynccontextmanager
async def served(make_engine: MakeEngine, **options: object) -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    """An engine, and a client of a server over it."""
    async with (
        make_engine(**options) as engine,
        running_server(engine, log_level="warning") as server,
        httpx.AsyncClient(base_url=server.url, timeout=120) as client,
    ):
        yield engine, client


@routes
async def test_a_priority_is_refused_where_nobody_looks_at_it(make_engine: MakeEngine, url: str) -> None:
    """N8: first come first served says so, rather than to ignore it."""
    async with served(make_engine) as (_, client):
        answer = await client.post(url, json={**BODIES[url], "max_tokens": 2, "priority": 1})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "priority")
        assert "--scheduling-policy priority" in error["message"]
        assert (await client.post(url, json={**BODIES[url], "max_tokens": 2, "priority": 0})).status_code == 200


@pytest.mark.slow
@routes
async def test_the_smaller_number_goes_first(make_engine: MakeEngine, url: str) -> None:
    """N8, C24: whoever came before."""
    ended: list[int] = []
    async with served(make_engine, max_num_seqs=1, scheduling_policy="priority") as (engine, client):

        async def ask(priority: int, max_tokens: int) -> None:
            body = {**BODIES[url], "max_tokens": max_tokens, "ignore_eos": True, "priority": priority}
            assert (await client.post(url, json=body)).status_code == 200
            ended.append(priority)

        async with asyncio.TaskGroup() as group, asyncio.timeout(120):
            group.create_task(ask(-9, 120))  # has the only row while the others come
            for count, priority in enumerate((3, 2, 1), start=1):
                while engine.stats().num_running + engine.stats().num_waiting < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                group.create_task(ask(priority, 2))
    assert ended == [-9, 1, 2, 3]


@routes
async def test_a_salt_parts_tenants(make_engine: MakeEngine, url: str) -> None:
    """N8, B17: what a tenant has sent before is found by that tenant and by nobody else."""
    answers = []
    async with served(make_engine) as (_, client):
        for salt in ("a", "b", None, "a", "b", None):
            body = {**BODIES[url], "max_tokens": 4, "temperature": 0, "cache_salt": salt}
            answers.append((await client.post(url, json=body)).json())
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) >= 32
    assert len({str(answer["choices"]) for answer in answers}) == 1
