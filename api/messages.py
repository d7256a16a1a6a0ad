"""From wire messages to the messages that the engine renders.

The engine brings contents and tool calls into one form (`normalize_messages` in `aioengine/chat.py`), so that
HTTP and the library mean the same; here only those fields go that an answer has and a message does not need.
Called by `chat.py` and `tokenize.py`.
"""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec

from aioengine.api.protocol import ChatMessage, Conversation
from aioengine.errors import InvalidRequest


class ChatOptions(TypedDict):
    """Keyword arguments of `engine.submit` and `engine.render` that concern the chat template."""

    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool | None
    chat_template_kwargs: dict[str, Any] | None


def engine_messages(fields: Conversation) -> list[dict[str, object]]:
    """The conversation as mappings with what was given; null is not given.

    Raises:
        InvalidRequest: no messages, or something that only an answer with sound or functions has.
    """
    if not fields.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return [_engine_message(message, f"messages[{i}]") for i, message in enumerate(fields.messages)]


def chat_options(fields: Conversation) -> ChatOptions:
    """How the conversation is to be rendered.

    Raises:
        InvalidRequest: the two ways to end the prompt contradict each other.
    """
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    adds = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    return {
        "add_generation_prompt": adds,
        "continue_final_message": continues,
        "add_special_tokens": fields.add_special_tokens,
        "chat_template_kwargs": fields.chat_template_kwargs,
    }


def _engine_message(message: ChatMessage, path: str) -> dict[str, object]:
    for name in ("audio", "function_call"):
        if getattr(message, name):
            raise InvalidRequest(f"{path}.{name} is not supported", param=f"{path}.{name}")
    result: dict[str, object] = {"role": message.role, "content": message.content or message.refusal or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    if message.tool_calls:
        result["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    return result
