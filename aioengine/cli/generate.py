"""`aioengine generate`: one prompt streamed to the terminal, or many prompts as JSON lines.

All lines of a file are read and checked before the model is loaded. Prompts run concurrently, as many as
`WINDOW` at once, or all of them where the engine is to be deterministic offline; results are written in the order of
the prompts. A prompt that fails gives a line with
`error` and does not stop the others; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from aioengine.cli.flags import engine_config, sampling_overrides
from aioengine.determinism import SATISFIED_BY, check_demand
from aioengine.errors import EngineError, InvalidConfig
from aioengine.types import PositionLogprobs, Prompt, RequestOutput, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from aioengine.api.face import Engine, Stream

WINDOW = 1024
"""Prompts in the engine at once; the engine itself decides how many of them run."""

DEFAULT_MAX_TOKENS = 256
"""For plain prompts, which a model may continue without end; chat answers end by themselves."""

Write = Callable[[bytes], None]

_SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingParams))
_LINE_NAMES = frozenset({"prompt", "messages", "id", "determinism"})


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of the input."""

    index: int
    prompt: Prompt
    sampling: Mapping[str, object] = field(default_factory=dict)
    """On top of the flags."""
    id: object = None
    """Whatever the line gave, written back."""
    determinism: str | None = None
    """What the line demands of the engine."""


async def run(args: argparse.Namespace) -> int:
    """Reads the prompts, then loads the model and answers them.

    Raises:
        EngineError: the input or the configuration cannot be used, or the only prompt failed.
    """
    logging.basicConfig(level="DEBUG" if args.debug else "WARNING", stream=sys.stderr)
    config, overrides = engine_config(args), sampling_overrides(args)
    asks_chat = args.chat or args.system is not None
    if args.file is None:
        jobs = [Job(0, as_chat(args.prompt, args.system) if asks_chat else args.prompt)]
    else:
        jobs = read_jobs(args.file, await asyncio.to_thread(_read_text, args.file), asks_chat, args.system)
    if not asks_chat:
        overrides.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    async with _started(config) as engine:
        if args.file is None and not args.json:
            await stream_text(engine, jobs[0], overrides, _write_text)
            return 0
        num_failed = await answer_all(engine, jobs, overrides, _write_bytes)
        return 1 if num_failed else 0


