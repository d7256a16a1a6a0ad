"""Tokenizers from folders and from GGUF metadata: ids, BOS, special tokens, errors."""

from __future__ import annotations

import dataclasses
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.gguf import gguf_tokenizer
from aioengine.gguf_format import read_gguf_file
from aioengine.model_spec import GgufTokenizer, HfTokenizerFiles
from aioengine.tokenizer import Tokenizer, load_tokenizer
from aioengine.types import SamplingParams

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def save(folder: Path, *, adds_bos: bool = True, **config: object) -> Path:
    """A folder with a byte-level tokenizer: `<s>` is id 0, `</s>` 1, then the 256 bytes."""
    tokens = ["<s>", "</s>", *ALPHABET]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=16, pad_id=1, pad_token="</s>")
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(HfTokenizerFiles(folder))


# ---- folders ----------------------------------------------------------------------------------------------


def test_folder_gives_ids_roles_and_text(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path))
    ids = tokenizer.encode("Grüße 🙂, more than four")
    assert ids[0] == 0 == tokenizer.bos_token_id
    assert len(ids) == 1 + len("Grüße 🙂, more than four".encode()), "truncated or padded"
    assert tokenizer.decode(ids) == "Grüße 🙂, more than four"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>Grüße 🙂, more than four"
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.vocab_size == 259
    assert tokenizer.uses_table
    assert tokenizer.is_special(1) and not tokenizer.is_special(258) and not tokenizer.is_special(5)
    assert tokenizer.token_bytes(258) == b"<tool>"
    assert tokenizer.token_bytes(tokenizer.encode(" ", False)[0]) == b" "
    assert tokenizer.token_bytes(9999) == b""


def test_a_text_gets_one_bos_only(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path))
    once = tokenizer.encode("<s>hi")
    assert once == tokenizer.encode("hi") == [0, *tokenizer.encode("hi", add_special_tokens=False)]
    assert tokenizer.encode("<s>hi", add_special_tokens=False) == once
    assert tokenizer.encode("<s><s>hi") == [0, *once], "only the one that was added is left out"
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_special_literals_can_be_plain_text(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path))
    assert tokenizer.encode("a</s>", add_special_tokens=False)[1:] == [1]
    literal = tokenizer.encode("a</s>", add_special_tokens=False, allow_special=False)
    assert len(literal) == 5 and 1 not in literal
    assert tokenizer.decode(literal) == "a</s>"
    assert tokenizer.encode("a</s>", add_special_tokens=False)[1:] == [1], "the option stuck"


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "x\0y"])
def test_text_that_is_no_text_is_refused(tmp_path: Path, text: str) -> None:
    tokenizer = load(save(tmp_path))
    with pytest.raises(InvalidRequest, match="surrogate|NUL"):
        tokenizer.encode(text)
    with pytest.raises(InvalidRequest):
        tokenizer.encode_batch(["fine", text])


def test_batches_and_threads_give_the_same_ids(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path))
    texts = [f"text {i} é</s>" * 5 for i in range(50)]
    expected = [tokenizer.encode(text) for text in texts]
    literal = [tokenizer.encode(text, allow_special=False) for text in texts]
    assert tokenizer.encode_batch(texts) == expected
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(lambda text: tokenizer.encode(text, allow_special=False), texts)) == literal


def test_post_processor_wins_over_the_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = load(save(tmp_path, adds_bos=False, add_bos_token=True))
    assert tokenizer.encode("a")[0] != 0
    assert "add_bos_token=True" in caplog.text


