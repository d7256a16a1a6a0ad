"""Copies whole KV blocks of all layers: what a request shares of a block it will write to itself.

    copies      num_copies x (source block, target block) int32, a section of the step buffer
    kv_caches   per layer [num_blocks, ...], blocks of the same bytes, each contiguous; layers may share a tensor

Runs at the head of a step that has copies, before its forward pass, and is not launched otherwise. No block
is source and target in one step, so copies may run in any order. Called by `aioengine/runner.py` (reference)
and `aioengine/graphs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs
from .step import COPY_WORDS, NUM_COPIES, OFF_COPIES


def copy_blocks_ref(copies: torch.Tensor, kv_caches: Sequence[torch.Tensor]) -> None:
    """copies int32 [C, 2]; changes the caches in place."""
    sources, targets = copies.long().unbind(1)
    for cache in _tensors(kv_caches):
        cache[targets] = cache[sources]


def _tensors(kv_caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each piece of memory once."""
    return list({cache.data_ptr(): cache for cache in kv_caches}.values())


_HEADER_COPIES = tl.constexpr(NUM_COPIES)
_HEADER_OFF_COPIES = tl.constexpr(OFF_COPIES)
_COPY_WORDS = tl.constexpr(COPY_WORDS)


@jit(varying=["block_words"])
def _copy_blocks_kernel(buffer_ptr, caches_ptr, block_words, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (i, layer, part) copies BLOCK words of pair i."""
    index, layer = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if index >= tl.load(buffer_ptr + _HEADER_COPIES):
        return
    pair_ptr = buffer_ptr + tl.load(buffer_ptr + _HEADER_OFF_COPIES) + index * _COPY_WORDS
    source = tl.load(pair_ptr).to(tl.int64)
    target = tl.load(pair_ptr + 1).to(tl.int64)
    cache_ptr = tl.load(caches_ptr + layer).to(tl.pointer_type(tl.int32))
    mask = at < block_words
    words = tl.load(cache_ptr + source * block_words + at, mask=mask, other=0)  # [BLOCK]
    tl.store(cache_ptr + target * block_words + at, words, mask=mask)  # [BLOCK]


class BlockCopier:
    """Copies between the blocks of one set of caches, in one launch for all layers.

    Raises:
        ValueError: caches that differ, or blocks that are not whole contiguous 4-byte words.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        first = kv_caches[0]
        block_bytes = first[0].numel() * first.itemsize
        for cache in kv_caches:
            equal = (cache.shape[0], cache[0].numel(), cache.dtype) == (first.shape[0], first[0].numel(), first.dtype)
            if not equal or not cache.is_contiguous():
                raise ValueError("the caches of all layers must be contiguous, with blocks of one size and type")
        if block_bytes % 4:
            raise ValueError(f"a block of {block_bytes} bytes is not made of 4-byte words")
        require_kernels(first.device)
        self._kv_caches = tuple(_tensors(kv_caches))  # the addresses below must stay theirs
        self._block_words = block_bytes // 4
        addresses = [cache.data_ptr() for cache in self._kv_caches]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=first.device)

    def copy(self, buffer: torch.Tensor, num_copies: int) -> None:
        """Makes the copies of the step in `buffer`; the host knows their number."""
        block = 1024
        grid = (num_copies, len(self._kv_caches), triton.cdiv(self._block_words, block))
        _copy_blocks_kernel[grid](
            buffer,
            self._addresses,
            self._block_words,
            BLOCK=block,
            num_warps=4,
            **launch_options(buffer.device),
        )
