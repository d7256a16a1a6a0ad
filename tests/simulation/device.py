"""The device of the simulation: it runs packed steps late, keeps what each KV slot holds, and distrusts everything.

It is a `Runner`. At launch it reads the packed buffer, as a copy to a device would, and holds it against the
scheduler's records; when the step's time has passed, it runs the step: first loads, then copies, then all rows
write, then every position of every context is read back through the block table and must be the KV of the request's own
text, as it is if what is read in step N was written by a step <= N. The steps in flight write late, so that
a block which was given away too early shows. Each KV group writes values of its own and reads only its windows,
but those whole: from the first position that the step's first query reads.

Drafts are verified as on a real device: where a row begins is what the scheduler says less what was rejected in it
since; a rejected draft leaves KV of another text, which nobody may read, and what is sampled behind it is told to
nobody.

A row that fails spoils what it writes in that step. Who hit that before the step was settled computes spoiled
KV and fails in turn; who got its row afterwards must not find any. So it is with a block that could not be loaded,
only that nobody fails for good: whatever such rows sample or report must be told to nobody.
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
from tests.oracle.kv import Group, first_read
from tests.simulation.tier import SimTier
from tests.simulation.truth import Truth, chained, sampled

_LOST = 1 << 40
"""Above every step: what tells a block that could not be loaded from one that a failed row has written."""
_GROUP = 1 << 60
"""Above every value of a chain: what tells the KV of one group from another's."""


@dataclass(slots=True)
class _Stay:
    """A request from the time that it got its row until it leaves it."""

    tables: list[dict[int, int]]
    """Block by logical index, per KV group."""
    settled_at: int
    """Newest step that was settled when it got its row."""
    is_spoiled: bool = False
    """It computes on what another, whose row failed, has computed."""
    has_lost: bool = False
    """It computes on what could not be loaded."""
    known_rejected: int = 0
    """Drafts that had been rejected in its row before."""
    end: int = 0
    """Positions that it has computed for good."""


@dataclass(slots=True)
class _Row:
    """One row of a launched step."""

    request: Request
    num_preemptions: int
    """Of the request, when the step was launched."""
    stay: _Stay
    row: int
    ids: list[int]
    num_computed: int
    sample_index: int
    plan_row: int
    num_drafts: int
    """The last of `ids`."""
    known_rejected: int
    """Drafts rejected in its row, as the scheduler knew."""
    num_unsure: int
    """Positions by which it may begin earlier than the scheduler says."""
    num_accepted: int = 0
    """Drafts that are its text, once it has run."""


@dataclass(slots=True)
class _Launched:
    """A step that was launched and has not run."""

    plan: StepPlan
    words: np.ndarray
    """What the buffer held at launch; it must hold it until the step has run."""
    loads: list[tuple[bytes, int]]
    """(hash, block)."""
    copies: list[tuple[int, int]]
    """(source, target) blocks."""
    rows: list[_Row]
    done: asyncio.Future[StepResult]


