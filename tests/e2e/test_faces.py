"""HTTP and command line, each with the engine in a process of its own, answer as the library does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError

from tests.e2e.answers import LOGPROB_TOLERANCE
from tests.e2e.conftest import Library
from tests.e2e.prompts import CHATS, NUM_OUTPUT_TOKENS, PROMPTS, TEXTS

pytestmark = pytest.mark.slow

TIMEOUT_S = 600
"""Against hangs only; the machine may be busy."""

AIOENGINE = [sys.executable, "-m", "aioengine"]

GREEDY = {"temperature": 0, "max_tokens": NUM_OUTPUT_TOKENS, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def base_url(smollm2_path: Path, library: Library) -> Iterator[str]:
    """A server process, which must end cleanly at the first signal."""
    environment = {name: value for name, value in os.environ.items() if name != "AIOENGINE_API_KEY"}
    argv = [*AIOENGINE, "serve", str(smollm2_path), "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        try:
            report = list(takewhile(lambda line: not line.startswith("ready in"), process.stdout))
            yield next(line.split()[-1] for line in report if line.startswith("URL"))
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


@pytest_asyncio.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=TIMEOUT_S, max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def model(client: AsyncOpenAI) -> str:
    return (await client.models.list()).data[0].id


async def test_whole_answers_equal_the_library(client: AsyncOpenAI, model: str, library: Library) -> None:
    async def complete(name: str) -> None:
        answer = await client.completions.create(model=model, prompt=TEXTS[name], logprobs=1, **GREEDY)
        (choice,), expected = answer.choices, library.answers[name]
        assert (choice.text, choice.finish_reason) == (expected.text, "length"), name
        assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE), name
        assert answer.usage.completion_tokens == NUM_OUTPUT_TOKENS
        assert answer.usage.prompt_tokens == len(library.prompt_ids[name])

    async def chat(name: str) -> None:
        answer = await client.chat.completions.create(
            model=model, messages=CHATS[name], logprobs=True, top_logprobs=2, **GREEDY
        )
        (choice,), expected = answer.choices, library.answers[f"chat {name}"]
        assert (choice.message.content, choice.finish_reason) == (expected.text, "length"), name
        found = [token.logprob for token in choice.logprobs.content]
        assert found == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE), name
        assert [token.top_logprobs[0].token for token in choice.logprobs.content] == [
            token.token for token in choice.logprobs.content
        ]

    await asyncio.gather(*map(complete, TEXTS), *map(chat, CHATS))


async def test_streamed_answers_equal_the_library(client: AsyncOpenAI, model: str, library: Library) -> None:
    async def complete(name: str) -> None:
        """The prompt as token ids, which must make no difference."""
        text, logprobs, reasons, usages = "", [], [], []
        async for chunk in await client.completions.create(
            model=model,
            prompt=library.prompt_ids[name],
            logprobs=0,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        ):
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                text += choice.text
                logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
                reasons += [choice.finish_reason] if choice.finish_reason else []
        expected = library.answers[name]
        assert (text, reasons) == (expected.text, ["length"]), name
        assert logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE), name
        assert [usage.completion_tokens for usage in usages] == [NUM_OUTPUT_TOKENS]

    async def chat(name: str) -> None:
        text, logprobs, reasons = "", [], []
        async for chunk in await client.chat.completions.create(
            model=model, messages=CHATS[name], logprobs=True, stream=True, **GREEDY
        ):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                logprobs += [token.logprob for token in choice.logprobs.content] if choice.logprobs else []
                reasons += [choice.finish_reason] if choice.finish_reason else []
        expected = library.answers[f"chat {name}"]
        assert (text, reasons) == (expected.text, ["length"]), name
        assert logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE), name

    await asyncio.gather(*map(complete, TEXTS), *map(chat, CHATS))


async def test_a_bad_request_does_not_disturb_the_server(client: AsyncOpenAI, model: str, library: Library) -> None:
    with pytest.raises(BadRequestError, match="max_tokens"):
        await client.completions.create(model=model, prompt="x", max_tokens=10**6)
    with pytest.raises(BadRequestError, match="temperature"):
        await client.completions.create(model=model, prompt="x", temperature=-1)
    answer = await client.completions.create(model=model, prompt=TEXTS["fact"], **GREEDY)
    assert answer.choices[0].text == library.answers["fact"].text


def test_the_command_line_answers_a_file_as_the_library_does(
    smollm2_path: Path, library: Library, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for name, prompt in PROMPTS.items():
            kind = "prompt" if isinstance(prompt, str) else "messages"
            lines.write(json.dumps({"id": name, kind: prompt}) + "\n")
    flags = ["--temperature", "0", "--max-tokens", str(NUM_OUTPUT_TOKENS), "--ignore-eos"]
    argv = ["generate", "--file", str(file), "--model", str(smollm2_path), *flags]
    done = subprocess.run([*AIOENGINE, *argv], stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    results = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [result["id"] for result in results] == list(PROMPTS)
    for result in results:
        assert result["text"] == library.answers[result["id"]].text, result["id"]
        assert (result["finish_reason"], result["completion_tokens"]) == ("length", NUM_OUTPUT_TOKENS)
        assert result["prompt_tokens"] == len(library.prompt_ids[result["id"]])