def test_folder_without_configuration_loads(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load(tmp_path)
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_ids == ()


def test_names_of_tokens_may_be_in_the_special_tokens_map(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": null, "unk_token": "not there"}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = load(tmp_path)
    assert tokenizer.named_tokens == {"eos_token": "</s>"}
    assert tokenizer.eos_token_ids == (1,)


def test_what_cannot_be_loaded_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer.json.*--tokenizer"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0b")
    with pytest.raises(ModelLoadError, match="tokenizer.model but no tokenizer.json.*save_pretrained"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        load(tmp_path)


def test_decoder_without_table_decodes_by_the_library(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "un": 1, "##able": 2, "hello": 3}
    backend = Backend(models.WordPiece(words, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert not tokenizer.uses_table
    assert tokenizer.decode([3, 1, 2]) == "hello unable"
    assert tokenizer.token_bytes(3) == b"hello"
    stream = tokenizer.text_stream(SamplingParams(stop="una"))
    assert stream.push([3, 1]) == 2
    assert stream.take() == "hello "
    assert stream.push([2, 3]) == 1
    assert (stream.take(), stream.stop_index) == ("", 0)


def test_stream_has_the_options_of_the_request(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path))
    ids = tokenizer.encode("ab</s>END", add_special_tokens=False)
    shown = tokenizer.text_stream(SamplingParams(skip_special_tokens=False, min_tokens=9))
    shown.push(ids)
    assert shown.take() == "ab</s>END"
    stopped = tokenizer.text_stream(SamplingParams(stop=["x", "END"], include_stop_str_in_output=True))
    stopped.push(ids)
    assert (stopped.take(), stopped.stop_index) == ("abEND", 1)


# ---- GGUF: byte-level BPE ---------------------------------------------------------------------------------


def byte_level_gguf(pre: str | None, **changes: object) -> GgufTokenizer:
    tokens = ["<s>", "</s>", "<tool>", *ALPHABET, "ab", "abc"]
    source = GgufTokenizer(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        scores=[],
        token_types=[3, 3, 4] + [1] * (len(tokens) - 3),
        merges=["a b", "ab c"],
        bos_token_id=0,
        eos_token_id=1,
        unk_token_id=None,
        pad_token_id=None,
        eot_token_id=None,
        add_bos_token=None,
        add_eos_token=None,
        add_space_prefix=None,
        chat_template=None,
    )
    return dataclasses.replace(source, **changes)  # type: ignore[arg-type]


def words(pre: str, text: str) -> list[str]:
    """How a rule splits a text, with the library's stand-in for a space made one again."""
    backend = load_tokenizer(byte_level_gguf(pre))._backend
    table = {char: byte for byte, char in enumerate(_stand_ins())}
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [bytes(table[char] for char in piece).decode() for piece in pieces]


def _stand_ins() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


TEXT = "I'LL don't pay 12345 (abc)\n\n  x2 ١٢½"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        (
            "smollm",
            # every digit alone, the space before a number too
            [
                "I",
                "'",
                "LL",
                " don",
                "'t",
                " pay",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " (",
                "abc",
                ")",
                "\n\n ",
                " x",
                "2",
            ]
            + [" ", "١", "٢", "½"],
        ),
        (
            "gpt-2",
            ["I", "'", "LL", " don", "'t", " pay", " 12345", " (", "abc", ")", "\n\n ", " x", "2", " ١٢½"],
        ),
        (
            "llama-bpe",
            [
                "I",
                "'LL",
                " don",
                "'t",
                " pay",
                " ",
                "123",
                "45",
                " (",
                "abc",
                ")\n\n",
                " ",
                " x",
                "2",
                " ",
                "١٢½",
            ],
        ),
        (
            "qwen2",
            [
                "I",
                "'LL",
                " don",
                "'t",
                " pay",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " (",
                "abc",
                ")\n\n",
                " ",
                " x",
                "2",
            ]
            + [" ", "١", "٢", "½"],
        ),
        (
            "tekken",
            [
                "I",
                "'LL",
                " don",
                "'t",
                " pay",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " (",
                "abc",
                ")\n\n",
                " ",
                " x",
                "2",
            ]
            + [" ", "١", "٢", "½"],
        ),
        (
            "gpt-4o",
            ["I'LL", " don't", " pay", " ", "123", "45", " (", "abc", ")\n\n", " ", " x", "2", " ", "١٢½"],
        ),
    ],
)
def test_rules_behind_the_names(pre: str, expected: list[str]) -> None:
    assert words(pre, TEXT) == expected
    assert "".join(expected) == TEXT


def test_casing_splits_words_in_tekken_only() -> None:
    assert words("tekken", "camelCaseWORD") == ["camel", "Case", "WORD"]
    assert words("qwen2", "camelCaseWORD") == ["camelCaseWORD"]


def test_qwen2_composes_characters_and_others_do_not() -> None:
    decomposed = "e\u0301"
    for pre, text in (("qwen2", "\u00e9"), ("deepseek-r1-qwen", decomposed), ("smollm", decomposed)):
        tokenizer = load_tokenizer(byte_level_gguf(pre))
        assert tokenizer.decode(tokenizer.encode(decomposed)) == text


def test_whole_words_of_the_vocabulary_come_before_merges_in_llama3() -> None:
    source = byte_level_gguf("llama-bpe", merges=["a b"])
    assert load_tokenizer(source).encode("abc", add_special_tokens=False) == [len(source.tokens) - 1]
    other = load_tokenizer(byte_level_gguf("qwen2", merges=["a b"])).encode("abc", add_special_tokens=False)
    assert len(other) == 2


@pytest.mark.parametrize(
    ("pre", "says", "has_bos"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
    ],
)
def test_bos_as_the_file_says_or_as_its_kind_wants(pre: str, says: bool | None, has_bos: bool) -> None:
    tokenizer = load_tokenizer(byte_level_gguf(pre, add_bos_token=says))
    assert (tokenizer.encode("a")[0] == 0) is has_bos
    assert len(tokenizer.encode("<s>a")) == 2


def test_gguf_control_and_user_tokens_are_found_in_text() -> None:
    tokenizer = load_tokenizer(byte_level_gguf("smollm", add_eos_token=True, eot_token_id=2))
    ids = tokenizer.encode("<s>a<tool>b</s>", add_special_tokens=False)
    assert [i for i in ids if i < 3] == [0, 2, 1]
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.encode("a")[-1] == 1
    assert tokenizer.eos_token_ids == (1, 2)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert 1 not in tokenizer.encode("</s>", add_special_tokens=False, allow_special=False)


@pytest.mark.parametrize(
    ("changes", "words_"),
    [
        ({"pre": "brand-new"}, "'brand-new'.*llama-bpe.*--tokenizer"),
        ({"pre": None}, "None.*--tokenizer"),
        ({"pre": "default"}, "'default'.*--tokenizer"),
        ({"model": "t5"}, "'t5'.*--tokenizer"),
        ({"merges": ["ab"]}, "broken merge 'ab'"),
        ({"merges": ["a €"]}, "merges do not fit"),
        ({"token_types": [1]}, "token types"),
        ({"tokens": ["a", "b", "a"], "token_types": []}, "'a' more than once"),
        ({"model": "llama"}, "scores"),
    ],
)
def test_gguf_metadata_that_would_give_wrong_ids_is_refused(changes: dict[str, object], words_: str) -> None:
    with pytest.raises(ModelLoadError, match=words_):
        load_tokenizer(dataclasses.replace(byte_level_gguf("smollm"), **changes))  # type: ignore[arg-type]


# ---- GGUF: SentencePiece ----------------------------------------------------------------------------------


def sentencepiece_gguf(**changes: object) -> GgufTokenizer:
    scores = {"▁▁": -9, "bc": -3, "▁ab": -2, "ab": -1, "▁a": 0, "▁": -4, "a": -5, "b": -6, "c": -7, "é": -8}
    pieces = list(scores)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "[INST]", "ba"]
    source = GgufTokenizer(
        model="llama",
        pre="default",
        tokens=tokens,
        scores=[0.0] * 259 + [float(scores[piece]) for piece in pieces] + [0.0, 0.0],
        token_types=[2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4, 3],
        merges=[],
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        pad_token_id=None,
        eot_token_id=None,
        add_bos_token=None,
        add_eos_token=None,
        add_space_prefix=None,
        chat_template=None,
    )
    return dataclasses.replace(source, **changes)  # type: ignore[arg-type]


