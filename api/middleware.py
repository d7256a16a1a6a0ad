"""Pure ASGI middleware: request id and last-resort error, bearer token, body limit.

Order from the outside in, as `app.py` stacks them: `RequestBoundary`, (CORS), `BearerAuth`, `BodyLimit`.
`AdminAuth` stands before each admin route, whatever is around it.
"""

from __future__ import annotations

import hmac
import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aioengine.api.errors import UNEXPECTED, UNEXPECTED_MESSAGE, error_body, json_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
"""All that can be read without the key."""

ADMIN_PATHS = frozenset({"/reset_prefix_cache"})
ADMIN_PREFIX = "/admin/"
"""Routes behind the admin key; the other key is not asked for there."""

MAX_REQUEST_ID_CHARS = 128


class RequestBoundary:
    """Echoes or makes `X-Request-Id`, and turns an exception that nobody caught into a logged 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            if started:
                raise
            logger.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            body = error_body(UNEXPECTED_MESSAGE, UNEXPECTED.type, code=UNEXPECTED.code)
            await json_response(body, UNEXPECTED.status)(scope, receive, send_with_id)


def _request_id(given: str | None) -> str:
    if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


class BearerAuth:
    """Refuses everything but `OPEN_PATHS` without the right `Authorization: Bearer` header."""

    def __init__(self, app: ASGIApp, api_key: str, *, has_admin: bool = False) -> None:
        self.app = app
        self._expected = api_key.encode()
        self._has_admin = has_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]) or bears(scope, self._expected):
            await self.app(scope, receive, send)
            return
        message = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
        body = error_body(message, "invalid_request_error", code="invalid_api_key")
        response = json_response(body, 401, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or (self._has_admin and (path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX)))


class AdminAuth:
    """Stands before each admin route: 401 without `Authorization: Bearer`, 403 with a wrong key."""

    def __init__(self, app: ASGIApp, admin_key: str) -> None:
        self.app = app
        self._expected = admin_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if bears(scope, self._expected):
            await self.app(scope, receive, send)
            return
        is_given = "authorization" in Headers(scope=scope)
        what = "wrong" if is_given else "missing: send it as `Authorization: Bearer KEY`"
        body = error_body(f"the admin key is {what}", "invalid_request_error", code="invalid_admin_key")
        headers = None if is_given else {"WWW-Authenticate": "Bearer"}
        await json_response(body, 403 if is_given else 401, headers)(scope, receive, send)


def bears(scope: Scope, expected: bytes) -> bool:
    """Whether a request has `Authorization: Bearer` with this key; takes equally long for every wrong one."""
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    given = token.strip().encode("latin-1", "replace")
    return hmac.compare_digest(given, expected) and scheme.lower() == "bearer"


class BodyLimit:
    """Answers 413 to a body above the limit, by its declared length or as soon as too much has arrived."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        declared_bytes = int(length) if length.isdecimal() else 0
        received_bytes = 0

        async def counting_receive() -> Message:
            nonlocal received_bytes
            message = await receive() if declared_bytes <= self.max_bytes else {}
            received_bytes += len(message.get("body", b""))
            if max(declared_bytes, received_bytes) > self.max_bytes:
                raise HTTPException(413, f"the request body is larger than {self.max_bytes} bytes")
            return message

        await self.app(scope, counting_receive, send)
