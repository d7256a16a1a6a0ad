"""The engine requests of one HTTP call: submitted together, read together, aborted exactly once.

A call with a batch of prompts is several engine requests. `Submission` owns their streams from the moment
they are queued until `close()`, which every path of a route reaches: the end, an error, a client that left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from aioengine.api.face import Engine, Stream
from aioengine.errors import EngineClosed, EngineDead
from aioengine.types import PositionLogprobs, Prompt, RequestOutput, SamplingParams, Usage

T = TypeVar("T")

Item = tuple[int, RequestOutput]
"""The position of the prompt in the batch, and what is new for it."""


class Submission:
    """Queued requests and what they have used so far. Make one with `submit_all`."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._usages: dict[int, Usage] = {}

    @property
    def usage(self) -> Usage:
        """Token counts over all prompts; complete once every output was read."""
        parts = self._usages.values()
        return Usage(
            sum(u.prompt_tokens for u in parts),
            sum(u.completion_tokens for u in parts),
            sum(u.cached_tokens for u in parts),
        )

    async def close(self) -> None:
        """Aborts every request that has not ended; called once, the only place of the server that aborts."""
        for stream in self._streams:
            await stream.abort()

    async def in_order(self) -> AsyncIterator[Item]:
        """All outputs, prompt by prompt: for responses that are sent whole. Unread ones join meanwhile."""
        for i, stream in enumerate(self._streams):
            async for output in stream:
                yield self._checked(i, output)

    async def as_they_come(self) -> AsyncIterator[Item]:
        """All outputs as soon as they exist: for streams."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield self._checked(0, output)
            return
        async for item in self._merged():
            yield item

    async def _merged(self) -> AsyncIterator[Item]:
        """One task per stream feeds a short queue; a slow client stops the tasks, not the engine."""
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(len(self._streams))

        async def feed(i: int, stream: Stream) -> None:
            try:
                async for output in stream:
                    await queue.put((i, output))
            except Exception as error:
                await queue.put((i, error))
            else:
                await queue.put((i, None))

        tasks = [asyncio.create_task(feed(i, stream)) for i, stream in enumerate(self._streams)]
        try:
            num_open = len(tasks)
            while num_open:
                i, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield self._checked(i, item)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _checked(self, i: int, output: RequestOutput) -> Item:
        if output.usage is not None:
            self._usages[i] = output.usage
        if output.finish_reason == "error":
            raise EngineDead("the request failed in the engine")
        if output.finish_reason == "abort":
            raise EngineClosed("the request was aborted by the server")
        return i, output


@dataclass(slots=True)
class Collected:
    """One finished choice of a response that is sent whole."""

    prompt_index: int
    output: RequestOutput
    """The last one."""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None


async def collect(submission: Submission) -> list[Collected]:
    """Reads everything and closes the submission; choices in order.

    Raises:
        EngineError: the first failure.
    """
    choices: dict[tuple[int, int], Collected] = {}
    try:
        async for i, output in submission.in_order():
            choice = choices.setdefault((i, output.index), Collected(i, output))
            choice.output = output
            choice.logprobs += output.delta_logprobs or ()
            if output.prompt_logprobs is not None:
                choice.prompt_logprobs = output.prompt_logprobs
    finally:
        await submission.close()
    return [choices[key] for key in sorted(choices)]


async def submit_all(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, *, request_id: str, **options: Any
) -> Submission:
    """Submits every prompt, or none: if one is refused, those before it are aborted.

    Raises:
        EngineError: whatever `engine.submit` raises.
    """
    streams: list[Stream] = []
    try:
        for prompt in prompts:
            if streams:
                await asyncio.sleep(0)  # a long batch must not keep the loop for itself
            streams.append(await engine.submit(prompt, params, request_id=request_id, **options))
    except BaseException:
        await Submission(streams).close()
        raise
    return Submission(streams)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, cancelled as soon as the client leaves: servers do not cancel non-streaming handlers.

    Raises:
        ClientDisconnect: the client left first.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
