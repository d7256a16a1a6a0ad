"""POST /tokenize and /detokenize: what the model will really see of a text or a conversation."""

from __future__ import annotations

import asyncio

import orjson
from starlette.requests import Request
from starlette.responses import Response

from aioengine.api.errors import json_response
from aioengine.api.face import Engine, Tokenizer
from aioengine.api.logprobs import token_key
from aioengine.api.messages import chat_options, engine_messages
from aioengine.api.protocol import DetokenizeRequest, TokenizeRequest, read_request
from aioengine.errors import InvalidRequest


def _texts_of(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [token_key(tokenizer.token_bytes(token_id)) for token_id in tokens]


class Tokenization:
    """The routes, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def tokenize(self, request: Request) -> Response:
        """The ids of `prompt`, or of `messages` as `/v1/chat/completions` would render them."""
        fields = await read_request(request, TokenizeRequest, self._engine.model.name)
        tokens = await self._ids(fields)
        body: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": self._engine.model.max_model_len,
            "tokens": tokens,
        }
        if fields.return_token_strs:
            body["token_strs"] = await asyncio.to_thread(_texts_of, self._tokenizer(), tokens)
        return json_response(orjson.dumps(body))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        fields = await read_request(request, DetokenizeRequest, self._engine.model.name)
        if fields.tokens is None:
            raise InvalidRequest("tokens is missing", param="tokens")
        tokenizer, tokens = self._tokenizer(), fields.tokens
        if tokens and not (min(tokens) >= 0 and max(tokens) < tokenizer.vocab_size):
            raise InvalidRequest(
                f"tokens holds ids outside the vocabulary (0 to {tokenizer.vocab_size - 1})", param="tokens"
            )
        text = await asyncio.to_thread(tokenizer.decode, tokens, False)
        return json_response(orjson.dumps({"prompt": text}))

    async def _ids(self, fields: TokenizeRequest) -> list[int]:
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if fields.prompt is None:
            return await self._engine.render(engine_messages(fields), **chat_options(fields))
        add = fields.add_special_tokens is not False
        return await asyncio.to_thread(self._tokenizer().encode, fields.prompt, add)

    def _tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer")
        return self._engine.tokenizer
