"""Incremental decoding: equal to decoding at once for any split, stop texts, both paths."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from aioengine.fastcore.native import StopSet, TextStream, Vocabulary
from aioengine.gguf import gguf_tokenizer
from aioengine.gguf_format import read_gguf_file
from aioengine.gguf_tokenizer import make_backend
from aioengine.text_stream import WindowTextStream, make_vocabulary

MIXED = "Grüße, Привет שלום 你好世界 한국어 हिन्दी 🙂👩\u200d👩\u200d👧🇩🇪 e\u0301 \u200b\ufeff\U0010ffff\ufffd!"
PLAIN, ADDED, SPECIAL = 0, Vocabulary.ADDED, Vocabulary.ADDED | Vocabulary.SPECIAL


def vocabulary(tokens: Sequence[bytes], flags: Sequence[int] | None = None, strip: bool = False) -> Vocabulary:
    return Vocabulary(list(tokens), bytes(flags or [PLAIN] * len(tokens)), strip)


def every_byte() -> Vocabulary:
    return vocabulary([bytes([byte]) for byte in range(256)])


def without_unfinished(data: bytes) -> bytes:
    """The data without the beginning of a character at its end."""
    ends = [bytes([byte, 0x80, 0x80][:length]) for byte in (0x80, 0x90, 0xA0) for length in (1, 2, 3)]
    for num_held in (3, 2, 1):
        begun = data[len(data) - num_held :] if num_held <= len(data) else b""
        if begun and any(is_one_character(begun + end) for end in ends):
            return data[: len(data) - num_held]
    return data


def is_one_character(data: bytes) -> bool:
    return len(data.decode(errors="replace")) == 1 and data.decode(errors="ignore") != ""


def compositions(text: bytes) -> Iterator[list[bytes]]:
    """All ways to cut a text into pieces."""
    for cuts in itertools.product([False, True], repeat=max(len(text) - 1, 0)):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(text)]
        yield [text[a:b] for a, b in itertools.pairwise(at)]


def stopped_text(
    texts: Sequence[str], stops: Sequence[str], *, min_tokens: int = 0, include: bool = False
) -> tuple[str, int]:
    """The rule, naively: the text of the pieces up to its first stop text, and which one that is."""
    text = "".join(texts)
    for end in range(len("".join(texts[:min_tokens])) + 1, len(text) + 1):
        found = [(len(stop), i) for i, stop in enumerate(stops) if text[:end].endswith(stop)]
        if found:
            length, i = max(found, key=lambda item: item[0])
            return text[: end if include else end - length], i
    return text, -1


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that may be the beginning of a stop text."""
    return max(
        (k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])),
        default=0,
    )


def check_stops(pieces: Sequence[bytes], stops: Sequence[str], *, min_tokens: int = 0, include: bool = False) -> None:
    texts = [piece.decode() for piece in pieces]
    expected, which = stopped_text(texts, stops, min_tokens=min_tokens, include=include)
    stream = TextStream(vocabulary(pieces), StopSet(list(stops)), min_tokens=min_tokens, include_stop=include)
    taken = ""
    for i in range(len(pieces)):
        num_used = stream.push([i])
        taken += stream.take()
        assert num_used == 1
        if stream.stop_index >= 0:
            break
        so_far = "".join(texts[: i + 1])
        num_held = 0 if include else held_back(so_far, stops)
        assert taken == so_far[: len(so_far) - num_held]
    assert stream.stop_index == which
    stream.finish()
    assert taken + stream.take() == expected == stream.text


@settings(derandomize=True, deadline=None, max_examples=300)
@given(data=st.binary(max_size=40), seed=st.integers(0, 1000))
def test_any_bytes_in_any_split_decode_as_python_does(data: bytes, seed: int) -> None:
    draw = random.Random(seed)
    stream = TextStream(every_byte())
    left, seen = data, b""
    taken = ""
    while left:
        size = draw.randint(1, 4)
        piece, left = left[:size], left[size:]
        assert stream.push(list(piece)) == len(piece)
        taken += stream.take()
        seen += piece
        assert taken == without_unfinished(seen).decode(errors="replace"), "a character was sent late or early"
    stream.finish()
    taken += stream.take()
    assert taken == stream.text == data.decode(errors="replace") == every_byte().decode(list(data))


