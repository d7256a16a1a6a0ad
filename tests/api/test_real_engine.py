"""The server over the real engine and the built-in model: equal answers in every mode, storms, and the drain."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from aioengine import AsyncEngine, EngineConfig, SamplingParams
from aioengine.cli.generate import Job, answer_all
from tests.api.conftest import RunningServer, running_server
from tests.api.test_chat import events

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT_S = 300.0
"""Against hangs only; the machine may be busy."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def small_engine() -> AsyncEngine:
    return AsyncEngine(
        EngineConfig(
            "smollm2", max_model_len=512, num_gpu_blocks_override=200, max_num_seqs=16, log_stats_interval_s=0.0
        )
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[RunningServer]:
    async with small_engine() as engine, running_server(engine, log_level="warning") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as client:
        yield client


async def settle(engine: AsyncEngine) -> None:
    """Until nothing is queued or running; then every block must be free."""
    async with asyncio.timeout(TIMEOUT_S):
        while (stats := engine.stats()).num_running or stats.num_waiting:  # noqa: ASYNC110 - it has no such event
            await asyncio.sleep(0)
    assert stats.num_free_blocks == stats.num_blocks - 1


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[int, tuple[str, str]]:
    """Text and finish reason of each choice."""
    response = await client.post(path, json={**body, "stream": True})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    result: dict[int, tuple[str, str]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, reason = result.get(choice["index"], ("", ""))
        new = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        result[choice["index"]] = (text + new, choice["finish_reason"] or reason)
    return result


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "stop": [" the", "."]},
        {"temperature": 1.5, "seed": 5, "n": 3},
        {"temperature": 0, "logprobs": 2, "echo": True},
    ],
)
@pytest.mark.parametrize("prompt", ["Once upon a time", "def f(x):\n", "Ünïcödé 🙂 日本"])
async def test_a_stream_says_what_a_whole_answer_says(
    client: httpx.AsyncClient, prompt: str, fields: dict[str, Any]
) -> None:
    body = {"prompt": prompt, "max_tokens": 24, **fields}
    answer = await whole(client, COMPLETIONS, body)
    expected = {c["index"]: (c["text"], c["finish_reason"]) for c in answer["choices"]}
    assert await streamed(client, COMPLETIONS, body) == expected
    assert len(set(expected.values())) == fields.get("n", 1)


async def test_choices_that_share_a_prompt_say_what_separate_ones_say(client: httpx.AsyncClient) -> None:
    prompt = "Once upon a time there was a cat who lived in a small house by the sea"
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 1.2, "seed": 11, "n": 4}
    answer = await whole(client, COMPLETIONS, body)
    texts = [choice["text"] for choice in answer["choices"]]
    # Scores of the prompt make each choice compute it alone.
    alone = await whole(client, COMPLETIONS, {**body, "echo": True, "logprobs": 1})
    assert [choice["text"] for choice in alone["choices"]] == [prompt + text for text in texts]
    assert len(set(texts)) == 4
    assert await streamed(client, COMPLETIONS, body) == {
        choice["index"]: (choice["text"], choice["finish_reason"]) for choice in answer["choices"]
    }
    num_prompt = len((await whole(client, "/tokenize", {"prompt": prompt}))["tokens"])
    usage = answer["usage"]
    assert usage["prompt_tokens"] == num_prompt  # once, however many choices
    assert usage["total_tokens"] == num_prompt + usage["completion_tokens"]
    assert 20 < usage["completion_tokens"] <= 80


