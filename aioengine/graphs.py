"""The forward pass of a step on a device: unpacked, padded to a bucket, and replayed as a CUDA graph.

`StepForward` owns what every step reads and writes at fixed addresses (the step buffer, the persistent rows' block
table, draws, last tokens and rejected drafts, the chosen tokens) and one captured graph per `Bucket`
(`buckets.py`). A bucket seen for the first time
runs its step eagerly, which compiles and warms what it needs, and is captured right after; capture executes
nothing. Steps with a chunk long enough for cuDNN, and all steps at -O0, run eagerly at their own size.

All buckets share their inputs, and all graphs one memory pool: they run one after another on one stream, and nothing
of a step is read after the next has begun. Without CUDA (Triton's interpreter) everything runs eagerly, padded the
same. Called by `cuda_runner.py` on one stream, in launch order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.buckets import LONG_CHUNK, Bucket, Buckets, StepFacts, reads_last_only
from aioengine.fastcore.step_buffer import VERSION
from aioengine.kernels import step as layout
from aioengine.kernels.accept import accept
from aioengine.kernels.attention_plan import AttentionPlan, fill_plan, make_plan, row_counts, tile_for
from aioengine.kernels.attention_prefill import LongRow, unsupported_reason, warm
from aioengine.kernels.block_copy import BlockCopier
from aioengine.kernels.choose import DrawTable, choose
from aioengine.kernels.compile_ahead import can_compile_together, compiled_together
from aioengine.kernels.sampling_triton import argmax
from aioengine.kernels.step import StepInputs, unpack
from aioengine.kv_layout import KVLayout
from aioengine.layers.context import FinalRows, StepContext
from aioengine.layers.ops_cuda import CudaOps, DeviceAttention
from aioengine.model_spec import ModelSpec
from aioengine.sampler import Choice
from aioengine.transfer import to_device

if TYPE_CHECKING:
    from aioengine.models import Model

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """Fixed buffers of a bucket and its graph, once captured."""

    inputs: StepInputs
    attention: tuple[DeviceAttention, ...]
    final: FinalRows | None = None
    graph: torch.cuda.CUDAGraph | None = None

    @property
    def num_hidden(self) -> int:
        return self.inputs.num_tokens if self.final is None else self.inputs.num_rows


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step left on the device."""

    hidden: torch.Tensor
    """[T, H] normalized hidden states, of tokens or of the last token of each row; undefined if the bucket chose."""
    inputs: StepInputs
    ctx: StepContext
    has_chosen: bool
    """`StepForward.packed` and `last_token` hold the choices."""

    @property
    def sample_indices(self) -> torch.Tensor:
        """[N] which of the hidden states predicts each sample."""
        return self.inputs.sample_indices if self.ctx.final is None else self.inputs.sample_plan_rows


