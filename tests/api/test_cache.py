"""The governed cache over HTTP and from the command line, on a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioengine.api.app import create_app
from aioengine.cli import EXIT_FAILED, EXIT_USAGE, main
from aioengine.config import ServerConfig
from aioengine.errors import InvalidConfig
from tests.api.conftest import MakeClient, RunningServer, running_server
from tests.api.fake_engine import FakeEngine
from tests.engine.conftest import MakeEngine, make_engine, tiny_folder, tiny_model

__all__ = ["make_engine", "tiny_folder", "tiny_model"]

KEY = {"Authorization": "Bearer secret"}
ADMIN = {"enable_admin": True, "admin_api_key": "secret"}
POSTS = ["evict", "quarantine", "lift", "pin", "lease", "unpin", "prewarm", "reset"]
SYSTEM = "You are a helpful machine that answers in letters. "
FIRST, SECOND = SYSTEM + "The first document is about birds.", SYSTEM + "Another document, about fish and more."


@pytest.fixture
async def server(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningServer]:
    for name in ("AIOENGINE_API_KEY", "AIOENGINE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    async with make_engine() as engine, running_server(engine, log_level="warning", **ADMIN) as running:
        yield running


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        yield client


async def complete(client: httpx.AsyncClient, prompt: str, **fields: object) -> tuple[str, int]:
    """Text, and how many prompt tokens were found in full blocks."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    answer = (await client.post("/v1/completions", json=body)).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"] // 16 * 16


async def govern(client: httpx.AsyncClient, operation: str, **fields: object) -> dict[str, Any]:
    response = await client.post(f"/admin/cache/{operation}", json=fields, headers=KEY)
    reply: dict[str, Any] = response.json()
    assert response.status_code == (409 if reply["status"] == "refused" else 200), reply
    return reply


async def test_a_span_is_evicted_and_answers_stay(client: httpx.AsyncClient) -> None:
    """Q3: over HTTP."""
    texts = [(await complete(client, prompt))[0] for prompt in (FIRST, SECOND)]
    reply = await govern(client, "evict", prompt=FIRST, start=len(SYSTEM))
    assert (reply["action"], reply["status"]) == ("evict", "exact") and reply["num_blocks"] >= 2
    assert await complete(client, SECOND) == (texts[1], 80)
    assert await complete(client, FIRST) == (texts[0], 48)
    assert await complete(client, FIRST) == (texts[0], 80)


async def test_a_reply_tells_what_stays_cached(client: httpx.AsyncClient) -> None:
    await complete(client, FIRST)
    reply = await govern(client, "evict", prompt=FIRST)
    assert (reply["status"], reply["num_tokens"], reply["num_cached_tokens"]) == ("exact", len(FIRST), 80)
    assert reply["note"].startswith("80 tokens of it are still cached") and reply["num_blocks"] == 0
    reply = await govern(client, "evict", prompt=FIRST, start=0)
    assert (reply["num_blocks"], reply["num_cached_tokens"], reply["note"]) == (5, 0, None)


async def test_tenants_are_apart_and_quarantined_apart(client: httpx.AsyncClient) -> None:
    """B17, N8, Q4: two tenants over HTTP, and the record of what was done."""
    text, cached = await complete(client, FIRST, cache_salt="a")
    assert cached == 0 and await complete(client, FIRST, cache_salt="b") == (text, 0)
    reply = await govern(client, "quarantine", prompt=FIRST, start=0, cache_salt="a", require_exact=True)
    assert reply["status"] == "exact" and reply["cache_salt"] == "a"
    for _ in range(2):
        assert await complete(client, FIRST, cache_salt="a") == (text, 0)
        assert await complete(client, FIRST, cache_salt="b") == (text, 80)
    records = (await client.get("/admin/cache/audit", headers=KEY)).json()["records"]
    assert [(r["action"], r["cache_salt"]) for r in records] == [("quarantine", "a")]
    assert (await govern(client, "lift", prompt=FIRST, start=0, cache_salt="a"))["status"] == "exact"
    assert [(await complete(client, FIRST, cache_salt="a"))[1] for _ in range(2)] == [0, 80]