async def test_chat_equals_the_completion_of_its_rendered_prompt(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Name three colors."}]
    body = {"messages": messages, "max_tokens": 32, "temperature": 0}
    answer = (await whole(client, CHAT, body))["choices"][0]
    ids = (await whole(client, "/tokenize", {"messages": messages}))["tokens"]
    plain = (await whole(client, COMPLETIONS, {"prompt": ids, "max_tokens": 32, "temperature": 0}))["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (plain["text"], plain["finish_reason"])
    assert (await streamed(client, CHAT, body))[0] == (plain["text"], plain["finish_reason"])


async def test_scores_of_a_prompt_are_those_of_its_generation(client: httpx.AsyncClient) -> None:
    body = {"prompt": "The sky is", "max_tokens": 12, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    made = (await whole(client, COMPLETIONS, body))["choices"][0]
    ids = made["prompt_token_ids"] + made["token_ids"]
    body = {"prompt": ids, "max_tokens": 0, "logprobs": 1, "echo": True}
    scored = (await whole(client, COMPLETIONS, body))["choices"][0]
    count = len(made["token_ids"])
    assert scored["logprobs"]["tokens"][-count:] == made["logprobs"]["tokens"]
    assert scored["logprobs"]["token_logprobs"][-count:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)
    assert "".join(scored["logprobs"]["tokens"]) == scored["text"] == "The sky is" + made["text"]
    offsets = scored["logprobs"]["text_offset"]
    for offset, token in zip(offsets, scored["logprobs"]["tokens"], strict=True):
        assert scored["text"][offset:].startswith(token)


async def test_http_command_line_and_library_say_the_same(server: RunningServer, client: httpx.AsyncClient) -> None:
    assert isinstance(server.engine, AsyncEngine)
    body = {"prompt": "A cat is", "max_tokens": 16, "temperature": 0}
    over_http = (await whole(client, COMPLETIONS, body))["choices"][0]["text"]
    written: list[bytes] = []
    jobs = [Job(0, "A cat is")]
    assert await answer_all(server.engine, jobs, {"max_tokens": 16, "temperature": 0}, written.append) == 0
    params = SamplingParams(max_tokens=16, temperature=0)
    outputs = [output.delta async for output in server.engine.generate("A cat is", params)]
    assert json.loads(written[0])["text"] == "".join(outputs) == over_http


async def test_a_resent_prompt_hits_the_cache_and_says_the_same(client: httpx.AsyncClient) -> None:
    body = {"prompt": "All work and no play " * 8, "max_tokens": 8, "temperature": 0}
    first, second = [await whole(client, COMPLETIONS, body) for _ in range(2)]
    assert second["choices"] == first["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    salted = await whole(client, COMPLETIONS, {**body, "cache_salt": "mine"})
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


BAD: list[tuple[str, object]] = [
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10_000}),
    (COMPLETIONS, {"prompt": "long " * 2000}),
    (COMPLETIONS, {"prompt": [10**6]}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999999": 1}}),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [2**40]}),
    (COMPLETIONS, {"prompt": "x", "temperature": -1, "stream": True}),
    (COMPLETIONS, {"prompt": ["x", ""], "stream": True}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}),
    (CHAT, {"messages": [{"role": "user"}], "seed": 2**70}),
]


@pytest.mark.parametrize("seed", [0, 1])
async def test_a_storm_of_bad_cut_and_normal_requests_leaves_nothing_behind(
    server: RunningServer, client: httpx.AsyncClient, seed: int
) -> None:
    engine = server.engine
    assert isinstance(engine, AsyncEngine)
    rng = random.Random(seed)
    normal = {"prompt": "The capital of France is", "max_tokens": 10, "temperature": 0}
    expected = (await whole(client, COMPLETIONS, normal))["choices"]

    async def bad() -> None:
        path, body = rng.choice(BAD)
        assert (await client.post(path, json=body)).status_code == 400, body

    async def good() -> None:
        assert (await whole(client, COMPLETIONS, normal))["choices"] == expected

    async def cut_stream(num_lines: int, num_choices: int) -> None:
        body = {"prompt": ["Once", "More"], "n": num_choices, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.aiter_lines()
            for _ in range(num_lines):
                await anext(lines)

    async def cut_whole(num_turns: int) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}
        task = asyncio.create_task(client.post(CHAT, json=body))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

    kinds: list[Callable[[], Awaitable[None]]] = [
        bad,
        good,
        lambda: cut_stream(rng.randrange(12), rng.randint(1, 3)),
        lambda: cut_whole(rng.randrange(200)),
    ]
    await asyncio.gather(*(rng.choice(kinds)() for _ in range(60)))
    await settle(engine)
    assert (await client.get("/health")).json() == {"status": "ready"}
    assert (await whole(client, COMPLETIONS, normal))["choices"] == expected


async def test_64_streams_at_once_complete(server: RunningServer, client: httpx.AsyncClient) -> None:
    async def one(i: int) -> tuple[str, str]:
        body = {"prompt": f"Number {i}:", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        return (await streamed(client, COMPLETIONS, body))[0]

    answers = await asyncio.gather(*(one(i) for i in range(64)))
    assert {reason for _, reason in answers} == {"length"}
    assert isinstance(server.engine, AsyncEngine)
    await settle(server.engine)


async def test_a_drain_past_its_deadline_tells_the_client() -> None:
    async with small_engine() as engine, running_server(engine, drain_timeout_s=0.0) as server:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client,
            client.stream("POST", COMPLETIONS, json=body) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            server.server.stop()
            rest = [line async for line in lines if line]
            assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_closed"
        assert await asyncio.wait_for(server.task, TIMEOUT_S) == 0
