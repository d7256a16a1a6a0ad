"""SwiGLU and GeGLU against float64."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import activation
from tests.kernels.batches import RELATIVE_ERROR, relative_error

SHAPES = [(1, 16), (3, 3072), (5, 33), (0, 16)]


@pytest.fixture
def silu_mul(run):
    return activation.silu_mul if run == "triton" else activation.silu_mul_ref


@pytest.fixture
def gelu_tanh_mul(run):
    return activation.gelu_tanh_mul if run == "triton" else activation.gelu_tanh_mul_ref


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_silu_mul_equals_its_formula(silu_mul, rows, width, dtype, device):
    torch.manual_seed(3)
    gate_up = torch.randn(rows, 2 * width, device=device).to(dtype) * 4
    gate, up = gate_up[:, :width].double(), gate_up[:, width:].double()
    y = silu_mul(gate_up)
    assert y.dtype == dtype
    assert y.shape == (rows, width)
    assert relative_error(y, gate / (1 + torch.exp(-gate)) * up) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_gelu_tanh_mul_equals_its_formula(gelu_tanh_mul, rows, width, dtype, device):
    torch.manual_seed(4)
    gate_up = torch.randn(rows, 2 * width, device=device).to(dtype) * 4
    gate, up = gate_up[:, :width].double(), gate_up[:, width:].double()
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    y = gelu_tanh_mul(gate_up)
    assert y.shape == (rows, width)
    assert relative_error(y, 0.5 * gate * (1 + torch.tanh(inner)) * up) < RELATIVE_ERROR[dtype]
