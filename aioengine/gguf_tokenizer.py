"""A `tokenizers.Tokenizer` out of the metadata of a GGUF file.

A GGUF file stores the vocabulary and, for byte-level BPE, the merges, but of the rule that splits text into
words it has only a name (`pre`). The rules behind the names are those of the models' own tokenizer.json
files. A name that is not known here is an error: a wrong rule gives plausible, wrong token ids.
`tokenizer.py` calls this.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aioengine.errors import ModelLoadError
from aioengine.model_spec import GgufTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)

_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

# One alternative per kind of word; `None` stands for GPT-2's rule, which the library has built in.
_SPLITS: dict[str, str | None] = {
    "gpt2": None,
    "digits": None,
    "llama3": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_SPACES}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_SPACES}",
    "tekken": rf"{_CASED_WORD % ('', '')}|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_SPACES}",
    "gpt4o": (
        _CASED_WORD % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + rf"|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_SPACES}"
    ),
}

_RULE_OF_PRE = {
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "codeshell": "digits",
    "exaone": "digits",
    "minerva-7b": "digits",
    "gpt-2": "gpt2",
    "phi-2": "gpt2",
    "mpt": "gpt2",
    "olmo": "gpt2",
    "exaone4": "gpt2",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "falcon3": "llama3",
    "dbrx": "llama3",
    "smaug-bpe": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "tekken": "tekken",
    "gpt-4o": "gpt4o",
    "llama4": "gpt4o",
}

# Models that take a word as one token if the vocabulary has it, whatever the merges say, and that want BOS
# where the file does not say.
_WHOLE_WORDS_FIRST = {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"}
_COMPOSED_UNICODE = {"qwen2", "megrez"}


def make_backend(source: GgufTokenizer) -> Tokenizer:
    """A tokenizer that adds no special tokens by itself.

    Raises:
        ModelLoadError: the metadata is broken or of a kind whose rules are not known.
    """
    if len(source.token_types) not in (0, len(source.tokens)):
        raise ModelLoadError(f"the GGUF file has {len(source.tokens)} tokens but {len(source.token_types)} token types")
    vocab = {token: token_id for token_id, token in enumerate(source.tokens)}
    if len(vocab) != len(source.tokens):
        twice = next(token for token_id, token in enumerate(source.tokens) if vocab[token] != token_id)
        raise ModelLoadError(f"the GGUF file has the token {twice!r} more than once")
    if source.model == "gpt2":
        backend = _byte_level_bpe(source, vocab)
    elif source.model == "llama":
        backend = _sentencepiece_bpe(source, vocab)
    else:
        raise ModelLoadError(
            f"the GGUF file has a {source.model!r} tokenizer; known are gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE). Give the model's original tokenizer with --tokenizer"
        )
    special, other = [], []
    for token, token_type in zip(source.tokens, source.token_types, strict=False):
        if token_type == _CONTROL and token:
            special.append(AddedToken(token, normalized=False, special=True))
        elif token_type == _USER_DEFINED and token:
            other.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(other)
    return backend


def adds_bos(source: GgufTokenizer) -> bool:
    """Whether a plain text gets BOS: as the file says, else as models of its kind want it."""
    if source.add_bos_token is not None:
        return source.add_bos_token
    return source.model == "llama" or source.pre in _WHOLE_WORDS_FIRST


def _byte_level_bpe(source: GgufTokenizer, vocab: dict[str, int]) -> Tokenizer:
    rule = _RULE_OF_PRE.get(source.pre or "")
    if rule is None:
        raise ModelLoadError(
            f"the GGUF file names the pre-tokenizer {source.pre!r}, whose rule is not known; known are "
            f"{', '.join(sorted(_RULE_OF_PRE))}. Give the model's original tokenizer with --tokenizer"
        )
    merges = []
    for merge in source.merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelLoadError(f"the GGUF file has the broken merge {merge!r}")
        merges.append((left, right))
    try:
        model = models.BPE(vocab, merges, ignore_merges=source.pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"the GGUF file's merges do not fit its tokens: {error}") from None
    backend = Tokenizer(model)
    split = _SPLITS[rule]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), to_bytes]
        )
    elif rule == "digits":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes])
    else:
        backend.pre_tokenizer = to_bytes
    if source.pre in _COMPOSED_UNICODE:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(source: GgufTokenizer, vocab: dict[str, int]) -> Tokenizer:
    if len(source.scores) != len(source.tokens):
        raise ModelLoadError(f"the GGUF file has {len(source.tokens)} tokens but {len(source.scores)} scores")
    unknown = source.unk_token_id
    model = models.BPE(
        vocab,
        _merges_by_score(source.tokens, source.scores, source.token_types),
        unk_token=None if unknown is None else source.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    has_prefix = source.add_space_prefix is not False
    prepend = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], token_types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to put a piece together from two pieces, best score first; among equals the older parts."""
    pieces = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if not token_types or token_types[token_id] in (_NORMAL, _UNUSED)
    }
    merges = []
    for piece, token_id in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((-scores[token_id], pieces[left], pieces[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]
