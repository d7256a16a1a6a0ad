"""The requests that live: from admission until their last choice has ended.

Puts prepared requests into the scheduler, settles completed steps (tokens -> scheduler -> text -> stream), and
is the one place that aborts. Blocks belong to the scheduler, text to `outputs.py`; this joins the two and
counts. Everything here runs on the event loop's thread. Called by `engine.py`; `settle()` by `loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioengine.errors import ContextLengthExceeded, EngineError
from aioengine.fastcore.request import Request, Siblings
from aioengine.fastcore.scheduler import Scheduler
from aioengine.intake import PreparedRequest
from aioengine.metrics import EngineMetrics, Histogram
from aioengine.outputs import ChoiceOutput, RequestStream
from aioengine.types import RequestTiming

if TYPE_CHECKING:
    from aioengine.fastcore.key_tails import Media
    from aioengine.fastcore.step_buffer import StepPlan
    from aioengine.outputs import RowLogprobs
    from aioengine.runner import StepResult
    from aioengine.tokenizer import Tokenizer


logger = logging.getLogger(__name__)

PREEMPTION_WARNING_S = 10.0
"""Least time between two warnings about preemptions."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request with all its choices. `label` is the caller's name for it and need not be unique."""

    label: str
    stream: RequestStream
    choices: list[LiveChoice] = field(default_factory=list)
    num_open: int = 0


@dataclass(slots=True, eq=False)
class LiveChoice:
    """One choice: what the scheduler knows of it, what its reader gets, and when tokens came."""

    owner: LiveRequest
    output: ChoiceOutput
    request: Request = field(init=False)
    """Set as soon as it is made; the two refer to each other."""
    is_open: bool = True
    first_token_s: float | None = None
    last_token_s: float = 0.0


class _Gaps:
    """Times between tokens in one step. Nearly all choices had their last token in the same step before, so that
    neighbours with equal gaps are counted together and booked once."""

    __slots__ = ("_histogram", "_now_s", "count", "last_s", "num_booked")

    def __init__(self, histogram: Histogram, now_s: float) -> None:
        self._histogram = histogram
        self._now_s = now_s
        self.last_s = now_s
        """When the choices that are being counted had their last token."""
        self.count = 0
        self.num_booked = 0
        """Choices counted and booked."""

    def turn_to(self, last_s: float) -> None:
        """Counts a choice whose last token came at another time than that of those before it."""
        self.book()
        self.last_s, self.count = last_s, 1

    def book(self) -> None:
        """Moves what was counted into the histogram."""
        if self.count:
            self._histogram.observe(self._now_s - self.last_s, self.count)
            self.num_booked += self.count
            self.count = 0

    def book_together(self, count: int) -> None:
        """Tokens that came in one step with the token of their choice before them, at no distance from it.

        So gaps are as many as tokens and add up to the time; vLLM counts one gap for all tokens of a step.
        """
        if count:
            self._histogram.observe(0.0, count)