def pieces_of(text: str, **changes: object) -> list[str]:
    source = sentencepiece_gguf(**changes)
    return [source.tokens[i] for i in load_tokenizer(source).encode(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["<s>", "▁ab"]),  # by way of ▁a, which scores higher than ab
        ("cab", ["<s>", "▁", "c", "ab"]),
        ("cabc", ["<s>", "▁", "c", "ab", "c"]),  # ab before bc
        ("é€", ["<s>", "▁", "é", "<0xE2>", "<0x82>", "<0xAC>"]),
        ("  c", ["<s>", "▁▁", "▁", "c"]),
        ("c[INST] a</s>b", ["<s>", "▁", "c", "[INST]", "▁", "▁a", "</s>", "▁", "b"]),
        ("<s>c", ["<s>", "▁", "c"]),
    ],
)
def test_sentencepiece_merges_by_score(text: str, expected: list[str]) -> None:
    assert pieces_of(text) == expected


def test_control_tokens_are_never_merged_from_letters() -> None:
    tokenizer = load_tokenizer(sentencepiece_gguf())
    assert tokenizer.decode(tokenizer.encode("cba")) == "c"  # "ba" is a control token here
    ids = tokenizer.encode("cba", allow_special=False)
    assert len(ids) == 5 and tokenizer.decode(ids) == "cba"


