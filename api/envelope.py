"""What surrounds the choices of a response, streamed or whole: ids, names, usage. Used by both routes."""

from __future__ import annotations

import time
import uuid
from importlib.metadata import version

from aioengine.types import Usage

VERSION = version("aioengine")


def response_head(
    prefix: str, object_name: str, model_name: str, fingerprint: str, request_id: str | None
) -> dict[str, object]:
    """The fields before `choices`; `fingerprint` is the engine's, `request_id` the client's, if it gave one."""
    return {
        "id": f"{prefix}-{request_id or uuid.uuid4().hex}",
        "object": object_name,
        "created": int(time.time()),
        "model": model_name,
        "system_fingerprint": f"aioengine-{VERSION}-{fingerprint}",
    }


def usage_json(usage: Usage) -> dict[str, object]:
    """Usage as in OpenAI's responses."""
    return {**running_usage_json(usage), "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


def running_usage_json(usage: Usage) -> dict[str, object]:
    """Usage in the middle of a stream, when the cached share is not reported yet."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
