"""Gathers KV blocks of all layers into one buffer, and puts them back: what travels to host memory and from it.

    block_ids   [num_blocks] int32
    kv_caches   per layer [pool_blocks, page], each contiguous
    staging     [at least num_blocks, num_layers, page], contiguous: a block's pages behind each other

Called by `aioengine/host_pages.py` between two steps, on the stream of the steps; not part of any graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .jit import jit, require_kernels, tl, triton


def pack_blocks_ref(block_ids: torch.Tensor, kv_caches: Sequence[torch.Tensor], staging: torch.Tensor) -> None:
    """block_ids int32 [N]; staging[i, layer] becomes block i of the layer's cache."""
    for layer, cache in enumerate(kv_caches):
        staging[: len(block_ids), layer] = cache[block_ids.long()]


def unpack_blocks_ref(staging: torch.Tensor, block_ids: torch.Tensor, kv_caches: Sequence[torch.Tensor]) -> None:
    """The other way round. No block is named twice."""
    for layer, cache in enumerate(kv_caches):
        cache[block_ids.long()] = staging[: len(block_ids), layer]


@jit(varying=["page_words"])
def _pack_blocks_kernel(
    block_ids_ptr, caches_ptr, staging_ptr, page_words, BLOCK: tl.constexpr, TO_STAGING: tl.constexpr
):
    """Program (i, layer, part) moves BLOCK words of block i."""
    index, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block_id = tl.load(block_ids_ptr + index).to(tl.int64)
    page_ptr = tl.load(caches_ptr + layer).to(tl.pointer_type(tl.int32)) + block_id * page_words
    staged_ptr = staging_ptr + (index * tl.num_programs(1) + layer) * page_words
    mask = at < page_words
    if TO_STAGING:
        words = tl.load(page_ptr + at, mask=mask, other=0)  # [BLOCK]
        tl.store(staged_ptr + at, words, mask=mask)  # [BLOCK]
    else:
        words = tl.load(staged_ptr + at, mask=mask, other=0)  # [BLOCK]
        tl.store(page_ptr + at, words, mask=mask)  # [BLOCK]


class BlockPacker:
    """Packs blocks of one set of caches, in one launch for all layers.

    Raises:
        ValueError: caches that differ, or pages that are not whole contiguous 4-byte words.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        first = kv_caches[0]
        page_bytes = first[0].numel() * first.itemsize
        for cache in kv_caches:
            if (cache.shape, cache.dtype) != (first.shape, first.dtype) or not cache.is_contiguous():
                raise ValueError("the caches of all layers must be contiguous, with blocks of one size and type")
        if page_bytes % 4:
            raise ValueError(f"a page of {page_bytes} bytes is not made of 4-byte words")
        require_kernels(first.device)
        self._kv_caches = tuple(kv_caches)  # the addresses below must stay theirs
        self._page_words = page_bytes // 4
        self._device = first.device
        addresses = [cache.data_ptr() for cache in kv_caches]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=first.device)

    def pack(self, block_ids: Sequence[int], staging: torch.Tensor) -> None:
        """Blocks of the pool into the first places of `staging`."""
        self._launch(block_ids, staging, to_staging=True)

    def unpack(self, staging: torch.Tensor, block_ids: Sequence[int]) -> None:
        """The first places of `staging` into blocks of the pool, no block twice."""
        self._launch(block_ids, staging, to_staging=False)

    def close(self) -> None:
        """Lets the caches go."""
        self._kv_caches = ()

    def _launch(self, block_ids: Sequence[int], staging: torch.Tensor, *, to_staging: bool) -> None:
        assert len(block_ids) <= len(staging), f"{len(block_ids)} blocks into {len(staging)} places"
        block = 1024
        grid = (len(block_ids), len(self._kv_caches), triton.cdiv(self._page_words, block))
        ids = torch.tensor(block_ids, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        _pack_blocks_kernel[grid](
            ids.to(self._device, non_blocking=True),
            self._addresses,
            staging.view(torch.int32),
            self._page_words,
            BLOCK=block,
            TO_STAGING=to_staging,
            num_warps=4,
        )
