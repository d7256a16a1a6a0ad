"""POST /v1/completions: one prompt or a batch, as text or token ids, each continued n times."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response

from aioengine.api.envelope import response_head, running_usage_json, usage_json
from aioengine.api.errors import json_response
from aioengine.api.face import Engine, Tokenizer
from aioengine.api.logprobs import CompletionLogprobs, joined, prompt_logprobs_json
from aioengine.api.protocol import (
    CompletionRequest,
    StreamOptions,
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
from aioengine.types import RequestOutput, SamplingParams, Usage

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this route, where the model recommends nothing else."""

MAX_CHOICES = 4096
"""Most choices of one call over all prompts."""

TextPrompts = list[str | list[int]]


class Completions:
    """The route, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def create(self, request: Request) -> Response:
        """Answers one request; every check comes before the first byte."""
        fields = await read_request(request, CompletionRequest, self._engine.model.name)
        check_neutral(fields)
        check_request_id(fields)
        check_prompt_logprobs(fields)
        options = check_stream_options(fields)
        prompts = _prompts(fields)
        params = self._params(fields, len(prompts))
        name, fingerprint = self._engine.model.name, self._engine.fingerprint
        head = response_head("cmpl", "text_completion", name, fingerprint, fields.request_id)
        if not fields.stream:
            return json_response(await unless_disconnected(request, self._whole(fields, prompts, params, head)))
        answer = Answer(fields, params, await self._echoed(fields, prompts), self._engine.tokenizer)
        submission = await self._submit(fields, prompts, params, head)
        return EventStream(submission, CompletionChunks(answer, head, options))

    def _params(self, fields: CompletionRequest, num_prompts: int) -> SamplingParams:
        overrides = sampling_overrides(fields)
        default = self._engine.default_sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
        overrides["max_tokens"] = default if fields.max_tokens is None else fields.max_tokens
        overrides["logprobs"] = fields.logprobs
        if fields.echo and fields.logprobs is not None:
            if fields.prompt_logprobs not in (None, fields.logprobs):
                raise InvalidRequest(
                    "with echo and logprobs, prompt_logprobs must be left out or equal logprobs",
                    param="prompt_logprobs",
                )
            overrides["prompt_logprobs"] = fields.logprobs
        params = self._engine.sampling_params(**overrides)
        if fields.best_of not in (None, 1, params.n):
            raise InvalidRequest(f"best_of={fields.best_of} must be 1 or equal n={params.n}", param="best_of")
        if fields.suffix:
            raise InvalidRequest("suffix is not supported", param="suffix")
        if num_prompts * params.n > MAX_CHOICES:
            raise InvalidRequest(
                f"{num_prompts} prompts with n={params.n} are more than {MAX_CHOICES} choices", param="prompt"
            )
        return params

    async def _submit(
        self,
        fields: CompletionRequest,
        prompts: TextPrompts,
        params: SamplingParams,
        head: Mapping[str, object],
    ) -> Submission:
        return await submit_all(
            self._engine,
            prompts,
            params,
            request_id=str(head["id"]),
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
            determinism=fields.determinism,
            add_special_tokens=fields.add_special_tokens,
        )

    async def _whole(
        self,
        fields: CompletionRequest,
        prompts: TextPrompts,
        params: SamplingParams,
        head: Mapping[str, object],
    ) -> bytes:
        answer = Answer(fields, params, await self._echoed(fields, prompts), self._engine.tokenizer)
        submission = await self._submit(fields, prompts, params, head)
        choices = [answer.choice(choice) for choice in await collect(submission)]
        return orjson.dumps({**head, "choices": choices, "usage": usage_json(submission.usage)})

    async def _echoed(self, fields: CompletionRequest, prompts: TextPrompts) -> list[str] | None:
        """The text to echo for each prompt: a text as it came, token ids decoded."""
        if not fields.echo:
            return None
        tokenizer, skips = self._engine.tokenizer, fields.skip_special_tokens is not False

        def texts() -> list[str]:
            return [p if isinstance(p, str) else tokenizer.decode(p, skips) if tokenizer else "" for p in prompts]

        if tokenizer is not None:
            _check_ids(prompts, tokenizer.vocab_size)
        return await asyncio.to_thread(texts)


def _prompts(fields: CompletionRequest) -> TextPrompts:
    """The batch of prompts: one text, texts, one list of ids, or lists of ids."""
    prompt = fields.prompt
    if prompt is None:
        raise InvalidRequest("prompt is missing", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be an empty list", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise InvalidRequest("prompt mixes token ids with other prompts", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def _check_ids(prompts: TextPrompts, vocab_size: int) -> None:
    """Ids that the tokenizer does not know cannot be echoed."""
    for prompt in prompts:
        if isinstance(prompt, list) and prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
            raise InvalidRequest(
                f"prompt holds token ids outside the vocabulary (0 to {vocab_size - 1})", param="prompt"
            )


class Answer:
    """Turns outputs into choices: the same text and numbers, streamed or whole."""

    def __init__(
        self,
        fields: CompletionRequest,
        params: SamplingParams,
        echoed: Sequence[str] | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.fields = fields
        self.params = params
        self.has_logprobs = params.logprobs is not None
        self._echoed = echoed
        self._tokenizer = tokenizer

    def echoed(self, prompt_index: int) -> str:
        """The prompt's text, if it is to be repeated."""
        return self._echoed[prompt_index] if self._echoed is not None else ""

    def index(self, prompt_index: int, output: RequestOutput) -> int:
        """Position of a choice among those of all prompts."""
        return prompt_index * self.params.n + output.index

    def logprobs(self) -> CompletionLogprobs:
        """A fresh builder for one choice."""
        return CompletionLogprobs(self._tokenizer, skip_special_tokens=self.params.skip_special_tokens)

    def choice(self, choice: Collected) -> dict[str, object]:
        """A whole choice."""
        output, fields = choice.output, self.fields
        echoed = self.echoed(choice.prompt_index)
        parts = []
        if self.has_logprobs:
            builder = self.logprobs()
            if fields.echo and choice.prompt_logprobs is not None:
                parts.append(builder.echo(output.prompt_token_ids, choice.prompt_logprobs, echoed))
            parts.append(builder.output(choice.logprobs))
        result: dict[str, object] = {
            "index": self.index(choice.prompt_index, output),
            "text": echoed + output.text,
            "logprobs": joined(parts) if self.has_logprobs else None,
            "finish_reason": output.finish_reason,
        }
        if output.stop_reason is not None:
            result["stop_reason"] = output.stop_reason
        if fields.prompt_logprobs is not None and choice.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs_json(choice.prompt_logprobs)
        if fields.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
            result["token_ids"] = output.token_ids
        return result


