"""Server-sent events: framing, the response that owns its requests, and errors after the first byte.

An event is built as bytes once. What is the same in every chunk of a response is encoded when it starts
(`ChunkFrame`), so that a chunk costs one `orjson.dumps` of its text and one join.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from aioengine.api.errors import body_of
from aioengine.api.submission import Submission
from aioengine.types import PositionLogprobs, RequestOutput, Usage

DONE = b"data: [DONE]\n\n"

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies must neither store nor collect the events."""


class ChunkFrame:
    """The constant parts of one response's chunks: everything around the choice."""

    def __init__(self, head: Mapping[str, object], *, include_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: bytes, extra: Mapping[str, object] | None = None) -> bytes:
        """One event; `choice` is JSON, or empty for the usage event; `extra` replaces the usage of null."""
        if extra is None:
            return b"".join((self._head, choice, self._tail))
        return b"".join((self._head, choice, b"],", orjson.dumps(extra)[1:], b"\n\n"))


class RunningUsage:
    """Counts of a stream so far, for `continuous_usage_stats`."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._num_generated = 0

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        """Takes note of an output."""
        self._prompts[prompt_index] = len(output.prompt_token_ids)
        self._num_generated += len(output.delta_token_ids)

    @property
    def usage(self) -> Usage:
        """Tokens of the prompts that have begun to answer, and all generated ones."""
        return Usage(sum(self._prompts.values()), self._num_generated, 0)


class Held:
    """What a choice has produced since its last chunk besides text: a chunk without text is not sent."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self) -> None:
        self.logprobs: list[PositionLogprobs] = []
        self.token_ids: list[int] = []

    def add(self, output: RequestOutput) -> None:
        """Takes the new tokens of an output."""
        self.token_ids += output.delta_token_ids
        self.logprobs += output.delta_logprobs or ()


class ChunkEncoder(Protocol):
    """Makes the events of one response; one class per route."""

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events for an output, joined; empty if there is nothing to tell yet."""

    def end(self, usage: Usage) -> bytes:
        """The events after the last output, without [DONE]."""


async def encode_events(submission: Submission, encoder: ChunkEncoder) -> AsyncGenerator[bytes, None]:
    """The body of a streamed response. An error becomes one event, and the stream ends without [DONE]."""
    try:
        async for prompt_index, output in submission.as_they_come():
            data = encoder.events(prompt_index, output)
            if data:
                yield data
        yield encoder.end(submission.usage) + DONE
    except Exception as error:
        yield b"data: " + body_of(error) + b"\n\n"


class EventStream(StreamingResponse):
    """Streams events and closes its submission in every case, even if the client left before the first byte.

    Starlette cancels the body when the client disconnects, but it neither closes a body that waits in `send`
    nor starts one whose client is already gone; hence the `finally` here and not in the generator.
    """

    def __init__(self, submission: Submission, encoder: ChunkEncoder) -> None:
        self._submission = submission
        self._events = encode_events(submission, encoder)
        super().__init__(self._events, headers=HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._submission.close()
            await self._events.aclose()
