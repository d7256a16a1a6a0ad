"""The real server: the official client, cut and stalled connections, odd requests, drain and death."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from aioengine.api.server import listen
from aioengine.errors import InvalidConfig
from tests.api.conftest import RunningServer, running_server
from tests.api.fake_engine import FakeEngine, assert_all_settled
from tests.api.test_chat import HELLO

TIMEOUT_S = 20
"""Nothing here takes long; a hang must fail instead of hanging."""


@asynccontextmanager
async def official_client(server: RunningServer, api_key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0) as client:
        yield client


def request_bytes(path: str, body: object, *, length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data


class Connection:
    """A raw connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read_until(self, text: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(text), TIMEOUT_S)

    async def read_response(self) -> tuple[int, bytes]:
        """Status and body of a response with a Content-Length."""
        head = await self.read_until(b"\r\n\r\n")
        status = int(head.split()[1])
        (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        return status, await asyncio.wait_for(self.reader.readexactly(int(length.split()[1])), TIMEOUT_S)

    def cut(self) -> None:
        """Ends the connection at once."""
        self.writer.transport.abort()


@asynccontextmanager
async def connect(server: RunningServer) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def settled(engine: FakeEngine) -> None:
    await asyncio.wait_for(engine.wait_until(lambda: not engine.live), TIMEOUT_S)


async def test_official_client_chat(server: RunningServer) -> None:
    async with official_client(server) as client:
        whole = await client.chat.completions.create(model="fake", messages=HELLO)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == " one two three"
        assert whole.usage is not None and whole.usage.completion_tokens == 4
        stream = await client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True
        )  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == " one two three"
        assert chunks[-1].usage.completion_tokens == 4
        again = [*HELLO, whole.choices[0].message, *HELLO]
        await client.chat.completions.create(model="fake", messages=again)  # type: ignore[arg-type]


async def test_official_client_completions_and_models(server: RunningServer) -> None:
    async with official_client(server) as client:
        whole = await client.completions.create(model="fake", prompt=["a", "b"], logprobs=2, echo=True)
        assert [c.text for c in whole.choices] == ["a one two three", "b one two three"]
        assert whole.choices[0].logprobs is not None
        stream = await client.completions.create(model="fake", prompt=[1, 2, 3], stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == " one two three"
        assert [m.id async for m in client.models.list()] == ["fake"]


async def test_official_client_sees_the_right_exceptions(server: RunningServer, engine: FakeEngine) -> None:
    async with official_client(server) as client:
        with pytest.raises(openai.BadRequestError, match="did you mean top_p"):
            await client.completions.create(model="fake", prompt="x", extra_body={"top_pp": 1})
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        engine.max_waiting = 0
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="fake", prompt="x")
        engine.max_waiting, engine.fail_after = None, 1
        stream = await client.completions.create(model="fake", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="broken on purpose"):
            _ = [chunk async for chunk in stream]


async def test_many_streams_at_once(server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(model="fake", prompt=str(i), stream=True, echo=True)
        return "".join([c.choices[0].text async for c in stream])

    async with official_client(server) as client:
        texts = await asyncio.gather(*(one(client, i) for i in range(64)))
    assert texts == [f"{i} one two three" for i in range(64)]


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
async def test_a_cut_stream_aborts_its_requests(server: RunningServer, engine: FakeEngine, prompt: object) -> None:
    engine.hold()
    engine.release(1)
    async with connect(server) as connection:
        connection.writer.write(request_bytes("/v1/completions", {"prompt": prompt, "stream": True}))
        await connection.read_until(b" one")
        connection.cut()
        await settled(engine)
    assert not engine.submitted[0].is_finished


async def test_a_cut_stream_aborts_before_its_first_token(server: RunningServer, engine: FakeEngine) -> None:
    engine.hold()
    async with connect(server) as connection:
        connection.writer.write(request_bytes("/v1/chat/completions", {"messages": HELLO, "stream": True}))
        await engine.wait_blocked()
        connection.cut()
        await settled(engine)


@pytest.mark.parametrize("ending", ["cut", "half-close"])
@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": ["x", "y"], "n": 3}, {"messages": HELLO}])
async def test_a_client_that_leaves_aborts_a_whole_answer(
    server: RunningServer, engine: FakeEngine, body: dict[str, object], ending: str
) -> None:
    engine.hold()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with connect(server) as connection:
        connection.writer.write(request_bytes(path, body))
        await engine.wait_blocked()
        if ending == "cut":
            connection.cut()
        else:
            connection.writer.write_eof()
        await settled(engine)


async def test_leaving_with_a_pipelined_request_aborts_the_running_one(
    server: RunningServer, engine: FakeEngine
) -> None:
    engine.script = lambda ids, i: [65] * 4000
    engine.hold()
    body = {"prompt": "x", "stream": True, "max_tokens": 4000}
    async with connect(server) as connection:
        connection.writer.write(request_bytes("/v1/completions", body) * 2)
        await engine.wait_blocked()
        connection.cut()
        engine.release(4000)  # the server notices when it writes; it reads nothing behind a pipelined request
        await settled(engine)
    assert not engine.submitted[0].is_finished


async def test_one_client_leaving_does_not_touch_another(server: RunningServer, engine: FakeEngine) -> None:
    engine.hold()
    async with connect(server) as leaving, connect(server) as staying:
        for connection in (leaving, staying):
            connection.writer.write(request_bytes("/v1/completions", {"prompt": "x"}))
        await engine.wait_until(lambda: len(engine.submitted) == 2)
        leaving.cut()
        await asyncio.wait_for(engine.wait_until(lambda: len(engine.live) == 1), TIMEOUT_S)
        engine.release(100)
        status, body = await staying.read_response()
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, " one two three")


