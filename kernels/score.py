"""Log-probabilities of a batch: of one token per row, with its rank, and of the most likely ones.

    logprob  max((x - max x) - log sum exp(x - max x), floor) of the raw logits x of a row
    rank     1 + how many logits are strictly greater; 0 if a logit is NaN or +inf, or all are -inf
    top      the `width` greatest log-probabilities, greatest first, lowest id first on ties

All of it for all rows in three launches that read the logits twice and keep no copy of them. The vocabulary is cut
into groups of `GROUP` tokens: the best of a row is the best of its groups' best, and once it is taken only its own
group must be looked through for the next. Keys order tokens as the outcome does: log-probability, then lower id.

What comes out is one int32 matrix [n, 3 + 2 width], so that one copy brings it to the host: token id, bits of its
log-probability, rank, ids of the top, bits of their log-probabilities. Results of a row depend on that row only.
Called by `aioengine/sampling_backend.py`.
"""

from __future__ import annotations

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs
from .sampling import rank_ref, top_logprobs_ref
from .sampling_triton import sortable

GROUP = 256
CHUNK = 32 * GROUP
MOST_TOP = 256
"""Widths beyond this are for the reference: one program finds the top of a row one after the other."""


def score_ref(
    logits: torch.Tensor, at: torch.Tensor | None, token_ids: torch.Tensor, width: int, floor: float
) -> torch.Tensor:
    """Scores rows `at` [n], or all, of logits [S, V]; `token_ids` [S] has one token for every row of them."""
    if at is not None:
        logits, token_ids = logits.index_select(0, at), token_ids.index_select(0, at)
    x = logits.float()
    values = x.log_softmax(-1).clamp_(min=floor)
    is_finite = torch.isfinite(x.gather(1, x.argmax(-1)[:, None])[:, 0])
    rank = torch.where(is_finite, rank_ref(x, token_ids)[1], 0)
    chosen = values.gather(1, token_ids.long()[:, None])
    top_ids, top = top_logprobs_ref(values, width)
    scalars = token_ids.int(), chosen[:, 0].view(torch.int32), rank.int()
    return torch.cat((torch.stack(scalars, 1), top_ids.int(), top.view(torch.int32)), 1)


@jit
def _totals_kernel(
    logits_ptr, at_ptr, totals_ptr, vocab_size, stride_row, HAS_AT: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Program (i, chunk): the greatest logit of a chunk and the sum of exp(x - that)."""
    i = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = i
    if HAS_AT:
        row = tl.load(at_ptr + i).to(tl.int64)
    x = tl.load(logits_ptr + row * stride_row + index, mask=index < vocab_size, other=float("-inf"))  # [CHUNK]
    x = x.to(tl.float32)
    greatest = tl.max(x, axis=0)
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    totals_ptr += 2 * (i * tl.num_programs(1) + tl.program_id(1))
    tl.store(totals_ptr, greatest)
    tl.store(totals_ptr + 1, tl.sum(tl.exp(x - base), axis=0))


@jit
def _logprobs_of(x, greatest, log_total, floor):
    value = (x - greatest) - log_total
    return tl.where(value > floor, value, floor)


@jit
def _keys_of(value, index):
    """int64 that order as the outcome: the greater log-probability, then the lower id."""
    return (sortable(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@jit(varying=["num_chunks"])
def _groups_kernel(
    logits_ptr,
    at_ptr,
    token_ids_ptr,
    totals_ptr,
    row_totals_ptr,
    greater_ptr,
    best_ptr,
    vocab_size,
    num_chunks,
    floor,
    stride_row,
    HAS_AT: tl.constexpr,
    HAS_TOP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, chunk): how many logits exceed the chosen one, the best key of each group, and the row's total."""
    i, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, CHUNKS)
    groups: tl.constexpr = CHUNK // GROUP
    index = chunk * CHUNK + tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = i
    if HAS_AT:
        row = tl.load(at_ptr + i).to(tl.int64)
    logits_ptr += row * stride_row
    totals_ptrs = totals_ptr + 2 * (i * num_chunks + lanes)
    maxima = tl.load(totals_ptrs, mask=lanes < num_chunks, other=float("-inf"))  # [CHUNKS]
    sums = tl.load(totals_ptrs + 1, mask=lanes < num_chunks, other=0.0)  # [CHUNKS]
    greatest = tl.max(maxima, axis=0)
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    log_total = tl.log(tl.sum(sums * tl.exp(maxima - base), axis=0))
    if chunk == 0:
        tl.store(row_totals_ptr + 2 * i, greatest)
        tl.store(row_totals_ptr + 2 * i + 1, log_total)
    chosen = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    x = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)  # [groups, GROUP]
    greater = tl.sum(tl.sum((x > chosen).to(tl.int32), axis=1), axis=0)
    tl.store(greater_ptr + i * num_chunks + chunk, greater)
    if HAS_TOP:
        keys = _keys_of(_logprobs_of(x, greatest, log_total, floor), index)
        best = tl.max(tl.where(index < vocab_size, keys, -0x7FFFFFFFFFFFFFFF), axis=1)  # [groups]
        tl.store(best_ptr + (i * num_chunks + chunk) * groups + tl.arange(0, groups), best)


