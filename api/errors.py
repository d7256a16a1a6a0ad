"""Errors as OpenAI error objects: the one table from error class to HTTP status, and its handlers.

Used by `app.py` (handlers), `middleware.py` (401, 413, 500) and `sse.py` (errors after the first byte).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from aioengine.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    EngineError,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
    UnknownModel,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one class of errors looks on the wire."""

    status: int
    type: str
    code: str | None = None
    retry_after_s: int | None = None


KINDS: tuple[tuple[type[EngineError], ErrorKind], ...] = (
    (ContextLengthExceeded, ErrorKind(400, "invalid_request_error", "context_length_exceeded")),
    (UnknownModel, ErrorKind(404, "invalid_request_error", "model_not_found")),
    (InvalidRequest, ErrorKind(400, "invalid_request_error")),
    (QueueFull, ErrorKind(429, "rate_limit_error", "queue_full", RETRY_AFTER_S)),
    (RequestTimeout, ErrorKind(504, "timeout_error", "request_timeout")),
    (EngineClosed, ErrorKind(503, "service_unavailable_error", "engine_closed", RETRY_AFTER_S)),
    (EngineDead, ErrorKind(503, "server_error", "engine_dead")),
)
"""The first class that matches counts, so children stand before their parents."""

UNEXPECTED = ErrorKind(500, "server_error", "internal_error")
UNEXPECTED_MESSAGE = "the server met an unexpected error; its log says more"

HTTP_TYPES = {401: "invalid_request_error", 429: "rate_limit_error"}


class AuthenticationFailed(Exception):
    """The bearer token is missing or wrong."""


def kind_of(error: BaseException) -> ErrorKind:
    """The row of the table for an error; anything unknown is an internal error."""
    return next((kind for cls, kind in KINDS if isinstance(error, cls)), UNEXPECTED)


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON of an OpenAI error object."""
    error = {"message": message, "type": type, "param": param, "code": code}
    return orjson.dumps({"error": error})


def body_of(error: BaseException) -> bytes:
    """The error object for any exception. Internals of unexpected ones stay in the log."""
    kind = kind_of(error)
    if isinstance(error, EngineError) and kind is not UNEXPECTED:
        return error_body(error.message, kind.type, param=error.param, code=kind.code)
    logger.error("unexpected error while serving a request", exc_info=error)
    return error_body(UNEXPECTED_MESSAGE, kind.type, code=kind.code)


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of JSON bytes."""
    return Response(body, status, headers, media_type="application/json")


def response_of(error: BaseException) -> Response:
    """The whole HTTP response for an exception."""
    kind = kind_of(error)
    headers = {"Retry-After": str(kind.retry_after_s)} if kind.retry_after_s is not None else None
    return json_response(body_of(error), kind.status, headers)


async def on_engine_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for every `EngineError`."""
    return response_of(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for 404, 405 and our own 408, 413 and 415."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is no {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    type = HTTP_TYPES.get(error.status_code, "invalid_request_error")
    headers = dict(error.headers) if error.headers else None
    return json_response(error_body(message, type), error.status_code, headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Nobody is left to read this; the status is for logs."""
    return Response(status_code=499)
