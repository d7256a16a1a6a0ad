"""Copies of whole blocks in all layers, against a loop over them."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import step as layout
from aioengine.kernels.block_copy import BlockCopier, copy_blocks_ref
from tests.kernels.triton_here import need_triton

NUM_BLOCKS = 12
SHAPES = [(1, 4, 2), (3, 8, 6), (2, 16, 130)]  # of one block: heads, tokens, K and V


def caches_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn((NUM_BLOCKS, *shape), device=device).to(dtype) for _ in range(3)]


def packed(copies: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """A step buffer with nothing but copies, behind some other words."""
    header = [0] * layout.HEADER_WORDS
    header[layout.OFF_COPIES], header[layout.NUM_COPIES] = layout.HEADER_WORDS + 5, len(copies)
    words = [*header, *[9] * 5, *(block for pair in copies for block in pair)]
    return torch.tensor(words, dtype=torch.int32, device=device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("copies", [[(3, 7)], [(3, 7), (3, 1), (11, 2)]])
def test_targets_become_their_sources_and_nothing_else_changes(run, shape, copies, dtype, device):
    caches = caches_of(shape, dtype, device)
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        for source, target in copies:
            cache[target] = cache[source].clone()
    if run == "triton":
        BlockCopier(caches).copy(packed(copies, device), len(copies))
    else:
        copy_blocks_ref(torch.tensor(copies, dtype=torch.int32, device=device), caches)
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(got, want)


def test_layers_that_share_a_tensor_are_copied_once(device):
    need_triton(device)
    caches = caches_of(SHAPES[0], torch.float16, device)
    shared = [cache.flatten(1).unflatten(1, (1, -1, 2)) for cache in caches]
    copier = BlockCopier([*caches, *shared])
    assert copier._addresses.tolist() == [cache.data_ptr() for cache in caches]


def test_programs_beyond_the_copies_do_nothing(device):
    need_triton(device)
    caches = caches_of(SHAPES[1], torch.float32, device)
    before = [cache.clone() for cache in caches]
    BlockCopier(caches).copy(packed([], device), 1)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_caches_that_differ_are_refused(device):
    need_triton(device)
    caches = caches_of(SHAPES[0], torch.float16, device)
    with pytest.raises(ValueError, match="blocks of one size and type"):
        BlockCopier([caches[0], caches[1].float()])
    with pytest.raises(ValueError, match="blocks of one size and type"):
        BlockCopier([cache.transpose(1, 2) for cache in caches_of((2, 4, 2), torch.float16, device)])
    with pytest.raises(ValueError, match="4-byte words"):
        BlockCopier([torch.zeros(4, 1, 1, 3, dtype=torch.float16, device=device)])
