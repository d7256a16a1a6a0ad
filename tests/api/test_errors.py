"""Every error has the right status and OpenAI's form, and nothing else happens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from aioengine.api.errors import KINDS, UNEXPECTED_MESSAGE
from aioengine.api.protocol import ChatRequest, CompletionRequest
from aioengine.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    EngineError,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
)
from tests.api.conftest import MakeClient
from tests.api.fake_engine import BOS, FakeEngine
from tests.api.test_chat import HELLO, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def refused(client: httpx.AsyncClient, url: str, body: object) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post(url, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"1", b'"x"', b'{"messages": [}', b'{"temperature": NaN}',
        b'{"temperature": 1e999}', b'{"prompt": "\\ud800"}', b'{"prompt": "a\\udc00b"}',
        b'{"prompt": "\xff"}', b"\x00", b'{"prompt": "a"} x', b"[" * 100_000,
        b'{"metadata":' + b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_bodies_that_are_not_json_objects(client: httpx.AsyncClient, url: str, body: bytes) -> None:
    await refused(client, url, body)


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("max_tokens", "5", "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 10**40, "max_tokens"),
        ("temperature", "hot", "temperature"),
        ("temperature", -1, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", [1], "top_p"),
        ("top_k", -2, "top_k"),
        ("n", 0, "n"),
        ("n", 10**9, "n"),
        ("seed", 2**64, "seed"),
        ("stream", "yes", "stream"),
        ("stop", [1], "stop[0]"),
        ("stop", [""], "stop"),
        ("stop", {"a": 1}, "stop"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("logit_bias", {"1": 1000}, "logit_bias"),
        ("logit_bias", {"1": "x"}, "logit_bias[...]"),
        ("logit_bias", [1], "logit_bias"),
        ("stop_token_ids", ["x"], "stop_token_ids[0]"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("bad_words", "word", "bad_words"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
        ("min_tokens", 20_000, "min_tokens"),
        ("priority", 1, "priority"),
        ("cache_salt", 1, "cache_salt"),
        ("user", 1, "user"),
        ("model", 1, "model"),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_wrong_types_and_ranges_name_the_field(
    client: httpx.AsyncClient, url: str, field: str, value: object, path: str
) -> None:
    base = {"max_tokens": 5, **({"messages": HELLO} if url == CHAT else {"prompt": "hi"})}
    error = await refused(client, url, {**base, field: value})
    assert error["param"] == path
    assert path.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ""}]}, "messages[0].role"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": 1}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "x"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"audio": {}}, "audio"),
        ({"prediction": {}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
)
async def test_refused_chat_fields_name_their_path(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, object], path: str
) -> None:
    error = await refused(client, CHAT, {"messages": HELLO, **fields})
    assert error["param"] == path
    assert not engine.submitted


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("max_token", "unknown field max_token; did you mean max_tokens?"),
        ("best-of", "unknown field best-of; did you mean best_of?"),
        ("Max_Tokens", "unknown field Max_Tokens; did you mean max_tokens?"),
        ("guided_jsn", "unknown field guided_jsn"),
        ("stop_words", "unknown field stop_words"),
        ("tools", "tools is not supported yet; leave it out"),
    ],
)
async def test_unknown_fields_are_refused_by_name(client: httpx.AsyncClient, field: str, message: str) -> None:
    error = await refused(client, COMPLETIONS, {"prompt": "x", field: 1})
    assert (error["message"], error["param"]) == (message, field)


FOREIGN: dict[str, tuple[object, ...]] = {
    "use_beam_search": (True, False),
    "length_penalty": (0.5, 1.0, 1),
    "early_stopping": (True, False),
    "truncate_prompt_tokens": (5,),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
    "structured_outputs": ({"regex": "a"},),
    "guided_json": ({},),
    "guided_regex": ("a",),
    "guided_choice": (["a"],),
    "guided_grammar": ("root ::= a",),
    "guided_decoding_backend": ("xgrammar",),
    "guided_whitespace_pattern": (" ",),
    "structural_tag": ("{}",),
    "logits_processors": (["x"], []),
    "return_tokens_as_token_ids": (True, False),
    "mm_processor_kwargs": ({"a": 1}, {}),
    "kv_transfer_params": ({"a": 1}, {}),
    "vllm_xargs": ({"a": 1}, {}),
}
"""What clients of vLLM send: a value that asks for something, and those that do not."""

FOREIGN_IN_CHAT: dict[str, tuple[object, ...]] = {
    "echo": (True, False),
    "best_of": (2, 1),
    "chat_template": ("{{ messages }}",),
    "documents": ([{"text": "a"}], []),
    "include_reasoning": (False, True),
    "thinking_token_budget": (5,),
    "media_io_kwargs": ({"a": 1}, {}),
}


@pytest.mark.parametrize(
    ("url", "field", "values"),
    [
        *((url, *item) for url in (CHAT, COMPLETIONS) for item in FOREIGN.items()),
        *((CHAT, *item) for item in FOREIGN_IN_CHAT.items()),
        (COMPLETIONS, "prompt_embeds", ("AAAA",)),
    ],
)
async def test_fields_of_others_pass_only_where_they_ask_for_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, url: str, field: str, values: tuple[object, ...]
) -> None:
    base = {"messages": HELLO} if url == CHAT else {"prompt": "hi"}
    asks, *neutral = values
    error = await refused(client, url, {**base, field: asks})
    assert (error["message"], error["param"]) == (f"{field} is not supported yet; leave it out", field)
    assert not engine.submitted
    for value in [*neutral, None]:
        assert (await client.post(url, json={**base, field: value})).status_code == 200


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_a_body_that_is_not_there_is_called_empty(client: httpx.AsyncClient, url: str) -> None:
    for response in (await client.post(url), await client.post(url, content=b" \n")):
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the request body is empty; send a JSON object"


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_s_own_id_is_in_the_answer_s(
    client: httpx.AsyncClient, engine: FakeEngine, url: str, stream: bool
) -> None:
    base = {"stream": stream, **({"messages": HELLO} if url == CHAT else {"prompt": "hi"})}
    response = await client.post(url, json={**base, "request_id": "job 7"})
    answers = [e for e in events(response.text) if e != "[DONE]"] if stream else [response.json()]
    expected = f"{'chatcmpl' if url == CHAT else 'cmpl'}-job 7"
    assert {answer["id"] for answer in answers} == {expected} == {engine.submitted[0].request_id}
    for wrong in ("", "a\nb", "é", "x" * 129):
        assert (await refused(client, url, {**base, "request_id": wrong}))["param"] == "request_id"


async def test_special_tokens_are_added_where_they_are_asked_for(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for given in (None, True, False):
        await client.post(COMPLETIONS, json={"prompt": "hi", "add_special_tokens": given})
        await client.post(CHAT, json={"messages": HELLO, "add_special_tokens": given})
    assert [options["add_special_tokens"] for options in engine.options] == [None, None, True, True, False, False]
    assert [stream.prompt_ids[0] == BOS for stream in engine.submitted[::2]] == [True, True, False]


@pytest.mark.parametrize(
    ("url", "schema", "required"),
    [(CHAT, ChatRequest, {"messages": HELLO}), (COMPLETIONS, CompletionRequest, {"prompt": "hi"})],
)
async def test_null_means_not_given_for_every_field(
    client: httpx.AsyncClient, engine: FakeEngine, url: str, schema: Any, required: dict[str, object]
) -> None:
    response = await client.post(url, json={**dict.fromkeys(schema.__struct_fields__), **required})
    assert response.status_code == 200
    plain = await client.post(url, json=required)
    assert plain.json()["choices"] == response.json()["choices"]
    assert engine.submitted[0].params == engine.submitted[1].params


def test_every_field_of_the_openai_client_is_known() -> None:
    chat = set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    plain = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert chat <= set(ChatRequest.__struct_fields__)
    assert plain <= set(CompletionRequest.__struct_fields__)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_another_model_is_not_found(client: httpx.AsyncClient, url: str) -> None:
    response = await client.post(url, json={"model": "gpt-5"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'fake'" in error["message"]


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (InvalidRequest("bad", param="top_p"), 400, None, None),
        (ContextLengthExceeded("long"), 400, "context_length_exceeded", None),
        (QueueFull("full"), 429, "queue_full", "1"),
        (RequestTimeout("late"), 504, "request_timeout", None),
        (EngineClosed("draining"), 503, "engine_closed", "1"),
        (EngineDead("dead"), 503, "engine_dead", None),
        (EngineError("odd"), 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors_before_the_first_byte(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    error: EngineError,
    status: int,
    code: str | None,
    retry_after: str | None,
    stream: bool,
) -> None:
    engine.submit_error = error
    response = await client.post(CHAT, json={"messages": HELLO, "stream": stream})
    assert response.status_code == status
    body = response.json()["error"]
    assert (body["code"], body["param"]) == (code, error.param)
    assert body["message"] == (error.message if status != 500 else UNEXPECTED_MESSAGE)
    assert response.headers.get("retry-after") == retry_after


def test_children_come_before_their_parents_in_the_table() -> None:
    seen: list[type[EngineError]] = []
    for cls, _ in KINDS:
        assert not any(issubclass(cls, parent) for parent in seen)
        seen.append(cls)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_failure_in_the_middle_of_a_whole_answer_is_a_status(
    client: httpx.AsyncClient, engine: FakeEngine, url: str
) -> None:
    engine.fail_after = 2
    response = await client.post(url, json={"messages": HELLO} if url == CHAT else {"prompt": "x"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
async def test_failure_in_the_middle_of_a_stream_is_one_last_event(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: object
) -> None:
    engine.fail_after = 2
    response = await client.post(COMPLETIONS, json={"prompt": prompt, "stream": True})
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert chunks and all("choices" in c for c in chunks)
    assert last["error"]["code"] == "engine_dead"


async def test_failure_of_one_prompt_ends_the_stream_of_a_batch(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    def script(ids: Sequence[int], index: int) -> Sequence[int]:
        if ids[-1] == ord("y"):
            raise EngineDead("the other one has failed")
        return [65]

    engine.script = script
    engine.hold()
    response = await client.post(COMPLETIONS, json={"prompt": ["x", "y"], "stream": True})
    (last,) = events(response.text)
    assert last["error"]["message"] == "the other one has failed"


async def test_unexpected_failure_tells_nothing_but_is_logged(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.submit_error = ValueError("secret")
    response = await client.post(CHAT, json={"messages": HELLO}, headers={"X-Request-Id": "r1"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "r1"
    assert response.json()["error"] == {
        "message": UNEXPECTED_MESSAGE,
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    engine.submit_error, engine.fail_after, engine.failure = None, 1, ValueError("secret")
    *_, last = events((await client.post(CHAT, json={"messages": HELLO, "stream": True})).text)
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(last)
    assert caplog.text.count("secret") == 2


async def test_an_abort_by_the_server_is_an_error_not_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.finish_reason = "abort"
    response = await client.post(CHAT, json={"messages": HELLO})
    assert response.status_code == 503
    *_, last = events((await client.post(CHAT, json={"messages": HELLO, "stream": True})).text)
    assert last["error"]["code"] == "engine_closed"


async def test_unknown_paths_and_methods(client: httpx.AsyncClient) -> None:
    response = await client.get("/nowhere")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "there is no /nowhere"
    response = await client.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_other_content_types_are_refused(client: httpx.AsyncClient) -> None:
    for content_type, status in (("text/plain", 415), ("application/json; charset=utf-8", 200)):
        response = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": content_type})
        assert response.status_code == status


async def test_body_above_the_limit_is_413(make_client: MakeClient) -> None:
    client = make_client(max_request_bytes=2000)
    body = json.dumps({"prompt": "x" * 3000}).encode()
    assert (await client.post(COMPLETIONS, content=body)).status_code == 413

    async def pieces() -> Any:
        for i in range(0, len(body), 500):
            yield body[i : i + 500]

    response = await client.post(COMPLETIONS, content=pieces())
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "the request body is larger than 2000 bytes"
    assert (await client.post(COMPLETIONS, json={"prompt": "x" * 1500})).status_code == 200
