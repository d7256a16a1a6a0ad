"""POST /v1/chat/completions: one conversation in, n answers out, streamed or whole."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.requests import Request
from starlette.responses import Response

from aioengine.api.envelope import response_head, running_usage_json, usage_json
from aioengine.api.errors import json_response
from aioengine.api.face import Engine
from aioengine.api.logprobs import chat_logprobs, prompt_logprobs_json
from aioengine.api.messages import chat_options, engine_messages
from aioengine.api.protocol import (
    ChatRequest,
    check_neutral,
    check_prompt_logprobs,
    check_request_id,
    check_stream_options,
    read_request,
    sampling_overrides,
)
from aioengine.api.sse import ChunkFrame, EventStream, Held, RunningUsage
from aioengine.api.submission import Collected, Submission, collect, submit_all, unless_disconnected
from aioengine.errors import InvalidRequest
from aioengine.types import RequestOutput, Usage


class Chat:
    """The route, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def create(self, request: Request) -> Response:
        """Answers one request; every check comes before the first byte."""
        fields = await read_request(request, ChatRequest, self._engine.model.name)
        check_neutral(fields)
        check_request_id(fields)
        check_prompt_logprobs(fields)
        options = check_stream_options(fields)
        name, fingerprint = self._engine.model.name, self._engine.fingerprint
        if fields.stream:
            head = response_head("chatcmpl", "chat.completion.chunk", name, fingerprint, fields.request_id)
            frame = ChunkFrame(head, include_usage=bool(options.include_usage))
            return EventStream(
                await self._submit(fields, str(head["id"])),
                ChatChunks(
                    frame,
                    has_logprobs=bool(fields.logprobs),
                    has_token_ids=bool(fields.return_token_ids),
                    has_usage=bool(options.include_usage),
                    has_running_usage=bool(options.continuous_usage_stats),
                ),
            )
        head = response_head("chatcmpl", "chat.completion", name, fingerprint, fields.request_id)
        return json_response(await unless_disconnected(request, self._whole(fields, head)))

    async def _submit(self, fields: ChatRequest, request_id: str) -> Submission:
        overrides = sampling_overrides(fields)
        overrides["max_tokens"] = _max_tokens(fields)
        overrides["logprobs"] = _num_logprobs(fields)
        try:
            return await submit_all(
                self._engine,
                [engine_messages(fields)],
                self._engine.sampling_params(**overrides),
                request_id=request_id,
                priority=fields.priority or 0,
                cache_salt=fields.cache_salt,
                determinism=fields.determinism,
                **chat_options(fields),
            )
        except InvalidRequest as error:
            if error.param == "logprobs":  # which a chat calls otherwise
                raise InvalidRequest(f"top_{error.message}", param="top_logprobs") from None
            raise

    async def _whole(self, fields: ChatRequest, head: Mapping[str, object]) -> bytes:
        submission = await self._submit(fields, str(head["id"]))
        choices = await collect(submission)
        body = {
            **head,
            "choices": [_choice(choice, fields) for choice in choices],
            "usage": usage_json(submission.usage),
        }
        first = choices[0]
        if fields.prompt_logprobs is not None and first.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_json(first.prompt_logprobs)
        if fields.return_token_ids:
            body["prompt_token_ids"] = first.output.prompt_token_ids
        return orjson.dumps(body)


def _max_tokens(fields: ChatRequest) -> int | None:
    new, old = fields.max_completion_tokens, fields.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            f"max_completion_tokens={new} and max_tokens={old} contradict each other; give one of them",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _num_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequest("top_logprobs is only allowed with logprobs=true", param="top_logprobs")
    return None


def _choice(choice: Collected, fields: ChatRequest) -> dict[str, object]:
    output = choice.output
    result: dict[str, object] = {
        "index": output.index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": chat_logprobs(choice.logprobs) if fields.logprobs else None,
        "finish_reason": output.finish_reason,
    }
    if output.stop_reason is not None:
        result["stop_reason"] = output.stop_reason
    if fields.return_token_ids:
        result["token_ids"] = output.token_ids
    return result


class ChatChunks:
    """Events of a streamed chat: the role, then text, then the finish reason, for each choice."""

    def __init__(
        self,
        frame: ChunkFrame,
        *,
        has_logprobs: bool,
        has_token_ids: bool,
        has_usage: bool,
        has_running_usage: bool,
    ) -> None:
        self._frame = frame
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids
        self._has_usage = has_usage
        self._running = RunningUsage() if has_running_usage else None
        self._held: dict[int, Held] = {}

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The role comes with the first output, so that it never looks like a first token."""
        index, parts = output.index, []
        if self._running is not None:
            self._running.count(prompt_index, output)
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = Held()
            parts.append(self._role(output))
        if self._has_logprobs or self._has_token_ids:
            held.add(output)
        if output.delta:
            parts.append(self._chunk(index, b'{"content":' + orjson.dumps(output.delta) + b"}", held))
        if output.finish_reason is not None:
            ending = b'"' + output.finish_reason.encode() + b'"'
            if output.stop_reason is not None:
                ending += b',"stop_reason":' + orjson.dumps(output.stop_reason)
            parts.append(self._chunk(index, b"{}", held, ending))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """The usage event, if asked for."""
        return self._frame.chunk(b"", {"usage": usage_json(usage)}) if self._has_usage else b""

    def _role(self, output: RequestOutput) -> bytes:
        choice = (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % output.index
        )
        extra = self._usage()
        if self._has_token_ids:
            extra = {**(extra or ({"usage": None} if self._has_usage else {}))}
            extra["prompt_token_ids"] = output.prompt_token_ids
        return self._frame.chunk(choice, extra)

    def _chunk(self, index: int, delta: bytes, held: Held, ending: bytes = b"null") -> bytes:
        logprobs, token_ids = b"null", b""
        if self._has_logprobs and held.logprobs:
            logprobs = orjson.dumps(chat_logprobs(held.logprobs))
            held.logprobs = []
        if self._has_token_ids:
            token_ids = b',"token_ids":' + orjson.dumps(held.token_ids)
            held.token_ids = []
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index, delta, logprobs, ending, token_ids
        )  # fmt: skip
        return self._frame.chunk(choice, self._usage())

    def _usage(self) -> dict[str, object] | None:
        return None if self._running is None else {"usage": running_usage_json(self._running.usage)}