async def test_a_tenant_leaves_and_answers_stay(client: httpx.AsyncClient) -> None:
    texts = [(await complete(client, prompt, cache_salt=salt))[0] for salt in ("a", "b") for prompt in (FIRST, SECOND)]
    assert texts[:2] == texts[2:]
    reply = await govern(client, "evict", cache_salt="a")
    assert (reply["status"], reply["cache_salt"], reply["num_tokens"]) == ("exact", "a", 0)
    assert reply["num_blocks"] >= 7 and reply["num_requests"] == 0
    assert [await complete(client, prompt, cache_salt="b") for prompt in (FIRST, SECOND)] == [
        (t, 80) for t in texts[:2]
    ]
    assert await complete(client, FIRST, cache_salt="a") == (texts[0], 0)
    assert (await govern(client, "quarantine", cache_salt="a", require_exact=True))["num_blocks"] >= 5
    for _ in range(2):
        assert await complete(client, FIRST, cache_salt="a") == (texts[0], 0)
    assert (await govern(client, "lift", cache_salt="a"))["status"] == "exact"
    assert [(await complete(client, FIRST, cache_salt="a"))[1] for _ in range(2)] == [0, 80]


async def test_what_is_evicted_quarantined_or_reset_leaves_host_memory_too(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INV-70 over HTTP: the pool is too small to keep anything; what is hit was loaded from the tier."""
    for name in ("AIOENGINE_API_KEY", "AIOENGINE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    options = {"num_gpu_blocks_override": 15, "kv_offloading_size": 0.01}
    async with (
        make_engine(**options) as engine,
        running_server(engine, log_level="warning", **ADMIN) as server,
        httpx.AsyncClient(base_url=server.url, timeout=120) as client,
    ):

        async def after_flood(prompt: str) -> tuple[str, int]:
            for n in range(3):
                await complete(client, f"{n} a flood that fills half of the pool and shares nothing with anybody {n}")
            return await complete(client, prompt)

        texts = [(await complete(client, prompt))[0] for prompt in (FIRST, SECOND)]
        assert [await after_flood(prompt) for prompt in (FIRST, SECOND)] == [(text, 80) for text in texts]
        await after_flood("nothing")
        reply = await govern(client, "evict", prompt=FIRST, start=len(SYSTEM), require_exact=True)
        assert (reply["status"], reply["num_blocks"], reply["num_offloaded_blocks"]) == ("exact", 0, 2)
        assert (reply["num_tokens"], reply["num_cached_tokens"]) == (len(FIRST), 48)
        assert [await after_flood(prompt) for prompt in (FIRST, SECOND)] == [(texts[0], 48), (texts[1], 80)]
        assert await after_flood(FIRST) == (texts[0], 80)
        assert (await govern(client, "quarantine", prompt=FIRST, start=0))["num_offloaded_blocks"] > 5  # SECOND's too
        for _ in range(2):
            assert await after_flood(FIRST) == (texts[0], 0)
        assert (await govern(client, "lift", prompt=FIRST, start=0))["status"] == "exact"
        assert [await after_flood(FIRST) for _ in range(2)] == [(texts[0], 0), (texts[0], 80)]
        stats = (await client.get("/admin/cache/stats", headers=KEY)).json()
        reply = await govern(client, "reset")
        assert (reply["status"], reply["num_offloaded_blocks"]) == ("exact", stats["num_offloaded_blocks"])
        assert await complete(client, FIRST) == (texts[0], 0)


async def test_prewarm_pin_lease_and_unpin(client: httpx.AsyncClient) -> None:
    refused = await govern(client, "pin", prompt=FIRST)
    assert refused["status"] == "refused" and "prewarm it first" in refused["reason"]
    assert (await govern(client, "prewarm", prompt=FIRST))["num_blocks"] == 5
    pinned = await govern(client, "pin", prompt=FIRST)
    leased = await govern(client, "lease", prompt=FIRST, ttl_s=600)
    assert (pinned["num_blocks"], leased["expires_in_s"]) == (5, 600.0)
    assert (await complete(client, FIRST))[1] == 80
    stats = (await client.get("/admin/cache/stats", headers=KEY)).json()
    assert stats["num_pinned_blocks"] == 5 and set(stats["leases"]) == {leased["pin_id"]}
    refused = await govern(client, "reset")
    assert refused["status"] == "refused" and "2 pins" in refused["reason"]
    for reply in (pinned, leased):
        assert (await govern(client, "unpin", pin_id=reply["pin_id"]))["status"] == "exact"
    assert (await govern(client, "unpin", pin_id="pin-1"))["status"] == "refused"
    assert (await govern(client, "reset"))["num_blocks"] >= 5


async def test_chat_messages_name_a_prefix(client: httpx.AsyncClient) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    for _ in range(2):
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert (await govern(client, "evict", messages=messages[:1], start=0))["num_blocks"] > 0
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_forced_reset_at_vllms_address_changes_no_answer(client: httpx.AsyncClient) -> None:
    long = {"max_tokens": 60, "ignore_eos": True}
    expected, _ = await complete(client, FIRST, **long)
    running = asyncio.create_task(complete(client, FIRST, **long))
    statuses = set()
    while not running.done():
        forced = await client.post("/reset_prefix_cache?reset_running_requests=true", headers=KEY)
        assert forced.status_code == 200 and forced.json()["status"] == "exact"
        statuses.add((await client.post("/reset_prefix_cache", headers=KEY)).status_code)
        await asyncio.sleep(0.05)
    assert (await running)[0] == expected and statuses <= {200, 409}
    wrong = await client.post("/reset_prefix_cache?reset_running_requests=perhaps", headers=KEY)
    assert wrong.status_code == 400


@pytest.mark.parametrize(
    ("operation", "body", "param"),
    [
        ("evict", {}, "prompt"),
        ("evict", {"prompt": "a", "messages": []}, "prompt"),
        ("evict", {"messages": []}, "messages"),
        ("evict", {"cache_salt": ""}, "prompt"),
        ("evict", {"cache_salt": "a", "start": 0}, "start"),
        ("pin", {"cache_salt": "a"}, "prompt"),
        ("prewarm", {"cache_salt": "a"}, "prompt"),
        ("evict", {"prompt": "abc", "start": 7}, "start"),
        ("evict", {"prompt": "abc", "start": 2**31}, "start"),
        ("lift", {"prompt": "abc", "start": 10**30}, "start"),
        ("quarantine", {"prompt": "a" * 20_000}, "prompt"),
        ("evict", {"prompt": "abc", "force": True}, "force"),
        ("pin", {"prompt": "abc", "start": 1}, "start"),
        ("lease", {"prompt": "abc"}, "ttl_s"),
        ("lease", {"prompt": "abc", "ttl_s": -1}, "ttl_s"),
        ("unpin", {}, "pin_id"),
        ("prewarm", {"prompt": [10**7]}, "prompt"),
        ("reset", {"force": "yes"}, "force"),
    ],
)
async def test_bad_requests_say_what_is_wrong(
    client: httpx.AsyncClient, operation: str, body: dict[str, object], param: str
) -> None:
    response = await client.post(f"/admin/cache/{operation}", json=body, headers=KEY)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_the_audit_s_limit_is_checked(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        await govern(client, "reset")
    assert len((await client.get("/admin/cache/audit?limit=2", headers=KEY)).json()["records"]) == 2
    for wrong in ("-2", "", "9" * 5000):
        response = await client.get(f"/admin/cache/audit?limit={wrong}", headers=KEY)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


# ---- events -------------------------------------------------------------------------------------------------


async def test_kv_events_are_streamed_with_what_came_before(make_engine: MakeEngine) -> None:
    on = '{"enable_kv_cache_events": true}'
    async with (
        make_engine(kv_events_config=on) as engine,
        running_server(engine, log_level="warning", **ADMIN) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60, headers=KEY) as client,
    ):
        await complete(client, FIRST, cache_salt="tenant")
        async with client.stream("GET", "/admin/kv_events?from=0") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            batches: list[dict[str, Any]] = []

            async def read_until(kind: str) -> dict[str, Any]:
                async for line in lines:
                    if line.startswith("data: "):
                        batches.append(json.loads(line[6:]))
                        for event in batches[-1]["events"]:
                            if event["type"] == kind:
                                return dict(event)
                raise AssertionError(kind)

            stored = await read_until("BlockStored")
            assert stored["parent_block_hash"] is None and stored["block_size"] == 16
            assert stored["token_ids"][:80] == (await engine.render(FIRST))[:80]
            assert len(stored["block_hashes"][0]) == 32
            await govern(client, "evict", prompt=FIRST, start=0, cache_salt="tenant")
            removed = await read_until("BlockRemoved")
            assert set(stored["block_hashes"]) <= set(removed["block_hashes"])
            await govern(client, "reset")
            await read_until("AllBlocksCleared")
            assert [batch["number"] for batch in batches] == list(range(len(batches)))
        for wrong in ("x", "9" * 5000):
            assert (await client.get(f"/admin/kv_events?from={wrong}")).status_code == 400
        async with asyncio.timeout(30):
            while engine.kv_events is not None and engine.kv_events._subscribers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the client has left: so must its subscription


async def test_a_reader_of_kv_events_does_not_hold_up_the_shutdown(make_engine: MakeEngine) -> None:
    on = '{"enable_kv_cache_events": true}'
    async with (
        make_engine(kv_events_config=on) as engine,
        running_server(engine, log_level="warning", drain_timeout_s=3600.0, **ADMIN) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60, headers=KEY) as client,
        client.stream("GET", "/admin/kv_events?from=0") as response,
    ):
        lines = response.aiter_lines()
        assert await anext(lines) == ": kv events"
        await complete(client, FIRST)
        running.server.stop()
        async with asyncio.timeout(60):
            told = [line async for line in lines if line.startswith("data: ")]
            await running.task
        assert "BlockStored" in told[0]


async def test_kv_events_say_that_they_are_off(client: httpx.AsyncClient) -> None:
    response = await client.get("/admin/kv_events", headers=KEY)
    assert response.status_code == 400 and "--kv-events-config" in response.json()["error"]["message"]


# ---- who may ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"api_key": "other"}], ids=["open", "with an API key"])
async def test_admin_routes_need_the_admin_key(make_client: MakeClient, options: dict[str, str]) -> None:
    client = make_client(**ADMIN, **options)
    posts = [*(f"/admin/cache/{post}" for post in POSTS), "/reset_prefix_cache"]
    gets = ["/admin/cache/audit", "/admin/cache/stats", "/admin/kv_events"]
    for method, path in [*(("POST", path) for path in posts), *(("GET", path) for path in gets)]:
        bare = await client.request(method, path, json={})
        assert (bare.status_code, bare.json()["error"]["code"]) == (401, "invalid_admin_key"), path
        for wrong in ("Bearer wrong", "Bearer other", "Basic secret", "Bearer secret2", "Bearer"):
            response = await client.request(method, path, json={}, headers={"Authorization": wrong})
            assert (response.status_code, response.json()["error"]["code"]) == (403, "invalid_admin_key"), path


async def test_the_admin_key_opens_nothing_else(make_client: MakeClient) -> None:
    client = make_client(**ADMIN, api_key="other")
    assert (await client.get("/v1/models", headers=KEY)).status_code == 401
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer other"})).status_code == 200


async def test_without_enable_admin_there_are_no_such_routes(make_client: MakeClient) -> None:
    client = make_client()
    for path in ("/admin/cache/reset", "/admin/cache/stats", "/reset_prefix_cache"):
        for method in ("GET", "POST"):
            assert (await client.request(method, path, headers=KEY)).status_code == 404


def test_admin_without_a_key_does_not_start(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AIOENGINE_ADMIN_KEY", raising=False)
    with pytest.raises(InvalidConfig, match="enable_admin needs a key"):
        create_app(engine, ServerConfig(enable_admin=True))
    with pytest.raises(InvalidConfig, match="add --enable-admin"):
        create_app(engine, ServerConfig(admin_api_key="k"))
    assert main(["serve", "--port", "0", "--enable-admin", "--model", "nowhere"]) == EXIT_USAGE
    assert "enable_admin needs a key: give --admin-api-key or set AIOENGINE_ADMIN_KEY" in capsys.readouterr().err
    monkeypatch.setenv("AIOENGINE_ADMIN_KEY", "from the environment")
    assert ServerConfig(enable_admin=True).effective_admin_key() == "from the environment"
    assert ServerConfig().effective_admin_key() is None


# ---- the command line ---------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run_cli(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    async def run(operation: str, *argv: str) -> tuple[int, Any]:
        line = ["cache", operation, "--url", server.url, "--admin-key", "secret", *argv]
        code = await asyncio.to_thread(main, line)
        out = capsys.readouterr()
        if not out.out:
            return code, out.err
        reply = json.loads(out.out)
        noted = f"aioengine: note: {reply['note'].replace('start=0', '--start 0')}\n" if reply.get("note") else ""
        assert out.err == noted
        return code, reply

    return run


async def test_every_operation_from_the_command_line(
    run_cli: Callable[..., Any], client: httpx.AsyncClient, tmp_path: Path
) -> None:
    ids = (await client.post("/tokenize", json={"prompt": FIRST})).json()["tokens"]
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "A long enough message to fill a block."}]))
    code, reply = await run_cli("prewarm", FIRST, "--cache-salt", "t")
    assert (code, reply["status"], reply["cache_salt"], reply["num_blocks"]) == (0, "exact", "t", 5)
    code, pinned = await run_cli("pin", "--token-ids", ",".join(map(str, ids)), "--cache-salt", "t")
    assert (code, pinned["num_blocks"]) == (0, 5)
    code, leased = await run_cli("lease", FIRST, "--cache-salt", "t", "--ttl-s", "60", "--require-exact")
    assert (code, leased["expires_in_s"]) == (0, 60.0)
    assert (await run_cli("unpin", pinned["pin_id"]))[0] == 0
    code, reply = await run_cli("evict", FIRST[:60], "--cache-salt", "t")
    assert (code, reply["num_cached_tokens"], reply["num_blocks"]) == (0, 48, 2)
    assert "start=0 takes all of it" in reply["note"]
    assert (await run_cli("prewarm", FIRST, "--cache-salt", "t"))[0] == 0
    code, reply = await run_cli("evict", FIRST, "--cache-salt", "t", "--start", "20")
    assert (code, reply["num_pins_broken"], reply["num_blocks"]) == (0, 0, 4)
    code, reply = await run_cli("evict", "--all", "--cache-salt", "t")
    assert (code, reply["status"], reply["num_blocks"]) == (0, "exact", 1)
    assert (await run_cli("quarantine", "--all", "--cache-salt", "t"))[1]["status"] == "exact"
    assert (await run_cli("lift", "--all", "--cache-salt", "t"))[1]["status"] == "exact"
    assert (await run_cli("prewarm", "--messages", str(messages)))[1]["status"] == "exact"
    assert (await run_cli("quarantine", "--messages", str(messages), "--start", "0"))[1]["num_blocks"] >= 1
    assert (await run_cli("lift", "--messages", str(messages), "--start", "0"))[0] == 0
    assert (await run_cli("reset", "--force"))[1]["status"] == "exact"
    assert (await run_cli("stats"))[1]["num_cached_blocks"] == 0
    code, audit = await run_cli("audit", "--limit", "3")
    assert [record["action"] for record in audit["records"]] == ["quarantine", "lift", "reset"]


async def test_refusals_and_errors_have_exit_codes(
    run_cli: Callable[..., Any], server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, reply = await run_cli("unpin", "pin-77")
    assert (code, reply["status"]) == (EXIT_FAILED, "refused")
    for argv, code, text in [
        (["evict", "abc", "--start", "9"], EXIT_FAILED, "the server answers 400: start=9 is not a token"),
        (["evict", "--token-ids", "1,x"], EXIT_USAGE, "--token-ids '1,x' must be numbers"),
        (["evict", "--token-ids", "", "--cache-salt", "t"], EXIT_USAGE, "--token-ids '' must be numbers"),
        (["evict", "--messages", "", "--cache-salt", "t"], EXIT_USAGE, "--messages  cannot be read"),
        (["evict", "", "--cache-salt", "t"], EXIT_FAILED, "the server answers 400"),
        (["evict", "--all"], EXIT_USAGE, "--all needs the tenant: give --cache-salt"),
        (["evict", "--messages", "/nowhere.json"], EXIT_USAGE, "--messages /nowhere.json cannot be read"),
        (["stats", "--admin-key", "wrong"], EXIT_FAILED, "the server answers 403: the admin key is wrong"),
        (["stats", "--url", "http://127.0.0.1:1"], EXIT_FAILED, "cannot be reached"),
        (["stats", "--url", "nonsense"], EXIT_USAGE, "must look like http://HOST:PORT"),
        (["stats", "--url", "http://127.0.0.1:port"], EXIT_USAGE, "must look like http://HOST:PORT"),
        (["stats", "--url", "http://[::1"], EXIT_USAGE, "must look like http://HOST:PORT"),
        (["stats", "--url", f"{server.url}/a b"], EXIT_FAILED, "does not answer as a server of aioengine"),
        (["stats", "--admin-key", "secret\n"], EXIT_USAGE, "the admin key holds a line break"),
        (["stats", "--admin-key", "k\u00e9y \u20ac"], EXIT_FAILED, "the server answers 403: the admin key is wrong"),
    ]:
        found, err = await run_cli(*argv)
        assert (found, text in err) == (code, True), err


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello",
        b"HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\n[]",
        b'HTTP/1.1 400 Bad\r\nContent-Length: 13\r\n\r\n{"error":"x"}',
    ],
)
async def test_another_server_is_told_from_ours(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        code = await asyncio.to_thread(main, ["cache", "stats", "--url", url, "--admin-key", "k"])
    err = capsys.readouterr().err
    assert code == EXIT_FAILED and ("does not answer as a server" in err or "the server answers 4" in err), err


async def test_an_admin_key_may_have_any_letters(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_server(engine, enable_admin=True, admin_api_key="k\u00e9y \u20ac") as running:
        line = ["cache", "audit", "--url", running.url, "--admin-key", "k\u00e9y \u20ac"]
        await asyncio.to_thread(main, line)
    assert "admin key" not in capsys.readouterr().err


def test_the_command_line_needs_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("AIOENGINE_ADMIN_KEY", raising=False)
    assert main(["cache", "stats"]) == EXIT_USAGE
    assert "no admin key: give --admin-key or set AIOENGINE_ADMIN_KEY" in capsys.readouterr().err
