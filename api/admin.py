"""GET /health, /metrics and /version: what operators and probes ask."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from aioengine.api.envelope import VERSION
from aioengine.api.errors import RETRY_AFTER_S, json_response
from aioengine.api.face import Engine

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Admin:
    """The routes, over one engine. None of them waits for anything."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def health(self, request: Request) -> Response:
        """200 if and only if the engine takes requests; the body says what else it is."""
        status = self._engine.health()
        body = orjson.dumps({"status": status})
        if status == "ready":
            return json_response(body)
        return json_response(body, 503, {"Retry-After": str(RETRY_AFTER_S)})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self._engine.metrics_text(), headers={"Content-Type": METRICS_TYPE})

    async def version(self, request: Request) -> Response:
        """The version of this package."""
        return json_response(orjson.dumps({"version": VERSION}))
