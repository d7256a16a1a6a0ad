"""The packed step and the ring of buffers it lives in."""

from typing import Final, final

import numpy as np
import numpy.typing as npt

from aioengine.fastcore.request import Request

VERSION: Final[int]
HEADER_WORDS: Final[int]
ROW_WORDS: Final[int]
BLOCK_WORDS: Final[int]
COPY_WORDS: Final[int]
FLAG_SAMPLE: Final[int]
FLAG_PROMPT_LOGITS: Final[int]
FLAG_JOINED: Final[int]
DRAFTS_SHIFT: Final[int]
HEADER_VERSION: Final[int]
HEADER_STEP_ID: Final[int]
HEADER_NUM_ROWS: Final[int]
HEADER_NUM_TOKENS: Final[int]
HEADER_NUM_SAMPLES: Final[int]
HEADER_OFF_ROWS: Final[int]
HEADER_OFF_TOKENS: Final[int]
HEADER_OFF_BLOCKS: Final[int]
HEADER_NUM_BLOCK_UPDATES: Final[int]
HEADER_TOTAL_WORDS: Final[int]
HEADER_OFF_COPIES: Final[int]
HEADER_NUM_COPIES: Final[int]
HEADER_NUM_DRAFTS: Final[int]
ROW_ROW: Final[int]
ROW_QUERY_START: Final[int]
ROW_NUM_NEW: Final[int]
ROW_NUM_COMPUTED: Final[int]
ROW_FLAGS: Final[int]
ROW_SAMPLE_INDEX: Final[int]
ROW_NUM_OUTPUT: Final[int]
ROW_NUM_REJECTED: Final[int]

@final
class StepPlan:
    """What one step computes; made by `Scheduler.schedule`."""

    step_id: int
    """Counts from 1; the header holds its low 31 bits."""
    num_rows: int
    num_tokens: int
    num_samples: int
    num_copies: int
    """Blocks to copy before the forward pass."""
    num_drafts: int
    """Draft tokens among the tokens."""
    requests: list[Request]
    """By row of the plan."""
    sample_requests: list[Request]
    """By sample index; a row with drafts has a sample more than those."""
    joined: list[Request]
    """Those that got their row in this step: the runner rebuilds all state of the row."""
    left_rows: list[int]
    """Rows given back since the last plan; they leave before the joined ones enter (INV-37)."""
    loads: list[tuple[bytes, int]]
    """(block hash, block id) to load from the connector before anything else of the step is done."""
    dropped_rows: list[int]
    """Set by `Scheduler.update`: plan rows whose sample or failure is to be told to nobody, as it is computed anew."""
    buffer: npt.NDArray[np.int32]
    """The packed step, a slice of the ring; valid until `Scheduler.update(plan, ...)`."""

    def num_computed(self, index: int) -> int:
        """Context length of plan row `index` before this step, if all drafts in flight are accepted.

        RuntimeError after the update.
        """
    def num_new(self, index: int) -> int:
        """Tokens of plan row `index` in this step, drafts included; RuntimeError after the update."""

@final
class StepBuffer:
    """The ring of preallocated buffers; `ring` is int32 [num_slots, slot_words] and never moves."""

    ring: npt.NDArray[np.int32]
    num_slots: int
    max_rows: int
    row_stride: int
    """Rows of the device's block table per group."""
    max_tokens: int
    max_join_blocks: int
    """Most table entries that rows joining in one step may send; at least one whole table."""
    max_block_updates: int

    def __init__(
        self,
        num_slots: int,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        max_table_blocks: int,
        num_groups: int = 1,
        row_stride: int = 0,
    ) -> None: ...

def read_step(
    buffer: npt.NDArray[np.int32], long_chunk: int
) -> tuple[
    int,
    npt.NDArray[np.int32],
    npt.NDArray[np.int32],
    npt.NDArray[np.int32],
    npt.NDArray[np.int32],
    list[tuple[int, int]],
    list[tuple[int, int, int, int]],
]:
    """What the host must know of a packed step.

    Returns max_query_len, query_lens [R], then of each sample [N] its persistent row, its position in the output
    and its plan row; the (plan row, first token) of rows whose prompt is scored; and the (plan row, first token,
    tokens, context) of rows with `long_chunk` or more new tokens.

    Raises:
        ValueError: the buffer has another layout than this version knows.
    """