class CompletionChunks:
    """Events of a streamed completion. A choice's first one has the echo, its last one the finish reason."""

    def __init__(self, answer: Answer, head: Mapping[str, object], options: StreamOptions) -> None:
        self._answer = answer
        self._has_usage = bool(options.include_usage)
        self._has_token_ids = bool(answer.fields.return_token_ids)
        self._frame = ChunkFrame(head, include_usage=self._has_usage)
        self._running = RunningUsage() if options.continuous_usage_stats else None
        self._held: dict[int, Held] = {}
        self._builders: dict[int, CompletionLogprobs] = {}

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """One chunk, or nothing while there is no text to send."""
        index = self._answer.index(prompt_index, output)
        if self._running is not None:
            self._running.count(prompt_index, output)
        held, text, parts, is_first = self._held.get(index), output.delta, [], False
        if held is None:
            held, is_first = Held(), True
            self._held[index] = held
            echoed = self._answer.echoed(prompt_index)
            text = echoed + text
            if self._answer.has_logprobs:
                builder = self._builders[index] = self._answer.logprobs()
                if output.prompt_logprobs is not None:
                    parts.append(builder.echo(output.prompt_token_ids, output.prompt_logprobs, echoed))
        if self._answer.has_logprobs or self._has_token_ids:
            held.add(output)
        if not text and output.finish_reason is None and not (is_first and self._has_token_ids):
            return b""
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index,
            orjson.dumps(text),
            self._logprobs(index, held, parts),
            b'"%b"' % output.finish_reason.encode() if output.finish_reason else b"null",
            self._more(output, held, is_first),
        )
        usage = None if self._running is None else {"usage": running_usage_json(self._running.usage)}
        return self._frame.chunk(choice, usage)

    def end(self, usage: Usage) -> bytes:
        """The usage event, if asked for."""
        return self._frame.chunk(b"", {"usage": usage_json(usage)}) if self._has_usage else b""

    def _logprobs(self, index: int, held: Held, parts: list[dict[str, list[object]]]) -> bytes:
        if not self._answer.has_logprobs:
            return b"null"
        parts.append(self._builders[index].output(held.logprobs))
        held.logprobs = []
        return orjson.dumps(joined(parts)) if any(part["tokens"] for part in parts) else b"null"

    def _more(self, output: RequestOutput, held: Held, is_first: bool) -> bytes:
        """Fields that are there only when they have something to say."""
        more: dict[str, object] = {}
        if output.stop_reason is not None:
            more["stop_reason"] = output.stop_reason
        if self._has_token_ids:
            if is_first:
                more["prompt_token_ids"] = output.prompt_token_ids
            more["token_ids"] = held.token_ids
            held.token_ids = []
        return b"," + orjson.dumps(more)[1:-1] if more else b""
