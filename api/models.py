"""GET /v1/models and /v1/models/{id}: the one model that is served, with its sampling defaults."""

from __future__ import annotations

import dataclasses
import time

import orjson
from starlette.requests import Request
from starlette.responses import Response

from aioengine.api.errors import json_response
from aioengine.api.face import Engine
from aioengine.errors import UnknownModel


class Models:
    """The routes, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """All models."""
        return json_response(orjson.dumps({"object": "list", "data": [self._card()]}))

    async def get(self, request: Request) -> Response:
        """One model by its id, which may hold slashes."""
        name = request.path_params["model_id"]
        if name != self._engine.model.name:
            raise UnknownModel(f"the model {name!r} is not served here", param="model")
        return json_response(orjson.dumps(self._card()))

    def _card(self) -> dict[str, object]:
        model = self._engine.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "aioengine",
            "max_model_len": model.max_model_len,
            "default_sampling": dict(self._engine.default_sampling),
            "determinism": dataclasses.asdict(self._engine.determinism),
        }