@asynccontextmanager
async def _started(config: Any) -> AsyncIterator[Engine]:
    from aioengine.engine import AsyncEngine  # imports torch: not before the input has been checked

    async with AsyncEngine(config) as engine:
        yield engine


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write_bytes(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _read_text(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise InvalidConfig(f"cannot read {name}: {error.strerror}", param="file") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{name} is not UTF-8 (byte {error.start})", param="file") from None


def as_chat(prompt: str, system: str | None) -> list[dict[str, object]]:
    """A prompt as a user's message, after the system message if there is one."""
    opening: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


def read_jobs(name: str, text: str, asks_chat: bool, system: str | None) -> list[Job]:
    """The prompts of a file: JSON lines if its first line is a JSON object, else one plain prompt per line.

    Raises:
        InvalidConfig: naming the line that cannot be used.
    """
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidConfig(f"{name} holds no prompts", param="file")
    jobs = []
    if not _is_json_object(lines[0][1]):
        for index, (_, line) in enumerate(lines):
            line = line.removesuffix("\r")
            jobs.append(Job(index, as_chat(line, system) if asks_chat else line))
        return jobs
    for index, (number, line) in enumerate(lines):
        try:
            jobs.append(_read_line(index, line, asks_chat, system))
        except InvalidConfig as error:
            raise InvalidConfig(f"{name}:{number}: {error}", param="file") from None
    return jobs


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _read_line(index: int, line: str, asks_chat: bool, system: str | None) -> Job:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidConfig(f"not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidConfig("not a JSON object")
    for key in values:
        if key not in _LINE_NAMES | _SAMPLING_NAMES:
            raise InvalidConfig(f"unknown field {key}")
    prompt, messages = values.get("prompt"), values.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidConfig("give either prompt or messages")
    if messages is not None:
        if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
            raise InvalidConfig("messages must be a list of objects with role and content")
        chosen: Prompt = messages
    elif isinstance(prompt, str):
        chosen = as_chat(prompt, system) if asks_chat else prompt
    elif isinstance(prompt, list) and not asks_chat:
        chosen = prompt
    else:
        raise InvalidConfig("prompt must be a string" + ("" if asks_chat else " or a list of token ids"))
    demand = values.get("determinism")
    if demand is not None and not (isinstance(demand, str) and demand in SATISFIED_BY):
        raise InvalidConfig(f"determinism={demand!r} must be {' or '.join(SATISFIED_BY)}")
    sampling = {name: values[name] for name in values.keys() & _SAMPLING_NAMES if values[name] is not None}
    try:
        SamplingParams(**sampling)
    except EngineError as error:
        raise InvalidConfig(str(error)) from None
    return Job(index, chosen, sampling, values.get("id"), demand)


async def stream_text(engine: Engine, job: Job, overrides: Mapping[str, object], write: Callable[[str], None]) -> None:
    """Writes an answer as it comes; several answers one after the other, each under its number.

    Raises:
        EngineError: the prompt was refused, or the engine failed.
    """
    params = engine.sampling_params(**{**overrides, **job.sampling})
    texts = [""] * params.n
    async for output in outputs_of(engine, job, params):
        if params.n == 1:
            write(output.delta)
        texts[output.index] += output.delta
    if params.n == 1:
        write("\n")
    else:
        write("".join(f"[{i}] {text}\n" for i, text in enumerate(texts)))


async def outputs_of(
    engine: Engine, job: Job, params: SamplingParams, queued: Stream | None = None
) -> AsyncIterator[RequestOutput]:
    """The outputs of one job, which may have been queued before; leaving early ends the request."""
    if queued is None:
        stream = await engine.submit(job.prompt, params, determinism=job.determinism)
    else:
        stream = queued
    try:
        async for output in stream:
            yield output
    finally:
        await stream.abort()


async def answer_all(engine: Engine, jobs: Iterable[Job], overrides: Mapping[str, object], write: Write) -> int:
    """Answers every job and writes one JSON line per choice, in order; returns how many jobs failed."""
    if engine.determinism.level == "offline":
        return await _answer_together(engine, list(jobs), overrides, write)
    num_failed = 0
    running: deque[asyncio.Task[list[dict[str, object]]]] = deque()

    async def finish_first() -> int:
        lines = await running[0]
        running.popleft()
        return _write_lines(lines, write)

    try:
        for job in jobs:
            if len(running) == WINDOW:
                num_failed += await finish_first()
            running.append(asyncio.create_task(_answer(engine, job, overrides)))
        while running:
            num_failed += await finish_first()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return num_failed


async def _answer_together(engine: Engine, jobs: list[Job], overrides: Mapping[str, object], write: Write) -> int:
    """As `answer_all`, with every job queued before the first one runs: so each run takes the same steps."""
    queued = await _queue_all(engine, jobs, overrides)
    num_failed = num_read = 0
    try:
        for job, one in zip(jobs, queued, strict=True):
            num_read += 1
            num_failed += _write_lines(await _answer(engine, job, overrides, one), write)
    finally:
        for one in queued[num_read:]:
            if not isinstance(one, EngineError):
                await one.abort()
    return num_failed


def _write_lines(lines: list[dict[str, object]], write: Write) -> bool:
    """Writes the lines of a job; returns whether it failed."""
    write(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))
    return "error" in lines[0]


async def _queue_all(engine: Engine, jobs: list[Job], overrides: Mapping[str, object]) -> list[Stream | EngineError]:
    """The stream of each job, or why it was refused."""
    found: dict[int, Stream | EngineError] = {}
    params: dict[int, SamplingParams] = {}
    for i, job in enumerate(jobs):
        try:
            chosen = engine.sampling_params(**{**overrides, **job.sampling})
            check_demand(job.determinism, engine.determinism, chosen)
            params[i] = chosen
        except EngineError as error:
            found[i] = error
    queued = await engine.submit_all([jobs[i].prompt for i in params], list(params.values()))
    found |= zip(params, queued, strict=True)
    return [found[i] for i in range(len(jobs))]


async def _answer(
    engine: Engine, job: Job, overrides: Mapping[str, object], queued: Stream | EngineError | None = None
) -> list[dict[str, object]]:
    """The lines of one job, which is submitted now unless it was `queued` before."""
    head: dict[str, object] = {"index": job.index} if job.id is None else {"index": job.index, "id": job.id}
    try:
        params = engine.sampling_params(**{**overrides, **job.sampling})
        results = [_Result() for _ in range(params.n)]
        if isinstance(queued, EngineError):
            raise queued
        async with aclosing(outputs_of(engine, job, params, queued)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                results[output.index].add(output)
    except EngineError as error:
        return [{**head, "error": str(error), "param": error.param}]
    return [{**head, "choice": i, **result.json()} for i, result in enumerate(results)]


class _Result:
    """One choice of a job."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._logprobs: list[PositionLogprobs] | None = None
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None

    def add(self, output: RequestOutput) -> None:
        self._last = output
        if output.delta_logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *output.delta_logprobs]
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs

    def json(self) -> dict[str, object]:
        output = self._last
        assert output is not None, "a choice ends with an output"
        result: dict[str, object] = {
            "text": output.text,
            "finish_reason": output.finish_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
        }
        if output.stop_reason is not None:
            result["stop_reason"] = output.stop_reason
        if self._logprobs is not None:
            result["logprobs"] = [_position(p) for p in self._logprobs]
        if self._prompt_logprobs is not None:
            result["prompt_logprobs"] = [p and _position(p) for p in self._prompt_logprobs]
        return result


def _position(position: PositionLogprobs) -> dict[str, object]:
    return {**_token(position.chosen), "top": [_token(token) for token in position.top]}


def _token(token: TokenLogprob) -> dict[str, object]:
    return {"token_id": token.token_id, "token": token.token, "logprob": token.logprob, "rank": token.rank}
