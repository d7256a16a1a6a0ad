"""Log-probabilities on the wire: the chat form, the completions form, and prompt logprobs.

JSON has no infinities: anything below -9999 (a masked token, or a NaN of a broken model) is sent as -9999.
Chat tokens carry their exact bytes; completions tokens that are not UTF-8 alone are written
`bytes:\\xf0\\x9f`, as OpenAI does, so that two different tokens never share one key.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from aioengine.api.face import Tokenizer
from aioengine.types import PositionLogprobs, TokenLogprob

LOWEST = -9999.0


def finite(logprob: float) -> float:
    """The value, or -9999 for anything lower and for NaN."""
    return logprob if logprob > LOWEST else LOWEST


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, object]:
    """`choices[].logprobs` of a chat response."""
    content = [
        {**_chat_token(position.chosen), "top_logprobs": [_chat_token(token) for token in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, object]:
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": list(token.token_bytes)}


def token_key(token_bytes: bytes) -> str:
    """A token as text, or as escaped bytes if it is not UTF-8 on its own."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def prompt_logprobs_json(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, object] | None]:
    """`prompt_logprobs`, by token id for every position, as in vLLM; the first is null."""
    result: list[dict[str, object] | None] = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        tokens = {token.token_id: token for token in (position.chosen, *position.top)}
        result.append(
            {
                str(token.token_id): {
                    "logprob": finite(token.logprob),
                    "rank": token.rank,
                    "decoded_token": token.token,
                }
                for token in tokens.values()
            }
        )
    return result


class CompletionLogprobs:
    """`choices[].logprobs` of one choice of a plain completion, built piece by piece.

    `text_offset` counts characters of the returned text, echoed prompt included. A token that begins inside a
    character has the offset of that character; a special token that is left out of the text has no width.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def echo(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], text: str
    ) -> dict[str, list[object]]:
        """The echoed prompt, whose text is `text`; its first token has no log-probability."""
        pieces = self._pieces()
        for token_id, position in zip(token_ids, positions, strict=True):
            if position is None:
                key = token_key(self._tokenizer.token_bytes(token_id)) if self._tokenizer else ""
                self._append(pieces, token_id, key, None, None)
            else:
                self._append_position(pieces, position)
        self._move_to(pieces, len(text))
        return pieces

    def output(self, positions: Sequence[PositionLogprobs]) -> dict[str, list[object]]:
        """The next generated tokens."""
        pieces = self._pieces()
        for position in positions:
            self._append_position(pieces, position)
        return pieces

    @staticmethod
    def _pieces() -> dict[str, list[object]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _append_position(self, pieces: dict[str, list[object]], position: PositionLogprobs) -> None:
        top: dict[str, float] = {}
        for token in (*position.top, position.chosen):
            top.setdefault(token_key(token.token_bytes), finite(token.logprob))
        chosen = position.chosen
        self._append(pieces, chosen.token_id, token_key(chosen.token_bytes), finite(chosen.logprob), top)

    def _append(
        self,
        pieces: dict[str, list[object]],
        token_id: int,
        key: str,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        pieces["tokens"].append(key)
        pieces["token_logprobs"].append(logprob)
        pieces["top_logprobs"].append(top)
        pieces["text_offset"].append(self._offset)
        tokenizer = self._tokenizer
        if tokenizer is not None and not (self._skips_special and tokenizer.is_special(token_id)):
            self._offset += len(self._decoder.decode(tokenizer.token_bytes(token_id)))

    def _move_to(self, pieces: dict[str, list[object]], offset: int) -> None:
        """The prompt's text is known: no token of it lies behind its end, and the output begins there."""
        pieces["text_offset"] = [min(o, offset) for o in pieces["text_offset"] if isinstance(o, int)]
        self._offset = offset
        self._decoder.reset()


def joined(parts: Sequence[dict[str, list[object]]]) -> dict[str, list[object]]:
    """Several pieces of one choice as one."""
    result = CompletionLogprobs._pieces()
    for part in parts:
        for name, values in part.items():
            result[name] += values
    return result
