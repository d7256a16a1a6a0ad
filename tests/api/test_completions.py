"""Plain completions: prompts of every form, batches, echo, logprobs, streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.fake_engine import BOS, EOS, FakeEngine
from tests.api.test_chat import events

URL = "/v1/completions"


async def ask(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    response = await client.post(URL, json={"prompt": "hi", **fields})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def stream(client: httpx.AsyncClient, **fields: object) -> list[Any]:
    response = await client.post(URL, json={"prompt": "hi", "stream": True, **fields})
    assert response.status_code == 200, response.text
    return events(response.text)


async def test_whole_answer_has_the_shape_of_openai(client: httpx.AsyncClient) -> None:
    answer = await ask(client)
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": " one two three", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["total_tokens"] == 3 + 4


async def test_stream_has_one_chunk_per_text_and_the_reason_on_the_last(client: httpx.AsyncClient) -> None:
    *chunks, done = await stream(client)
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": " one", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": " two", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": " three", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
    ]
    assert all("usage" not in c for c in chunks)


async def test_usage_chunk_comes_only_when_asked(client: httpx.AsyncClient) -> None:
    *chunks, last, _ = await stream(client, stream_options={"include_usage": True})
    assert all(c["usage"] is None for c in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


async def test_continuous_usage_counts_up(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = await stream(client, stream_options=options)
    assert [c["usage"]["total_tokens"] for c in chunks] == [4, 5, 6, 7]
    assert last["usage"]["total_tokens"] == 7


async def test_default_max_tokens_is_16_unless_the_model_says_otherwise(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await ask(client)
    engine.default_sampling = {"max_tokens": 33}
    await ask(client)
    await ask(client, max_tokens=5)
    assert [s.params.max_tokens for s in engine.submitted] == [16, 33, 5]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        ([97, 98], [[97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_prompts_of_every_form(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: object, expected: list[list[int]]
) -> None:
    answer = await ask(client, prompt=prompt)
    assert [s.prompt_ids for s in engine.submitted] == expected
    assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_batch_with_n_is_indexed_prompt_by_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda ids, i: [ids[-1], *str(i).encode(), EOS]
    whole = await ask(client, prompt=["a", "b"], n=2)
    texts = {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
    assert {c["index"]: c["text"] for c in whole["choices"]} == texts
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    *chunks, usage, _ = await stream(client, prompt=["a", "b"], n=2, stream_options={"include_usage": True})
    streamed = dict.fromkeys(texts, "")
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 4 * 3


async def test_one_bad_prompt_refuses_the_whole_batch(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(URL, json={"prompt": ["a", ""], "stream": True})
    assert response.status_code == 400
    assert len(engine.submitted) == 1  # aborted, as the fixture asserts


async def test_echo_repeats_text_and_decodes_ids(client: httpx.AsyncClient) -> None:
    assert (await ask(client, echo=True))["choices"][0]["text"] == "hi one two three"
    assert (await ask(client, prompt=[BOS, 104, 105], echo=True))["choices"][0]["text"] == "hi one two three"
    *chunks, _ = await stream(client, echo=True)
    assert chunks[0]["choices"][0]["text"] == "hi one"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "hi one two three"


async def test_scoring_a_prompt_for_evaluations(client: httpx.AsyncClient) -> None:
    answer = await ask(client, prompt=[104, 105, 106], echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hij", "length")
    assert choice["logprobs"] == {
        "tokens": ["h", "i", "j"],
        "token_logprobs": [None, -0.625, -0.75],
        "top_logprobs": [None, {"A": -0.625, "i": -0.625}, {"A": -0.625, "j": -0.75}],
        "text_offset": [0, 1, 2],
    }
    assert "prompt_logprobs" not in choice
    assert answer["usage"]["completion_tokens"] == 0


async def test_echoed_and_generated_logprobs_join(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda ids, i: [258, *"é".encode(), 66, EOS]
    fields = {"prompt": "aé", "echo": True, "logprobs": 0}
    logprobs = (await ask(client, **fields))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [
        "<s>", "a", "bytes:\\xc3", "bytes:\\xa9", " one", "bytes:\\xc3", "bytes:\\xa9", "B", "</s>"
    ]  # fmt: skip
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 6, 6, 7, 8]
    assert logprobs["top_logprobs"][4] == {" one": -1.0}
    *chunks, _ = await stream(client, **fields)
    streamed: dict[str, list[object]] = {name: [] for name in logprobs}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == logprobs


async def test_infinite_logprobs_become_the_lowest_number(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.lowest_logprob = float("-inf")
    logprobs = (await ask(client, logprobs=1))["choices"][0]["logprobs"]
    assert set(logprobs["token_logprobs"]) == {-9999.0}


async def test_prompt_logprobs_are_per_choice(client: httpx.AsyncClient) -> None:
    choices = (await ask(client, n=2, prompt_logprobs=0))["choices"]
    for choice in choices:
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1] == {"104": {"logprob": -0.5, "rank": 7, "decoded_token": "h"}}


async def test_token_ids_are_returned_on_request(client: httpx.AsyncClient) -> None:
    choice = (await ask(client, return_token_ids=True))["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([BOS, 104, 105], [258, 259, 260, EOS])
    *chunks, _ = await stream(client, return_token_ids=True)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [BOS, 104, 105]
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [258, 259, 260, EOS]


async def test_no_chunk_while_a_character_is_incomplete(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda ids, i: [*"é".encode(), EOS]
    *chunks, _ = await stream(client)
    assert [c["choices"][0]["text"] for c in chunks] == ["é", ""]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [999999], "echo": True}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ["a"] * 5, "n": 1000}, "prompt"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_refused_fields(client: httpx.AsyncClient, fields: dict[str, object], param: str) -> None:
    response = await client.post(URL, json={"prompt": "hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_best_of_equal_to_n_is_accepted(client: httpx.AsyncClient) -> None:
    assert len((await ask(client, best_of=2, n=2))["choices"]) == 2
    assert len((await ask(client, best_of=1))["choices"]) == 1
