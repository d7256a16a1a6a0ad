"""POST /admin/cache/*, POST /reset_prefix_cache, GET /admin/kv_events: the governed cache over HTTP.

All off unless `--enable-admin`, and each behind the admin key (`AdminAuth`). An operation answers its `CacheReply`
as JSON: 200 if it was done, exactly or degraded, 409 if it was refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypedDict

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from aioengine.api.errors import json_response
from aioengine.api.face import Engine
from aioengine.api.messages import engine_messages
from aioengine.api.protocol import (
    EvictRequest,
    LeaseRequest,
    LiftRequest,
    NamedRequest,
    PinRequest,
    ResetRequest,
    UnpinRequest,
    read_request,
)
from aioengine.api.sse import HEADERS
from aioengine.errors import InvalidRequest
from aioengine.types import CacheReply, Prompt

MAX_RECORDS = 1000
MAX_DIGITS = 18


class Naming(TypedDict):
    """Keyword arguments of every operation that names a prefix."""

    cache_salt: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool | None
    chat_template_kwargs: dict[str, Any] | None


class CacheRoutes:
    """The routes, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def evict(self, request: Request) -> Response:
        """Takes a span and all computed after it out of the cache."""
        fields = await read_request(request, EvictRequest, self._engine.model.name)
        exact = bool(fields.require_exact)
        prompt, naming = _name_or_salt_of(fields)
        return _answer(await self._engine.cache.evict(prompt, start=fields.start, require_exact=exact, **naming))

    async def quarantine(self, request: Request) -> Response:
        """Evicts a span and keeps it out of the cache."""
        fields = await read_request(request, EvictRequest, self._engine.model.name)
        exact = bool(fields.require_exact)
        prompt, naming = _name_or_salt_of(fields)
        return _answer(await self._engine.cache.quarantine(prompt, start=fields.start, require_exact=exact, **naming))

    async def lift(self, request: Request) -> Response:
        """Ends a quarantine."""
        fields = await read_request(request, LiftRequest, self._engine.model.name)
        prompt, naming = _name_or_salt_of(fields)
        return _answer(await self._engine.cache.lift(prompt, start=fields.start, **naming))

    async def pin(self, request: Request) -> Response:
        """Keeps a prefix from being evicted."""
        fields = await read_request(request, PinRequest, self._engine.model.name)
        prompt, naming = _name_of(fields)
        exact = bool(fields.require_exact)
        return _answer(await self._engine.cache.pin(prompt, require_exact=exact, **naming))

    async def lease(self, request: Request) -> Response:
        """Keeps a prefix for some time."""
        fields = await read_request(request, LeaseRequest, self._engine.model.name)
        prompt, naming = _name_of(fields)
        if fields.ttl_s is None:
            raise InvalidRequest("ttl_s is missing", param="ttl_s")
        exact = bool(fields.require_exact)
        return _answer(await self._engine.cache.lease(prompt, fields.ttl_s, require_exact=exact, **naming))

    async def unpin(self, request: Request) -> Response:
        """Ends a pin or a lease."""
        fields = await read_request(request, UnpinRequest, self._engine.model.name)
        if fields.pin_id is None:
            raise InvalidRequest("pin_id is missing", param="pin_id")
        return _answer(await self._engine.cache.unpin(fields.pin_id))

    async def prewarm(self, request: Request) -> Response:
        """Computes a prefix into the cache."""
        fields = await read_request(request, NamedRequest, self._engine.model.name)
        prompt, naming = _name_of(fields)
        return _answer(await self._engine.cache.prewarm(prompt, **naming))

    async def reset(self, request: Request) -> Response:
        """Forgets everything cached."""
        fields = await read_request(request, ResetRequest, self._engine.model.name)
        return _answer(await self._engine.cache.reset(force=bool(fields.force)))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """The same at vLLM's address, with vLLM's query parameter for the forced form."""
        given = request.query_params.get("reset_running_requests", "false").lower()
        if given not in ("true", "false", "1", "0"):
            raise InvalidRequest(
                f"reset_running_requests={given!r} must be true or false", param="reset_running_requests"
            )
        return _answer(await self._engine.cache.reset(force=given in ("true", "1")))

    async def audit(self, request: Request) -> Response:
        """The newest records of the audit log, oldest first; `?limit=` bounds them."""
        limit = _number_in(request, "limit")
        records = self._engine.cache.audit(MAX_RECORDS if limit is None else min(limit, MAX_RECORDS))
        return json_response(orjson.dumps({"records": [dataclasses.asdict(record) for record in records]}))

    async def stats(self, request: Request) -> Response:
        """Sizes, pins and counters."""
        return json_response(orjson.dumps(dataclasses.asdict(self._engine.cache.stats())))

    async def kv_events(self, request: Request) -> Response:
        """What is cached and forgotten as server-sent events; `?from=N` begins with batch N, if it is still kept."""
        start = _number_in(request, "from")
        events = self._engine.kv_events
        if events is None:
            raise InvalidRequest("KV events are off; start with --kv-events-config")
        return KVEventStream(events.subscribe_json(start))


class KVEventStream(StreamingResponse):
    """Streams batches, and ends its subscription when the client leaves."""

    def __init__(self, batches: AsyncIterator[bytes]) -> None:
        self._frames = _frames(batches)
        super().__init__(self._frames, headers=HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._frames.aclose()


async def _frames(batches: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """A comment first, so that a client knows that it is connected."""
    yield b": kv events\n\n"
    async with aclosing(batches):  # type: ignore[type-var]
        async for batch in batches:
            yield b"data: " + batch + b"\n\n"


def _number_in(request: Request, name: str) -> int | None:
    """A whole number from the query, None if it is not there.

    Raises:
        InvalidRequest: it is something else, or has more digits than any number meant.
    """
    given = request.query_params.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS):
        shown = given if len(given) <= MAX_DIGITS else f"{given[:MAX_DIGITS]}..."
        raise InvalidRequest(f"{name}={shown!r} must be a whole number of at most {MAX_DIGITS} digits", param=name)
    return int(given)


def _name_of(fields: NamedRequest) -> tuple[Prompt, Naming]:
    """The prefix that a request names.

    Raises:
        InvalidRequest: both `prompt` and `messages`, or neither.
    """
    prompt, naming = _name_or_salt_of(fields)
    if prompt is None:
        raise InvalidRequest("give either prompt or messages", param="prompt")
    return prompt, naming


def _name_or_salt_of(fields: NamedRequest) -> tuple[Prompt | None, Naming]:
    """The prefix that a request names, None for everything under its salt.

    Raises:
        InvalidRequest: both `prompt` and `messages`.
    """
    if fields.prompt is not None and fields.messages is not None:
        raise InvalidRequest("give either prompt or messages", param="prompt")
    prompt: Prompt | None = fields.prompt if fields.messages is None else engine_messages(fields)
    return prompt, {
        "cache_salt": fields.cache_salt,
        "add_generation_prompt": bool(fields.add_generation_prompt),
        "continue_final_message": bool(fields.continue_final_message),
        "add_special_tokens": fields.add_special_tokens,
        "chat_template_kwargs": fields.chat_template_kwargs,
    }


def _answer(reply: CacheReply) -> Response:
    return json_response(orjson.dumps(dataclasses.asdict(reply)), 409 if reply.status == "refused" else 200)