def test_sentencepiece_without_prefix_space() -> None:
    assert pieces_of("c a", add_space_prefix=False) == ["<s>", "c", "▁a"]


def test_sentencepiece_text_comes_back() -> None:
    tokenizer = load_tokenizer(sentencepiece_gguf())
    assert tokenizer.uses_table
    for text in ("ab cab", " c", "é€🙂 a", "a[INST]b"):
        ids = tokenizer.encode(text)
        expected = text.replace("[INST]", "[INST] ")  # a word starts anew behind an added token
        assert tokenizer.decode(ids) == expected == tokenizer._backend.decode(ids)
    assert tokenizer.decode([1, *tokenizer.encode("a")], skip_special_tokens=False) == "<s><s> a"


# ---- the default model ------------------------------------------------------------------------------------

# From the documented rule: each digit alone, then GPT-2's words, then the file's merges. Checked against
# llama.cpp on the same file.
SMOLLM2_IDS = {
    "Hello, world! 12345  it's": [19556, 28, 905, 17, 216, 33, 34, 35, 36, 37, 216, 357, 506],
    "def f(x):\n    return x**2  # 3.14": [
        1604,
        275,
        24,
        104,
        727,
        472,
        1003,
        1792,
        828,
        34,
        216,
        907,
        216,
        35,
    ]
    + [30, 33, 36],
    "½ ²³ १२३ 你好🙂": [
        16738,
        216,
        19133,
        39050,
        216,
        9310,
        117,
        9310,
        118,
        9310,
        119,
        216,
        18645,
        250,
        48392,
    ]
    + [138, 10813, 38887],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "\t\ttabs\t": [197, 197, 100, 7366, 197],
    "I'LL we'Ve don't": [57, 23, 16421, 392, 23, 25917, 1326, 982],
    "3.14159e-10": [35, 30, 33, 36, 33, 37, 41, 85, 29, 33, 32],
    "0x7fffffff": [32, 104, 39, 34712, 484, 86],
    "١٢٣٤": [164, 111, 164, 112, 164, 113, 164, 114],
    "e\u0301 é": [85, 151, 219, 26411],
    "foo_bar__baz--qux": [15236, 79, 6299, 890, 45511, 423, 385, 104],
    "a\u00a0b\u2003c\u200bd": [81, 15442, 82, 321, 221, 83, 321, 229, 84],
    "\r\n\r\n x\r\n": [18682, 1792, 2738],
    "x<|im_end|>  y": [104, 2, 216, 329],
    "<|im_end|": [44, 108, 306, 79, 486, 108],
    "trailing ": [4861, 4966, 216],
}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    source = gguf_tokenizer(read_gguf_file(smollm2_path))
    assert source is not None
    return load_tokenizer(source)


@pytest.mark.slow
@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_smollm2_ids(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.encode(text) == SMOLLM2_IDS[text]
    assert smollm2.decode(SMOLLM2_IDS[text], skip_special_tokens=False) == text


@pytest.mark.slow
def test_smollm2_roles(smollm2: Tokenizer) -> None:
    assert smollm2.uses_table
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.encode("") == [], "this model adds no BOS"
    assert smollm2.is_special(1) and smollm2.token_bytes(1) == b"<|im_start|>"


@pytest.mark.slow
def test_smollm2_table_equals_the_library_for_every_whole_token(smollm2: Tokenizer) -> None:
    for token_id in range(smollm2.vocab_size):
        data = smollm2.token_bytes(token_id)
        assert data.decode(errors="replace") == smollm2._backend.decode([token_id], skip_special_tokens=False)
