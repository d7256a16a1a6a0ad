"""What operators see: health, metrics, models, the key, request ids, CORS, tokenization, the lifespan."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from aioengine.api.app import create_app
from aioengine.config import ServerConfig
from tests.api.conftest import MakeClient
from tests.api.fake_engine import BOS, FakeEngine
from tests.api.test_chat import HELLO

OPEN = ["/health"]
CLOSED = ["/v1/models", "/v1/models/fake", "/metrics", "/version", "/nowhere", "/health/"]


@pytest.mark.parametrize("state", ["starting", "draining", "stalled", "dead", "closed"])
async def test_health_is_200_only_when_ready(make_client: MakeClient, engine: FakeEngine, state: str) -> None:
    client = make_client()
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})
    engine.state = state
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": state})
    assert response.headers["retry-after"] == "1"


async def test_metrics_are_prometheus_text(make_client: MakeClient, engine: FakeEngine) -> None:
    response = await make_client().get("/metrics")
    assert response.content == engine.metrics_text()
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_models_show_the_name_the_limit_and_the_defaults(make_client: MakeClient, engine: FakeEngine) -> None:
    engine.default_sampling = {"temperature": 0.2}
    client = make_client()
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card.pop("created") > 0
    assert card == {
        "id": "fake",
        "object": "model",
        "owned_by": "aioengine",
        "max_model_len": 4096,
        "default_sampling": {"temperature": 0.2},
        "determinism": {"level": "unavailable", "reason": "the operator has declared nothing"},
    }
    assert (await client.get("/v1/models/fake")).json()["id"] == "fake"
    response = await client.get("/v1/models/org/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_version(make_client: MakeClient) -> None:
    assert set((await make_client().get("/version")).json()) == {"version"}


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic key", "key", "Bearer key2", "Bearer kéy"]
)
async def test_everything_but_health_needs_the_key(make_client: MakeClient, header: str | None) -> None:
    client = make_client(api_key="key")
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for path in CLOSED:
        response = await client.get(path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert (await client.post(path, json={}, headers=headers)).status_code == 401
    for path in OPEN:
        assert (await client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_the_right_key_opens(make_client: MakeClient, scheme: str) -> None:
    client = make_client(api_key="kéy")
    response = await client.get("/v1/models", headers={"Authorization": f"{scheme} kéy".encode()})
    assert response.status_code == 200


async def test_the_key_may_come_from_the_environment(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOENGINE_API_KEY", "env")
    client = make_client()
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer env"})).status_code == 200


async def test_request_id_is_echoed_or_made(make_client: MakeClient) -> None:
    client = make_client()
    for path in ("/health", "/nowhere", "/v1/models"):
        response = await client.get(path, headers={"X-Request-Id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
    made = {(await client.get("/health")).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for bad in (b"x" * 129, b"caf\xe9", b""):
        response = await client.get("/health", headers={"X-Request-Id": bad})
        assert response.headers["x-request-id"].encode() != bad


async def test_two_requests_with_one_id_do_not_meet(make_client: MakeClient, engine: FakeEngine) -> None:
    client = make_client()
    ids = set()
    for _ in range(2):
        response = await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "same"})
        ids.add(response.json()["id"])
    assert len(ids) == 2
    assert {s.request_id for s in engine.submitted} == ids


async def test_browsers_may_call_from_the_given_origins_only(make_client: MakeClient) -> None:
    client = make_client(allow_origins="https://a.example, https://b.example", api_key="key")
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("https://b.example", True), ("https://c.example", False)):
        response = await client.options("/v1/completions", headers={"Origin": origin, **preflight})
        assert (response.headers.get("access-control-allow-origin") == origin) is allowed
        response = await client.get("/v1/models", headers={"Origin": origin})
        assert response.status_code == 401
        assert (response.headers.get("access-control-allow-origin") == origin) is allowed


async def test_tokenize_shows_what_the_model_sees(make_client: MakeClient) -> None:
    client = make_client()
    answer = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert answer == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [BOS, 104, 0xC3, 0xA9],
        "token_strs": ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    bare = (await client.post("/tokenize", json={"prompt": "h", "add_special_tokens": False})).json()
    assert bare["tokens"] == [104]
    chat = (await client.post("/tokenize", json={"messages": HELLO})).json()
    assert chat["tokens"] == [BOS, *b"user: hi\nassistant: "]
    back = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert back == {"prompt": "<s>user: hi\nassistant: "}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HELLO}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [262]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
async def test_tokenization_refuses(make_client: MakeClient, path: str, body: dict[str, object]) -> None:
    response = await make_client().post(path, json=body)
    assert response.status_code == 400


def test_the_lifespan_owns_the_engine(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig())) as client:
        assert client.get("/health").status_code == 200
        assert engine.num_entered == 1
    assert engine.state == "closed"