class StepForward:
    """Runs forward passes; see the head of the file.

    Args:
        buffer_words: most words of a step buffer.
        buckets: sizes that steps are padded to, ascending, as `token_buckets`; none runs every step eagerly.
        num_speculative_tokens: most drafts of a row.
        uses_cudnn: for long chunks, where it can serve them.
    """

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        ops: CudaOps,
        kv_caches: Sequence[torch.Tensor],
        *,
        layout: KVLayout,
        max_num_seqs: int,
        max_blocks: int,
        buffer_words: int,
        buckets: tuple[int, ...],
        num_speculative_tokens: int = 0,
        uses_cudnn: bool = True,
    ) -> None:
        self._model = model
        self._spec = spec
        self._ops = ops
        self._kv_caches = kv_caches
        self._block_copier: BlockCopier | None = None
        self._layout = layout
        self._max_num_seqs = max_num_seqs
        self._device = ops.device
        self._uses_graphs = bool(buckets) and self._device.type == "cuda"
        self._entries: dict[Bucket, _Entry] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._uses_graphs else None
        group = spec.num_heads // spec.num_kv_heads
        few_queries = tile_for(group, few_queries=True).block_m // group
        self.buckets = Buckets(buckets, max_num_seqs, few_queries, num_speculative_tokens)
        self._windows = tuple(sorted({window or 0 for window in spec.layer_windows}))
        self.cudnn_refusal = (
            self._why_no_cudnn(ops.dtype) if uses_cudnn else "cuDNN is switched off by --attention-backend triton"
        )
        """Why long chunks stay with the paged kernel, or None."""
        self.waits_for_idle_time = False
        """A bucket that is not captured yet is made up for by a larger one: somebody will capture it later."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        self.buffer = ints(buffer_words)
        """The step to run; the runner copies it here before `run`."""
        num_groups = len(layout.groups)
        self.block_table = ints(num_groups * max_num_seqs, max_blocks)
        self._scales = None
        if num_groups > 1:
            scales = [size // layout.block_size for size in layout.block_sizes]
            self._scales = torch.tensor(scales, dtype=torch.int32, device=self._device)
        self.last_token = ints(max_num_seqs)
        self.rejected = ints(max_num_seqs)
        """Drafts rejected in each persistent row since the engine began (`kernels/accept.py`)."""
        self.packed = ints(2, self.buckets.max_samples)
        """Choices: token ids, then statuses."""
        self.draws = DrawTable.zeros(max_num_seqs, self._device)
        """How each persistent row chooses; the runner copies it here as requests join."""
        largest = buckets[-1] if buckets else 0
        self._inputs = self._empty_inputs(largest, max_num_seqs, self.buckets.max_samples)
        self._hidden = torch.zeros((largest, spec.hidden_size), dtype=ops.dtype, device=self._device)
        self._shared_plan = self._make_plan(max(largest, 1), max_num_seqs, False, 0, None)

    def _why_no_cudnn(self, dtype: torch.dtype) -> str | None:
        """None if cuDNN can serve the long chunks of some layer."""
        if 0 not in self._windows:
            return unsupported_reason(self._device, dtype, self._spec.head_dim, window=self._windows[0])
        return unsupported_reason(self._device, dtype, self._spec.head_dim)

    @property
    def num_graphs(self) -> int:
        return sum(entry.graph is not None for entry in self._entries.values())

    def run(self, facts: StepFacts, *, choice: Choice) -> StepOutput:
        """Runs the step that lies in `buffer`. `choice`: what all its samples can be chosen with."""
        if facts.num_copies:
            self._copier().copy(self.buffer, facts.num_copies)
        if facts.num_samples > self.buckets.max_samples:
            raise ValueError(f"step of {facts.num_samples} samples, the most is {self.buckets.max_samples}")
        is_long = bool(facts.long_rows) and self.cudnn_refusal is None
        if not self.buckets.sizes or is_long:
            return self._run_at_size(facts)
        bucket = self.buckets.of(facts, choice)
        if self.waits_for_idle_time and bucket not in self._entries:
            larger = self.buckets.larger(bucket, facts.num_tokens)
            bucket = next((other for other in larger if other in self._entries), bucket)
        if facts.prompt_spans and self.buckets.is_narrow(bucket):
            return self._run_at_size(facts)
        entry = self._entries.get(bucket)
        if entry is None:
            entry = self._enter(bucket)
        elif entry.graph is not None:
            entry.graph.replay()
        else:
            self._pass(bucket, entry)
        return StepOutput(self._hidden[: entry.num_hidden], entry.inputs, self._context(entry), bucket.choice > 0)

    def choose(
        self,
        hidden_rows: torch.Tensor,
        rows: torch.Tensor,
        num_outputs: torch.Tensor,
        ctx: StepContext,
        choice: Choice,
    ) -> None:
        """Choice from hidden rows [N, H] of persistent rows [N], kept in `packed` and `last_token`."""
        logits = self._model.logits(hidden_rows, ctx)
        is_filtered = choice == Choice.FILTERED
        choose(logits, rows, num_outputs, self.draws, self.packed, self.last_token, is_filtered)

    def accept(self, num_rows: int) -> None:
        """Accepts the drafts of the step in `buffer`, of at most so many rows, whose choices are in `packed`."""
        accept(self.buffer, self.packed, self.last_token, self.rejected, num_rows)

    def is_prepared(self, bucket: Bucket) -> bool:
        return bucket in self._entries

    def prepare(self, bucket: Bucket) -> None:
        """Captures a bucket ahead of its first step, by running a step of padding; leaves no trace."""
        if bucket not in self._entries:
            self.buffer[: layout.HEADER_WORDS] = _empty_header(self._device)
            self._enter(bucket)

    def warm_long_chunks(self, max_chunk: int) -> Iterator[None]:
        """Prepares what chunks of up to `max_chunk` tokens need, cuDNN's plans and kernels, a piece at a time."""
        if self.cudnn_refusal is None:
            if max_chunk >= LONG_CHUNK:
                yield from self.warm_rests()
            yield from warm(self._spec.num_heads, self._kv_caches[self._layout.groups[0].layers[0]], max_chunk)

    def warm_rests(self) -> Iterator[None]:
        """Compiles the lists of what cuDNN leaves of a batch, for every number of rows: of rows without tokens here."""
        zeros = torch.zeros(self._max_num_seqs + 1, dtype=torch.int32, device=self._device)
        for num_rows in row_counts(self._max_num_seqs):
            plan = self._make_plan(LONG_CHUNK, num_rows, False, 0, self._shared_plan, (1, LONG_CHUNK))
            fill_plan(plan, zeros[: num_rows + 1], zeros[:num_rows], zeros[:num_rows])
            yield

    def compile_ahead(self, num_tokens: int) -> None:
        """Compiles what `profile` and the first steps launch, in threads; none of it is run (`compile_ahead.py`).

        Nobody unpacks a step then, so the inputs are zeros, which index every table within its bounds.
        """
        if not can_compile_together():
            return
        self._inputs.zero_()
        with compiled_together():
            self._profile(self._largest_inputs(num_tokens).zero_())
            for bucket in self.buckets.at_start() if self.buckets.sizes else ():
                self._pass(bucket, self._make_entry(bucket))

    def profile(self, num_tokens: int) -> None:
        """Takes the memory that the largest step takes: padding through all layers, logits of all samples."""
        self.buffer[: layout.HEADER_WORDS] = _empty_header(self._device)
        self._profile(self._largest_inputs(num_tokens))

    def _largest_inputs(self, num_tokens: int) -> StepInputs:
        rows, samples = (min(most, num_tokens) for most in (self._max_num_seqs, self.buckets.max_samples))
        return self._empty_inputs(num_tokens, rows, samples)

    def _profile(self, inputs: StepInputs) -> None:
        tokens, rows = inputs.num_tokens, inputs.num_rows
        plans = {w: self._make_plan(tokens, rows, False, w, self._shared_plan) for w in self._windows}
        entry = _Entry(inputs, self._metadata(inputs, plans, ()))
        hidden = self._forward(entry)
        logits = self._model.logits(hidden[: inputs.num_samples], self._context(entry))
        wide = logits.float()
        argmax(wide + 0.0)

    def close(self) -> None:
        """Drops graphs and buffers; nothing may be running."""
        for entry in self._entries.values():
            if entry.graph is not None:
                entry.graph.reset()
        self._entries.clear()
        self._block_copier = None

    def warm_copies(self) -> None:
        """Compiles the copy of blocks, by a step that has none."""
        self.buffer[: layout.HEADER_WORDS] = _empty_header(self._device)
        self._copier().copy(self.buffer, 1)

    # ---- inside -----------------------------------------------------------------------------------------

    def _copier(self) -> BlockCopier:
        """Made late: the caches are given their final size after profiling."""
        if self._block_copier is None:
            self._block_copier = BlockCopier(self._kv_caches)
        return self._block_copier

    def _enter(self, bucket: Bucket) -> _Entry:
        """Makes a bucket, runs the step in `buffer` eagerly, then captures the same calls."""
        entry = self._make_entry(bucket)
        self._pass(bucket, entry)
        if self._uses_graphs:
            entry.graph = self._capture(bucket, entry)
        self._entries[bucket] = entry
        return entry

    def _capture(self, bucket: Bucket, entry: _Entry) -> torch.cuda.CUDAGraph | None:
        """None if the memory is too small for one more graph: steps that have none yet run eagerly from now on."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            self._pass(bucket, entry)
        except torch.OutOfMemoryError as error:
            logger.warning("no graph is captured any more, and steps of other sizes run eagerly: %s", error)
            self._uses_graphs = False
            return None
        finally:
            graph.capture_end()
        return graph

    def _make_entry(self, bucket: Bucket) -> _Entry:
        rows = self.buckets.rows_of(bucket)
        inputs = self._inputs.first(bucket.num_tokens, rows, self.buckets.samples_of(bucket))
        plans = {
            window: self._make_plan(bucket.num_tokens, rows, bucket.few_queries, window, self._shared_plan)
            for window in self._windows
        }
        final = self._final_rows(inputs) if self.buckets.is_narrow(bucket) else None
        return _Entry(inputs, self._metadata(inputs, plans, ()), final)

    def _final_rows(self, inputs: StepInputs) -> FinalRows:
        """The last token of each row; `_forward` fills its plan."""
        rows, window = inputs.num_rows, self._spec.layer_windows[-1] or 0
        plans = {window: self._make_plan(rows, rows, True, window, self._shared_plan)}
        whole = self._metadata(inputs, plans, ())
        attention = [
            replace(meta, query_start_loc=inputs.last_start_loc, num_tokens=rows, max_query_len=1) for meta in whole
        ]
        return FinalRows(inputs.last_tokens, attention)

    def _pass(self, bucket: Bucket, entry: _Entry) -> None:
        hidden = self._forward(entry)
        if bucket.choice:
            inputs, ctx = entry.inputs, self._context(entry)
            hidden_rows = hidden.index_select(0, inputs.sample_indices)
            self.choose(hidden_rows, inputs.sample_rows, inputs.sample_num_outputs, ctx, bucket.choice)
            if bucket.has_drafts:
                self.accept(inputs.num_rows)
        else:
            self._hidden[: entry.num_hidden].copy_(hidden)

    def _run_at_size(self, facts: StepFacts) -> StepOutput:
        sample_size = self.buckets.sample_size
        num_rows = sample_size(facts.num_rows)  # the last layer multiplies as many
        inputs = self._empty_inputs(facts.num_tokens, num_rows, sample_size(facts.num_samples))
        long_rows = facts.long_rows if self.cudnn_refusal is None else ()
        skipped = np.zeros(num_rows, np.int32)
        for row in long_rows:
            skipped[row.row] = row.num_covered
        plans = {}
        few_queries = facts.max_query_len <= self.buckets.few_queries
        for window in self._windows:
            owed = facts.query_lens - skipped[: facts.num_rows] if window == 0 else facts.query_lens
            plans[window] = self._make_plan(
                facts.num_tokens, num_rows, few_queries, window, self._shared_plan, owed.tolist()
            )
        reads_all = few_queries or facts.prompt_spans or facts.num_drafts
        is_narrow = not reads_all and reads_last_only(facts.num_tokens, num_rows)
        final = self._final_rows(inputs) if is_narrow else None
        entry = _Entry(inputs, self._metadata(inputs, plans, long_rows), final)
        skip = to_device(skipped, self._device) if long_rows else None
        hidden = self._forward(entry, skip)
        return StepOutput(hidden, inputs, self._context(entry), False)

    def _forward(self, entry: _Entry, skip: torch.Tensor | None = None) -> torch.Tensor:
        """`skip`: how many of each row's first queries cuDNN attends, in layers that see all."""
        inputs = entry.inputs
        rows = self.block_table, self.last_token, self.rejected
        unpack(self.buffer, *rows, self._layout.block_size, inputs, self._scales)
        for window, plan in entry.attention[0].plans.items():
            fill_plan(plan, inputs.query_start_loc, inputs.seq_lens, skip if window == 0 else None)
        if entry.final is not None:
            last = entry.final.attention[0]
            assert isinstance(last, DeviceAttention), type(last)
            for plan in last.plans.values():
                fill_plan(plan, inputs.last_start_loc, inputs.seq_lens)
        return self._model.forward(inputs.input_ids, inputs.positions, self._context(entry))

    def _context(self, entry: _Entry) -> StepContext:
        return StepContext(self._ops, entry.attention, self._kv_caches, self._layout.group_of_layer, entry.final)

    def _empty_inputs(self, num_tokens: int, num_rows: int, num_samples: int) -> StepInputs:
        max_blocks, num_groups = self.block_table.shape[1], len(self._layout.groups)
        return StepInputs.empty(num_tokens, num_rows, num_samples, max_blocks, self._device, num_groups)

    def _make_plan(
        self,
        num_tokens: int,
        num_rows: int,
        few_queries: bool,
        window: int,
        share: AttentionPlan | None,
        query_lens: Sequence[int] | None = None,
    ) -> AttentionPlan:
        spec = self._spec
        return make_plan(
            num_tokens,
            num_rows,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._device,
            window=window,
            decode_only=few_queries,
            share=share,
            query_lens=query_lens,
        )

    def _metadata(
        self, inputs: StepInputs, plans: dict[int, AttentionPlan], long_rows: tuple[LongRow, ...]
    ) -> tuple[DeviceAttention, ...]:
        """By group; all take their work lists from the same plans."""
        return tuple(
            DeviceAttention(
                inputs.query_start_loc,
                inputs.seq_lens,
                table,
                slots,
                inputs.num_tokens,
                inputs.num_rows,
                inputs.num_tokens,
                inputs.block_table.shape[2] * self._layout.block_size,
                plans,
                long_rows,
            )
            for table, slots in zip(inputs.block_table, inputs.slot_mapping, strict=True)
        )


def _empty_header(device: torch.device) -> torch.Tensor:
    """The header of a step without rows, tokens and samples."""
    words = [0] * layout.HEADER_WORDS
    words[layout.VERSION] = VERSION
    for offset in (layout.OFF_ROWS, layout.OFF_TOKENS, layout.OFF_BLOCKS, layout.TOTAL_WORDS):
        words[offset] = layout.HEADER_WORDS
    return torch.tensor(words, dtype=torch.int32, device=device)
