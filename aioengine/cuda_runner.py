"""Runs steps on a GPU: `launch` enqueues everything a step needs and returns; an eventfd resolves its future.

No thread waits for the device. On the compute stream: the step buffer's copy from a pinned ring, the forward
pass (`graphs.py`), sampling, the acceptance of drafts, and the chosen tokens' scatter by row, where the next step
finds them. A side stream waits for an event at the end of the step, copies token ids and statuses to pinned memory
and signals; it never holds up the next step. `completion.py` then has the oldest future resolved, so results come in
launch order. All methods run on the loop's thread, except the constructor and `warm_up`, which the loader calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.buckets import StepFacts
from aioengine.completion import CompletionWatch
from aioengine.config import CaptureTime
from aioengine.device import Device, MemoryReport
from aioengine.errors import EngineClosed, EngineDead
from aioengine.graphs import StepForward, StepOutput
from aioengine.kernels.choose import DrawTable
from aioengine.kv_connector import KVConnector, Store
from aioengine.runner import FAILURES, PROMPT_SLICE, StepResult, prompt_targets
from aioengine.sampler import NOT_FINITE, OK, PendingLogprobs, RowLogprobs, Sampler, SamplingPlan

if TYPE_CHECKING:
    from aioengine.fastcore.step_buffer import StepPlan
    from aioengine.models import Model

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
"""How often a pending step is asked whether the device has failed, which no signal would tell."""


@dataclass(slots=True)
class _Slot:
    """What one step in flight owns until its result is read."""

    words: torch.Tensor
    """The step buffer, pinned."""
    packed: torch.Tensor
    """[2, max_samples] on the device: the side stream reads it while the next step runs."""
    host_packed: torch.Tensor
    """The same, pinned."""
    draws: DrawTable
    """How each row chooses, pinned: copied to the device when a row begins to draw, or one that drew no longer does."""
    reached: torch.cuda.Event
    """The step's end on the compute stream."""
    arrived: torch.cuda.Event
    """Its results lie in `host_packed`."""
    is_free: bool = True


@dataclass(slots=True)
class _PromptScores:
    """Log-probabilities of one row's chunk, on their way to the host."""

    plan_row: int
    parts: list[PendingLogprobs]


@dataclass(slots=True)
class _Pending:
    """A launched step."""

    done: asyncio.Future[StepResult]
    slot: _Slot
    num_samples: int
    sample_plan_rows: np.typing.NDArray[np.int32]
    logprobs: PendingLogprobs | None
    lost_blocks: Sequence[int] = ()
    prompt_scores: list[_PromptScores] = field(default_factory=list)