def test_bytes_around_every_lead_byte_decode_as_python_does() -> None:
    probes = [
        0x00,
        0x41,
        0x7F,
        0x80,
        0x8F,
        0x90,
        0x9F,
        0xA0,
        0xBF,
        0xC0,
        0xC2,
        0xE0,
        0xED,
        0xF0,
        0xF4,
        0xF5,
        0xFF,
    ]
    table = every_byte()
    for lead in range(256):
        for rest in itertools.product(probes, repeat=2):
            data = bytes([lead, *rest])
            for tail in (b"", b"\x80", b"\x80A"):
                assert table.decode(list(data + tail)) == (data + tail).decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_scripts_and_emoji_survive_any_chunk_size(size: int) -> None:
    data = MIXED.encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    stream = TextStream(vocabulary(pieces))
    taken = ""
    for i in range(len(pieces)):
        stream.push([i])
        delta = stream.take()
        assert "\ufffd" not in delta or "\ufffd" in MIXED
        taken += delta
        assert MIXED.startswith(taken)
        assert len(MIXED.encode()[: sum(map(len, pieces[: i + 1]))]) - len(taken.encode()) < 4
    assert taken == MIXED


@pytest.mark.parametrize(
    "stops",
    [
        ["ab"],
        ["aab", "ab"],
        ["aba", "bab"],
        ["a", "aa"],
        ["abab", "bb"],
        ["aabb", "abb", "bb"],
        ["bbba", "a"],
        ["abaab", "baa"],
    ],
)
def test_stop_texts_in_all_chunkings_of_all_short_texts(stops: list[str]) -> None:
    for length in range(1, 6):
        for letters in itertools.product("ab", repeat=length):
            for pieces in compositions("".join(letters).encode()):
                check_stops(pieces, stops)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    text=st.text("abc", min_size=1, max_size=14),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    cuts=st.sets(st.integers(1, 13)),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_stop_texts_with_min_tokens_and_inclusion(
    text: str, stops: list[str], cuts: set[int], min_tokens: int, include: bool
) -> None:
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b].encode() for a, b in itertools.pairwise(at)]
    check_stops(pieces, stops, min_tokens=min_tokens, include=include)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    text=st.text("é你🙂x", min_size=1, max_size=8),
    stops=st.lists(st.text("é你🙂x", min_size=1, max_size=3), min_size=1, max_size=3, unique=True),
    size=st.integers(1, 5),
)
def test_stop_texts_inside_split_characters(text: str, stops: list[str], size: int) -> None:
    data = text.encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    expected, which = stopped_text(list(text), stops)
    stream = TextStream(vocabulary(pieces), StopSet(stops))
    taken = ""
    for i in range(len(pieces)):
        stream.push([i])
        taken += stream.take()
        assert expected.startswith(taken)
        if stream.stop_index >= 0:
            break
    stream.finish()
    assert (taken + stream.take(), stream.stop_index) == (expected, which)


def test_stop_within_one_push_drops_the_tokens_behind_it() -> None:
    stream = TextStream(vocabulary([b"a", b"EN", b"D.", b"b"]), StopSet(["END"]))
    assert stream.push([0, 1, 2, 3]) == 3
    assert (stream.take(), stream.stop_index) == ("a", 0)
    assert stream.push([0]) == 1
    stream.finish()
    assert stream.take() == ""


def test_text_complete_within_min_tokens_is_never_matched() -> None:
    # INV-63: "END" is complete with the third token and is passed over, though "D" can begin nothing new.
    tokens = [b"E", b"N", b"D", b"!", b"END"]
    stream = TextStream(vocabulary(tokens), StopSet(["END"]), min_tokens=3)
    assert stream.push([0, 1, 2]) == 3
    assert stream.take() == "END"
    stream.push([3])
    assert (stream.take(), stream.stop_index) == ("!", -1)
    stream.push([4])
    assert (stream.take(), stream.stop_index, stream.text) == ("", 0, "END!")


def test_text_that_began_within_min_tokens_is_matched_when_it_ends_later() -> None:
    stream = TextStream(vocabulary([b"xE", b"ND"]), StopSet(["END"]), min_tokens=1)
    stream.push([0])
    assert stream.take() == "x"
    stream.push([1])
    assert (stream.stop_index, stream.text) == (0, "x")


def test_broken_end_is_flushed_and_not_matched() -> None:
    stream = TextStream(every_byte(), StopSet(["\ufffd", "ab"]))
    stream.push([0x61, 0xE4, 0xBD])
    assert stream.take() == ""  # "a" may begin "ab", the rest is no character yet
    stream.finish()
    assert (stream.take(), stream.stop_index) == ("a\ufffd", -1)


