"""The CUDA operations in Triton's interpreter: fused for a few rows, and what the plain operations compute."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import linear
from aioengine.kernels.linear import skinny_tile
from aioengine.layers.ops_cuda import CudaOps, DeviceWeight
from aioengine.layers.ops_torch import TorchOps, TorchWeight
from tests.kernels.triton_here import need_triton

HIDDEN, MLP, EPS = 48, 40, 1e-5
FUSED = ("norm_linear", "norm_gated_linear", "linear_add")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fused kernels that were called."""
    need_triton(torch.device("cpu"))
    names: list[str] = []
    for name in FUSED:
        kernel = getattr(linear, name)
        monkeypatch.setattr(linear, name, lambda *args, _n=name, _k=kernel: (names.append(_n), _k(*args))[1])
    return names


def decoder_like(ops: CudaOps | TorchOps, rows: int, has_bias: bool) -> list[torch.Tensor]:
    """Products around a sum that goes on, as a decoder layer chains them; every intermediate value."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def weight(outs: int, ins: int) -> DeviceWeight | TorchWeight:
        matrix, bias = draw(outs, ins) / ins**0.5, draw(outs)
        return (DeviceWeight if isinstance(ops, CudaOps) else TorchWeight)(matrix, bias if has_bias else None)

    x, residual, gain = None, draw(rows, HIDDEN), draw(HIDDEN)
    seen = []
    for _ in range(2):
        qkv, residual = ops.add_norm_linear(x, residual, gain, EPS, weight(HIDDEN, HIDDEN))
        seen.append(qkv.clone())
        x, residual = ops.linear_add(qkv, weight(HIDDEN, HIDDEN), residual)
        gated, residual = ops.add_norm_gated_linear(x, residual, gain, EPS, weight(2 * MLP, HIDDEN))
        seen += [residual.clone(), gated.clone()]
        x, residual = ops.linear_add(gated, weight(HIDDEN, MLP), residual)
    return [*seen, ops.add_norm(x, residual, gain, EPS)[0]]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 9])
def test_a_chain_equals_the_plain_operations(launched: list[str], rows: int, has_bias: bool) -> None:
    found = decoder_like(CudaOps(torch.device("cpu"), torch.float32), rows, has_bias)
    expected = decoder_like(TorchOps(), rows, has_bias)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_rows_are_fused_where_the_table_says_so(launched: list[str], rows: int) -> None:
    decoder_like(CudaOps(torch.device("cpu"), torch.float32), rows, has_bias=False)
    is_skinny = skinny_tile(rows, HIDDEN, HIDDEN, gated=False) is not None
    assert set(launched) == (set(FUSED) if is_skinny else set())
    assert is_skinny == (rows <= 2)


def test_the_residual_that_was_given_stays_as_it_was(launched: list[str]) -> None:
    ops, residual = CudaOps(torch.device("cpu"), torch.float32), torch.ones(1, HIDDEN)
    weight = DeviceWeight(torch.ones(HIDDEN, HIDDEN), None)
    x, total = ops.linear_add(torch.ones(1, HIDDEN), weight, residual)
    assert x is None and bool((total == HIDDEN + 1).all()) and bool((residual == 1).all())


def test_a_large_gate_is_not_fused(launched: list[str]) -> None:
    ops = CudaOps(torch.device("cpu"), torch.float32)
    hidden = torch.ones(1, 4096)
    weight = DeviceWeight(torch.ones(4, 4096) / 4096, None)
    gated, residual = ops.add_norm_gated_linear(None, hidden, torch.ones(4096), EPS, weight)
    assert launched == [] and residual is hidden
    torch.testing.assert_close(gated, torch.full((1, 2), 0.7310586))
