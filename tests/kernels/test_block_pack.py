"""Blocks gathered from all layers into one buffer and put back, against a loop over them."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels.block_pack import BlockPacker, pack_blocks_ref, unpack_blocks_ref
from tests.kernels.triton_here import need_triton

NUM_BLOCKS, NUM_LAYERS, PLACES = 12, 3, 5
PAGES = [2, 48, 1300]  # values of a page: KV heads x tokens x keys and values; odd and more than a program's


def caches_of(page: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn((NUM_BLOCKS, page), device=device).to(dtype) for _ in range(NUM_LAYERS)]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("block_ids", [[7], [3, 0, 11], [4, 5, 6, 7, 8]])
def test_blocks_come_together_and_go_back_and_nothing_else_changes(run, page, block_ids, dtype, device):
    caches = caches_of(page, dtype, device)
    staging = torch.full((PLACES, NUM_LAYERS, page), 9.0, device=device).to(dtype)
    expected = staging.clone()
    for place, block_id in enumerate(block_ids):
        for layer, cache in enumerate(caches):
            expected[place, layer] = cache[block_id]
    ids = torch.tensor(block_ids, dtype=torch.int32, device=device)
    if run == "triton":
        BlockPacker(caches).pack(block_ids, staging)
    else:
        pack_blocks_ref(ids, caches, staging)
    assert torch.equal(staging, expected)

    targets = [(block_id + 1) % NUM_BLOCKS for block_id in block_ids]
    wanted = [cache.clone() for cache in caches]
    for layer, cache in enumerate(wanted):
        for place, target in enumerate(targets):
            cache[target] = expected[place, layer]
    if run == "triton":
        BlockPacker(caches).unpack(staging, targets)
    else:
        unpack_blocks_ref(staging, torch.tensor(targets, dtype=torch.int32, device=device), caches)
    for got, want in zip(caches, wanted, strict=True):
        assert torch.equal(got, want)


def test_caches_that_differ_are_refused(device):
    need_triton(device)
    caches = caches_of(48, torch.float16, device)
    with pytest.raises(ValueError, match="blocks of one size and type"):
        BlockPacker([caches[0], caches[1].float()])
    with pytest.raises(ValueError, match="blocks of one size and type"):
        BlockPacker([cache[:, ::2] for cache in caches])
    with pytest.raises(ValueError, match="4-byte words"):
        BlockPacker([torch.zeros(4, 3, dtype=torch.float16, device=device)])
