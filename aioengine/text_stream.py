"""Decoding token by token, for any tokenizer of the `tokenizers` library.

Nearly all decoders join the bytes of the tokens; for those a table of bytes (`native.Vocabulary`) and the
native `TextStream` do the work. `make_vocabulary` builds the table and says whether it may be used, by rule
and by trial. For other decoders there is `WindowTextStream`, which asks the library again for every token.
Used by `tokenizer.py` only.
"""

from __future__ import annotations

import json
import random
from typing import Protocol

import tokenizers

from aioengine.fastcore import native

_SAMPLE = (
    "Hello, world!  Two spaces\n\n\tand\ttabs; it's 1234567890 \u2014 na\u00efve caf\u00e9, Gr\u00fc\u00dfe, "
    "Ελληνικά, Привет, שלום, مرحبا, हिन्दी, ไทย, 你好世界, こんにちは, 한국어 "
    "🙂👩\u200d👩\u200d👧🇩🇪 e\u0301 \u200b def f(x): return x**2  # \u2581"
)

_MAX_HELD_TOKENS = 32
"""So many tokens without a whole character are no character at all."""


class TextStream(Protocol):
    """The text of one choice as its tokens come; for one thread.

    An unfinished character is held back, and so is what may still become the beginning of a stop text. The
    stop text that ends first wins; of several that end together the longest. One that is complete within
    the first `min_tokens` tokens is passed over.
    """

    @property
    def stop_index(self) -> int:
        """Which stop text ended it, -1 for none."""

    @property
    def num_taken_bytes(self) -> int:
        """UTF-8 length of everything that `take()` has returned."""

    @property
    def text(self) -> str:
        """All final text."""

    def push(self, token_ids: list[int]) -> int:
        """Appends tokens; returns how many were used, fewer than given if a stop text was completed."""

    def finish(self) -> None:
        """Makes held-back text final; nothing may be pushed afterwards."""

    def take(self) -> str:
        """The final text that was not taken before."""

    def text_until(self, num_bytes: int) -> str:
        """The first `num_bytes` bytes of final text."""


class WindowTextStream:
    """A `TextStream` for decoders without a table: decodes a window of the last tokens for each new one.

    The window starts with tokens whose text is known, so that the decoder sees what stands before the new
    ones. Stop texts are matched by the native stream, which gets text instead of ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, stream: native.TextStream, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._stream = stream
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # of the window
        self._num_read = 0  # tokens whose text has been passed on
        self._known = ""  # text of the window up to there
        self._length = 0  # characters passed on

    def push(self, token_ids: list[int]) -> int:
        for num_used, token_id in enumerate(token_ids, 1):
            self._ids.append(token_id)
            if self._stream.push_text(self._read(is_last=False)):
                return num_used
        return len(token_ids)

    def finish(self) -> None:
        self._stream.finish(self._read(is_last=True))

    def _read(self, is_last: bool) -> str:
        text = self._decode(self._start)
        is_held = text.endswith("\ufffd") and len(self._ids) - self._num_read < _MAX_HELD_TOKENS
        if is_held and not is_last:
            return ""
        if text.startswith(self._known):
            fresh = text[len(self._known) :]
        else:  # the decoder changed what it had said before; what is out cannot be taken back
            fresh = self._decode(0)[self._length :]
        self._length += len(fresh)
        known = self._decode(self._num_read)
        if known:  # a window without text would hide from the decoder that something stands before
            self._start, self._known = self._num_read, known
        else:
            self._known = text
        self._num_read = len(self._ids)
        return fresh

    def _decode(self, start: int) -> str:
        text: str = self._backend.decode(self._ids[start:], skip_special_tokens=self._skip_special_tokens)
        return text

    def take(self) -> str:
        return self._stream.take()

    def text_until(self, num_bytes: int) -> str:
        return self._stream.text_until(num_bytes)

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def stop_index(self) -> int:
        return self._stream.stop_index

    @property
    def num_taken_bytes(self) -> int:
        return self._stream.num_taken_bytes


def make_vocabulary(backend: tokenizers.Tokenizer) -> native.Vocabulary | None:
    """The bytes of every token, or None if the tokenizer's decoder does not just join them."""
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    size = 1 + max(vocab.values(), default=-1)
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    tokens = [b""] * size
    strip_first_space = False
    if kinds == ["ByteLevel"]:
        table = _byte_level_table()
        for token, token_id in vocab.items():
            try:
                tokens[token_id] = bytes(map(table.__getitem__, token))
            except KeyError:
                tokens[token_id] = token.encode()
    elif _is_sentencepiece(steps):
        strip_first_space = "Strip" in kinds
        for token, token_id in vocab.items():
            byte = _fallback_byte(token) if "ByteFallback" in kinds else None
            tokens[token_id] = token.replace("▁", " ").encode() if byte is None else byte
    else:
        return None
    flags = bytearray(size)
    for token_id, added in backend.get_added_tokens_decoder().items():
        flags[token_id] = native.Vocabulary.ADDED | (native.Vocabulary.SPECIAL if added.special else 0)
    vocabulary = native.Vocabulary(tokens, bytes(flags), strip_first_space)
    return vocabulary if _agrees(vocabulary, backend) else None


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, object]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, object]] = decoder.get("decoders", [decoder])
    return steps


def _is_sentencepiece(steps: list[dict[str, object]]) -> bool:
    """Whether the decoder turns ▁ into a space and byte tokens into bytes, and strips one space at most."""
    known: dict[str, dict[str, object]] = {
        "Replace": {"pattern": {"String": "▁"}, "content": " "},
        "ByteFallback": {},
        "Fuse": {},
        "Strip": {"content": " ", "start": 1, "stop": 0},
    }
    kinds = [str(step["type"]) for step in steps]
    return "Replace" in kinds and all(
        kind in known and step == {"type": kind, **known[kind]} for kind, step in zip(kinds, steps, strict=True)
    )


def _fallback_byte(token: str) -> bytes | None:
    """The byte that a token like <0x0A> stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


def _byte_level_table() -> dict[str, int]:
    """The stand-in of each byte in byte-level BPE: itself if printable, else counted from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _agrees(vocabulary: native.Vocabulary, backend: tokenizers.Tokenizer) -> bool:
    """Whether the table gives the library's text, for real text and for some hundred tokens.

    Tokens that are no whole characters are compared in real text only: what a broken character becomes is
    ours to say (one U+FFFD for each maximal part, as in Python), and SentencePiece decoders say otherwise.
    """
    draw = random.Random(0)
    whole = [i for i in draw.choices(range(len(vocabulary) or 1), k=400) if _is_utf8(vocabulary.token_bytes(i))]
    added = list(backend.get_added_tokens_decoder())[:8]
    samples = [backend.encode(_SAMPLE).ids, whole, [*added, *whole[:8], *added]]
    samples += [whole[i : i + 3] for i in range(0, len(whole), 3)]
    return all(
        vocabulary.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)
        for ids in samples
        for skip in (True, False)
    )


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
