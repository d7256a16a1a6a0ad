"""Skinny products and what is fused with them, against float64."""

from __future__ import annotations

import functools

import pytest
import torch

from aioengine.kernels import linear
from aioengine.kernels.linear import SkinnyTile
from tests.kernels.batches import RELATIVE_ERROR, relative_error
from tests.kernels.triton_here import need_triton

# rows, outputs, inputs
SHAPES = [(1, 48, 64), (1, 37, 200), (3, 37, 200), (8, 64, 96), (5, 16, 33), (0, 16, 16)]
TILES = [SkinnyTile(8, 256, 4), SkinnyTile(4, 256, 1), None]


@pytest.fixture(params=["reference", *TILES], ids=["reference", "wide", "narrow", "table"])
def op(request, device):
    """op(name) is the function of that name, in the implementation under test."""
    if request.param == "reference":
        return lambda name: getattr(linear, f"{name}_ref")
    need_triton(device)
    return lambda name: functools.partial(getattr(linear, name), tile=request.param)


def operands(shape, dtype, device):
    rows, outs, ins = shape
    generator = torch.Generator(device).manual_seed(sum(shape))

    def draw(*size):
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    return draw(rows, ins), draw(outs, ins), draw(ins) / 4 + 1


def normed(h: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    h = h.double()
    return h / (h.square().mean(1, keepdim=True) + eps).sqrt() * w.double()


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_with_and_without_bias(op, shape, dtype, device):
    x, weight, _ = operands(shape, dtype, device)
    bias = torch.randn(shape[1], device=device).to(dtype)
    plain = x.double() @ weight.double().T
    assert relative_error(op("linear")(x, weight), plain) < RELATIVE_ERROR[dtype]
    assert relative_error(op("linear")(x, weight, bias), plain + bias.double()) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_linear(op, shape, dtype, device):
    h, weight, gain = operands(shape, dtype, device)
    expected = normed(h, gain, 1e-5) @ weight.double().T
    assert relative_error(op("norm_linear")(h, gain, 1e-5, weight), expected) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_add_leaves_the_residual_alone(op, shape, dtype, device):
    x, weight, _ = operands(shape, dtype, device)
    residual = torch.randn(shape[:2], device=device).to(dtype)
    before = residual.clone()
    y = op("linear_add")(x, weight, residual)
    assert torch.equal(residual, before)
    assert relative_error(y, before.double() + x.double() @ weight.double().T) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_gated_linear(op, shape, gelu, dtype, device):
    rows, outs, ins = shape
    h, weight, gain = operands((rows, 2 * outs, ins), dtype, device)
    weight = weight / ins**0.5
    gate, up = (normed(h, gain, 1e-5) @ weight.double().T).chunk(2, dim=1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    y = op("norm_gated_linear")(h, gain, 1e-5, weight, gelu)
    assert y.shape == (rows, outs)
    assert relative_error(y, act * up) < RELATIVE_ERROR[dtype]


def test_more_rows_than_the_kernel_takes_are_refused(device):
    with pytest.raises((ValueError, RuntimeError), match="9 rows|Triton|triton"):
        linear.linear(torch.zeros(9, 8, device=device), torch.zeros(8, 8, device=device))


def test_one_row_takes_its_inputs_in_several_pieces(device, dtype):
    need_triton(device)
    h, weight, gain = operands((1, 24, 300), dtype, device)
    y = linear.norm_linear(h, gain, 1e-5, weight, tile=SkinnyTile(8, 64, 2))
    assert relative_error(y, normed(h, gain, 1e-5) @ weight.double().T) < RELATIVE_ERROR[dtype]
    with pytest.raises(ValueError, match="all 300 inputs"):
        linear.norm_linear(h.expand(2, -1), gain, 1e-5, weight, tile=SkinnyTile(8, 64, 2))