def test_special_tokens_are_skipped_between_parts_of_a_character() -> None:
    table = vocabulary([b"<s>", "é".encode()[:1], "é".encode()[1:], b" <x>"], [SPECIAL, PLAIN, PLAIN, ADDED])
    skipping = TextStream(table)
    skipping.push([0, 1, 0])
    assert skipping.take() == ""
    skipping.push([2, 3])
    assert skipping.take() == "é <x>"
    keeping = TextStream(table, skip_special_tokens=False)
    keeping.push([0, 3, 1, 2])
    assert keeping.take() == "<s> <x>é"
    assert table.decode([0, 3], False) == "<s> <x>"


def test_added_tokens_can_go_without_spaces_between_them() -> None:
    table = vocabulary([b" <a>", b" <b>", b" word"], [SPECIAL, ADDED, PLAIN])
    close = TextStream(table, skip_special_tokens=False, spaces_between_special_tokens=False)
    close.push([0, 1, 0, 2, 1])
    assert close.take() == " <a><b><a> word <b>"
    wide = TextStream(table, skip_special_tokens=False)
    wide.push([0, 1, 0, 2, 1])
    assert wide.take() == " <a> <b> <a> word <b>"


def test_first_space_is_stripped_from_whole_texts_only() -> None:
    table = vocabulary([b" Hello", b" ", b"<s>"], [PLAIN, PLAIN, SPECIAL], strip=True)
    assert table.decode([2, 0, 0]) == "Hello Hello"
    assert table.decode([1, 0]) == " Hello"
    assert table.decode([2, 0], False) == "<s> Hello"
    continuing = TextStream(table)
    continuing.push([0])
    assert continuing.take() == " Hello"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    stream = TextStream(vocabulary([b"a", b"b"]))
    assert stream.push([0, 99, -1, 2**40, 1]) == 5
    assert stream.take() == "ab"
    assert vocabulary([b"a"]).token_bytes(7) == b""


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match="one byte per token"):
        Vocabulary([b"a"], b"")
    with pytest.raises(TypeError):
        vocabulary([b"a"]).decode(["x"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        TextStream(vocabulary([b"a"])).push((0,))  # type: ignore[arg-type]


def test_earlier_text_can_be_read_again() -> None:
    stream = TextStream(vocabulary(["é".encode(), b"b"]))
    stream.push([0])
    stream.take()
    first = stream.num_taken_bytes
    stream.push([1, 1])
    stream.take()
    assert (stream.text_until(first), stream.text_until(stream.num_taken_bytes)) == ("é", "ébb")


# ---- tokenizers of the library ---------------------------------------------------------------------------


def byte_level() -> Backend:
    alphabet = sorted(decoders_alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {pair: len(vocab) + i for i, pair in enumerate(("he", "lo", "Ġw"))}
    backend = Backend(models.BPE(vocab, [("h", "e"), ("l", "o"), ("Ġ", "w")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    backend.add_tokens([AddedToken(" spaced é", normalized=False)])
    return backend


def decoders_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return list(ByteLevel.alphabet())


def sentencepiece(strip: bool = True) -> Backend:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "▁Hi", "é", "▁▁"]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.add_tokens([AddedToken("▁<tool>", normalized=False)])
    return backend


def word_pieces() -> Backend:
    words = ["[UNK]", "[CLS]", "un", "##aff", "##able", "hello", "world", ".", "don", "'", "t"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]"])
    return backend


@pytest.mark.parametrize("make", [byte_level, sentencepiece, lambda: sentencepiece(strip=False)])
def test_table_equals_the_librarys_decoder(make: object) -> None:
    backend: Backend = make()  # type: ignore[operator]
    table = make_vocabulary(backend)
    assert table is not None
    draw = random.Random(5)
    whole = [
        i for i in range(len(table)) if table.token_bytes(i).decode(errors="ignore").encode() == table.token_bytes(i)
    ]
    for _ in range(200):
        ids = draw.choices(whole, k=draw.randint(1, 8))
        for skip in (True, False):
            assert table.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


def wrong_strip() -> Backend:
    backend = sentencepiece()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    return backend


def wrong_replacement() -> Backend:
    backend = sentencepiece()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", "_"), decoders.Fuse()])
    return backend


def fused_too_late() -> Backend:
    """Looks like SentencePiece, but strips every token; only the trial can tell."""
    backend = sentencepiece()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


def no_decoder() -> Backend:
    return Backend(models.BPE({"a": 0, "b": 1}, []))


@pytest.mark.parametrize("make", [word_pieces, wrong_strip, wrong_replacement, fused_too_late, no_decoder])
def test_other_decoders_get_no_table(make: object) -> None:
    assert make_vocabulary(make()) is None  # type: ignore[operator]


def window(backend: Backend, stops: list[str] | None = None, *, skip: bool = True, **options: int) -> WindowTextStream:
    stream = TextStream(None, StopSet(stops) if stops else None, **options)  # type: ignore[arg-type]
    return WindowTextStream(backend, stream, skip)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("make", [byte_level, sentencepiece, word_pieces, fused_too_late, no_decoder])
def test_window_equals_the_librarys_decoder_for_any_split(make: object, skip: bool) -> None:
    backend: Backend = make()  # type: ignore[operator]
    size = backend.get_vocab_size()
    draw = random.Random(11)
    for _ in range(150):
        ids = draw.choices(range(size), k=draw.randint(1, 12))
        if make is sentencepiece or make is fused_too_late:  # broken characters are another matter, below
            ids = [i for i in ids if not 129 <= i <= 256]
        stream = window(backend, skip=skip)
        taken = ""
        rest = ids
        while rest:
            cut = draw.randint(1, 3)
            stream.push(rest[:cut])
            rest = rest[cut:]
            taken += stream.take()
        stream.finish()
        assert taken + stream.take() == backend.decode(ids, skip_special_tokens=skip) == stream.text


def test_both_paths_agree_on_text_stops_and_min_tokens() -> None:
    backend = byte_level()
    table = make_vocabulary(backend)
    assert table is not None
    draw = random.Random(3)
    ids = backend.encode(MIXED + " hello world").ids
    for _ in range(200):
        start = draw.randrange(len(ids))
        part = ids[start : start + draw.randint(1, 40)]
        stops = draw.sample(["lo w", "好", "🙂", " ", "世界 한", "ü"], k=2)
        options = {"min_tokens": draw.choice([0, 0, 5]), "include_stop": draw.choice([False, True])}
        fast = TextStream(table, StopSet(stops), **options)  # type: ignore[arg-type]
        slow = window(backend, stops, **options)
        for token_id in part:
            used = fast.push([token_id]), slow.push([token_id])
            assert used == (1, 1)
            assert fast.stop_index == slow.stop_index
            if fast.stop_index >= 0:
                break
        fast.finish()
        slow.finish()
        assert fast.text == slow.text


def test_window_holds_an_unfinished_character() -> None:
    stream = window(sentencepiece())
    stream.push([1 + byte for byte in "a🙂".encode()[:3]])
    assert stream.take() == "a"
    stream.push([1 + byte for byte in "a🙂".encode()[3:]])
    assert stream.take() == "🙂"


def test_window_gives_up_on_endless_garbage() -> None:
    stream = window(sentencepiece())
    taken = ""
    for _ in range(100):
        stream.push([1 + 0xFF])
        taken += stream.take()
    assert len(taken) > 50
    stream.finish()
    assert taken + stream.take() == "\ufffd" * 100


def test_window_survives_a_decoder_that_changes_its_mind() -> None:
    # The cleanup of WordPiece takes the space before "." back: "hello ." was never shown, "hello" was.
    backend = word_pieces()
    ids = [backend.token_to_id(word) for word in ("hello", ".", "don", "'", "t", "world", ".")]
    stream = window(backend)
    taken = ""
    for token_id in ids:
        stream.push([token_id])
        taken += stream.take()
    stream.finish()
    assert taken + stream.take() == stream.text
    assert stream.text.startswith("hello.") and stream.text.endswith("world.")


# ---- the default model ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_streams_equal_its_whole_decode_on_both_paths(smollm2_path: Path) -> None:
    source = gguf_tokenizer(read_gguf_file(smollm2_path))
    assert source is not None
    backend = make_backend(source)
    table = make_vocabulary(backend)
    assert table is not None
    draw = random.Random(2)
    ids = backend.encode(MIXED * 3).ids + [1, 2] + draw.choices(range(len(table)), k=3000)
    for skip in (True, False):
        expected = backend.decode(ids, skip_special_tokens=skip)
        for make in (lambda skip: TextStream(table, skip_special_tokens=skip), partial(window_of, backend)):
            stream = make(skip)
            taken, at = "", 0
            while at < len(ids):
                size = draw.randint(1, 9)
                stream.push(ids[at : at + size])
                at += size
                taken += stream.take()
            stream.finish()
            assert taken + stream.take() == expected == table.decode(ids, skip)


def window_of(backend: Backend, skip: bool) -> WindowTextStream:
    return window(backend, skip=skip)