class SimDevice:
    """Runs the steps of one scheduler.

    Args:
        kv_groups: as the scheduler got them.
        step_seconds: a step takes one of these; with 0 it has run when `launch` returns.
        tier: what it loads from.
        most_step_tokens: how far the ends of a step's tokens and of what its first query reads lie apart, at most.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_groups: Sequence[Group],
        step_seconds: Sequence[float],
        seed: int,
        tier: SimTier | None = None,
        most_step_tokens: int = 0,
    ) -> None:
        self._tier = tier
        self._most_step_tokens = most_step_tokens or scheduler.max_num_scheduled_tokens
        self._scheduler = scheduler
        self._pool = scheduler.kv.pool
        self._groups = kv_groups
        self._sizes = [scheduler.kv.block_size * scale for _, _, scale in kv_groups]
        self._step_seconds = step_seconds
        self._rng = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._kv: list[list[int]] = [[0] * max(self._sizes) for _ in range(scheduler.num_blocks)]
        self._last_token: dict[int, int] = {}
        self._rejected = [0] * scheduler.max_num_seqs
        self._stays: dict[Request, _Stay] = {}
        self._launched: deque[_Launched] = deque()
        self.is_failing = False
        self.settled_step = 0
        """Written by the world."""
        self.has_spoiled = False
        self.num_copies = 0
        self.num_spoiled = 0
        self.num_lost = 0
        self.num_accepted = self.num_rejected = 0
        self.read_lost: dict[int, set[int]] = {}
        """By step that was not settled yet: rows of its plan that have read what could not be loaded."""

    def launch(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """As `Runner.launch`."""
        done: asyncio.Future[StepResult] = self._loop.create_future()
        copies, rows = self._read_copies(plan), self._read_buffer(plan)
        written = [block_id for row in rows for block_id in self._written_by(row)]
        assert len(set(written)) == len(written), f"two rows of {plan} write one block"
        self._check_loads(plan, copies, written)
        self._launched.append(_Launched(plan, plan.buffer.copy(), list(plan.loads), copies, rows, done))
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
        by_row: dict[int, Request] = {}
        records = []
        for request in plan.requests:
            record = words[at : at + layout.ROW_WORDS]
            at += layout.ROW_WORDS
            truth = request.sampling
            assert record[layout.ROW_ROW] == request.row and request.row not in by_row, "two requests share a row"
            by_row[request.row] = request
            if record[layout.ROW_FLAGS] & layout.FLAG_JOINED:
                truth.reached = record[layout.ROW_NUM_COMPUTED]
                known_rejected = record[layout.ROW_NUM_REJECTED]
                assert known_rejected == self._rejected[request.row], f"row {request.row} is joined too early"
                self._stays[request] = _Stay(
                    [{} for _ in self._groups], self.settled_step, known_rejected=known_rejected, end=truth.reached
                )
                late = [row.request for launched in self._launched for row in launched.rows if row.row == request.row]
                assert not late, f"{request} joined row {request.row}, to which a step of {late} writes (INV-45)"
                assert truth.reached < len(truth.tokens), f"{request}: nothing is left to compute (INV-16)"
            records.append(record)
        at = words[layout.HEADER_OFF_BLOCKS]
        for _ in range(words[layout.HEADER_NUM_BLOCK_UPDATES]):
            row, logical, block_id = words[at : at + layout.BLOCK_WORDS]
            at += layout.BLOCK_WORDS
            group, row = divmod(row, self._scheduler.max_num_seqs)
            table = self._stays[by_row[row]].tables[group]
            assert logical == max(table, default=logical - 1) + 1 and (table or not logical or group), (
                f"{by_row[row]}: tables are append-only (INV-38, INV-39)"
            )
            assert block_id > 0, "the null block was handed out (INV-24)"
            table[logical] = block_id
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

    def _check_loads(self, plan: StepPlan, copies: list[tuple[int, int]], written: list[int]) -> None:
        """Each load fills one block of a request that joins, in front of what it computes, and nothing else does."""
        wanted = []
        for request in plan.joined:
            known = plan.num_computed(plan.requests.index(request)) // self._sizes[0]
            hashes = self._scheduler.kv.hashes_of(request)[:known] if plan.loads else []
            wanted += list(zip(hashes, request.block_ids()[:known], strict=False))
        targets = [block_id for _, block_id in plan.loads]
        found = [pair for pair in dict.fromkeys(wanted) if pair in plan.loads]  # others of the step may hit them
        assert found == plan.loads, f"{plan.loads} are not in their tables"
        assert len(set(targets)) == len(targets), "two loads go to one block"
        touched = {block_id for pair in copies for block_id in pair}
        assert not touched.intersection(targets), "a block that is loaded is copied, or copied to (INV-20)"
        assert not set(written).intersection(targets), "a block that is loaded is written"

    def _read_row(self, plan: StepPlan, i: int, request: Request, record: list[int], tokens: list[int]) -> _Row:
        row, start, num_new, num_computed, flags, sample_index, num_output, known_rejected = record
        truth, stay = request.sampling, self._stays[request]
        num_drafts, end = flags >> layout.DRAFTS_SHIFT, num_computed + num_new
        num_unsure = sum(map(len, request.drafts_in_flight())) - num_drafts
        assert num_new > num_drafts and end <= self._scheduler.max_model_len, f"{request}: INV-27"
        rolled_back = known_rejected - stay.known_rejected
        assert num_computed + rolled_back == truth.reached, f"{request} is computed twice or skipped (INV-28, INV-43)"
        truth.reached += num_new
        assert num_drafts == 0 or (num_new == 1 + num_drafts and sample_index >= 0 and request.takes_drafts)
        for group, (table, size) in enumerate(zip(self._stays[request].tables, self._sizes, strict=True)):
            self._check_table(request, group, table, num_computed - num_unsure)
            # What this step fills may be shared by now; it is written in no other (INV-28).
            for block_id in [table[end // size]] if end % size else []:
                assert self._pool.num_refs(block_id) == 1, f"{request} writes the shared block {block_id} (INV-25)"
                assert not self._pool.is_hashed(block_id), f"{request} writes the hashed block {block_id} (INV-12)"
        known = request.num_tokens + request.num_in_flight - (1 + num_drafts if sample_index >= 0 else 0)
        samples = end - num_drafts == known and truth.max_tokens > 0
        assert bool(flags & layout.FLAG_SAMPLE) == (sample_index >= 0) == samples
        assert num_output == known - request.num_prompt_tokens
        assert num_output + num_drafts < truth.max_tokens or not request.num_in_flight, (
            f"{request}: its last token is in flight (INV-29)"
        )
        if sample_index >= 0:
            own = plan.sample_requests[sample_index : sample_index + 1 + num_drafts]
            assert own == [request] * (1 + num_drafts)
        if flags & layout.FLAG_PROMPT_LOGITS:
            assert truth.params.prompt_logprobs is not None and num_computed < truth.num_scored
            truth.num_scored = min(end + 1, len(truth.prompt))
        ids = tokens[start : start + num_new]
        return _Row(
            request, request.num_preemptions, stay, row, ids, num_computed, sample_index, i,
            num_drafts, known_rejected, num_unsure,
        )  # fmt: skip

    def _check_table(self, request: Request, group: int, table: dict[int, int], num_computed: int) -> None:
        """The device's table is the request's, but where its blocks fell out of the window, and no other did."""
        ids, size = request.block_ids(group), self._sizes[group]
        num_out = ids.count(0)
        assert num_out <= first_read(self._groups[group], num_computed) // size, f"{request}: a block left too early"
        assert ids[num_out:] == [table.get(i) for i in range(num_out, len(ids))], f"{request}: {table} (INV-39)"
        kind, window, _ = self._groups[group]
        if kind != "full":
            most = -(-(window - 1 + self._most_step_tokens) // size) + 1
            assert len(ids) - num_out <= most, f"{request} has {len(ids) - num_out} blocks of group {group}, not {most}"

    def _written_by(self, row: _Row) -> list[int]:
        end = row.num_computed + len(row.ids)
        return [
            block_id
            for group in range(len(self._groups))
            for block_id in self._blocks(row, group, row.num_computed - row.num_unsure, end)
        ]

    def _blocks(self, row: _Row, group: int, start: int, end: int) -> list[int]:
        """The blocks of a range of positions."""
        size, table = self._sizes[group], row.stay.tables[group]
        return [table.get(i, 0) for i in range(start // size, -(-end // size))]

    def check_fences(self) -> None:
        """Blocks of a finished request are its own while a step that writes them has not run (INV-36).

        A preempted one gives them back at once: whatever follows on the device is behind its late writes. With a
        connector it keeps them too (C21).
        """
        for launched in self._launched:
            for row in launched.rows:
                request = row.request
                is_same = request.num_preemptions == row.num_preemptions
                if self._tier is not None or (request.status == "finished" and is_same):
                    for group, size in enumerate(self._sizes):
                        held, end = request.block_ids(group), row.num_computed + len(row.ids)
                        table = row.stay.tables[group]  # a victim may have got more for a step that was never made
                        same = [i for i, block_id in enumerate(held) if block_id in (0, table.get(i, block_id))]
                        assert len(same) == len(held) and len(held) * size >= end, (
                            f"{request} gave back blocks that step {launched.plan.step_id} writes (INV-36)"
                        )

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
        lost = [block_id for block_hash, block_id in launched.loads if not self._load(plan, block_hash, block_id)]
        for source, target in launched.copies:
            self._kv[target] = self._kv[source].copy()
        self.num_copies += len(launched.copies)
        for row in launched.rows:
            first = self._place(row)
            if row.sample_index >= 0 and 0 <= row.request.sampling.fails_at - first <= row.num_accepted:
                failures[row.plan_row] = "the row failed, as the script wants"
                self._write(row, [_spoiled_in(plan.step_id)] * len(row.ids))
                self.has_spoiled = True
            else:
                self._write(row, self._values(row))
        while self.has_spoiled and any(self._spoil(row) for row in launched.rows):
            pass  # rows read what others write in the same step
        for row in launched.rows:
            num_rejected = row.num_drafts - row.num_accepted
            del row.ids[len(row.ids) - num_rejected :]
            values = self._read(row)
            row.stay.end = row.num_computed + len(row.ids)
            if row.sample_index < 0:
                continue
            if row.stay.is_spoiled:
                failures[row.plan_row] = "the row read what a failed one has written"
            elif row.stay.has_lost and self._rng.random() < 0.3:
                failures[row.plan_row] = "the row read what was not loaded"
            self._verify(row, values[len(values) - 1 - row.num_accepted :], samples)
        self.read_lost[plan.step_id] = {row.plan_row for row in launched.rows if row.stay.has_lost}
        return StepResult(samples, failures=failures or None, lost_blocks=lost)

    def _place(self, row: _Row) -> int:
        """Finds where a row really begins and which drafts are its text; returns the number of its first output."""
        truth: Truth = row.request.sampling
        late = self._rejected[row.row] - row.known_rejected
        assert 0 <= late <= row.num_unsure, f"{row.request}: {late} drafts were rejected of {row.num_unsure}"
        row.num_computed -= late
        assert row.num_computed == row.stay.end, f"{row.request} goes on at {row.num_computed}, not {row.stay.end}"
        end = row.num_computed + len(row.ids)
        truth.grow(end)
        first = end - row.num_drafts
        while (
            row.num_accepted < row.num_drafts
            and row.ids[row.num_accepted - row.num_drafts] == truth.tokens[first + row.num_accepted]
        ):
            row.num_accepted += 1
        return first - len(truth.prompt) + 1

    def _values(self, row: _Row) -> list[int]:
        """KV of its tokens; behind a rejected draft that of another text."""
        truth: Truth = row.request.sampling
        end = row.num_computed + len(row.ids) - row.num_drafts
        values = truth.chain[row.num_computed : end]
        for token_id in row.ids[len(row.ids) - row.num_drafts :]:
            values.append(chained(values[-1], token_id))
        return values

    def _verify(self, row: _Row, values: list[int], samples: np.ndarray) -> None:
        """Samples behind each accepted draft; one that reads spoiled KV may find otherwise than its text."""
        drafts = row.ids[len(row.ids) - row.num_accepted :]
        for i, value in enumerate(values):
            token_id = sampled(value, row.request.sampling.seed)
            samples[row.sample_index + i] = self._last_token[row.row] = token_id
            if i < len(drafts) and token_id != drafts[i]:
                row.stay.end -= row.num_accepted - i
                row.num_accepted = i
                break
        self._rejected[row.row] += row.num_drafts - row.num_accepted
        self.num_accepted += row.num_accepted
        self.num_rejected += row.num_drafts - row.num_accepted

    def _load(self, plan: StepPlan, block_hash: bytes, block_id: int) -> bool:
        assert self._tier is not None, "a load without a connector"
        content = self._tier.load(block_hash)
        if content is not None:
            self._kv[block_id] = content
            return True
        self._kv[block_id] = [_lost_in(plan.step_id)] * self._sizes[0]
        self.has_spoiled = True
        self.num_lost += 1
        return False

    def store(self, stores: Sequence[tuple[bytes, int]]) -> None:
        """Gives the tier what blocks hold now."""
        for block_hash, block_id in stores:
            assert self._tier is not None
            assert min(self._kv[block_id]) >= 0, f"block {block_id} is stored and holds {self._kv[block_id]}"
            self._tier.store(block_hash, self._kv[block_id])

    def _write(self, row: _Row, values: list[int]) -> None:
        for group, size in enumerate(self._sizes):
            table, own = row.stay.tables[group], group * _GROUP
            for position, value in enumerate(values, start=row.num_computed):
                self._kv[table[position // size]][position % size] = value if value < 0 else value + own

    def _context(self, row: _Row, group: int) -> tuple[int, list[int]]:
        """The first position that a row reads, and the KV from there on to its last new one."""
        end, size = row.num_computed + len(row.ids), self._sizes[group]
        start = first_read(self._groups[group], row.num_computed)
        values = [value for block_id in self._blocks(row, group, start, end) for value in self._kv[block_id][:size]]
        return start, values[start % size : end - start // size * size]

    def _spoil(self, row: _Row) -> bool:
        """Spoils what a row writes if what it reads is; returns whether that changed anything."""
        contexts = [self._context(row, group)[1] for group in range(len(self._groups))]
        spoiled = next((value for context in contexts for value in context if value < 0), None)
        if spoiled is None or contexts[0][-1] < 0:
            return False
        self._write(row, [spoiled] * len(row.ids))
        return True

    def _read(self, row: _Row) -> list[int]:
        """Reads the context of a row in every group; returns what it read in the first."""
        truth, start = row.request.sampling, row.num_computed
        for group in range(1, len(self._groups)):
            self._check_context(row, group)
        context = self._check_context(row, 0)
        ids = row.ids
        if ids[0] == -1:
            ids = [self._last_token[row.row], *ids[1:]]
        assert row.stay.is_spoiled or row.stay.has_lost or ids == truth.tokens[start : start + len(ids)], (
            f"{truth.name} got the tokens {ids} at {start} (INV-41)"
        )
        return context

    def _check_context(self, row: _Row, group: int) -> list[int]:
        """Holds what a row reads in a group against its text; returns it."""
        truth, own = row.request.sampling, group * _GROUP
        start, context = self._context(row, group)
        wanted = truth.chain[start : start + len(context)]
        if group == 0 and context == wanted:
            return context
        for position, (got, value) in enumerate(zip(context, wanted, strict=True), start=start):
            if got == value + own:
                continue
            block_id = row.stay.tables[group].get(position // self._sizes[group])
            assert got < 0, (
                f"{truth.name} reads KV of another text at position {position}, block {block_id}, group {group}"
            )
            step_id = -got % _LOST
            assert step_id > row.stay.settled_at, (
                f"{truth.name} got its row after step {row.stay.settled_at} and reads at position {position} "
                f"what {'was lost' if -got > _LOST else 'failed'} in step {step_id}"
            )
            if -got > _LOST:
                row.stay.has_lost = True
                continue
            self.num_spoiled += not (row.stay.is_spoiled or truth.fails_at)
            row.stay.is_spoiled = truth.was_spoiled = True
        return context


def _spoiled_in(step_id: int) -> int:
    """What a row that fails in a step leaves in its slots."""
    return -step_id


def _lost_in(step_id: int) -> int:
    """What a step leaves in a block that it could not load."""
    return -step_id - _LOST
