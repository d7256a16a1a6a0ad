"""Runs steps: a plan goes in, a future of its results comes out.

`Runner` is what the step loop sees of any device. `CpuRunner` runs steps one after another in one worker
thread; a CUDA runner enqueues copies, graph replays and sampling on streams in `launch` itself and lets an
eventfd resolve the same future, without a thread. Nothing here schedules or knows requests beyond the
moment of launch: what a step needs of them is read then, on the loop's thread, because the worker runs later
and must not look at objects that the scheduler changes meanwhile.

Who calls what: the loop's thread calls `launch` and `close`; the worker thread alone touches the model, the
sampler, the rows and the KV pool. Steps run in the order of their launches, so a step may be launched before
the one before it has completed; tokens not known by then are -1 in its buffer and are filled in from the row.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from aioengine.batch import HostRows, HostStep, PromptSpan, scored_rows
from aioengine.device import Device, ForwardPass, MemoryReport
from aioengine.errors import EngineClosed, EngineDead
from aioengine.kernels.block_copy import copy_blocks_ref
from aioengine.kv_connector import KVConnector, Load, Store
from aioengine.layers.context import AttentionMetadata, StepContext
from aioengine.sampler import NOT_FINITE, NOTHING_ALLOWED, OK, RowLogprobs, Sampler, SamplingPlan

if TYPE_CHECKING:
    from aioengine.fastcore.step_buffer import StepPlan
    from aioengine.layers.ops import Ops
    from aioengine.models import Model

__all__ = ["CpuRunner", "MemoryReport", "RowLogprobs", "Runner", "StepResult"]

logger = logging.getLogger(__name__)

Ints = NDArray[np.int32]

PROMPT_SLICE = 32
"""Prompt positions whose logits are in memory at once."""

FAILURES = {
    NOT_FINITE: "the model's scores are not finite numbers",
    NOTHING_ALLOWED: "the sampling constraints leave no token to choose",
}


@dataclass(slots=True)
class StepResult:
    """What a step produced. Set by the runner, read by the step loop."""

    token_ids: Ints
    """[num_samples] in the order of `plan.sample_requests`; -1 for samples that follow a rejected draft."""
    logprobs: dict[int, RowLogprobs] | None = None
    """By sample index, ascending, of the tokens of rows that asked for them."""
    prompt_logprobs: dict[int, list[RowLogprobs]] | None = None
    """By plan row: one entry per position of the chunk that predicts a prompt token."""
    failures: dict[int, str] | None = None
    """By position of the row in the plan: why its request must end with an error; its tokens mean nothing."""
    lost_blocks: Sequence[int] = ()
    """Ids of `plan.loads` that could not be loaded."""


class Runner(Protocol):
    """Runs the steps of one engine on one device."""

    @property
    def memory(self) -> MemoryReport:
        """Sizes of the weights and the KV pool."""

    @property
    def polled_s(self) -> float:
        """Seconds that the loop was kept awake to ask the device whether a step has ended."""

    @property
    def connector(self) -> KVConnector | None:
        """Keeps blocks outside the pool; None if nothing does."""

    def launch(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Starts a step after those launched before and returns at once. It begins with `plan.loads`, then come copies.

        Called on the loop's thread, right after the plan was made; the future belongs to the running loop and
        is resolved there. It fails with `EngineDead` if the device failed in this step or an earlier one, and
        with `EngineClosed` if the runner was closed first. The plan's buffer must stay as it is until then.
        """

    def store(self, work: Store) -> None:
        """Does work of a connector behind the steps launched so far and before any later one; returns at once.

        Called on the loop's thread. A device that fails in it fails the next step.
        """

    def use_idle_time(self) -> bool:
        """Does a piece of work that no request waits for; False if there is none. While no step is in flight."""

    async def close(self) -> None:
        """Ends the step that runs, fails those not begun, and gives memory and threads back. Idempotent."""


@dataclass(slots=True)
class _Join:
    """A request that got its row in a step, as far as the sampler must know it."""

    row: int
    sampling: SamplingPlan
    prompt_ids: Ints
    output_ids: Ints


@dataclass(slots=True)
class PromptTargets:
    """Prompt tokens that a chunk's logits are scored against: its own, one further on."""

    ids: Ints
    count: int


@dataclass(slots=True)
class _Launched:
    """A step on its way to the worker."""

    buffer: Ints
    left_rows: list[int]
    joins: list[_Join]
    prompt_targets: dict[int, PromptTargets]
    load: Load | None
    done: asyncio.Future[StepResult]