class CudaRunner:
    """Runs steps on one GPU; owns its device, streams, graphs and pool until `close()`.

    Args:
        max_in_flight: steps launched and not yet resolved at most.
        max_chunk: most prompt tokens of one request in a step.
        poll_us: how long a step that is due is asked for, see `CompletionWatch`.
        capture: when graphs are captured that no step has needed yet.
        connector: keeps blocks outside the pool; its loads are enqueued eagerly in front of a step, its stores
            between two steps, so that no graph knows of them. Closed with the runner.
    """

    def __init__(
        self,
        model: Model,
        forward: StepForward,
        device: Device,
        memory: MemoryReport,
        stream: torch.cuda.Stream,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_in_flight: int,
        max_chunk: int,
        poll_us: int = 0,
        capture: CaptureTime = "first use",
        connector: KVConnector | None = None,
    ) -> None:
        self.memory = memory
        self.connector = connector
        self._model: Model | None = model
        self._forward: StepForward | None = forward
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._max_chunk = max_chunk
        self._capture = capture
        self._idle_work: Iterator[None] | None = None
        self._compute = stream
        self._side = torch.cuda.Stream(stream.device)
        with torch.cuda.stream(stream):
            self._sampler: Sampler | None = Sampler(vocab_size, max_num_seqs, stream.device)
            self._slots = [self._make_slot(forward) for _ in range(max_in_flight + 1)]
        stream.synchronize()
        self._next_slot = 0
        self._pending: deque[_Pending] = deque()
        self._completion = CompletionWatch(self._resolve_oldest, poll_us)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._check: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._is_closed = False

    def _make_slot(self, forward: StepForward) -> _Slot:
        shape = forward.packed.shape
        return _Slot(
            torch.empty(len(forward.buffer), dtype=torch.int32, pin_memory=True),
            torch.zeros(shape, dtype=torch.int32, device=self._compute.device),
            torch.empty(shape, dtype=torch.int32, pin_memory=True),
            DrawTable.zeros(self._max_num_seqs, torch.device("cpu"), pin_memory=True),
            torch.cuda.Event(),
            torch.cuda.Event(),
        )

    def warm_up(self) -> None:
        """Captures what the level wants captured at start; the rest is left to idle time, or to its first use."""
        forward = self._forward
        assert forward is not None
        if not forward.buckets.sizes:
            self._capture = "never"
        with torch.no_grad(), torch.cuda.stream(self._compute):
            self._idle_work = self._prepare_all(forward)
            if self._capture == "idle":
                forward.waits_for_idle_time = True
                for bucket in forward.buckets.at_start():
                    forward.prepare(bucket)
            elif self._capture == "start":
                for _ in self._idle_work:
                    pass
            forward.warm_copies()
            self._compute.synchronize()

    def _prepare_all(self, forward: StepForward) -> Iterator[None]:
        """Everything that steps may come to need and that is not prepared yet, a piece at a time."""
        yield from forward.warm_long_chunks(self._max_chunk)
        for bucket in forward.buckets.ahead():
            if not forward.is_prepared(bucket):
                forward.prepare(bucket)
                yield

    @property
    def has_idle_work(self) -> bool:
        """Whether something is left that `use_idle_time` would do."""
        return self._idle_work is not None and self._capture == "idle" and self._failure is None

    def use_idle_time(self) -> bool:
        """Prepares one thing that is still missing; False if there was none. Called while no step is in flight."""
        if not self.has_idle_work or self._idle_work is None or self._pending or self._is_closed:
            return False
        try:
            with torch.no_grad(), torch.cuda.stream(self._compute):
                next(self._idle_work)
        except StopIteration:
            self._idle_work = None
        except torch.OutOfMemoryError as error:
            logger.warning("no graph is captured ahead any more: %s", error)
            self._idle_work = None
        except Exception as error:
            self._fail(error)
        return self.has_idle_work

    def launch(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[StepResult] = loop.create_future()
        if self._is_closed:
            done.set_exception(EngineClosed("the runner is closed"))
        elif self._failure is not None:
            done.set_exception(_dead(self._failure))
        else:
            self._watch(loop)
            try:
                with torch.no_grad(), torch.cuda.stream(self._compute):
                    self._pending.append(self._launch(plan, done))
            except Exception as error:
                self._fail(error)
                done.set_exception(_dead(error))
        return done

    def store(self, work: Store) -> None:
        if self._is_closed or self._failure is not None:
            return
        try:
            with torch.no_grad(), torch.cuda.stream(self._compute):
                work()
        except Exception as error:
            self._fail(error)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._drain()
            if self._check is not None:
                self._check.cancel()
            with contextlib.suppress(RuntimeError):  # a device that has failed fails here again
                self._compute.synchronize()
                self._side.synchronize()
            self._completion.close()
            if self.connector is not None:
                self.connector.close()
            if self._forward is not None:
                self._forward.close()
            self._forward = self._model = self._sampler = self._idle_work = None
            self._slots.clear()
            self._device.close()

    async def _drain(self) -> None:
        if self._pending:
            await asyncio.wait([pending.done for pending in self._pending])

    # ---- launching --------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan, done: asyncio.Future[StepResult]) -> _Pending:
        forward, sampler, model = self._forward, self._sampler, self._model
        assert forward is not None and sampler is not None and model is not None
        slot = self._slots[self._next_slot]
        if not slot.is_free:
            raise RuntimeError(f"more than {len(self._slots)} steps in flight")
        slot.is_free = False
        self._next_slot = (self._next_slot + 1) % len(self._slots)

        num_words = len(plan.buffer)
        slot.words.numpy()[:num_words] = plan.buffer
        forward.buffer[:num_words].copy_(slot.words[:num_words], non_blocking=True)
        for row in plan.left_rows:
            sampler.leave(row)
        for request in plan.joined:
            ids, prompt_len = request.token_ids(), request.num_prompt_tokens
            assert isinstance(request.sampling, SamplingPlan), request.sampling
            sampler.join(request.row, request.sampling, ids[:prompt_len], ids[prompt_len:])
        changed = sampler.changed_draws()
        if changed is not None:
            for column, values in zip(slot.draws.columns(), changed, strict=True):
                column.numpy()[:] = values
            forward.draws.copy_(slot.draws)

        lost_blocks = self.connector.load(plan.loads)() if self.connector is not None and plan.loads else ()
        facts = StepFacts.of(plan.buffer)
        num_samples = facts.num_samples
        choice = sampler.choice(facts.sample_rows, facts.sample_num_outputs)
        output = forward.run(facts, choice=choice)
        pending = _Pending(done, slot, num_samples, facts.sample_plan_rows, None, lost_blocks)
        if num_samples:
            if not output.has_chosen:
                inputs, size = output.inputs, forward.buckets.sample_size(num_samples)
                rows = output.hidden.index_select(0, output.sample_indices[:size])
                if choice:
                    num_outputs = inputs.sample_num_outputs[:size]
                    forward.choose(rows, inputs.sample_rows[:size], num_outputs, output.ctx, choice)
                else:
                    logits = model.logits(rows, output.ctx)[:num_samples]
                    # Drafts in flight may be rejected, of which only the device will know.
                    positions = inputs.sample_num_outputs[:num_samples] if forward.buckets.num_drafts else None
                    sampled = sampler.sample(logits, facts.sample_rows, facts.sample_num_outputs, positions)
                    device_rows = inputs.sample_rows[:num_samples].long()
                    forward.last_token.index_copy_(0, device_rows, sampled.token_ids)
                    forward.packed[:, :num_samples].copy_(sampled.packed)
                    pending.logprobs = sampled.logprobs
                if facts.num_drafts:
                    forward.accept(facts.num_rows)
            slot.packed.copy_(forward.packed)
        if facts.prompt_spans:
            pending.prompt_scores = self._score_prompts(plan, facts, output, sampler, model)
        slot.reached.record(self._compute)
        self._side.wait_event(slot.reached)
        with torch.cuda.stream(self._side):
            if num_samples:
                slot.host_packed.copy_(slot.packed, non_blocking=True)
            if pending.logprobs is not None:
                pending.logprobs = pending.logprobs.to_host()
            for score in pending.prompt_scores:
                score.parts = [part.to_host() for part in score.parts]
        slot.arrived.record(self._side)
        self._completion.launched(self._side.cuda_stream, facts.num_tokens.bit_length(), slot.arrived.query)
        return pending

    def _score_prompts(
        self, plan: StepPlan, facts: StepFacts, output: StepOutput, sampler: Sampler, model: Model
    ) -> list[_PromptScores]:
        """Log-probabilities of prompt tokens, a slice of positions at a time; read when the step is done."""
        targets = prompt_targets(plan)
        scores = []
        for plan_row, first in facts.prompt_spans:
            target = targets[plan_row]
            # as many logits as a step of decodes has, unless all of them are to be kept
            size = PROMPT_SLICE if target.count < 0 else max(PROMPT_SLICE, self._max_num_seqs)
            parts = []
            for start in range(0, len(target.ids), size):
                ids = target.ids[start : start + size]
                rows = output.hidden[first + start : first + start + len(ids)]
                parts.append(sampler.prompt_logprobs(model.logits(rows, output.ctx), ids, target.count))
            scores.append(_PromptScores(plan_row, parts))
        return scores

    # ---- completion -------------------------------------------------------------------------------------

    @property
    def polled_s(self) -> float:
        return self._completion.polled_s

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._completion.attach(loop)
        if self._check is None:
            self._check = loop.call_later(CHECK_INTERVAL_S, self._on_check)

    def _resolve_oldest(self) -> None:
        if self._pending:
            self._resolve(self._pending.popleft())

    def _on_check(self) -> None:
        """While steps are pending, asks the device for an error; it signals nothing after one."""
        self._check = None
        if not self._pending or self._loop is None:
            return
        try:
            self._pending[0].slot.reached.query()
        except RuntimeError as error:
            self._fail(error)
            return
        self._check = self._loop.call_later(CHECK_INTERVAL_S, self._on_check)

    def _resolve(self, pending: _Pending) -> None:
        try:
            result = _read(pending)
        except Exception as error:
            self._pending.appendleft(pending)
            self._fail(error)
            return
        pending.slot.is_free = True
        if not pending.done.done():
            pending.done.set_result(result)

    def _fail(self, error: BaseException) -> None:
        """Fails every step in flight and all to come."""
        if self._failure is None:
            self._failure = error
        self._completion.forget()
        while self._pending:
            pending = self._pending.popleft()
            if not pending.done.done():
                pending.done.set_exception(_dead(self._failure))


def _read(pending: _Pending) -> StepResult:
    """The result of a step whose copies have arrived."""
    token_ids, status = pending.slot.host_packed.numpy()[:, : pending.num_samples].copy()
    result = StepResult(token_ids, lost_blocks=pending.lost_blocks)
    if status.any():
        rows = pending.sample_plan_rows
        result.failures = {int(rows[i]): FAILURES[int(status[i])] for i in np.flatnonzero(status != OK)}
    if pending.logprobs is not None:
        found = pending.logprobs.resolve()
        result.logprobs = {key: value for key, value in found.items() if value is not None and token_ids[key] >= 0}
    if pending.prompt_scores:
        result.prompt_logprobs = {}
        for score in pending.prompt_scores:
            entries = _entries(score.parts)
            if None in entries:
                result.failures = (result.failures or {}) | {score.plan_row: FAILURES[NOT_FINITE]}
            result.prompt_logprobs[score.plan_row] = [entry for entry in entries if entry is not None]
    return result


def _entries(parts: Sequence[PendingLogprobs]) -> list[RowLogprobs | None]:
    return [entry for part in parts for entry in part.resolve().values()]


def _dead(error: BaseException) -> EngineDead:
    dead = EngineDead(f"the device failed while running a step: {type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead
