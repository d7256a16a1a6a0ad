"""Outputs: deltas, coalescing, stop texts, ends of choices, readers that leave, log-probabilities."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from aioengine.errors import EngineDead
from aioengine.outputs import ChoiceOutput, RequestStream
from aioengine.tokenizer import Tokenizer
from aioengine.types import RequestOutput, RequestTiming, SamplingParams, Usage

A, B, C, D, E, N, HALF_1, HALF_2, EOS, STOP = range(10)  # HALF_1 and HALF_2 make one "é"


@dataclass
class Row:
    token_id: int
    logprob: float
    rank: int
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def row(token_id: int, logprob: float, rank: int, *top: tuple[int, float]) -> Row:
    ids, values = zip(*top, strict=True) if top else ((), ())
    return Row(token_id, logprob, rank, np.array(ids, np.int32), np.array(values, np.float32))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens = ["a", "b", "c", "D", "E", "N", "Ã", "©", "</s>", "<stop>"]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])
    backend.add_tokens([AddedToken("<stop>", normalized=False)])
    return Tokenizer(backend)


def make(
    tokenizer: Tokenizer | None, params: SamplingParams | None = None, prompt: list[int] | None = None
) -> tuple[RequestStream, ChoiceOutput]:
    stream = RequestStream("r", 1)
    params = params or SamplingParams()
    return stream, ChoiceOutput(stream, 0, tokenizer, params, prompt or [A, B], eos_token_ids=(EOS,))


async def drain(stream: RequestStream) -> list[RequestOutput]:
    return [out async for out in stream]


async def test_each_output_has_what_is_new_and_everything_so_far(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    choice.push([A])
    first = await anext(stream)
    choice.push([B, C])
    second = await anext(stream)
    choice.push([D], "length")
    choice.finish("length")
    last = await anext(stream)
    assert (first.delta, first.text, first.delta_token_ids, first.token_ids) == ("a", "a", [A], [A])
    assert (second.delta, second.text, second.delta_token_ids) == ("bc", "abc", [B, C])
    assert (last.delta, last.text, last.token_ids) == ("D", "abcD", [A, B, C, D])
    assert [out.finish_reason for out in (first, second, last)] == [None, None, "length"]
    assert [out.is_finished for out in (first, second, last)] == [False, False, True]
    assert second.token_ids == [A, B, C], "an output changed after it was handed out"
    assert (first.request_id, first.index, first.prompt_token_ids) == ("r", 0, [A, B])
    assert await drain(stream) == []


async def test_unread_deltas_join(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    for token_id in (A, B, C):
        choice.push([token_id])
    assert len(stream._ready) == 1
    out = await anext(stream)
    assert (out.delta, out.delta_token_ids) == ("abc", [A, B, C])
    for _ in range(1000):
        choice.push([A])
    choice.finish("abort")
    assert len(stream._ready) == 1
    (last,) = await drain(stream)
    assert (last.delta, last.finish_reason, len(last.token_ids)) == ("a" * 1000, "abort", 1003)


async def test_reader_that_waits_is_woken_once_per_output(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    reader = asyncio.ensure_future(drain(stream))
    await asyncio.sleep(0)
    choice.push([A])
    choice.push([B])
    await asyncio.sleep(0)
    choice.push([C])
    choice.finish("length")
    assert [out.delta for out in await reader] == ["ab", "c"]


async def test_split_character_comes_whole_and_a_broken_one_at_the_end(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    choice.push([A, HALF_1])
    assert (await anext(stream)).delta == "a"
    choice.push([HALF_2, HALF_1], "length")
    choice.finish("length")
    (last,) = await drain(stream)
    assert (last.delta, last.text) == ("é\ufffd", "aé\ufffd")
    assert last.delta_token_ids == [HALF_2, HALF_1]


async def test_stop_text_cuts_the_text_and_keeps_the_tokens(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(stop=["zz", "END"]))
    assert choice.push([A, E]) is None
    assert (await anext(stream)).delta == "a"
    assert choice.push([N]) is None
    assert choice.push([D, B, B]) == "END", "behind the stop text there is nothing"
    choice.finish(None)
    (last,) = await drain(stream)
    assert (last.delta, last.text) == ("", "a")
    assert last.token_ids == [A, E, N, D] and choice.num_tokens == 4
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert last.usage == Usage(prompt_tokens=2, completion_tokens=4, cached_tokens=0)


async def test_stop_text_is_kept_if_asked_for(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(stop="END", include_stop_str_in_output=True))
    assert choice.push([A, E, N, D]) == "END"
    choice.finish("length")
    (last,) = await drain(stream)
    assert (last.text, last.finish_reason, last.stop_reason) == ("aEND", "stop", "END")


async def test_stop_text_wins_over_a_length_limit_in_the_same_step(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(stop="b"))
    assert choice.push([A, B], "length") == "b"
    choice.finish("length")
    (last,) = await drain(stream)
    assert (last.text, last.finish_reason, last.stop_reason) == ("a", "stop", "b")


async def test_held_back_text_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(stop="END"))
    choice.push([A, E, N], "length")
    choice.finish("length")
    (last,) = await drain(stream)
    assert (last.text, last.stop_reason) == ("aEN", None)


@pytest.mark.parametrize(
    ("stop_id", "options", "text", "stop_reason"),
    [
        (EOS, {}, "a", None),
        (STOP, {"stop_token_ids": [STOP]}, "a", STOP),
        (STOP, {"stop_token_ids": [STOP], "include_stop_str_in_output": True}, "a<stop>", STOP),
        (EOS, {"include_stop_str_in_output": True}, "a", None),  # special, so it has no text
        (EOS, {"include_stop_str_in_output": True, "skip_special_tokens": False}, "a</s>", None),
        (EOS, {"skip_special_tokens": False}, "a", None),
        (EOS, {"ignore_eos": True, "stop_token_ids": [EOS]}, "a", EOS),
    ],
)
async def test_closing_token_has_text_only_if_asked_for(
    tokenizer: Tokenizer, stop_id: int, options: dict[str, object], text: str, stop_reason: int | None
) -> None:
    stream, choice = make(tokenizer, SamplingParams(**options))  # type: ignore[arg-type]
    choice.push([A])
    choice.push([stop_id], "stop", stop_id)
    choice.finish("stop")
    (last,) = await drain(stream)
    assert (last.text, last.token_ids) == (text, [A, stop_id])
    assert (last.finish_reason, last.stop_reason) == ("stop", stop_reason)


@pytest.mark.parametrize("options", [{}, {"include_stop_str_in_output": True}])
async def test_stop_text_wins_over_a_closing_token_that_came_with_it(
    tokenizer: Tokenizer, options: dict[str, bool]
) -> None:
    """Several tokens of one step end as they would have ended one by one."""
    stream, choice = make(tokenizer, SamplingParams(logprobs=0, stop="c", stop_token_ids=[STOP], **options))
    rows = [row(i, -1, 1) for i in (A, C, B, STOP)]
    assert choice.push([A, C, B, STOP], "stop", STOP, rows) == "c"
    choice.finish("stop")
    (last,) = await drain(stream)
    assert (last.text, last.token_ids) == ("ac" if options else "a", [A, C])
    assert (last.finish_reason, last.stop_reason) == ("stop", "c")
    assert last.delta_logprobs is not None and [p.chosen.token_id for p in last.delta_logprobs] == [A, C]


async def test_closing_token_behind_others_has_no_text(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(logprobs=0, stop="c"))
    assert choice.push([A, B, EOS], "stop", EOS, [row(i, -1, 1) for i in (A, B, EOS, C)]) is None
    choice.finish("stop")
    (last,) = await drain(stream)
    assert (last.text, last.token_ids, last.stop_reason) == ("ab", [A, B, EOS], None)
    assert last.delta_logprobs is not None and [p.chosen.token_id for p in last.delta_logprobs] == [A, B, EOS]


@pytest.mark.parametrize(("min_tokens", "used"), [(0, [A]), (1, [A, B, A]), (2, [A, B, A]), (3, [A, B, A, C, A])])
async def test_stop_text_within_min_tokens_is_passed_over_among_several_tokens(
    tokenizer: Tokenizer, min_tokens: int, used: list[int]
) -> None:
    stream, choice = make(tokenizer, SamplingParams(stop="a", min_tokens=min_tokens))
    assert choice.push([A, B, A, C, A, B]) == "a"
    choice.finish(None)
    (last,) = await drain(stream)
    assert last.token_ids == used


async def test_closing_token_never_completes_a_stop_text(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(stop="a<stop>", stop_token_ids=[STOP]))
    choice.push([A])
    assert choice.push([STOP], "stop", STOP) is None
    choice.finish("stop")
    (last,) = await drain(stream)
    assert (last.text, last.stop_reason) == ("a", STOP)


async def test_nothing_generated_still_gives_one_last_output(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(max_tokens=0))
    timing = RequestTiming(1.0, 2.0, None, 3.0)
    choice.finish("length", num_cached_tokens=1, timing=timing)
    choice.finish("abort")  # a second end changes nothing
    (last,) = await drain(stream)
    assert (last.text, last.token_ids, last.finish_reason, last.timing) == ("", [], "length", timing)
    assert last.usage == Usage(prompt_tokens=2, completion_tokens=0, cached_tokens=1)
    assert choice.push([A]) is None and stream.is_finished


async def test_choices_share_a_stream_and_the_last_output_has_the_usage(tokenizer: Tokenizer) -> None:
    stream = RequestStream("r", 3)
    choices = [ChoiceOutput(stream, i, tokenizer, SamplingParams(n=3), [A, B, C]) for i in range(3)]
    reader = asyncio.ensure_future(drain(stream))
    await asyncio.sleep(0)
    choices[1].push([A])
    choices[1].finish("length", num_cached_tokens=2)
    await asyncio.sleep(0)
    for choice in (choices[0], choices[2]):
        choice.push([B, C])
        choice.finish("stop", num_cached_tokens=choice.index)
    outs = await reader
    assert [(out.index, out.text, out.finish_reason) for out in outs] == [
        (1, "a", "length"),
        (0, "bc", "stop"),
        (2, "bc", "stop"),
    ]
    assert [out.usage for out in outs] == [None, None, Usage(3, 5, 0)]


async def test_failure_is_raised_after_what_was_there(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    choice.push([A])
    stream.fail(EngineDead("the device failed"))
    choice.finish("error")
    out = await anext(stream)
    assert (out.delta, out.finish_reason) == ("a", None)
    for _ in range(2):
        with pytest.raises(EngineDead, match="device failed"):
            await anext(stream)


async def test_failure_reaches_a_reader_that_waits(tokenizer: Tokenizer) -> None:
    stream, _ = make(tokenizer)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.fail(EngineDead("gone"))
    with pytest.raises(EngineDead):
        await reader


async def test_failure_after_the_end_changes_nothing(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    choice.finish("length")
    stream.fail(EngineDead("late"))
    assert [out.finish_reason for out in await drain(stream)] == ["length"]


async def test_cancelled_reader_closes_the_request(tokenizer: Tokenizer) -> None:
    closed: list[RequestStream] = []
    stream = RequestStream("r", 1, closed.append)
    choice = ChoiceOutput(stream, 0, tokenizer, SamplingParams(), [A])
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled() and closed == [stream] and stream.is_closed
    choice.push([A])
    choice.finish("abort")
    assert choice.num_tokens == 0 and not stream._ready, "something was kept for nobody"
    assert await drain(stream) == []
    stream.close()
    assert closed == [stream]


async def test_a_reader_cancelled_right_after_it_was_woken_closes_the_request(tokenizer: Tokenizer) -> None:
    closed: list[RequestStream] = []
    stream = RequestStream("r", 1, closed.append)
    choice = ChoiceOutput(stream, 0, tokenizer, SamplingParams(), [A])
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    choice.push([A])
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled() and closed == [stream]


@pytest.mark.parametrize("leave", ["abort", "aclose", "with"])
async def test_leaving_early_calls_back_once(tokenizer: Tokenizer, leave: str) -> None:
    closed: list[RequestStream] = []
    stream = RequestStream("r", 1, closed.append)
    choice = ChoiceOutput(stream, 0, tokenizer, SamplingParams(), [A])
    choice.push([A])
    if leave == "with":
        async with stream:
            await anext(stream)
    else:
        await getattr(stream, leave)()
    await stream.aclose()
    assert closed == [stream]


async def test_leaving_at_the_end_calls_nobody(tokenizer: Tokenizer) -> None:
    closed: list[RequestStream] = []
    stream = RequestStream("r", 1, closed.append)
    choice = ChoiceOutput(stream, 0, tokenizer, SamplingParams(), [A])
    choice.finish("length")
    async with stream:
        pass
    assert closed == []


async def test_abort_ends_the_iteration_of_a_reader_that_waits(tokenizer: Tokenizer) -> None:
    stream, _ = make(tokenizer)
    reader = asyncio.ensure_future(drain(stream))
    await asyncio.sleep(0)
    await stream.abort()
    assert await reader == []


async def test_second_reader_is_refused(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="already being read"):
        await anext(stream)
    choice.push([A])
    assert (await reader).delta == "a"


async def test_logprobs_go_with_their_tokens(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(logprobs=2))
    choice.push([A], logprobs=[row(A, -0.5, 1, (A, -0.5), (HALF_1, -1.5))])
    choice.push([B], logprobs=[row(B, float("-inf"), 7)])
    out = await anext(stream)
    assert out.delta_logprobs is not None and len(out.delta_logprobs) == 2
    first, second = out.delta_logprobs
    assert (first.chosen.token_id, first.chosen.rank, first.chosen.token) == (A, 1, "a")
    assert [(top.token_id, top.logprob, top.rank) for top in first.top] == [(A, -0.5, 1), (HALF_1, -1.5, 2)]
    assert (first.top[1].token, first.top[1].token_bytes) == ("\ufffd", b"\xc3")
    assert second.chosen.logprob == float("-inf") and second.top == ()
    assert type(first.top[0].token_id) is int and type(first.top[0].logprob) is float
    choice.finish("length")
    (last,) = await drain(stream)
    assert last.delta_logprobs == []


async def test_logprobs_behind_a_stop_text_are_dropped(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(logprobs=0, stop="b"))
    choice.push([A, B, C], logprobs=[row(A, -1, 1), row(B, -2, 1), row(C, -3, 1)])
    choice.finish(None)
    (out,) = await drain(stream)
    assert out.delta_logprobs is not None
    assert [position.chosen.token_id for position in out.delta_logprobs] == [A, B] == out.delta_token_ids


async def test_outputs_without_logprobs_have_none(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    choice.push([A], logprobs=[row(A, -1, 1)])
    assert (await anext(stream)).delta_logprobs is None


async def test_prompt_logprobs_come_with_the_first_output(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(prompt_logprobs=1), [A, B, C])
    choice.push_prompt_logprobs(2, [row(C, -2, 1, (C, -2))])  # chunks may come in any order
    choice.push_prompt_logprobs(1, [row(B, -1, 3, (A, -0.5))])
    choice.push([D])
    first = await anext(stream)
    choice.push([D])
    second = await anext(stream)
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert [p.chosen.token for p in first.prompt_logprobs[1:] if p] == ["b", "c"]
    assert second.prompt_logprobs is None


async def test_without_tokenizer_there_are_ids_only() -> None:
    stream, choice = make(None, SamplingParams(logprobs=0))
    choice.push([A], logprobs=[row(A, -1, 1)])
    choice.push([EOS], "stop", EOS)
    choice.finish("stop")
    (out,) = await drain(stream)
    assert (out.delta, out.text, out.token_ids, out.finish_reason) == ("", "", [A, EOS], "stop")
    assert out.delta_logprobs is not None and out.delta_logprobs[0].chosen.token_bytes == b""


async def test_outputs_are_plain_records_when_copied(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer)
    choice.push([A, HALF_1, HALF_2])
    out = await anext(stream)
    assert isinstance(out, RequestOutput) and "'aé'" in repr(out)
    for other in (copy.copy(out), copy.deepcopy(out), pickle.loads(pickle.dumps(out))):
        assert type(other) is RequestOutput
        assert (other.text, other.token_ids, other.delta) == ("aé", [A, HALF_1, HALF_2], "aé")
    with pytest.raises(AttributeError):
        out.nothing  # noqa: B018


async def test_streams_leave_nothing_behind(tokenizer: Tokenizer) -> None:
    stream, choice = make(tokenizer, SamplingParams(stop="END"))
    text = choice._text
    before = sys.getrefcount(text)
    for _ in range(100):
        choice.push([A])
        out = await anext(stream)
        assert out.text
    del out
    assert sys.getrefcount(text) == before


async def test_a_late_field_is_made_when_it_is_read() -> None:
    stream = RequestStream("a", 1)
    choice = ChoiceOutput(stream, 0, None, SamplingParams(), [7, 8])
    choice.push([1, 2])
    out = await anext(stream)
    choice.push([3])
    assert (out.request_id, out.index, out.prompt_token_ids, out.token_ids) == ("a", 0, [7, 8], [1, 2])
    assert (out.delta_logprobs, out.prompt_logprobs, out.stop_reason, out.timing) == (None, None, None, None)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        out.nonsense  # noqa: B018
