"""Chooses the next tokens of simple rows and keeps them: for the host in one piece, for the next step by row.

A row is simple if its token is the greatest logit or a seeded draw at a temperature, from all tokens or from those
that min-p, top-k and top-p leave: nothing edits its logits. What that needs lies on the device by persistent row
(`DrawTable`), so that a captured graph serves any mix.

    packed      [2, max_samples] int32  token ids, then statuses: 0 fine, 1 not finite, 2 all of them -inf
    last_token  [max_rows] int32        what a -1 in the next step buffer stands for

Samples with row -1 are padding and leave no trace in `last_token`.
Called by `aioengine/graphs.py` at the end of a step whose rows are all simple, and by `aioengine/sampling_backend.py`
with logits that were edited before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .jit import INTERPRETED, jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs
from .sampling import draw_ref, filter_threshold_ref
from .sampling_triton import filter_threshold, gumbel, sortable


@dataclass(frozen=True, slots=True)
class DrawTable:
    """How every persistent row chooses; set by the runner as requests join, [max_rows] each."""

    temperature: torch.Tensor  # float32, 0 takes the greatest logit
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int32, the vocabulary's size keeps all
    seeds: torch.Tensor  # int64, the bits of an unsigned key

    @classmethod
    def zeros(cls, max_rows: int, device: torch.device, *, pin_memory: bool = False) -> DrawTable:
        """All rows greedy."""

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_rows, dtype=dtype, device=device, pin_memory=pin_memory)

        return cls(
            temperature=column(torch.float32),
            top_p=column(torch.float32),
            min_p=column(torch.float32),
            top_k=column(torch.int32),
            seeds=column(torch.int64),
        )

    def columns(self) -> tuple[torch.Tensor, ...]:
        return self.temperature, self.top_p, self.min_p, self.top_k, self.seeds

    def copy_(self, other: DrawTable) -> None:
        """Takes another table over, in stream order."""
        for own, source in zip(self.columns(), other.columns(), strict=True):
            own.copy_(source, non_blocking=True)


def choose_ref(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_outputs: torch.Tensor,
    table: DrawTable,
    packed: torch.Tensor,
    last_token: torch.Tensor,
    is_filtered: bool = True,
) -> None:
    """Logits [N, V] of persistent rows [N] whose outputs so far are num_outputs [N]; writes packed and last_token."""
    num_samples, x = len(rows), logits.float()
    at = rows.clamp(min=0).long()
    ids, divisor = x.argmax(-1), table.temperature[at]
    drawn = divisor > 0
    z, at_drawn = x[drawn] / divisor[drawn, None], at[drawn]
    threshold = torch.full_like(z[:, 0], -torch.inf)
    if is_filtered and len(z):
        threshold = filter_threshold_ref(z, *(t[at_drawn] for t in (table.top_k, table.top_p, table.min_p)))
    ids[drawn] = draw_ref(z, threshold, table.seeds[at_drawn], num_outputs[drawn])
    top = x.gather(1, ids[:, None])[:, 0]
    packed[0, :num_samples] = ids.int()
    packed[1, :num_samples] = torch.where(torch.isfinite(top), 0, torch.where(top == -torch.inf, 2, 1)).int()
    real = rows >= 0
    last_token[rows[real].long()] = ids[real].int()


@jit(varying=["blocks_per_program"], unaligned=["rows_ptr", "num_outputs_ptr", "temperature_ptr", "seeds_ptr"])
def _best_of_chunk_kernel(
    logits_ptr,
    rows_ptr,
    num_outputs_ptr,
    temperature_ptr,
    seeds_ptr,
    threshold_ptr,
    keys_ptr,
    vocab_size,
    blocks_per_program,
    stride_logits_row,
    HAS_THRESHOLD: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (sample, chunk): the greatest score among the tokens of its blocks, lowest id first on ties."""
    sample = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    start = tl.program_id(1) * blocks_per_program * BLOCK
    row = tl.maximum(tl.load(rows_ptr + sample), 0)
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(num_outputs_ptr + sample)
    threshold = float("-inf")
    if HAS_THRESHOLD:
        threshold = tl.load(threshold_ptr + sample)
    best = tl.full([BLOCK], -0x80000000, tl.int32)
    best_index = start + tl.arange(0, BLOCK)
    for first in range(start, tl.minimum(start + blocks_per_program * BLOCK, vocab_size), BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < vocab_size
        logits_ptrs = logits_ptr + sample * stride_logits_row + index
        score = tl.load(logits_ptrs, mask=mask, other=float("-inf")).to(tl.float32)  # [BLOCK]
        if temperature > 0.0:  # the same for the whole program: greedy rows pay for no noise
            z = tl.div_rn(score, temperature + tl.zeros([BLOCK], tl.float32))
            score = z + gumbel(seed, position, first, BLOCK // 4, APPROXIMATE)
            if HAS_THRESHOLD:  # what is no number stays, to be told
                score = tl.where((z >= threshold) | (z != z) | (z == float("inf")), score, float("-inf"))
        key = tl.where(mask, sortable(score), -0x80000000)
        is_better = key > best
        best = tl.where(is_better, key, best)
        best_index = tl.where(is_better, index, best_index)
    keys = (best.to(tl.int64) << 32) | (0x7FFFFFFF - best_index).to(tl.int64)
    tl.store(keys_ptr + sample * tl.num_programs(1) + tl.program_id(1), tl.max(keys, axis=0))


@jit(varying=["num_chunks", "stride_packed"], unaligned=["rows_ptr"])
def _keep_best_kernel(
    keys_ptr,
    logits_ptr,
    rows_ptr,
    packed_ptr,
    last_token_ptr,
    num_chunks,
    stride_logits_row,
    stride_packed,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per sample: the best of its chunks, with its status."""
    sample = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    chunk = tl.arange(0, BLOCK)
    lowest = -0x7FFFFFFFFFFFFFFF
    keys = tl.load(keys_ptr + sample * num_chunks + chunk, mask=chunk < num_chunks, other=lowest)  # [BLOCK]
    token_id = 0x7FFFFFFF - (tl.max(keys, axis=0) & 0xFFFFFFFF)
    row = tl.load(rows_ptr + sample)
    top = tl.load(logits_ptr + sample * stride_logits_row + token_id).to(tl.float32)
    status = tl.where(top == float("-inf"), 2, tl.where((top != top) | (top == float("inf")), 1, 0))
    tl.store(packed_ptr + sample, token_id.to(tl.int32))
    tl.store(packed_ptr + stride_packed + sample, status)
    tl.store(last_token_ptr + row, token_id.to(tl.int32), mask=row >= 0)


def choose(
    logits: torch.Tensor,
    rows: torch.Tensor,
    num_outputs: torch.Tensor,
    table: DrawTable,
    packed: torch.Tensor,
    last_token: torch.Tensor,
    is_filtered: bool = True,
) -> None:
    """See `choose_ref`; nothing is read back. Without `is_filtered` no row has a filter: two launches."""
    require_kernels(logits.device)
    num_samples, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("logits must be contiguous along the vocabulary")
    if num_samples == 0:
        return
    threshold = _thresholds(logits, rows, table) if is_filtered else None
    block = 2048
    blocks = triton.cdiv(vocab_size, block)
    blocks_per_program = triton.cdiv(blocks, min(blocks, max(1, 1056 // num_samples), 1024))
    chunks = triton.cdiv(blocks, blocks_per_program)
    keys = torch.empty((num_samples, chunks), dtype=torch.int64, device=logits.device)
    options = launch_options(logits.device)
    _best_of_chunk_kernel[(num_samples, chunks)](
        logits,
        rows,
        num_outputs,
        table.temperature,
        table.seeds,
        threshold,
        keys,
        vocab_size,
        blocks_per_program,
        logits.stride(0),
        HAS_THRESHOLD=is_filtered,
        APPROXIMATE=not INTERPRETED,
        BLOCK=block,
        num_warps=8,
        **options,
    )
    _keep_best_kernel[(num_samples,)](
        keys,
        logits,
        rows,
        packed,
        last_token,
        chunks,
        logits.stride(0),
        packed.stride(0),
        BLOCK=triton.next_power_of_2(blocks),
        num_warps=1,
        **options,
    )


def _thresholds(logits: torch.Tensor, rows: torch.Tensor, table: DrawTable) -> torch.Tensor:
    """The lowest divided logit that survives each row's filters, float32 [N]."""
    at = rows.clamp(min=0)
    temperature, top_p, min_p, top_k = (column.index_select(0, at) for column in table.columns()[:4])
    divisor = torch.where(temperature > 0, temperature, 1.0)
    return filter_threshold(logits / divisor[:, None], top_k, top_p, min_p)
