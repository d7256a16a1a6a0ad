"""RMSNorm with and without the residual, against float64."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import norm
from tests.kernels.batches import RELATIVE_ERROR, relative_error

SHAPES = [(1, 64), (3, 1024), (7, 100), (2, 4096), (0, 64)]


def expected_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    x, w = x.double(), w.double()
    return x / torch.sqrt((x * x).mean(dim=1, keepdim=True) + eps) * w


@pytest.fixture
def rms_norm(run):
    return norm.rms_norm if run == "triton" else norm.rms_norm_ref


@pytest.fixture
def add_rms_norm(run):
    return norm.add_rms_norm if run == "triton" else norm.add_rms_norm_ref


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_its_formula(rms_norm, shape, dtype, device):
    torch.manual_seed(1)
    x = torch.randn(shape, device=device).to(dtype)
    w = (1 + torch.randn(shape[1], device=device)).to(dtype)
    y = rms_norm(x, w, 1e-5)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert relative_error(y, expected_norm(x, w, 1e-5)) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("shape", SHAPES)
def test_residual_is_added_before_the_norm_and_returned(add_rms_norm, rms_norm, shape, dtype, device):
    torch.manual_seed(2)
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    w = (1 + torch.randn(shape[1], device=device)).to(dtype)
    before = x.clone(), residual.clone()
    y, total = add_rms_norm(x, residual, w, 1e-6)
    assert torch.equal(total, (before[0].float() + before[1].float()).to(dtype))
    assert torch.equal(y, rms_norm(total, w, 1e-6)), "fused and separate operations agree bit for bit"


def test_large_values_do_not_overflow_in_half_precision(rms_norm, device):
    x = torch.full((1, 128), 6e4, dtype=torch.float16, device=device)
    y = rms_norm(x, torch.ones(128, dtype=torch.float16, device=device), 1e-6)
    assert torch.allclose(y.float(), torch.ones(1, 128, device=device), atol=1e-3)
