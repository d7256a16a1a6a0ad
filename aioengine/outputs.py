"""What a request has produced and its caller has not read yet.

`ChoiceOutput` is the output state of one choice: tokens, text, log-probabilities. `RequestStream` is the
async iterator that a caller reads; it joins the choices of a request. Everything here runs on the event
loop's thread. The step loop writes with `push()` and `finish()`, which do not wait and keep at most one
unread `RequestOutput` per choice, so that a slow reader costs nobody anything (deltas join).
Who runs the request is not known here: closing a stream early calls `on_close`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, cast

from aioengine.types import (
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    RequestTiming,
    SamplingParams,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    import numpy as np

    from aioengine.tokenizer import Tokenizer


class RowLogprobs(Protocol):
    """Log-probabilities of one row as the sampler hands them over."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top_ids(self) -> np.ndarray: ...
    @property
    def top_logprobs(self) -> np.ndarray: ...


class StreamedOutput(RequestOutput):
    """A `RequestOutput` whose fields are made when first read, apart from what is new.

    `text` and `token_ids` grow with the output: building them for every delta would cost more than the delta
    itself. And one is made per token and reader, who wants the delta and little else.
    """

    __slots__ = ("_choice", "_num_bytes", "_num_tokens")

    def __init__(self, choice: ChoiceOutput, delta: str, delta_token_ids: list[int], num_bytes: int) -> None:
        self._choice = choice
        self._num_bytes = num_bytes
        self._num_tokens = len(choice._token_ids)
        self.delta = delta
        self.delta_token_ids = delta_token_ids
        self.finish_reason = None
        self.usage = None

    def __getattr__(self, name: str) -> object:
        # Reached only for a field that is not set yet.
        make = _LATE_FIELDS.get(name)
        if make is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = make(self)
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles are plain records."""
        return RequestOutput, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


_LATE_FIELDS: dict[str, Callable[[StreamedOutput], object]] = {
    "request_id": lambda out: out._choice._stream.request_id,
    "index": lambda out: out._choice.index,
    "text": lambda out: out._choice._text_until(out._num_bytes),
    "token_ids": lambda out: out._choice._token_ids[: out._num_tokens],
    "prompt_token_ids": lambda out: out._choice._prompt_token_ids,
    **dict.fromkeys(("delta_logprobs", "prompt_logprobs", "stop_reason", "timing"), lambda _: None),
}


class ChoiceOutput:
    """One choice: what it has generated, and what of it is unread.

    In every settled step the loop does::

        stop_text = choice.push(new_ids, request.finish_reason, request.stop_token_id, rows)
        if stop_text is not None:
            scheduler.finish(request, "stop")
        if stop_text is not None or request.finish_reason is not None:
            choice.finish(request.finish_reason, num_cached_tokens=request.num_cached_tokens, timing=timing)

    Without a tokenizer the text stays empty.
    """

    __slots__ = (
        "_eos_token_ids",
        "_include_stop",
        "_is_queued",
        "_num_delivered_tokens",
        "_prompt_logprobs",
        "_prompt_token_ids",
        "_rows",
        "_stop_token_id",
        "_stops",
        "_stream",
        "_text",
        "_timing",
        "_token_ids",
        "_tokenizer",
        "finish_reason",
        "index",
        "num_cached_tokens",
        "num_tokens",
        "stop_reason",
    )

    def __init__(
        self,
        stream: RequestStream,
        index: int,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_token_ids: list[int],
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`eos_token_ids` are the model's own end tokens; ending on one of them gives no stop_reason."""
        self._stream: RequestStream = stream
        self.index: int = index
        self._tokenizer = tokenizer
        self._text = None if tokenizer is None else tokenizer.text_stream(params)
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._eos_token_ids = () if params.ignore_eos else eos_token_ids
        self._prompt_token_ids: list[int] = prompt_token_ids
        self._token_ids: list[int] = []
        self.num_tokens = 0
        """Tokens generated so far, a closing stop token included."""
        self._num_delivered_tokens = 0
        self._rows: list[RowLogprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(prompt_token_ids)
        self._stop_token_id: int | None = None
        self._timing: RequestTiming | None = None
        self._is_queued = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        stream._choices.append(self)

    def push(
        self,
        new_ids: list[int],
        finish_reason: str | None = None,
        stop_token_id: int | None = None,
        logprobs: Sequence[RowLogprobs] | None = None,
    ) -> str | None:
        """Takes the tokens of one step and wakes the reader; returns the stop text they complete, if any.

        `finish_reason` and `stop_token_id` are the request's after the step: with "stop" and an id, the
        last token is a closing one and gets no text unless the caller asked for it. Tokens behind a stop
        text are dropped. `logprobs` has one entry per token.
        """
        stream = self._stream
        if self.finish_reason is not None or stream.is_closed:
            return None
        stop_text = None
        text = self._text
        if text is not None:
            is_closed = finish_reason == "stop" and stop_token_id is not None and not self._include_stop
            # INV-63: the decoder never sees the closing token
            num_used = text.push(new_ids[:-1] if is_closed else new_ids)
            if self._stops and text.stop_index >= 0:
                stop_text = self._stops[text.stop_index]
                new_ids = new_ids[:num_used]
        if finish_reason == "stop":
            self._stop_token_id = stop_token_id
        if self._rows is not None and logprobs is not None:
            self._rows.extend(logprobs[: len(new_ids)])
        self._token_ids += new_ids
        self.num_tokens += len(new_ids)
        if not self._is_queued:
            self._is_queued = True
            stream._ready.append(self)
            waiter = stream._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        return stop_text

    def push_prompt_logprobs(self, start: int, rows: Sequence[RowLogprobs]) -> None:
        """Sets the log-probabilities of the prompt tokens from index `start` (1 or more) on.

        They travel with the first output of the choice, so all of them must be here before its first token.
        """
        if self._prompt_logprobs is not None:
            for position, row in enumerate(rows, start):
                self._prompt_logprobs[position] = self._position_logprobs(row)

    def finish(
        self,
        reason: str | None = None,
        *,
        num_cached_tokens: int = 0,
        timing: RequestTiming | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Ends the choice: held-back text is released and the last output gets its finish reason.

        A stop text that was found makes the reason "stop". When the last choice ends, its output also gets
        `usage`; by default that counts this stream's prompt once and the tokens of all its choices.
        Ending a choice twice does nothing, and so does ending it after `stream.fail()`: then the error is
        what the reader gets in place of a last output.
        """
        stream = self._stream
        if self.finish_reason is not None or stream._error is not None:
            return
        text = self._text
        if text is not None and text.stop_index >= 0:
            self.finish_reason = "stop"
            self.stop_reason = self._stops[text.stop_index]
        else:
            assert reason in ("stop", "length", "abort", "error"), reason
            self.finish_reason = cast(FinishReason, reason)
            if reason == "stop" and self._stop_token_id not in self._eos_token_ids:
                self.stop_reason = self._stop_token_id
            if text is not None:
                text.finish()
        self.num_cached_tokens = num_cached_tokens
        self._timing = timing
        stream._num_unfinished -= 1
        if stream._num_unfinished == 0:
            stream._usage = usage or stream._count_usage()
        if not self._is_queued and not stream.is_closed:
            self._is_queued = True
            stream._wake(self)

    def _take(self) -> StreamedOutput:
        """Everything unread as one output; called by the stream when the reader comes."""
        self._is_queued = False
        text = self._text
        if text is None:
            delta, num_bytes = "", 0
        else:
            delta = text.take()
            num_bytes = text.num_taken_bytes
        num_delivered = self._num_delivered_tokens
        new_ids = self._token_ids[num_delivered:]
        out = StreamedOutput(self, delta, new_ids, num_bytes)
        if self._rows is not None:
            out.delta_logprobs = [self._position_logprobs(row) for row in self._rows]
            self._rows.clear()
        if self._prompt_logprobs is not None and num_delivered == 0:
            out.prompt_logprobs = self._prompt_logprobs
            self._prompt_logprobs = None
        self._num_delivered_tokens = num_delivered + len(new_ids)
        if self.finish_reason is not None:
            out.finish_reason = self.finish_reason
            out.stop_reason = self.stop_reason
            out.timing = self._timing
        return out

    def _text_until(self, num_bytes: int) -> str:
        return "" if self._text is None else self._text.text_until(num_bytes)

    def _position_logprobs(self, row: RowLogprobs) -> PositionLogprobs:
        top = tuple(
            self._token_logprob(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(row.top_ids.tolist(), row.top_logprobs.tolist(), strict=True), 1
            )
        )
        return PositionLogprobs(self._token_logprob(int(row.token_id), float(row.logprob), int(row.rank)), top)

    def _token_logprob(self, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        if self._tokenizer is None:
            return TokenLogprob(token_id, logprob, rank, "", b"")
        token_bytes = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id, logprob, rank, token_bytes.decode(errors="replace"), token_bytes)


class RequestStream:
    """The outputs of one request, as an async iterator for one reader.

    Yields a `RequestOutput` whenever a choice has something new, in the order in which the choices became
    ready; ends after the last one of each choice. A failure of the request is raised once everything that
    came before it has been read.

    Leaving early ends the request: cancel the waiting task, `await stream.abort()`, or use
    `async with stream:`. Leaving a bare `async for` with `break` does not close it, as with any iterator.
    """

    __slots__ = (
        "_choices",
        "_error",
        "_loop",
        "_num_unfinished",
        "_on_close",
        "_ready",
        "_usage",
        "_waiter",
        "is_closed",
        "request_id",
    )

    def __init__(
        self, request_id: str, num_choices: int, on_close: Callable[[RequestStream], None] | None = None
    ) -> None:
        """Made on the loop that will read it. `on_close(stream)` is called once, synchronously, if the
        reader leaves before the end: it aborts whatever still runs for this stream."""
        self.request_id: str = request_id
        self.is_closed = False
        """Whether the reader has left; nothing pushed from then on is kept."""
        self._choices: list[ChoiceOutput] = []
        self._num_unfinished = num_choices
        self._on_close = on_close
        self._ready: deque[ChoiceOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._error: BaseException | None = None
        self._usage: Usage | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended or the request has failed; unread outputs may remain."""
        return self._num_unfinished == 0 or self._error is not None

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error, raised after what is already there has been read."""
        if self.is_finished or self.is_closed:
            return
        self._error = error
        self._wake(None)

    def close(self) -> None:
        """Drops what is unread and, if the request still runs, has it aborted. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._ready.clear()
        on_close, self._on_close = self._on_close, None
        if on_close is not None and not self.is_finished:
            on_close(self)
        self._wake(None)

    async def aclose(self) -> None:
        """`close()`, under the name that `contextlib.aclosing` and async generators use."""
        self.close()

    async def abort(self) -> None:
        """Ends the request now; a reader that waits sees the end of the iteration."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamedOutput:
        while not self._ready:
            if self._error is not None and not self.is_closed:
                raise self._error
            if self._num_unfinished == 0 or self.is_closed:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(f"request {self.request_id} is already being read by another task")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                self._waiter = None
        out = self._ready.popleft()._take()
        if self._num_unfinished == 0 and not self._ready:
            out.usage = self._usage
        return out

    def _wake(self, choice: ChoiceOutput | None) -> None:
        if choice is not None:
            self._ready.append(choice)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _count_usage(self) -> Usage:
        choices = self._choices
        return Usage(
            prompt_tokens=len(choices[0]._prompt_token_ids),
            completion_tokens=sum(choice.num_tokens for choice in choices),
            # What a later choice reads of the prompt may have been computed by an earlier one.
            cached_tokens=min(choice.num_cached_tokens for choice in choices),
        )
