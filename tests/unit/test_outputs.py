"""Outputs: deltas, coalescing, stop texts, end of choices, readers that leave."""

from __future__ import annotations

import asyncio

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from aioengine.outputs import ChoiceOutput, RequestStream
from aioengine.tokenizer import Tokenizer
from aioengine.types import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer() -> Tokenizer:
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


async def test_unread_deltas_join_and_the_last_output_has_reason_and_usage() -> None:
    stream = RequestStream("r", 1)
    choice = ChoiceOutput(stream, 0, make_tokenizer(), SamplingParams(), [5, 6])
    choice.push([0])
    first = await anext(stream)
    choice.push([1])
    choice.push([2, 3], "length")
    choice.finish("length", num_cached_tokens=1)
    last = await anext(stream)
    assert (first.delta, first.text, first.token_ids, first.finish_reason) == ("a", "a", [0], None)
    assert (last.delta, last.text, last.delta_token_ids) == ("bcd", "abcd", [1, 2, 3])
    assert last.finish_reason == "length"
    assert last.usage is not None and last.usage.total_tokens == 6
    assert [out async for out in stream] == []


async def test_cancelled_reader_closes_the_request() -> None:
    closed: list[RequestStream] = []
    stream = RequestStream("r", 1, closed.append)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled() and closed == [stream] and stream.is_closed
