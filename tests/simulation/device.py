"""The device of the simulation: it runs packed steps late, keeps what each KV slot holds, and distrusts everything.

It is a `Runner`. At launch it reads the packed buffer, as a copy to a device would, and holds it against the
scheduler's records; when the step's time has passed, it runs the step: every position of the context is read
back through the block table and must be the KV of the request's own text. The steps in flight write late, so
that a block which was given away too early shows.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aioengine.errors import EngineDead
from aioengine.fastcore import step_buffer as layout
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan
from aioengine.runner import StepResult
from tests.simulation.truth import Truth, sampled


@dataclass(slots=True)
class _Row:
    """One row of a launched step."""

    request: Request
    num_preemptions: int
    """Of the request, when the step was launched."""
    table: list[int]
    row: int
    ids: list[int]
    num_computed: int
    sample_index: int
    plan_row: int


@dataclass(slots=True)
class _Launched:
    """A step that was launched and has not run."""

    plan: StepPlan
    words: np.ndarray
    """What the buffer held at launch; it must hold it until the step has run."""
    copies: list[tuple[int, int]]
    """(source, target) blocks."""
    rows: list[_Row]
    done: asyncio.Future[StepResult]


class SimDevice:
    """Runs the steps of one scheduler.

    Args:
        step_seconds: a step takes one of these; with 0 it has run when `launch` returns.
    """

    def __init__(self, scheduler: Scheduler, step_seconds: Sequence[float], seed: int) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv.pool
        self._block_size = scheduler.kv.block_size
        self._step_seconds = step_seconds
        self._rng = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._kv: list[list[int]] = [[0] * self._block_size for _ in range(scheduler.num_blocks)]
        self._last_token: dict[int, int] = {}
        self._launched: deque[_Launched] = deque()
        self.is_failing = False
        self.num_copies = 0

    def launch(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """As `Runner.launch`."""
        done: asyncio.Future[StepResult] = self._loop.create_future()
        copies = self._read_copies(plan)
        self._launched.append(_Launched(plan, plan.buffer.copy(), copies, self._read_buffer(plan), done))
        seconds = self._rng.choice(self._step_seconds)
        if seconds == 0 and len(self._launched) == 1:
            self._run_oldest()
        elif len(self._launched) == 1:
            self._loop.call_later(seconds, self._run_oldest)
        return done

    # ---- at launch --------------------------------------------------------------------------------------

    def _read_buffer(self, plan: StepPlan) -> list[_Row]:
        words = plan.buffer.tolist()
        assert words[layout.HEADER_VERSION] == layout.VERSION
        assert words[layout.HEADER_STEP_ID] == plan.step_id
        num_rows, num_tokens = words[layout.HEADER_NUM_ROWS], words[layout.HEADER_NUM_TOKENS]
        assert (num_rows, num_tokens) == (plan.num_rows, plan.num_tokens) and num_rows > 0
        assert words[layout.HEADER_NUM_SAMPLES] == plan.num_samples == len(plan.sample_requests)
        assert words[layout.HEADER_TOTAL_WORDS] == len(words)
        at = words[layout.HEADER_OFF_ROWS]
        by_row: dict[int, Truth] = {}
        records = []
        for request in plan.requests:
            record = words[at : at + layout.ROW_WORDS]
            at += layout.ROW_WORDS
            truth = request.sampling
            assert record[layout.ROW_ROW] == request.row and request.row not in by_row, "two requests share a row"
            by_row[request.row] = truth
            if record[layout.ROW_FLAGS] & layout.FLAG_JOINED:
                truth.table, truth.reached = [], record[layout.ROW_NUM_COMPUTED]
                late = [row.request for launched in self._launched for row in launched.rows if row.row == request.row]
                assert not late, f"{request} joined row {request.row}, to which a step of {late} writes (INV-45)"
                assert truth.reached < len(truth.tokens), f"{request}: nothing is left to compute (INV-16)"
            records.append(record)
        at = words[layout.HEADER_OFF_BLOCKS]
        for _ in range(words[layout.HEADER_NUM_BLOCK_UPDATES]):
            row, logical, block_id = words[at : at + layout.BLOCK_WORDS]
            at += layout.BLOCK_WORDS
            table = by_row[row].table
            assert logical == len(table), f"{by_row[row].name}: tables are append-only (INV-38, INV-39)"
            assert block_id > 0, "the null block was handed out (INV-24)"
            table.append(block_id)
        off_tokens = words[layout.HEADER_OFF_TOKENS]
        tokens = words[off_tokens : off_tokens + num_tokens]
        return [
            self._read_row(plan, i, request, record, tokens)
            for i, (request, record) in enumerate(zip(plan.requests, records, strict=True))
        ]

    def _read_copies(self, plan: StepPlan) -> list[tuple[int, int]]:
        words = plan.buffer.tolist()
        at, count = words[layout.HEADER_OFF_COPIES], words[layout.HEADER_NUM_COPIES]
        assert count == plan.num_copies and at + layout.COPY_WORDS * count == len(words)
        pairs = words[at:]
        copies = list(zip(pairs[::2], pairs[1::2], strict=True))
        targets = {target for _, target in copies}
        assert 0 not in pairs and len(targets) == count, "two copies go to one block"
        assert not targets & {source for source, _ in copies}, "a block is source and target of copies"
        return copies

    def _read_row(self, plan: StepPlan, i: int, request: Request, record: list[int], tokens: list[int]) -> _Row:
        row, start, num_new, num_computed, flags, sample_index, num_output, _ = record
        truth: Truth = request.sampling
        end = num_computed + num_new
        assert num_new > 0 and end <= self._scheduler.max_model_len, f"{request}: INV-27"
        assert num_computed == truth.reached, f"{request} is computed twice or skipped: {truth.reached} (INV-28)"
        truth.reached = end
        assert truth.table == request.block_ids(), f"{request}: {truth.table} on the device (INV-39)"
        for block_id in truth.table[num_computed // self._block_size : -(-end // self._block_size)]:
            assert self._pool.num_refs(block_id) == 1, f"{request} writes the shared block {block_id} (INV-25)"
            assert not self._pool.is_hashed(block_id), f"{request} writes the hashed block {block_id} (INV-12)"
        known = request.num_tokens + request.num_in_flight - (sample_index >= 0)
        assert bool(flags & layout.FLAG_SAMPLE) == (sample_index >= 0) == (end == known and truth.max_tokens > 0)
        assert num_output == known - request.num_prompt_tokens
        assert num_output < truth.max_tokens or not request.num_in_flight, (
            f"{request}: its last token is in flight (INV-29)"
        )
        if sample_index >= 0:
            assert plan.sample_requests[sample_index] is request
        if flags & layout.FLAG_PROMPT_LOGITS:
            assert truth.params.prompt_logprobs is not None and num_computed < truth.num_scored
            truth.num_scored = min(end + 1, len(truth.prompt))
        ids = tokens[start : start + num_new]
        return _Row(request, request.num_preemptions, truth.table, row, ids, num_computed, sample_index, i)

    def check_fences(self) -> None:
        """Blocks of a finished request are its own while a step that writes them has not run (INV-36).

        A preempted one gives them back at once: whatever follows on the device is behind its late writes.
        """
        for launched in self._launched:
            for row in launched.rows:
                request = row.request
                if request.status == "finished" and request.num_preemptions == row.num_preemptions:
                    held = request.block_ids()
                    assert held == row.table[: len(held)] and len(held) * self._block_size >= row.num_computed + len(
                        row.ids
                    ), f"{request} gave back blocks that step {launched.plan.step_id} writes (INV-36)"

    # ---- when its time has come -------------------------------------------------------------------------

    def _run_oldest(self) -> None:
        """Runs the oldest step, and those behind it that take no time."""
        while True:
            launched = self._launched.popleft()
            assert np.array_equal(launched.words, launched.plan.buffer), "a buffer was used again too early"
            if self.is_failing:
                launched.done.set_exception(EngineDead("the device failed, as the script wants"))
            else:
                launched.done.set_result(self._run(launched))
            if not self._launched:
                return
            seconds = self._rng.choice(self._step_seconds)
            if seconds > 0:
                self._loop.call_later(seconds, self._run_oldest)
                return

    def _run(self, launched: _Launched) -> StepResult:
        plan = launched.plan
        samples = np.full(plan.num_samples, -1, np.int32)
        failures = {}
        for source, target in launched.copies:
            self._kv[target] = self._kv[source].copy()
        self.num_copies += len(launched.copies)
        # Each row reads before the rows after it write: a hit on a block of the same step would show.
        for row in launched.rows if plan.step_id % 2 else reversed(launched.rows):
            value = self._run_row(row)
            if row.sample_index < 0:
                continue
            truth: Truth = row.request.sampling
            token_id = sampled(value, truth.seed)
            samples[row.sample_index] = self._last_token[row.row] = token_id
            num_known = row.num_computed + len(row.ids)
            if truth.fails_at and num_known - len(truth.prompt) + 1 == truth.fails_at:
                failures[row.plan_row] = "the row failed, as the script wants"
        return StepResult(samples, failures=failures or None)

    def _run_row(self, row: _Row) -> int:
        """Reads the context, writes the new positions; returns the KV of the last one."""
        truth, kv, size, start = row.request.sampling, self._kv, self._block_size, row.num_computed
        end = start + len(row.ids)
        truth.grow(end)
        chain = truth.chain
        context: list[int] = []
        for block_id in row.table[: -(-start // size)]:
            context += kv[block_id]
        if context[:start] != chain[:start]:
            position = next(i for i in range(start) if context[i] != chain[i])
            raise AssertionError(
                f"{truth.name} reads KV of another text at position {position} of {start}, "
                f"block {row.table[position // size]}"
            )
        ids = row.ids
        if ids == [-1]:
            ids = [self._last_token[row.row]]
        assert ids == truth.tokens[start:end], f"{truth.name} got the tokens {ids} at {start} (INV-41)"
        for position in range(start, end):
            kv[row.table[position // size]][position % size] = chain[position]
        return kv[row.table[(end - 1) // size]][(end - 1) % size]