class CpuRunner:
    """Runs steps in one worker thread, which ends with `close()`, or when nobody holds the runner any more.

    Args:
        connector: keeps blocks outside the pool; closed with the runner.
    """

    polled_s = 0.0

    def __init__(
        self,
        model: Model,
        device: Device,
        kv_caches: Sequence[torch.Tensor],
        memory: MemoryReport,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        connector: KVConnector | None = None,
    ) -> None:
        self.memory = memory
        self.connector = connector
        max_blocks = -(-max_model_len // memory.layout.block_size)
        work = _StepWork(
            model,
            device.forward_pass(model, kv_caches, memory.layout, max_num_tokens),
            device.ops,
            kv_caches,
            memory.layout.group_of_layer,
            HostRows(max_num_seqs, max_blocks, memory.layout.block_sizes),
            Sampler(vocab_size, max_num_seqs),
        )
        self._worker = _Worker(work, device, connector)
        self._worker.start()
        self._let_go = weakref.finalize(self, _Worker.end, self._worker)
        self._ended: asyncio.Future[None] | None = None

    def launch(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        done: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            done.set_exception(EngineClosed("the runner is closed"))
            return done
        joins = []
        for request in plan.joined:
            ids, prompt_len = request.token_ids(), request.num_prompt_tokens
            assert isinstance(request.sampling, SamplingPlan), request.sampling
            joins.append(_Join(request.row, request.sampling, ids[:prompt_len], ids[prompt_len:]))
        load = self.connector.load(plan.loads) if self.connector is not None and plan.loads else None
        launched = _Launched(plan.buffer, list(plan.left_rows), joins, prompt_targets(plan), load, done)
        self._worker.queue.put(launched)
        return done

    def store(self, work: Store) -> None:
        if self._ended is None:
            self._worker.queue.put(work)

    def use_idle_time(self) -> bool:
        return False

    def warm_up(self) -> None:
        """Runs one token against the null block, so that the first request does not pay for first uses.

        Called by the loader before the first launch.
        """
        assert self._worker.work is not None
        self._worker.work.warm_up()

    async def close(self) -> None:
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
            self._worker.on_end = self._ended
            self._worker.is_closing = True
            self._worker.queue.put(None)
        await asyncio.shield(self._ended)
        self._let_go()


class _Worker:
    """The thread that runs steps. It does not hold the runner, only what it runs them with."""

    def __init__(self, work: _StepWork, device: Device, connector: KVConnector | None) -> None:
        self.work: _StepWork | None = work
        self.queue: SimpleQueue[_Launched | Store | None] = SimpleQueue()
        self.is_closing = False
        """Steps not begun fail from now on."""
        self.on_end: asyncio.Future[None] | None = None
        self._device = device
        self._connector = connector
        self._failure: str | None = None
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aioengine-cpu-runner", daemon=True)

    def start(self) -> None:
        """Starts the thread with torch's own parallelism off in it, and as it was everywhere else.

        The native kernels use all cores; torch's threads would only spin against them. Torch keeps the number
        per thread once a thread has used it, and one default for threads to come, which is restored here.
        """
        default = torch.get_num_threads()
        self._thread.start()
        self._has_started.wait()
        torch.set_num_threads(default)

    def end(self) -> None:
        """Joins the thread after the step it is in. Runs at the interpreter's exit too, if nobody closed."""
        self.is_closing = True
        self.queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # makes the number this thread's own
        self._has_started.set()
        with torch.no_grad():
            while (item := self.queue.get()) is not None:
                if isinstance(item, _Launched):
                    self._run_one(item)
                else:
                    self._store(item)
        self.work = None
        if self._connector is not None:
            self._connector.close()
        self._device.close()
        if self.on_end is not None:
            _tell(self.on_end, self.on_end.set_result, None)

    def _run_one(self, launched: _Launched) -> None:
        """Runs a step and resolves its future; the outermost frame of a device failure."""
        done = launched.done
        if self.is_closing:
            _tell(done, done.set_exception, EngineClosed("the runner was closed before the step began"))
        elif self._failure is not None:
            _tell(done, done.set_exception, EngineDead(self._failure))
        else:
            assert self.work is not None
            try:
                result = self.work.run(launched)
            except Exception as error:
                self._failure = self._failed("running a step", error)
                _tell(done, done.set_exception, EngineDead(self._failure))
            else:
                _tell(done, done.set_result, result)

    def _store(self, work: Store) -> None:
        """Keeps blocks outside the pool; a failure is told by the next step."""
        if self.is_closing or self._failure is not None:
            return
        try:
            work()
        except Exception as error:
            self._failure = self._failed("storing KV blocks", error)

    @staticmethod
    def _failed(doing: str, error: Exception) -> str:
        # Logged here as text: the frames of a traceback would keep the model's memory.
        logger.error("the device failed while %s\n%s", doing, traceback.format_exc())
        return f"the device failed while {doing}: {type(error).__name__}: {error}"


def _tell(future: asyncio.Future[Any], settle: Callable[[Any], None], value: object) -> None:
    """Settles a future of a loop in another thread, unless it was cancelled or the loop is gone."""

    def settle_if_open() -> None:
        if not future.done():
            settle(value)

    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to be told
        future.get_loop().call_soon_threadsafe(settle_if_open)


@dataclass(slots=True)
class _StepWork:
    """What the worker thread runs steps with; used by no other thread once steps are launched."""

    model: Model
    forward: ForwardPass
    ops: Ops
    kv_caches: Sequence[torch.Tensor]
    group_of_layer: Sequence[int]
    rows: HostRows
    sampler: Sampler

    def run(self, launched: _Launched) -> StepResult:
        for row in launched.left_rows:
            self.sampler.leave(row)
        for join in launched.joins:
            self.sampler.join(join.row, join.sampling, join.prompt_ids, join.output_ids)
        step = self.rows.unpack(launched.buffer)
        lost_blocks = launched.load() if launched.load is not None else ()
        if step.copies is not None:
            copy_blocks_ref(step.copies, self.kv_caches)
        hidden = self.forward(step.input_ids, step.positions, step.attention)
        ctx = StepContext(self.ops, step.attention, self.kv_caches, self.group_of_layer)
        result = self._sample(step, hidden, ctx)
        if step.prompt_spans:
            self._score_prompts(step.prompt_spans, launched.prompt_targets, hidden, ctx, result)
        result.lost_blocks = lost_blocks
        return result

    def _sample(self, step: HostStep, hidden: torch.Tensor, ctx: StepContext) -> StepResult:
        if not len(step.sample_rows):
            return StepResult(np.empty(0, np.int32))
        # A row has no more samples than tokens. So if they are as many, every token is sampled from, in order.
        if len(step.sample_rows) != len(step.input_ids):
            hidden = hidden[torch.from_numpy(step.sample_tokens)]
        logits = self.model.logits(hidden, ctx)
        sampled = self.sampler.sample(logits, step.sample_rows, step.sample_num_outputs)
        token_ids, status = sampled.packed.numpy()
        self.rows.accept(step, token_ids, status)
        result = StepResult(token_ids)
        if status.any():
            result.failures = {
                int(step.sample_plan_rows[i]): FAILURES[int(status[i])] for i in np.flatnonzero(status != OK)
            }
        if sampled.logprobs is not None:
            found = sampled.logprobs.resolve()
            result.logprobs = {key: value for key, value in found.items() if value is not None and token_ids[key] >= 0}
        return result

    def _score_prompts(
        self,
        spans: Sequence[PromptSpan],
        targets: dict[int, PromptTargets],
        hidden: torch.Tensor,
        ctx: StepContext,
        result: StepResult,
    ) -> None:
        """Log-probabilities of prompt tokens, a slice of positions at a time."""
        result.prompt_logprobs = {}
        for span in spans:
            target = targets[span.plan_row]
            entries: list[RowLogprobs] = []
            for start in range(0, len(target.ids), PROMPT_SLICE):
                ids = target.ids[start : start + PROMPT_SLICE]
                rows = hidden[span.start + start : span.start + start + len(ids)]
                pending = self.sampler.prompt_logprobs(self.model.logits(rows, ctx), ids, target.count)
                for entry in pending.resolve().values():
                    if entry is None:
                        result.failures = (result.failures or {}) | {span.plan_row: FAILURES[NOT_FINITE]}
                    else:
                        entries.append(entry)
            result.prompt_logprobs[span.plan_row] = entries

    def warm_up(self) -> None:
        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        meta = AttentionMetadata(ints(0, 1), ints(1), ints(0)[None], ints(-1), 1, 1, 1, 1)
        metas = (meta,) * (max(self.group_of_layer) + 1)
        with torch.no_grad():
            hidden = self.forward(ints(0), ints(0), metas)
            self.model.logits(hidden, StepContext(self.ops, metas, self.kv_caches, self.group_of_layer))


def prompt_targets(plan: StepPlan) -> dict[int, PromptTargets]:
    """For each row of the plan that scores its prompt: the prompt tokens its chunk predicts."""
    found: dict[int, PromptTargets] = {}
    for i, computed, num_new in scored_rows(plan.buffer):
        request = plan.requests[i]
        first = computed + 1
        end = min(first + num_new, request.num_prompt_tokens)
        assert isinstance(request.sampling, SamplingPlan), request.sampling
        count = request.sampling.params.prompt_logprobs
        assert count is not None
        found[i] = PromptTargets(request.token_ids()[first:end], count)
    return found
