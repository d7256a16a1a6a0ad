"""Text to token ids and back, for one model.

`Tokenizer` wraps a `tokenizers.Tokenizer`, made from a Hugging Face folder here or from GGUF metadata in
`gguf_tokenizer.py`, and adds what the engine needs: exact bytes of every token, an incremental decoder
(`text_stream`), one rule about BOS, and errors that blame the request. Encoding and decoding are thread safe
and are called from worker threads when long; a `TextStream` belongs to one thread.
Chat templates are only found here; `chat.py` renders them.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.fastcore import native
from aioengine.model_spec import GgufTokenizer, HfTokenizerFiles
from aioengine.types import SamplingParams

logger = logging.getLogger(__name__)

_SELF_TEST_TEXT = (
    "Hello, world!  Two spaces\n\n\tand\ttabs; it's 1234567890 — naïve café, Grüße, Ελληνικά, Привет, "
    "שלום, مرحبا, हिन्दी, ไทย, 你好世界, こんにちは, 한국어 🙂👩‍👩‍👧🇩🇪 e\u0301 \u200b def f(x): return x**2  # ▁"
)


class TextStream(Protocol):
    """The text of one choice, token by token; the native `TextStream` or `WindowTextStream`."""

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


class Tokenizer:
    """A model's tokenizer. Make one with `load_tokenizer`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`backend` encodes with its own post-processor when special tokens are wanted."""
        self._backend = backend
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_templates: Mapping[str, str] = dict(chat_templates or {})
        """Jinja templates by name; the main one is "default"."""
        added = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, str] = {token_id: token.content for token_id, token in added.items()}
        """Tokens that are found in text before anything else, special or not."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest token id; the model's logits may be wider."""
        self._vocabulary, is_exact = _make_vocabulary(backend, self.vocab_size, self.special_ids)
        self.uses_table = is_exact and _table_agrees(self._vocabulary, backend, self.special_ids)
        """Whether text is decoded from a table of bytes (fast); else by the library, in a window (slow)."""
        logger.info(
            "tokenizer: %d tokens, text is decoded %s",
            self.vocab_size,
            "from a table of bytes" if self.uses_table else "by the tokenizers library (slow path)",
        )

    @property
    def chat_template(self) -> str | None:
        """The model's main chat template."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of a text.

        `add_special_tokens` adds what the model wants around a text (BOS for most), but never a second BOS.
        With `allow_special=False` the literals of special tokens are ordinary text.

        Raises:
            InvalidRequest: the text cannot be encoded as UTF-8 or has a NUL character.
        """
        _check_text(text)
        backend = self._backend if allow_special else self._without_specials()
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        if add_special_tokens and len(ids) > 1 and bos is not None and ids[0] == bos == ids[1]:
            del ids[0]  # the text brought its own
        return ids

    def encode_batch(
        self, texts: Iterable[str], add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[list[int]]:
        """`encode` for many texts. One after another on purpose: the library's own batch call starts a
        thread pool that never ends; callers that want several cores use several threads."""
        return [self.encode(text, add_special_tokens, allow_special) for text in texts]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Broken UTF-8 becomes U+FFFD; ids outside the vocabulary have no text."""
        if self.uses_table:
            return self._vocabulary.decode(list(token_ids), skip_special_tokens)
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes that a token adds to a text; empty outside the vocabulary."""
        return self._vocabulary.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of a text when special tokens are skipped."""
        return token_id in self.special_ids

    def text_stream(self, params: SamplingParams) -> TextStream:
        """A decoder for the output of one choice, with the stop texts and options of `params`."""
        stops = native.StopSet(list(params.stop)) if params.stop else None
        return native.TextStream(
            self._vocabulary,
            stops,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _without_specials(self) -> tokenizers.Tokenizer:
        with self._plain_lock:
            if self._plain_backend is None:
                plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
                plain.encode_special_tokens = True
                self._plain_backend = plain
            return self._plain_backend


def load_tokenizer(source: HfTokenizerFiles | GgufTokenizer) -> Tokenizer:
    """The tokenizer of a checkpoint (its `tokenizer_source`).

    Raises:
        ModelLoadError: files are missing or broken, or of a kind that would give wrong token ids.
    """
    if isinstance(source, HfTokenizerFiles):
        return _from_folder(source.folder)
    raise ModelLoadError("tokenizers from GGUF files cannot be read yet")


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder} has no tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(path))
    return Tokenizer(backend)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "send valid Unicode"
        ) from None
    if "\0" in text:
        raise InvalidRequest(f"the text has a NUL character at character {text.index(chr(0))}; remove it")


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def _make_vocabulary(
    backend: tokenizers.Tokenizer, vocab_size: int, special_ids: frozenset[int]
) -> tuple[native.Vocabulary, bool]:
    """The bytes of every token, and whether the decoder is of a kind for which they make up the text."""
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    strip_first_space = False
    if kinds == ["ByteLevel"]:
        table = _byte_level_table()

        def to_bytes(token: str) -> bytes:
            try:
                return bytes(map(table.__getitem__, token))
            except KeyError:
                return token.encode()

        is_exact = True
    else:
        replaces = [step for step in steps if step["type"] == "Replace"]
        strips = [step for step in steps if step["type"] == "Strip"]
        has_byte_fallback = "ByteFallback" in kinds
        is_exact = (
            set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
            and len(replaces) == 1
            and replaces[0]["pattern"] == {"String": "▁"}
            and replaces[0]["content"] == " "
            and (not strips or (len(strips) == 1 and strips[0] | {"type": ""} == _STRIP_ONE_SPACE))
        )
        strip_first_space = bool(strips)

        def to_bytes(token: str) -> bytes:
            if has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    pass
            return token.replace("▁", " ").encode()

    tokens = [b""] * vocab_size
    flags = bytearray(vocab_size)
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        tokens[token_id] = to_bytes(token)
    for token_id in backend.get_added_tokens_decoder():
        flags[token_id] = native.Vocabulary.ADDED
    for token_id in special_ids:
        flags[token_id] |= native.Vocabulary.SPECIAL
    return native.Vocabulary(tokens, bytes(flags), strip_first_space), is_exact


_STRIP_ONE_SPACE = {"type": "", "content": " ", "start": 1, "stop": 0}


def _table_agrees(
    vocabulary: native.Vocabulary, backend: tokenizers.Tokenizer, special_ids: frozenset[int]
) -> bool:
    """Whether the table gives the library's text for real text and for random tokens that are valid UTF-8."""
    draw = random.Random(0)
    whole = [i for i in draw.choices(range(len(vocabulary)), k=400) if _is_utf8(vocabulary.token_bytes(i))]
    samples = [backend.encode(_SELF_TEST_TEXT).ids, whole, [*list(special_ids)[:8], *whole[:8]]]
    samples += [whole[i : i + 3] for i in range(0, len(whole), 3)]
    for ids in samples:
        for skip in (True, False):
            if vocabulary.decode(ids, skip) != backend.decode(ids, skip_special_tokens=skip):
                return False
    return True


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
