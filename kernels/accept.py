"""Accepts drafts: how many of a row's drafts are what the model would have chosen, and what that makes of its samples.

A row with d drafts has d + 1 samples, each chosen as if the drafts before it were right (`step.py` draws the buffer).
Draft j is accepted if it is sample j and all before it are accepted. With a accepted, samples 0 .. a are the row's
next tokens: exactly those that steps without drafts would have chosen. Samples behind them mean nothing.

    packed      [2, max_samples] int32  token ids, then statuses: -1 and 0 behind the last sample that counts
    last_token  [max_rows] int32        sample a
    rejected    [max_rows] int32        drafts rejected in each persistent row since the engine began; wraps

Called by `aioengine/graphs.py` behind the choice of a step that has drafts. Rows without any are left alone.
"""

from __future__ import annotations

import torch

from . import step as layout
from .jit import jit, launch_options, let_next_start, require_kernels, tl, wait_for_inputs


def accept_ref(buffer: torch.Tensor, packed: torch.Tensor, last_token: torch.Tensor, rejected: torch.Tensor) -> None:
    """Accepts the drafts of the step in `buffer`; writes packed, last_token and rejected in place."""
    header = buffer[: layout.HEADER_WORDS].tolist()
    for i in range(header[layout.NUM_ROWS]):
        words = buffer[header[layout.OFF_ROWS] + i * layout.ROW_WORDS :][: layout.ROW_WORDS].tolist()
        num_drafts = words[layout.FLAGS] >> layout.DRAFTS_SHIFT
        if not num_drafts:
            continue
        end = header[layout.OFF_TOKENS] + words[layout.QUERY_START] + words[layout.NUM_NEW]
        samples = packed[:, words[layout.SAMPLE_INDEX] :][:, : num_drafts + 1]
        is_equal = buffer[end - num_drafts : end] == samples[0, :-1]
        num_accepted = int(is_equal.int().cumprod(0).sum())
        row = words[layout.ROW]
        last_token[row] = samples[0, num_accepted]
        rejected[row] += num_drafts - num_accepted
        samples[0, num_accepted + 1 :] = -1
        samples[1, num_accepted + 1 :] = 0


_HEADER_ROWS = tl.constexpr(layout.NUM_ROWS)
_HEADER_OFF_ROWS = tl.constexpr(layout.OFF_ROWS)
_HEADER_OFF_TOKENS = tl.constexpr(layout.OFF_TOKENS)
_ROW_WORDS = tl.constexpr(layout.ROW_WORDS)
_ROW = tl.constexpr(layout.ROW)
_QUERY_START = tl.constexpr(layout.QUERY_START)
_NUM_NEW = tl.constexpr(layout.NUM_NEW)
_FLAGS = tl.constexpr(layout.FLAGS)
_SAMPLE_INDEX = tl.constexpr(layout.SAMPLE_INDEX)
_DRAFTS_SHIFT = tl.constexpr(layout.DRAFTS_SHIFT)


@jit(varying=["stride_packed"])
def _accept_kernel(
    buffer_ptr, packed_ptr, last_token_ptr, rejected_ptr, stride_packed, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program per row of the step, or of its padding; it alone touches the row's samples.

    Of one warp: what it reads at an address it has read before it writes there.
    """
    index = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    real = index < tl.load(buffer_ptr + _HEADER_ROWS)
    words_ptr = buffer_ptr + tl.load(buffer_ptr + _HEADER_OFF_ROWS) + index * _ROW_WORDS
    num_drafts = tl.load(words_ptr + _FLAGS, mask=real, other=0) >> _DRAFTS_SHIFT
    if num_drafts > 0:
        row = tl.load(words_ptr + _ROW)
        end = tl.load(words_ptr + _QUERY_START) + tl.load(words_ptr + _NUM_NEW)
        drafts_ptr = buffer_ptr + tl.load(buffer_ptr + _HEADER_OFF_TOKENS) + end - num_drafts
        ids_ptr = packed_ptr + tl.load(words_ptr + _SAMPLE_INDEX)
        accepted = num_drafts
        for first in range(0, num_drafts, BLOCK):
            nth = first + tl.arange(0, BLOCK)
            mask = nth < num_drafts
            draft = tl.load(drafts_ptr + nth, mask=mask, other=0)  # [BLOCK]
            sampled = tl.load(ids_ptr + nth, mask=mask, other=0)  # [BLOCK]
            accepted = tl.minimum(accepted, tl.min(tl.where(draft != sampled, nth, num_drafts), axis=0))
        tl.store(last_token_ptr + row, tl.load(ids_ptr + accepted))
        tl.store(rejected_ptr + row, tl.load(rejected_ptr + row) + num_drafts - accepted)
        for first in range(accepted + 1, num_drafts + 1, BLOCK):
            nth = first + tl.arange(0, BLOCK)
            mask = nth <= num_drafts
            zero = tl.zeros_like(nth)
            tl.store(ids_ptr + nth, zero - 1, mask=mask)  # [BLOCK]
            tl.store(ids_ptr + stride_packed + nth, zero, mask=mask)  # [BLOCK]


def accept(
    buffer: torch.Tensor, packed: torch.Tensor, last_token: torch.Tensor, rejected: torch.Tensor, num_rows: int
) -> None:
    """See `accept_ref`. `num_rows`: at least the step's; a graph captured for so many serves all steps of no more.

    One launch; nothing is read back.
    """
    require_kernels(buffer.device)
    if packed.stride(1) != 1:
        raise ValueError("token ids and statuses must each be contiguous")
    if num_rows == 0:
        return
    _accept_kernel[(num_rows,)](
        buffer,
        packed,
        last_token,
        rejected,
        packed.stride(0),
        BLOCK=32,
        num_warps=1,
        **launch_options(buffer.device),
    )
