"""Chat completions: shapes of whole and streamed answers, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.fake_engine import BOS, EOS, FakeEngine

HELLO = [{"role": "user", "content": "hi"}]
URL = "/v1/chat/completions"


def events(body: str) -> list[Any]:
    """The decoded events of a stream; "[DONE]" stays text."""
    assert body.endswith("\n\n")
    result = []
    for block in body[:-2].split("\n\n"):
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        result.append(data if data == "[DONE]" else json.loads(data))
    return result


async def ask(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def stream(client: httpx.AsyncClient, **fields: object) -> list[Any]:
    response = await client.post(URL, json={"messages": HELLO, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_whole_answer_has_the_shape_of_openai(client: httpx.AsyncClient) -> None:
    answer = await ask(client, model="fake")
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " one two three", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_prompt = len("user: hi\nassistant: ") + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 4,
        "total_tokens": num_prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_cached_tokens_are_reported(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 16
    assert (await ask(client))["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_stream_sends_role_then_text_then_finish_then_done(client: httpx.AsyncClient) -> None:
    *chunks, done = await stream(client)
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert [c["delta"] for c in choices] == [
        {"role": "assistant", "content": ""},
        {"content": " one"},
        {"content": " two"},
        {"content": " three"},
        {},
    ]
    assert [c["finish_reason"] for c in choices] == [None] * 4 + ["stop"]
    assert all(c["logprobs"] is None for c in choices)


async def test_stream_with_usage_ends_with_one_usage_chunk(client: httpx.AsyncClient) -> None:
    *chunks, last, done = await stream(client, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_continuous_usage_counts_up(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = await stream(client, stream_options=options)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 1, 2, 3, 4]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


async def test_n_choices_are_separate_and_each_begins_with_a_role(client: httpx.AsyncClient) -> None:
    whole = await ask(client, n=2)
    assert [(c["index"], c["message"]["content"]) for c in whole["choices"]] == [
        (0, " one two three"),
        (1, " one two three1"),
    ]
    *chunks, _ = await stream(client, n=2)
    for index, text in ((0, " one two three"), (1, " one two three1")):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == text
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]


async def test_length_is_the_finish_reason_of_a_cut_answer(client: httpx.AsyncClient) -> None:
    for limit in (
        {"max_tokens": 2},
        {"max_completion_tokens": 2},
        {"max_tokens": 2, "max_completion_tokens": 2},
    ):
        choice = (await ask(client, **limit))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (" one two", "length")


async def test_max_tokens_defaults_to_the_whole_context(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client)
    assert engine.submitted[0].params.max_tokens is None


async def test_logprobs_carry_exact_bytes(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda ids, i: [*"é".encode(), EOS]
    content = (await ask(client, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert [c["bytes"] for c in content] == [[0xC3], [0xA9], list(b"</s>")]
    assert [c["token"] for c in content] == ["\ufffd", "\ufffd", "</s>"]
    assert [len(c["top_logprobs"]) for c in content] == [2, 2, 2]
    assert content[0]["top_logprobs"][0] == {"token": "A", "logprob": -0.625, "bytes": [65]}


async def test_logprobs_without_top_are_allowed(client: httpx.AsyncClient) -> None:
    content = (await ask(client, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == [" one", " two", " three", "</s>"]
    assert all(c["top_logprobs"] == [] for c in content)


async def test_streamed_logprobs_are_those_of_the_whole_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda ids, i: [65, *"é🙂".encode(), 66, EOS]
    whole = (await ask(client, logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
    *chunks, _ = await stream(client, logprobs=True, top_logprobs=1)
    choices = [c["choices"][0] for c in chunks]
    streamed = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
    assert streamed == whole
    texts = [c["delta"]["content"] for c in choices if c["delta"].get("content")]
    assert texts == ["A", "é", "🙂", "B"]  # no chunk while a character is incomplete


async def test_infinite_logprobs_become_the_lowest_number(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for value in (float("-inf"), float("nan")):
        engine.lowest_logprob = value
        content = (await ask(client, logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
        assert {c["logprob"] for c in content} == {-9999.0}


async def test_prompt_logprobs_are_by_token_id(client: httpx.AsyncClient) -> None:
    answer = await ask(client, prompt_logprobs=1)
    positions = answer["prompt_logprobs"]
    assert len(positions) == answer["usage"]["prompt_tokens"]
    assert positions[0] is None
    assert positions[1] == {
        "117": {"logprob": -0.875, "rank": 7, "decoded_token": "u"},
        "65": {"logprob": -0.625, "rank": 1, "decoded_token": "A"},
    }


async def test_token_ids_are_returned_on_request(client: httpx.AsyncClient) -> None:
    prompt_ids = [BOS, *b"user: hi\nassistant: "]
    answer = await ask(client, return_token_ids=True)
    assert answer["prompt_token_ids"] == prompt_ids
    assert answer["choices"][0]["token_ids"] == [258, 259, 260, EOS]
    *chunks, _ = await stream(client, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == prompt_ids
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", ())] == [258, 259, 260, EOS]


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {
        "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"65": -100},
        "allowed_token_ids": [65], "bad_words": ["x"],
        "stop": ["y"], "stop_token_ids": [66], "include_stop_str_in_output": True, "ignore_eos": True,
        "seed": 7, "min_tokens": 1, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip
    await ask(client, max_tokens=2, cache_salt="s", **fields)
    params = engine.submitted[0].params
    expected = {**fields, "logit_bias": {65: -100.0}}
    for name, value in expected.items():
        given = getattr(params, name)
        assert (list(given) if isinstance(given, tuple) else given) == value, name
    assert engine.options[0]["cache_salt"] == "s"


async def test_template_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, chat_template_kwargs={"a": 1}, add_generation_prompt=False)
    await ask(client, continue_final_message=True)
    first, second = engine.options
    assert first["chat_template_kwargs"] == {"a": 1}
    assert (first["add_generation_prompt"], first["continue_final_message"]) == (False, False)
    assert (second["add_generation_prompt"], second["continue_final_message"]) == (False, True)


async def test_model_defaults_apply_and_given_values_win(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.default_sampling = {"temperature": 0.3, "top_k": 5}
    await ask(client, temperature=None)
    await ask(client, temperature=1.0)
    assert [s.params.temperature for s in engine.submitted] == [0.3, 1.0]
    assert [s.params.top_k for s in engine.submitted] == [5, 5]


async def test_our_own_answer_is_accepted_as_history(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await ask(client))["choices"][0]["message"]
    sdk_form = {**answer, "tool_calls": None, "annotations": [], "audio": None, "function_call": None}
    for message in (answer, sdk_form, {**answer, "tool_calls": []}):
        await ask(client, messages=[*HELLO, message, *HELLO])
        assert engine.options[-1]["prompt"][1] == {"role": "assistant", "content": " one two three"}  # type: ignore[index]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
async def test_absent_content_is_empty_content(
    client: httpx.AsyncClient, engine: FakeEngine, content: dict[str, object]
) -> None:
    await ask(client, messages=[*HELLO, {"role": "assistant", **content}])
    assert engine.options[-1]["prompt"][1] == {"role": "assistant", "content": ""}  # type: ignore[index]


async def test_text_parts_reach_the_engine_as_they_are(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    await ask(client, messages=messages)
    assert engine.options[-1]["prompt"] == messages


async def test_past_tool_calls_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    cut = {"id": "d", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    history = {"role": "assistant", "content": None, "tool_calls": [call, cut]}
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    await ask(client, messages=[*HELLO, history, result])
    assert engine.options[-1]["prompt"] == [*HELLO, {**history, "content": ""}, result]


async def test_neutral_values_of_missing_features_are_accepted(client: httpx.AsyncClient) -> None:
    await ask(
        client, tools=[], tool_choice="auto", functions=[], function_call="none",
        response_format={"type": "text"}, modalities=["text"], reasoning_effort="none",
        verbosity="medium", audio=None, prediction=None,
        web_search_options=None, moderation=None, parallel_tool_calls=True, user="u", metadata={"a": "b"},
        store=False, service_tier="auto", safety_identifier="s", prompt_cache_key="k", stream=False,
        stream_options=None, prompt_cache_retention="24h",
    )  # fmt: skip


async def test_max_tokens_zero_only_reads_the_prompt(client: httpx.AsyncClient) -> None:
    answer = await ask(client, max_tokens=0)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 0


async def test_stop_reason_is_sent_only_if_there_is_one(client: httpx.AsyncClient) -> None:
    assert "stop_reason" not in (await ask(client))["choices"][0]
