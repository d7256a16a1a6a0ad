"""A device made of lists that executes packed steps late, and a model whose next token depends on everything.

It reads nothing but `StepPlan.buffer`: block tables, tokens and positions as a real runner sees them. Its
KV cache keeps what was written to each slot, and a sampled token is a checksum of the whole context read
back through the block table. So a wrong block, slot, position, row or token changes the output.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioengine.fastcore import step_buffer as layout
from aioengine.fastcore.step_buffer import StepPlan


def next_token(context: Sequence[int], vocab_size: int = 40, seed: int = 0) -> int:
    """The "model": a token from 0 to vocab_size - 1 that depends on the seed and every token before it, in order."""
    return zlib.crc32(np.asarray(context, dtype=np.int32).tobytes(), seed) % vocab_size


class FakeDevice:
    """Runs steps in the order of their launch, each only when it is asked to finish."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.tables: dict[int, list[int]] = {}
        self.last_sampled: dict[int, int] = {}
        self.launched: deque[StepPlan] = deque()
        self.num_copies = 0
        self.computed: list[tuple[str, int]] = []
        """(request id, position) in the order of computation."""

    def launch(self, plan: StepPlan) -> None:
        """Enqueues a step."""
        self.launched.append(plan)

    def finish(self) -> tuple[StepPlan, npt.NDArray[np.int32]]:
        """Executes the oldest step and returns its samples."""
        plan = self.launched.popleft()
        words = plan.buffer
        header = words[: layout.HEADER_WORDS].tolist()
        assert header[layout.HEADER_VERSION] == layout.VERSION
        assert header[layout.HEADER_STEP_ID] == plan.step_id, "the slot was reused before its update"
        assert header[layout.HEADER_NUM_ROWS : layout.HEADER_NUM_SAMPLES + 1] == [
            plan.num_rows, plan.num_tokens, plan.num_samples
        ]  # fmt: skip
        assert header[layout.HEADER_TOTAL_WORDS] == len(words)
        off_rows, off_tokens, off_blocks = header[layout.HEADER_OFF_ROWS : layout.HEADER_OFF_BLOCKS + 1]
        off_copies = header[layout.HEADER_OFF_COPIES]
        rows = words[off_rows:off_tokens].reshape(-1, layout.ROW_WORDS).tolist()
        tokens = words[off_tokens:off_blocks].tolist()
        assert len({row[layout.ROW_ROW] for row in rows}) == len(rows), "two requests share a row"
        self.update_tables(rows, words[off_blocks:off_copies].reshape(-1, layout.BLOCK_WORDS).tolist())
        copies = words[off_copies:].reshape(-1, layout.COPY_WORDS).tolist()
        assert len(copies) == header[layout.HEADER_NUM_COPIES] == plan.num_copies
        self.copy_blocks(copies)
        samples = np.full(plan.num_samples, -1, dtype=np.int32)
        # As in a layer of a model: all rows are written before any is read, and nobody writes for another.
        written = [slot for index, row in enumerate(rows) for slot in self.write_row(plan, index, row, tokens)]
        assert len(set(written)) == len(written), "two rows write one slot"
        for index, row in enumerate(rows):
            self.read_row(plan, index, row, samples)
        return plan, samples

    def update_tables(self, rows: list[list[int]], blocks: list[list[int]]) -> None:
        for row in rows:
            if row[layout.ROW_FLAGS] & layout.FLAG_JOINED:
                self.tables[row[layout.ROW_ROW]] = []
        for row_id, logical, block_id in blocks:
            assert len(self.tables[row_id]) == logical, "block tables are append-only"
            assert block_id > 0, "the null block was handed out"
            self.tables[row_id].append(block_id)

    def copy_blocks(self, copies: list[list[int]]) -> None:
        """One after the other; no order may make a difference."""
        touched = [block_id for pair in copies for block_id in pair]
        targets = [target for _, target in copies]
        assert 0 not in touched and len(set(targets)) == len(targets), "a block is copied to twice"
        assert not set(targets) & {source for source, _ in copies}, "a block is both source and target"
        size = self.block_size
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        self.num_copies += len(copies)

    def write_row(self, plan: StepPlan, index: int, row: list[int], tokens: list[int]) -> list[int]:
        """Writes a row's new positions; returns their slots."""
        row_id, start, num_new, num_computed, _, _, _, reserved = row
        assert reserved == 0 and num_new > 0
        ids = tokens[start : start + num_new]
        if -1 in ids:
            assert ids == [-1], "only a decode row may take its token from the device"
            ids = [self.last_sampled[row_id]]
        slots = [self.slot(self.tables[row_id], num_computed + i) for i in range(num_new)]
        for position, (slot, token_id) in enumerate(zip(slots, ids, strict=True), start=num_computed):
            self.slots[slot] = (token_id, position)
            self.computed.append((plan.requests[index].request_id, position))
        return slots

    def read_row(self, plan: StepPlan, index: int, row: list[int], samples: npt.NDArray[np.int32]) -> None:
        """Reads the whole context of a row that samples."""
        row_id, _, num_new, num_computed, flags, sample_index, _, _ = row
        table = self.tables[row_id]
        if flags & layout.FLAG_SAMPLE:
            context = [self.read(table, position) for position in range(num_computed + num_new)]
            sampling = plan.requests[index].sampling
            seed = sampling if isinstance(sampling, int) else 0
            samples[sample_index] = self.last_sampled[row_id] = next_token(context, seed=seed)

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def read(self, table: list[int], position: int) -> int:
        content = self.slots[self.slot(table, position)]
        assert content is not None and content[1] == position, f"position {position} holds {content}"
        return content[0]
