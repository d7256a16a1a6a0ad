"""The wire schemas of requests: every field that is accepted, and how a body becomes a checked struct.

`null` means "not given" everywhere, so every field is optional here and defaults to None. Types are checked
by msgspec, whose errors name the field's path, ranges by `SamplingParams`, the rest by the engine.
A field that is not listed is refused by name; one that clients of OpenAI or vLLM send and this server cannot act on
is listed, and passes with a value that asks for nothing (`check_neutral`). Called by the routes; responses are built
where they are sent.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from aioengine.errors import InvalidRequest, UnknownModel

BODY_TIMEOUT_S = 60.0
"""A body that takes longer to arrive is answered with 408."""


class Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all request bodies."""

    model: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options` of both generation routes."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format`; anything but plain text is refused for now, whatever else it holds."""

    type: str


class GenerationFields(Fields, kw_only=True):
    """What chat and plain completions share. Those from `use_beam_search` on take neutral values only."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    determinism: str | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    user: str | None = None

    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    truncate_prompt_tokens: Any = None
    response_format: ResponseFormat | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    logits_processors: Any = None
    return_tokens_as_token_ids: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


SAMPLING_FIELDS = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "seed", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
"""Fields that go to `SamplingParams` under the same name."""


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The function of a past tool call; arguments are JSON text."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool call in the history."""

    id: str | None = None
    type: str | None = None
    index: int | None = None
    function: FunctionCall | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation, also in the form in which we and OpenAI's client give answers back."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions.

    Fields from `metadata` on change nothing about the answer of this server and are accepted; those from
    `tools` on are features it does not have, accepted with neutral values only (`check_neutral`).
    """

    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    echo: Any = None
    best_of: Any = None
    chat_template: Any = None
    documents: Any = None
    include_reasoning: Any = None
    thinking_token_budget: Any = None
    media_io_kwargs: Any = None


class TokenizeRequest(Fields, kw_only=True):
    """POST /tokenize: a text, or a conversation as it would be rendered."""

    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields, kw_only=True):
    """POST /detokenize."""

    tokens: list[int] | None = None


class NamedRequest(Fields, kw_only=True):
    """POST /admin/cache/prewarm, and the base of all that name a prefix: what a request would send."""

    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None


class EvictRequest(NamedRequest, kw_only=True):
    """POST /admin/cache/evict and /quarantine; without a prompt, everything under `cache_salt` is meant."""

    start: int | None = None
    require_exact: bool | None = None


class LiftRequest(NamedRequest, kw_only=True):
    """POST /admin/cache/lift."""

    start: int | None = None


class PinRequest(NamedRequest, kw_only=True):
    """POST /admin/cache/pin."""

    require_exact: bool | None = None


class LeaseRequest(PinRequest, kw_only=True):
    """POST /admin/cache/lease."""

    ttl_s: float | None = None


class UnpinRequest(Fields, kw_only=True):
    """POST /admin/cache/unpin."""

    pin_id: str | None = None


class ResetRequest(Fields, kw_only=True):
    """POST /admin/cache/reset."""

    force: bool | None = None


Conversation = ChatRequest | TokenizeRequest | NamedRequest
"""Requests with messages."""


NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ("text",),
    "modalities": ([], ["text"]),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
}
"""What this server cannot do, and besides null the values that do not ask for it."""

NEUTRAL_IN_CHAT: dict[str, tuple[object, ...]] = {"echo": (False,), "best_of": (1,)}
"""The same where only chats lack it."""

MAX_REQUEST_ID_CHARS = 128

CLOSE = 0.8
"""How much alike a name must be to a field's to be taken for a slip."""

T = TypeVar("T", bound=Fields)

_AT_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


