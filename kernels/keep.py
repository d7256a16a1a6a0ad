"""Keeps what a greedy step chose: for the host in one piece, for the next step by persistent row.

    packed      [2, max_samples] int32   token ids, then statuses: 0 fine, 1 not finite, 2 all of them -inf
    last_token  [max_rows] int32         what a -1 in the next step buffer stands for

Samples with row -1 are padding and leave no trace in `last_token`. Called by `aioengine/graphs.py` at the
end of a step whose rows are all greedy.
"""

from __future__ import annotations

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs


def keep_greedy_ref(
    ids: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor, last_token: torch.Tensor
) -> None:
    """ids int64 [N] chosen from logits [N, V] for persistent rows int32 [N]; writes packed and last_token."""
    num_samples = len(ids)
    top = logits.gather(1, ids[:, None])[:, 0].float()
    packed[0, :num_samples] = ids.int()
    packed[1, :num_samples] = torch.where(torch.isfinite(top), 0, torch.where(top == -torch.inf, 2, 1)).int()
    real = rows >= 0
    last_token[rows[real].long()] = ids[real].int()


@jit(varying=["num_samples"])
def _keep_kernel(
    ids_ptr,
    logits_ptr,
    rows_ptr,
    packed_ptr,
    last_token_ptr,
    num_samples,
    stride_logits_row,
    stride_packed,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_samples
    wait_for_inputs(PDL)
    let_next_start(PDL)
    ids = tl.load(ids_ptr + at, mask=mask, other=0)  # [BLOCK]
    rows = tl.load(rows_ptr + at, mask=mask, other=-1)  # [BLOCK]
    top = tl.load(logits_ptr + at.to(tl.int64) * stride_logits_row + ids, mask=mask, other=0.0).to(tl.float32)
    status = tl.where(top == float("-inf"), 2, tl.where((top != top) | (top == float("inf")), 1, 0))
    tl.store(packed_ptr + at, ids.to(tl.int32), mask=mask)  # [BLOCK]
    tl.store(packed_ptr + stride_packed + at, status, mask=mask)  # [BLOCK]
    tl.store(last_token_ptr + rows, ids.to(tl.int32), mask=mask & (rows >= 0))  # [BLOCK]


def keep_greedy(
    ids: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor, last_token: torch.Tensor
) -> None:
    """One launch; see `keep_greedy_ref`."""
    require_kernels(ids.device)
    num_samples = len(ids)
    if num_samples == 0:
        return
    block = 128
    _keep_kernel[(triton.cdiv(num_samples, block),)](
        ids,
        logits,
        rows,
        packed,
        last_token,
        num_samples,
        logits.stride(0),
        packed.stride(0),
        BLOCK=block,
        num_warps=4,
        **launch_options(ids.device),
    )
