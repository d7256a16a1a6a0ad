"""Fixtures of the server's tests: a scripted engine, an in-process client, a real server on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from aioengine.api.app import create_app
from aioengine.api.face import Engine
from aioengine.api.server import Server, listen, url_of
from aioengine.config import ServerConfig
from tests.api.fake_engine import FakeEngine, assert_all_settled

MakeClient = Callable[..., httpx.AsyncClient]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def make_client(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeClient]:
    """Makes clients of an in-process application over `engine`, with server options."""
    monkeypatch.delenv("AIOENGINE_API_KEY", raising=False)
    clients: list[httpx.AsyncClient] = []

    def make(**options: object) -> httpx.AsyncClient:
        app = create_app(engine, ServerConfig(**options))  # type: ignore[arg-type]
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.aclose()
    assert_all_settled(engine)


@pytest.fixture
def client(make_client: MakeClient) -> httpx.AsyncClient:
    return make_client()


class RunningServer:
    """A real server on a free port, in this loop."""

    def __init__(self, server: Server, engine: Engine, host: str, port: int, task: asyncio.Task[int]) -> None:
        self.server, self.engine, self.host, self.port, self.task = server, engine, host, port, task
        self.url = f"http://{host}:{port}"


@asynccontextmanager
async def running_server(engine: Engine, **options: object) -> AsyncIterator[RunningServer]:
    """Runs uvicorn as `aioengine serve` does, and stops it."""
    sock = listen("127.0.0.1", 0)
    host, port = sock.getsockname()
    assert url_of(sock) == f"http://{host}:{port}"
    started = asyncio.Event()
    server = Server(engine, ServerConfig(**options), on_started=started.set)  # type: ignore[arg-type]
    task = asyncio.create_task(server.run_on(sock))
    try:
        waiting = asyncio.ensure_future(started.wait())
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert started.is_set(), task
        yield RunningServer(server, engine, host, port, task)
    finally:
        server.should_exit = True
        await asyncio.wait((task,))
    task.result()


@pytest.fixture
async def server(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningServer]:
    monkeypatch.delenv("AIOENGINE_API_KEY", raising=False)
    async with running_server(engine) as running:
        yield running
    assert_all_settled(engine)