async def read_request(request: Request, schema: type[T], model_name: str) -> T:
    """Reads and checks a JSON body.

    Args:
        model_name: the name that `model` must have, if it is given.

    Raises:
        InvalidRequest: the body is not JSON, or a field is unknown or of the wrong type.
        UnknownModel: another model is asked for.
        HTTPException: 408, 413 or 415.
        ClientDisconnect: the client left before its body was complete.
    """
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, f"the body must be sent as Content-Type: application/json, not {media_type}")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.body()
    except TimeoutError:
        raise HTTPException(408, f"the request body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    fields = decode(body, schema)
    if fields.model is not None and fields.model != model_name:
        raise UnknownModel(
            f"the model {fields.model!r} is not served here; this server has {model_name!r}", param="model"
        )
    return fields


def decode(body: bytes, schema: type[T]) -> T:
    """Decodes a JSON body into a schema.

    Raises:
        InvalidRequest: with the path of the field in `param`.
    """
    if not body.strip():
        raise InvalidRequest("the request body is empty; send a JSON object")
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        raise _explain(str(error), schema) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply") from None


def _explain(text: str, schema: type[Fields]) -> InvalidRequest:
    """msgspec's message as a sentence that begins with the field."""
    match = _AT_PATH.match(text)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    unknown, missing = _UNKNOWN.match(what), _MISSING.match(what)
    if unknown:
        name = unknown["name"]
        where = f" in {path}" if path else ""
        if not path and (name in NEUTRAL or name in NEUTRAL_IN_CHAT):
            return _not_supported(name)
        known = [field for field in schema.__struct_fields__ if field not in NEUTRAL]
        near = [] if path else difflib.get_close_matches(name.lower(), known, n=1, cutoff=CLOSE)
        hint = f"; did you mean {near[0]}?" if near else ""
        return InvalidRequest(f"unknown field {name}{where}{hint}", param=f"{path}.{name}".lstrip("."))
    if missing:
        field = f"{path}.{missing['name']}".lstrip(".")
        return InvalidRequest(f"{field} is missing", param=field)
    what = what[:1].lower() + what[1:].replace("`", "")
    return InvalidRequest(f"{path or 'the request body'}: {what}", param=path or None)


def sampling_overrides(fields: GenerationFields) -> dict[str, object]:
    """The given sampling fields, for `engine.sampling_params`."""
    return {name: value for name in SAMPLING_FIELDS if (value := getattr(fields, name)) is not None}


def check_stream_options(fields: GenerationFields) -> StreamOptions:
    """The stream options, defaults filled in.

    Raises:
        InvalidRequest: options without a stream, or one that does not exist here.
    """
    options = fields.stream_options
    if options is None:
        return StreamOptions()
    if not fields.stream:
        raise InvalidRequest("stream_options is only allowed with stream=true", param="stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest(
            "stream_options.continuous_usage_stats needs include_usage=true",
            param="stream_options.continuous_usage_stats",
        )
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported", param="stream_options.include_obfuscation"
        )
    return options


def check_prompt_logprobs(fields: GenerationFields) -> None:
    """`prompt_logprobs` are part of a whole response and have no place in a stream.

    Raises:
        InvalidRequest: both were asked for.
    """
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream=true", param="prompt_logprobs")


def check_neutral(fields: GenerationFields) -> None:
    """Refuses features that the server does not have, unless they are asked for with their neutral value.

    Raises:
        InvalidRequest: naming the first such field.
    """
    lacking = {**NEUTRAL, **NEUTRAL_IN_CHAT} if isinstance(fields, ChatRequest) else NEUTRAL
    for name, neutral in lacking.items():
        value = getattr(fields, name, None)
        if isinstance(value, ResponseFormat):
            value = value.type
        if value is not None and value not in neutral:
            raise _not_supported(name)


def check_request_id(fields: GenerationFields) -> None:
    """A request's own id becomes a part of the answer's and of log lines.

    Raises:
        InvalidRequest: it is too long, or no line of plain characters.
    """
    given = fields.request_id
    if given is not None and not (0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()):
        raise InvalidRequest(
            f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters", param="request_id"
        )


def _not_supported(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported yet; leave it out", param=name)
