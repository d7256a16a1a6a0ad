"""Text to token ids and back, for one model.

`Tokenizer` wraps a `tokenizers.Tokenizer`, made from a Hugging Face folder here or from GGUF metadata in
`gguf_tokenizer.py`, and adds what the engine needs: exact bytes of every token, an incremental decoder
(`text_stream`), one rule about BOS, and errors that blame the request. Encoding and decoding are thread safe
and are called from worker threads when long; a `TextStream` belongs to one thread.
Chat templates are not its business: `checkpoint.py` finds them, `chat.py` renders them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.fastcore import native
from aioengine.gguf_tokenizer import adds_bos, make_backend
from aioengine.model_spec import GgufTokenizer, HfTokenizerFiles
from aioengine.text_stream import TextStream, WindowTextStream, make_vocabulary
from aioengine.types import SamplingParams

logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A model's tokenizer. Make one with `load_tokenizer`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        add_bos: bool | None = None,
        add_eos: bool = False,
    ) -> None:
        """`named_tokens` has the texts of `bos_token`, `eos_token` and so on; `eos_token_ids` adds end tokens
        to the one named there. With `add_bos=None` the backend's own post-processor adds special tokens,
        otherwise this class does."""
        self._backend = backend
        self._literal_backend: tokenizers.Tokenizer | None = None
        self._literal_lock = threading.Lock()
        self.named_tokens: Mapping[str, str] = dict(named_tokens or {})
        """Texts of the tokens with a role; chat templates see them under these names."""
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys(([] if eos is None else [eos]) + list(eos_token_ids or ())))
        """Tokens that end a text, the main one first."""
        self._prefix: list[int] | None = None
        self._suffix: list[int] = []
        if add_bos is not None:
            self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
            self._suffix = [eos] if add_eos and eos is not None else []
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Tokens that are left out of a text when special tokens are skipped."""
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest token id; the model's logits may be wider."""
        self._vocabulary = make_vocabulary(backend)
        logger.info(
            "tokenizer with %d tokens; text is decoded %s",
            self.vocab_size,
            "from a table of bytes" if self.uses_table else "by the tokenizers library, which is slower",
        )

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id

    @property
    def uses_table(self) -> bool:
        """Whether text is decoded from a table of bytes (fast) or by the library (slow)."""
        return self._vocabulary is not None

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of a text.

        `add_special_tokens` adds what the model wants around a plain text (BOS for most), but no second BOS
        to one that starts with it; a rendered chat template is complete and is encoded without. With
        `allow_special=False` the literals of special tokens in the text are ordinary characters.

        Raises:
            InvalidRequest: the text is no valid Unicode or has a NUL character.
        """
        _check_text(text)
        backend = self._backend if allow_special else self._without_specials()
        ids: list[int]
        if not add_special_tokens:
            ids = backend.encode(text, add_special_tokens=False).ids
            return ids
        if self._prefix is None:
            ids = backend.encode(text, add_special_tokens=True).ids
        else:
            ids = self._prefix + backend.encode(text, add_special_tokens=False).ids + self._suffix
        bos = self.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
            del ids[0]  # the text brought its own
        return ids

    def encode_batch(
        self, texts: Iterable[str], add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[list[int]]:
        """`encode` for many texts, one after another on purpose: the library's own batch call starts a pool
        of threads that never ends. Who wants several cores calls from several threads."""
        return [self.encode(text, add_special_tokens, allow_special) for text in texts]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Broken UTF-8 becomes U+FFFD; unknown ids have no text."""
        ids = list(token_ids)
        if self._vocabulary is not None:
            return self._vocabulary.decode(ids, skip_special_tokens)
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes that a token adds to a text; empty outside the vocabulary."""
        if self._vocabulary is not None:
            return self._vocabulary.token_bytes(token_id)
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of a text when special tokens are skipped."""
        return token_id in self.special_ids

    def text_stream(self, params: SamplingParams) -> TextStream:
        """A decoder for the output of one choice, with the stop texts and options of `params`.

        The text continues the prompt: a SentencePiece model's first space is kept, unlike in `decode`.
        """
        stream = native.TextStream(
            self._vocabulary,
            native.StopSet(list(params.stop)) if params.stop else None,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        if self._vocabulary is not None:
            return stream
        return WindowTextStream(self._backend, stream, params.skip_special_tokens)

    def _without_specials(self) -> tokenizers.Tokenizer:
        with self._literal_lock:
            if self._literal_backend is None:
                literal = tokenizers.Tokenizer.from_str(self._backend.to_str())
                literal.encode_special_tokens = True
                self._literal_backend = literal
            return self._literal_backend


def load_tokenizer(source: HfTokenizerFiles | GgufTokenizer) -> Tokenizer:
    """The tokenizer of a checkpoint (its `tokenizer_source`).

    Raises:
        ModelLoadError: files are missing or broken, or of a kind that would give wrong token ids.
    """
    return _from_folder(source.folder) if isinstance(source, HfTokenizerFiles) else _from_gguf(source)


def _from_gguf(source: GgufTokenizer) -> Tokenizer:
    backend = make_backend(source)
    ids = (source.bos_token_id, source.eos_token_id, source.unk_token_id, source.pad_token_id)
    return Tokenizer(
        backend,
        named_tokens={
            name: source.tokens[token_id]
            for name, token_id in zip(_NAMED_TOKENS, ids, strict=True)
            if token_id is not None and 0 <= token_id < len(source.tokens)
        },
        eos_token_ids=[] if source.eot_token_id is None else [source.eot_token_id],
        add_bos=adds_bos(source),
        add_eos=bool(source.add_eos_token),
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(_no_tokenizer_json(folder))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json") | _read_json(folder / "special_tokens_map.json")
    named_tokens = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str) and backend.token_to_id(text) is not None:
            named_tokens[name] = text
    tokenizer = Tokenizer(backend, named_tokens=named_tokens)
    wanted = config.get("add_bos_token")
    if isinstance(wanted, bool) and tokenizer.bos_token_id is not None:
        is_added = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
        if is_added != wanted:
            logger.warning(
                "tokenizer_config.json says add_bos_token=%s, but tokenizer.json, which is followed, does %s",
                wanted,
                "add it" if is_added else "not",
            )
    return tokenizer


def _no_tokenizer_json(folder: Path) -> str:
    found = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).is_file()]
    if not found:
        return f"{folder} has no tokenizer.json; give a folder that has one with --tokenizer"
    return (
        f"{folder} has {found[0]} but no tokenizer.json, the only form that is read; make one with "
        "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), or give a folder that "
        "has one with --tokenizer"
    )


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


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
