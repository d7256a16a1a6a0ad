"""From wire messages to the messages that the engine renders.

What we ourselves or OpenAI send as an answer is accepted as history: null, missing and empty content are the
same, and empty lists of tool calls are as good as none. Called by `chat.py` and `tokenize.py`.
"""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec

from aioengine.api.protocol import ChatMessage, Conversation, ToolCall
from aioengine.errors import InvalidRequest


def engine_messages(fields: Conversation) -> list[dict[str, object]]:
    """The conversation as mappings with `role`, text `content`, and what else was given.

    Raises:
        InvalidRequest: no messages, or a part that is not text.
    """
    if not fields.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return [_engine_message(message, f"messages[{i}]") for i, message in enumerate(fields.messages)]


class ChatOptions(TypedDict):
    """Keyword arguments of `engine.submit` and `engine.render` that concern the chat template."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None


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
        "chat_template_kwargs": fields.chat_template_kwargs,
    }


def _engine_message(message: ChatMessage, path: str) -> dict[str, object]:
    if not message.role:
        raise InvalidRequest(f"{path}.role must not be empty", param=f"{path}.role")
    for name in ("audio", "function_call"):
        if getattr(message, name):
            raise InvalidRequest(f"{path}.{name} is not supported", param=f"{path}.{name}")
    result: dict[str, object] = {"role": message.role, "content": _text(message, path)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return result


def _text(message: ChatMessage, path: str) -> str:
    """The content as one string; several text parts become lines."""
    content = message.content
    if content is None:
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        where = f"{path}.content[{i}]"
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise InvalidRequest(
                f"{where} has the type {kind!r}, but this model reads text only", param=f"{where}.type"
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}.{kind} must be a string", param=f"{where}.{kind}")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: ToolCall) -> dict[str, object]:
    """A past call as templates want it: the arguments as an object if they are one, else as they came."""
    function = call.function
    text = (function.arguments if function else None) or "{}"
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    arguments = decoded if isinstance(decoded, dict) else text
    name = (function.name if function else None) or ""
    return {"id": call.id or "", "type": "function", "function": {"name": name, "arguments": arguments}}