async def test_a_stalled_reader_stops_only_itself(server: RunningServer, engine: FakeEngine) -> None:
    engine.script = lambda ids, i: [65] * 4000 if len(ids) > 2 else [66]
    engine.model = type(engine.model)(max_model_len=10**6)
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(stalled, (server.host, server.port))
    body = {"prompt": "long", "stream": True, "max_tokens": 4000, "logprobs": 20}
    await loop.sock_sendall(stalled, request_bytes("/v1/completions", body))
    await asyncio.wait_for(engine.wait_until(lambda: engine.num_tokens > 100), TIMEOUT_S)
    async with official_client(server) as client:
        for _ in range(20):
            answer = await client.completions.create(model="fake", prompt="s", max_tokens=1)
            assert answer.choices[0].text == "B"
    assert engine.live == {engine.submitted[0]}  # waits in `send`, with its output unread
    stalled.close()
    await settled(engine)


async def test_half_a_request_reaches_nobody(server: RunningServer, engine: FakeEngine) -> None:
    async with connect(server) as connection:
        connection.writer.write(request_bytes("/v1/completions", {"prompt": "x"}, length=10_000))
        await connection.writer.drain()
        connection.cut()
    async with connect(server) as connection:
        connection.writer.write(b"POST /v1/completions HTTP/1.1\r\nHo")
        await connection.writer.drain()
        connection.cut()
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 200
    assert not engine.submitted


async def test_a_body_that_does_not_arrive_is_408(
    server: RunningServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.api.protocol.BODY_TIMEOUT_S", 0.0)
    async with connect(server) as connection:
        connection.writer.write(request_bytes("/v1/completions", {"prompt": "x"}, length=10_000))
        status, body = await connection.read_response()
    assert status == 408
    assert "did not arrive" in json.loads(body)["error"]["message"]
    assert not engine.submitted


async def test_garbage_gets_400_and_the_server_goes_on(server: RunningServer) -> None:
    async with connect(server) as connection:
        connection.writer.write(b"\x16\x03\x01 not http at all\r\n\r\n")
        assert b" 400 " in await connection.read_until(b"\r\n")
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 200


async def test_a_huge_body_is_413_and_the_connection_lives(server: RunningServer, engine: FakeEngine) -> None:
    body = {"prompt": "x" * (17 << 20)}
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 413
        assert (await client.get("/health")).status_code == 200
    assert not engine.submitted


async def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    async with connect(server) as connection:
        bodies = [{"prompt": letter, "echo": True} for letter in "abc"]
        connection.writer.write(b"".join(request_bytes("/v1/completions", body) for body in bodies))
        for letter in "abc":
            status, body = await connection.read_response()
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, f"{letter} one two three")


async def test_drain_refuses_new_requests_and_finishes_running_ones(engine: FakeEngine) -> None:
    engine.hold()
    async with running_server(engine, drain_timeout_s=7.0) as server, connect(server) as connection:
        connection.writer.write(request_bytes("/v1/completions", {"prompt": "x"}))
        await engine.wait_blocked()
        server.server.stop()
        await engine.wait_until(lambda: engine.state == "draining")
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).json() == {"status": "draining"}
            refused = await client.post("/v1/completions", json={"prompt": "y"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        engine.release(100)
        status, body = await connection.read_response()
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, " one two three")
        assert await asyncio.wait_for(server.task, TIMEOUT_S) == 0
    assert engine.drain_timeouts == [7.0]
    assert_all_settled(engine)


async def test_the_second_stop_cuts_running_requests_off(engine: FakeEngine) -> None:
    engine.hold()
    async with running_server(engine) as server, connect(server) as connection:
        connection.writer.write(request_bytes("/v1/completions", {"prompt": "x"}))
        await engine.wait_blocked()
        server.server.stop()
        server.server.stop()
        assert await asyncio.wait_for(server.task, TIMEOUT_S) == 1
        engine.release(1000)
        await settled(engine)


async def test_a_dead_engine_ends_the_server_with_an_error_code(engine: FakeEngine) -> None:
    async with running_server(engine) as server:
        engine.state = "dead"
        assert await asyncio.wait_for(server.task, TIMEOUT_S) == 1


async def test_a_taken_port_is_told_before_anything_is_loaded(server: RunningServer) -> None:
    with pytest.raises(InvalidConfig, match=f"cannot listen on 127.0.0.1:{server.port}"):
        listen("127.0.0.1", server.port)
    with pytest.raises(InvalidConfig, match="host"):
        listen("no.such.host.invalid", 0)
