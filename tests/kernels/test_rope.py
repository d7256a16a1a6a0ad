"""Rotary embedding, QK-norm and the cache write, against complex rotation and a model of the cache."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import rope
from tests.kernels.batches import RELATIVE_ERROR, relative_error

NUM_BLOCKS, BLOCK_SIZE = 6, 4
# heads, kv heads, head dim, rotary dim
SHAPES = [(4, 2, 16, 16), (3, 1, 32, 16), (2, 2, 64, 64)]


@pytest.fixture
def rope_and_cache(run):
    return rope.rope_and_cache if run == "triton" else rope.rope_and_cache_ref


def angles(max_position: int, rotary_dim: int, device: torch.device) -> torch.Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, rotary_dim, 2, device=device).double() / rotary_dim)
    return torch.outer(torch.arange(max_position, device=device).double(), frequencies)


def rotated(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """x [T, N, D] turned by theta [T, rotary_dim / 2] as complex numbers (first half + i second half)."""
    half = theta.shape[1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(
        torch.ones_like(theta), theta
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def normed(x: torch.Tensor, w: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if w is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w.double()


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_q_is_rotated_and_exactly_the_mapped_slots_are_written(rope_and_cache, shape, with_norm, dtype, device):
    """INV-42: padding has slot -1 and writes nothing."""
    num_heads, num_kv_heads, head_dim, rotary_dim = shape
    torch.manual_seed(5)
    positions = torch.tensor([0, 7, 31, 2, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([9, 23, -1, 4, -1], dtype=torch.int32, device=device)
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * head_dim, device=device).to(dtype)
    weights = [(1 + torch.randn(head_dim, device=device) / 4).to(dtype) if with_norm else None for _ in range(2)]
    theta = angles(32, rotary_dim, device)
    cos_sin = torch.cat((theta.cos(), theta.sin()), dim=1).float()
    cache = torch.randn(NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, 2 * head_dim, device=device).to(dtype)
    model = cache.double()

    q = rope_and_cache(qkv, positions, cos_sin, slots, cache, *weights, 1e-6, num_heads, num_kv_heads, head_dim)

    heads = qkv.double().view(5, -1, head_dim)
    here = theta[positions.long()]
    expected_q = rotated(normed(heads[:, :num_heads], weights[0], 1e-6), here)
    expected_k = rotated(normed(heads[:, num_heads : num_heads + num_kv_heads], weights[1], 1e-6), here)
    assert q.shape == (5, num_heads * head_dim)
    assert relative_error(q, expected_q.flatten(1)) < RELATIVE_ERROR[dtype]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK_SIZE)
            model[block, :, offset, :head_dim] = expected_k[token]
            model[block, :, offset, head_dim:] = heads[token, num_heads + num_kv_heads :]
    written = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=device)
    written[slots[slots >= 0].long()] = True
    after, expected = (c.transpose(1, 2).flatten(0, 1) for c in (cache, model))
    assert torch.equal(after[~written].double(), expected[~written]), "a slot outside the mapping changed"
    assert relative_error(after[written], expected[written]) < RELATIVE_ERROR[dtype]
    assert torch.equal(after[written][..., head_dim:].double(), expected[written][..., head_dim:])


def test_a_cache_with_swapped_strides_is_written_in_place(rope_and_cache, dtype, device):
    torch.manual_seed(6)
    stored = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 64, dtype=dtype, device=device)
    cache = stored.transpose(1, 2)
    qkv = torch.randn(2, 6 * 32, device=device).to(dtype)
    ints = {"dtype": torch.int32, "device": device}
    cos_sin = torch.cat((torch.ones(1, 16, device=device), torch.zeros(1, 16, device=device)), dim=1)
    rope_and_cache(qkv, torch.zeros(2, **ints), cos_sin, torch.tensor([3, 8], **ints), cache, None, None, 0.0, 2, 2, 32)
    heads = qkv.view(2, 6, 32)
    assert torch.equal(stored[0, 3], torch.cat((heads[0, 2:4], heads[0, 4:6]), dim=-1))
    assert torch.equal(stored[2, 0], torch.cat((heads[1, 2:4], heads[1, 4:6]), dim=-1))
    assert int((stored != 0).flatten(2).any(-1).sum()) == 2


def test_no_tokens_is_a_no_op(rope_and_cache, dtype, device):
    cache = torch.ones(2, 1, 4, 32, dtype=dtype, device=device)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    qkv = torch.zeros(0, 3 * 16, dtype=dtype, device=device)
    q = rope_and_cache(qkv, empty, torch.zeros(1, 16, device=device), empty, cache, None, None, 0.0, 1, 1, 16)
    assert q.shape == (0, 16)
    assert bool((cache == 1).all())
