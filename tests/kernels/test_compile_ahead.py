"""Kernels compiled side by side before anything is launched."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels.compile_ahead import can_compile_together, compiled_together
from aioengine.kernels.jit import jit, tl
from tests.kernels.triton_here import need_triton


@jit
def _add_kernel(out_ptr, count, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(out_ptr + at, mask=at < count) + ADDED, mask=at < count)


@pytest.mark.gpu
def test_launches_within_compile_and_run_nothing(device: torch.device) -> None:
    need_triton(device)
    if not can_compile_together():
        pytest.skip("this Triton does not compile in threads")
    out = torch.zeros(32, device=device)
    with compiled_together():
        for added in (1, 2, 2, 3):
            _add_kernel[(1,)](out, 20, BLOCK=32, ADDED=added)
    assert not out.any()
    compiled = _add_kernel.device_caches[torch.cuda.current_device()][0]
    assert len(compiled) == 3
    for added in (1, 2, 3):
        _add_kernel[(1,)](out, 20, BLOCK=32, ADDED=added)
    assert len(compiled) == 3, "nothing was left to compile"
    assert out.tolist() == [6.0] * 20 + [0.0] * 12


@pytest.mark.gpu
def test_a_kernel_that_does_not_compile_says_so_and_launches_work_again(device: torch.device) -> None:
    need_triton(device)
    if not can_compile_together():
        pytest.skip("this Triton does not compile in threads")
    out = torch.zeros(32, device=device)
    with pytest.raises(Exception, match="power of 2"), compiled_together():
        _add_kernel[(1,)](out, 20, BLOCK=33, ADDED=1)
    _add_kernel[(1,)](out, 20, BLOCK=32, ADDED=4)
    assert out[0] == 4


def test_where_it_cannot_compile_in_threads_it_refuses() -> None:
    if can_compile_together():
        pytest.skip("this Triton does")
    with pytest.raises(RuntimeError, match="does not compile in threads"), compiled_together():
        pass