class LiveRequests:
    """All live requests of one engine.

    Args:
        tokenizer: makes text of tokens; None leaves texts empty.
        eos_token_ids: the model's own end tokens.
        take_back: takes out of the cache what a request has computed whose row failed; nothing is settled then.
        clock: seconds that only go forward; of another kind in tests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        *,
        take_back: Callable[[Request], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._take_back = take_back
        self._clock = clock
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._live: dict[RequestStream, LiveRequest] = {}
        self._num_added = 0
        self._num_preemptions = 0
        self._warned_s = -math.inf
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._live)

    async def wait_empty(self) -> None:
        """Waits until no request lives."""
        await self._empty.wait()

    def add(
        self,
        prepared: PreparedRequest,
        label: str,
        *,
        priority: int,
        cache_salt: str | None,
        arrived_s: float,
        media: Media = (),
        prewarms: bool = False,
    ) -> RequestStream:
        """Queues a request and returns the stream of its outputs; one that prewarms computes for the cache alone.

        `media` as in `Request`; no caller has any before there are multimodal models.

        Raises:
            ContextLengthExceeded: the KV pool can never hold it; nothing was queued.
        """
        params, prompt_ids = prepared.params, prepared.prompt_token_ids
        stream = RequestStream(label, len(prepared.plans), self._closed_by_reader)
        live = LiveRequest(label, stream)
        # Choices compute their prompt once, unless each must have the logits of all its positions.
        wants_prompt_logits = params.prompt_logprobs is not None
        siblings = Siblings() if len(prepared.plans) > 1 and not wants_prompt_logits else None
        for index, plan in enumerate(prepared.plans):
            output = ChoiceOutput(stream, index, self._tokenizer, params, prompt_ids, eos_token_ids=self._eos_token_ids)
            choice = LiveChoice(live, output)
            self._num_added += 1
            choice.request = Request(
                f"{label}/{self._num_added}",
                prepared.packed_token_ids,
                max_tokens=prepared.max_tokens,
                min_tokens=params.min_tokens,
                eos_token_ids=self._eos_token_ids,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
                priority=priority,
                arrival_s=arrived_s,
                cache_salt=(cache_salt or "").encode("utf-8", "surrogatepass"),
                wants_prompt_logits=wants_prompt_logits,
                sampling=plan,
                takes_drafts=plan.takes_drafts,
                stream=choice,
                siblings=siblings,
                media=media,
                prewarms=prewarms,
            )
            live.choices.append(choice)
        try:
            for choice in live.choices:
                self._scheduler.add(choice.request)
        except ValueError as error:  # equal prompts: the first one raises or none does
            raise ContextLengthExceeded(str(error), param="prompt") from None
        live.num_open = len(live.choices)
        self._live[stream] = live
        self._empty.clear()
        self._metrics.requests_received += 1
        self._metrics.prompt_tokens += len(prompt_ids)
        return stream

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Books a completed step: new tokens into requests, texts and streams; ends what is finished."""
        now_s = self._clock()
        if result.prompt_logprobs:
            self._book_prompt_logprobs(plan, result)
        rows = _rows_by_request(plan, result) if result.logprobs else None
        failures = result.failures or {}
        for row in failures:
            self._take_back(plan.requests[row])
        changed = self._scheduler.update(plan, result.token_ids, result.lost_blocks)
        for row, why in failures.items():  # a row may fail before it samples anything
            if row in plan.dropped_rows and row not in (result.prompt_logprobs or ()):
                continue  # it is computed anew, and fails again if that was no accident; prompts are scored once
            failed = _choice_of(plan.requests[row])
            if failed.is_open:
                self._fail_choice(failed, EngineError(why))
        # Here every instruction counts: this runs for each token of each request.
        gaps = _Gaps(self._metrics.inter_token_latency, now_s)
        num_new = num_first = 0
        for request in changed:
            choice: LiveChoice = request.stream
            if not choice.is_open:
                continue
            output = choice.output
            new_ids = request.output_ids_from(output.num_tokens)
            if new_ids:
                num_new += len(new_ids)
                if choice.first_token_s is None:
                    num_first += 1
                    self._book_first_token(choice, now_s)
                elif choice.last_token_s == gaps.last_s:
                    gaps.count += 1
                else:
                    gaps.turn_to(choice.last_token_s)
                choice.last_token_s = now_s
            reason = request.finish_reason
            # `request.stop_token_id` is None for the model's own end tokens; a closing token is the last one.
            stop_id = new_ids[-1] if reason == "stop" else None
            stop_text = output.push(new_ids, reason, stop_id, rows.get(request) if rows else None)
            if stop_text is not None:
                num_new -= len(request.output_ids_from(output.num_tokens))  # those behind the stop text
                if reason is None:
                    self._scheduler.finish(request, "stop")
                reason = "stop"
            if reason is not None:
                self._end_choice(choice, reason, now_s)
        self._metrics.generation_tokens += num_new
        gaps.book()
        gaps.book_together(num_new - num_first - gaps.num_booked)
        if self._num_preempted_for_blocks() != self._num_preemptions:
            self._warn_of_preemptions(now_s)

    def abort_label(self, label: str) -> int:
        """Aborts every live request with this label; returns how many there were."""
        found = [live for live in self._live.values() if live.label == label]
        for live in found:
            self._abort(live)
        return len(found)

    def fail_all(self, error: EngineError) -> None:
        """Ends every live request with `error`, raised to its reader."""
        for live in list(self._live.values()):
            live.stream.fail(error)
            self._abort(live, "error")

    # ---- inside -----------------------------------------------------------------------------------------

    def _closed_by_reader(self, stream: RequestStream) -> None:
        live = self._live.get(stream)
        if live is not None:
            self._abort(live)

    def _abort(self, live: LiveRequest, reason: str = "abort") -> None:
        now_s = self._clock()
        for choice in live.choices:
            if choice.is_open:
                self._scheduler.finish(choice.request, reason)
                self._end_choice(choice, reason, now_s)

    def _fail_choice(self, choice: LiveChoice, error: EngineError) -> None:
        choice.owner.stream.fail(error)
        self._abort(choice.owner, "error")

    def _end_choice(self, choice: LiveChoice, reason: str, now_s: float) -> None:
        """The one place where a choice ends: exactly one final output, and the counters."""
        request, live, metrics = choice.request, choice.owner, self._metrics
        choice.is_open = False
        timing = RequestTiming(request.arrival_s, request.scheduled_s, choice.first_token_s, now_s)
        choice.output.finish(reason, num_cached_tokens=request.num_cached_tokens, timing=timing)
        metrics.finished[choice.output.finish_reason or reason] += 1
        metrics.request_latency.observe(now_s - request.arrival_s)
        num_tokens = choice.output.num_tokens
        if choice.first_token_s is not None and num_tokens > 1:
            metrics.time_per_output_token.observe((choice.last_token_s - choice.first_token_s) / (num_tokens - 1))
        live.num_open -= 1
        if live.num_open == 0:
            del self._live[live.stream]
            if not self._live:
                self._empty.set()

    def _warn_of_preemptions(self, now_s: float) -> None:
        """Says what to do about preemptions (checklist C20), at most every ten seconds."""
        if now_s - self._warned_s < PREEMPTION_WARNING_S:
            return
        total = self._num_preempted_for_blocks()
        logger.warning(
            "the KV pool is full: %s preempted and will be recomputed (%d in all); a larger pool or a smaller "
            "--max-num-seqs avoids that",
            "1 request was" if total - self._num_preemptions == 1 else f"{total - self._num_preemptions} requests were",
            total,
        )
        self._num_preemptions, self._warned_s = total, now_s

    def _num_preempted_for_blocks(self) -> int:
        # Making way for an urgent request is what its priority is for, a forced reset is meant, and a load that
        # failed has nothing to do with the pool: nothing to warn of.
        scheduler = self._scheduler
        return (
            scheduler.num_preemptions_total
            - scheduler.num_urgent_preemptions_total
            - scheduler.num_reset_preemptions_total
            - scheduler.num_load_preemptions_total
        )

    def _book_first_token(self, choice: LiveChoice, now_s: float) -> None:
        metrics, request = self._metrics, choice.request
        choice.first_token_s = now_s
        metrics.time_to_first_token.observe(now_s - request.arrival_s)
        if request.scheduled_s is not None:
            metrics.queue_time.observe(request.scheduled_s - request.arrival_s)

    def _book_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for position, rows in (result.prompt_logprobs or {}).items():
            request = plan.requests[position]
            choice = _choice_of(request)
            if choice.is_open:
                # Row i of the chunk predicts the prompt token after it.
                choice.output.push_prompt_logprobs(plan.num_computed(position) + 1, rows)


def _choice_of(request: Request) -> LiveChoice:
    choice = request.stream
    assert isinstance(choice, LiveChoice)
    return choice


def _rows_by_request(plan: StepPlan, result: StepResult) -> dict[Request, list[RowLogprobs]]:
    assert result.logprobs is not None
    rows: dict[Request, list[RowLogprobs]] = {}
    for index, row in result.logprobs.items():
        rows.setdefault(plan.sample_requests[index], []).append(row)
    return rows