@jit(varying=["num_chunks", "width"])
def _collect_kernel(
    logits_ptr,
    at_ptr,
    token_ids_ptr,
    row_totals_ptr,
    greater_ptr,
    best_ptr,
    out_ptr,
    vocab_size,
    num_chunks,
    width,
    floor,
    stride_row,
    HAS_AT: tl.constexpr,
    HAS_TOP: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PER_CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i: one line of the outcome."""
    i = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, CHUNKS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = i
    if HAS_AT:
        row = tl.load(at_ptr + i).to(tl.int64)
    logits_ptr += row * stride_row
    out_ptr += i * (3 + 2 * width)
    greatest = tl.load(row_totals_ptr + 2 * i)
    log_total = tl.load(row_totals_ptr + 2 * i + 1)
    greater = tl.load(greater_ptr + i * num_chunks + lanes, mask=lanes < num_chunks, other=0)  # [CHUNKS]
    # a NaN among the logits makes the total one
    is_finite = (log_total == log_total) & (greatest > float("-inf")) & (greatest < float("inf"))
    token_id = tl.load(token_ids_ptr + row).to(tl.int32)
    chosen = _logprobs_of(tl.load(logits_ptr + token_id).to(tl.float32), greatest, log_total, floor)
    tl.store(out_ptr, token_id)
    tl.store(out_ptr + 1, chosen.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2, tl.where(is_finite, tl.sum(greater, axis=0) + 1, 0))
    if HAS_TOP:
        group = tl.arange(0, GROUPS)
        num_groups = num_chunks * GROUPS_PER_CHUNK
        best_ptrs = best_ptr + i * num_groups + group
        keys = tl.load(best_ptrs, mask=group < num_groups, other=-0x7FFFFFFFFFFFFFFF)  # [GROUPS]
        for n in range(width):
            key = tl.max(keys, axis=0)
            best_id = (0x7FFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)
            order = (key >> 32).to(tl.int32)
            tl.store(out_ptr + 3 + n, best_id)
            tl.store(out_ptr + 3 + width + n, order ^ ((order >> 31) & 0x7FFFFFFF))  # undoes `sortable`
            index = (best_id // GROUP) * GROUP + tl.arange(0, GROUP)
            mask = index < vocab_size
            x = tl.load(logits_ptr + index, mask=mask, other=float("-inf")).to(tl.float32)  # [GROUP]
            rest = _keys_of(_logprobs_of(x, greatest, log_total, floor), index)
            rest = tl.max(tl.where(mask & (rest < key), rest, -0x7FFFFFFFFFFFFFFF), axis=0)
            keys = tl.where(group == best_id // GROUP, rest, keys)


def score(
    logits: torch.Tensor, at: torch.Tensor | None, token_ids: torch.Tensor, width: int, floor: float
) -> torch.Tensor:
    """See `score_ref`; `width` is at most `MOST_TOP` and the vocabulary's size."""
    require_kernels(logits.device)
    num_rows, vocab_size = logits.shape[0] if at is None else len(at), logits.shape[1]
    if logits.stride(1) != 1 or token_ids.stride(0) != 1:
        raise ValueError("logits must be contiguous along the vocabulary, token ids altogether")
    if width > min(MOST_TOP, vocab_size):
        raise ValueError(f"width={width}; at most {min(MOST_TOP, vocab_size)} can be found")

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    out = empty(num_rows, 3 + 2 * width)
    if num_rows == 0:
        return out
    num_chunks, per_chunk, has_top = triton.cdiv(vocab_size, CHUNK), CHUNK // GROUP, width > 0
    totals = empty(num_rows, num_chunks, 2, dtype=torch.float32)
    row_totals = empty(num_rows, 2, dtype=torch.float32)
    greater = empty(num_rows, num_chunks)
    best = empty(num_rows, num_chunks * per_chunk, dtype=torch.int64) if has_top else None
    # Two kernels compute a log-probability each for itself and compare: neither may fuse what the other rounds.
    chunks, options = triton.next_power_of_2(num_chunks), {**launch_options(logits.device), "enable_fp_fusion": False}
    stride, has_at = logits.stride(0), at is not None
    _totals_kernel[(num_rows, num_chunks)](
        logits, at, totals, vocab_size, stride, HAS_AT=has_at, CHUNK=CHUNK, num_warps=8, **options
    )
    _groups_kernel[(num_rows, num_chunks)](
        logits,
        at,
        token_ids,
        totals,
        row_totals,
        greater,
        best,
        vocab_size,
        num_chunks,
        floor,
        stride,
        HAS_AT=has_at,
        HAS_TOP=has_top,
        CHUNKS=chunks,
        CHUNK=CHUNK,
        GROUP=GROUP,
        num_warps=8,
        **options,
    )
    _collect_kernel[(num_rows,)](
        logits,
        at,
        token_ids,
        row_totals,
        greater,
        best,
        out,
        vocab_size,
        num_chunks,
        width,
        floor,
        stride,
        HAS_AT=has_at,
        HAS_TOP=has_top,
        CHUNKS=chunks,
        GROUPS=triton.next_power_of_2(num_chunks * per_chunk),
        GROUPS_PER_CHUNK=per_chunk,
        GROUP=GROUP,
        num_warps=4,
        **options,
    )
    return out
