"""What the host knows of a step, and the sizes that steps are padded to.

A `Bucket` is what a CUDA graph is captured for; `Buckets` says which one serves a step, and which are captured before
any step needs them. Nothing here touches a device. Used by `graphs.py` and `cuda_runner.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aioengine.fastcore.step_buffer import read_step
from aioengine.kernels import step as layout
from aioengine.kernels.attention_prefill import SIZES, LongRow
from aioengine.sampler import Choice

BUCKET_STEPS = ((64, 8), (256, 16), (512, 32), (1024, 64), (2048, 128), (4096, 256), (8192, 512), (1 << 30, 1024))
"""Buckets up to so many tokens are so far apart: padding stays small, and products of 8 more rows take longer."""
AT_START = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Decodes that are captured before the first request; steps of the sizes between wait for idle time in these."""
MOST_PADDING = 0.34
"""Share of a step that may be padding before its own bucket is captured at once."""

LONG_CHUNK = SIZES[0]
"""Chunks of so many queries go to cuDNN where it serves the layer."""

Ints = NDArray[np.int32]


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Sizes that steps are padded to: dense for few tokens, up to the most that a step may have."""
    largest = max(max_num_seqs, max_num_batched_tokens)
    sizes = [size for size in (1, 2, 4, 8) if size < largest]
    for end, step in BUCKET_STEPS:
        sizes += range(max(sizes, default=0) + step, min(end + 1, largest), step)
    return (*sizes, largest)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the host must know of a step: read once from its buffer, and valid as long as that."""

    num_rows: int
    num_tokens: int
    num_samples: int
    num_drafts: int
    max_query_len: int
    query_lens: Ints
    """[R] new tokens of each row."""
    sample_rows: Ints
    """[N] persistent row of each sample."""
    sample_num_outputs: Ints
    """[N] position of the token to sample in its output; too large where drafts in flight come to be rejected."""
    sample_plan_rows: Ints
    """[N] position of each sample's row in the plan."""
    prompt_spans: tuple[tuple[int, int], ...]
    """(plan row, first token) of rows whose prompt is scored."""
    num_copies: int
    """Blocks to copy before the forward pass."""
    long_rows: tuple[LongRow, ...]
    """Rows with `LONG_CHUNK` or more new tokens."""

    @classmethod
    def of(cls, buffer: Ints) -> StepFacts:
        """
        Raises:
            ValueError: the buffer has another layout than this version knows.
        """
        longest, lens, rows, outputs, plan_rows, spans, long_rows = read_step(buffer, LONG_CHUNK)
        return cls(
            int(buffer[layout.NUM_ROWS]),
            int(buffer[layout.NUM_TOKENS]),
            int(buffer[layout.NUM_SAMPLES]),
            int(buffer[layout.NUM_DRAFTS]),
            longest,
            lens,
            rows,
            outputs,
            plan_rows,
            tuple(spans),
            int(buffer[layout.NUM_COPIES]),
            tuple(LongRow(*row) for row in long_rows),
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a graph was captured for."""

    num_tokens: int
    few_queries: bool
    """No row has more queries than the decode tile takes, so that one attention launch serves all."""
    choice: Choice
    """How it ends: with hidden states (`OTHER`), or with the choice of every sample (`kernels/choose.py`)."""
    has_drafts: bool = False
    """Any token may be sampled from, and the choices end with `kernels/accept.py`."""


def reads_last_only(num_tokens: int, num_rows: int) -> bool:
    """Whether the last layer is spared tokens that nobody reads: where they are at least half of the step."""
    return 2 * num_rows <= num_tokens


class Buckets:
    """Which bucket serves a step, and which are captured ahead.

    Args:
        sizes: ascending, as `token_buckets`; none if every step runs eagerly.
        few_queries: queries of a row that the decode tile takes.
        num_drafts: most drafts of a row, 0 without speculation.
    """

    def __init__(self, sizes: tuple[int, ...], max_num_seqs: int, few_queries: int, num_drafts: int) -> None:
        self.sizes = sizes
        self.few_queries = few_queries
        self.num_drafts = num_drafts
        self._max_num_seqs = max_num_seqs
        most = max_num_seqs * (1 + num_drafts)
        self.max_samples = min(most, sizes[-1]) if sizes else most
        """Most samples of a step."""
        # One kind for all steps of decodes with drafts, though some have few enough.
        self._few_with_drafts = 1 + num_drafts <= few_queries
        self._decode_sizes = sizes[: bisect_left(sizes, max_num_seqs) + 1][::-1]  # largest first
        self._draft_sizes: tuple[int, ...] = ()  # of steps of decodes that may all have drafts, largest first
        if num_drafts:
            self._draft_sizes = tuple(size for size in sizes[: bisect_left(sizes, most) + 1][::-1] if size > 1)

    def of(self, facts: StepFacts, choice: Choice) -> Bucket:
        """The smallest bucket that serves a step."""
        has_drafts = facts.num_drafts > 0
        few_queries = facts.max_query_len <= self.few_queries and (self._few_with_drafts or not has_drafts)
        size = self.sizes[bisect_left(self.sizes, facts.num_tokens)]
        is_small = few_queries or (has_drafts and size in self._draft_sizes)
        chooses = is_small and facts.num_samples > 0 and not facts.prompt_spans
        return Bucket(size, few_queries, choice if chooses else Choice.OTHER, has_drafts)

    def larger(self, bucket: Bucket, num_tokens: int) -> Iterator[Bucket]:
        """The next larger buckets of the kind, as long as a step of so many tokens does not waste too much of them."""
        for size in self.sizes[bisect_left(self.sizes, bucket.num_tokens) + 1 :]:
            if size - num_tokens > MOST_PADDING * size:
                return
            yield replace(bucket, num_tokens=size)

    def rows_of(self, bucket: Bucket) -> int:
        return min(bucket.num_tokens, self._max_num_seqs)

    def samples_of(self, bucket: Bucket) -> int:
        return min(bucket.num_tokens, self.max_samples) if bucket.has_drafts else self.rows_of(bucket)

    def is_narrow(self, bucket: Bucket) -> bool:
        """Whether its last layer computes the last token of each row alone."""
        reads_all = bucket.few_queries or bucket.has_drafts
        return not reads_all and reads_last_only(bucket.num_tokens, self.rows_of(bucket))

    def sample_size(self, num_samples: int) -> int:
        """How many rows the logits of so many samples are computed for: as many as a decode captured at start has.

        For a number of rows never multiplied before, cuBLAS loads a kernel and torch takes memory. Both may wait for
        the device, and the loop with them: for a whole step of prompts, if one runs.
        """
        if not self.sizes or num_samples == 0:
            return num_samples
        if num_samples > self._max_num_seqs:
            larger = (size for size in reversed(self._likely_draft_sizes()) if size >= num_samples)
            return min(next(larger, self.max_samples), self.max_samples)
        larger = (size for size in reversed(self._likely_sizes()) if size >= num_samples)
        return min(next(larger, num_samples), self._max_num_seqs)

    def at_start(self) -> list[Bucket]:
        """What the first steps need: the largest step, so that all others fit into its memory, and decodes."""
        drafts = self._with_drafts(self._likely_draft_sizes(), Choice.PLAIN)
        return [self._mixed(self.sizes[-1]), *drafts, *self._plain(self._likely_sizes(), Choice.PLAIN)]

    def ahead(self) -> list[Bucket]:
        """Every bucket to be captured ahead, the likeliest first but for the largest."""
        mixed = [self._mixed(size) for size in reversed(self.sizes)]
        found = mixed[:1]
        found += self._with_drafts(self._draft_sizes, Choice.PLAIN)
        found += self._plain(self._decode_sizes, Choice.PLAIN)
        found += mixed[1:]
        if self.num_drafts:
            found += (self._mixed_with_drafts(size) for size in reversed(self.sizes) if size > 1)
        for choice in (Choice.FILTERED, Choice.OTHER):
            found += self._plain(self._likely_sizes(), choice)
            found += self._with_drafts(self._likely_draft_sizes(), choice)
        return list(dict.fromkeys(found))

    # ---- inside -----------------------------------------------------------------------------------------

    def _mixed(self, size: int) -> Bucket:
        return Bucket(size, few_queries=False, choice=Choice.OTHER)

    def _mixed_with_drafts(self, size: int) -> Bucket:
        choice = Choice.PLAIN if size in self._draft_sizes else Choice.OTHER
        return Bucket(size, few_queries=False, choice=choice, has_drafts=True)

    def _plain(self, sizes: Sequence[int], choice: Choice) -> list[Bucket]:
        return [Bucket(size, few_queries=True, choice=choice) for size in sizes]

    def _with_drafts(self, sizes: Sequence[int], choice: Choice) -> list[Bucket]:
        return [Bucket(size, self._few_with_drafts, choice, has_drafts=True) for size in sizes]

    def _likely_sizes(self) -> list[int]:
        decodes = self._decode_sizes
        return [size for size in decodes if size in AT_START or size == decodes[0]]

    def _likely_draft_sizes(self) -> list[int]:
        """As many as of decodes without drafts, but all of a single request's: the smaller ones, since speculation is
        for few requests."""
        likely = [size for size in self._draft_sizes if size in AT_START or size == self._draft_sizes[0]]
        num_alone = sum(size < 2 * (1 + self.num_drafts) for size in likely)
        return likely[-max(len(self._likely_sizes()), num_alone) :]
