"""Kernels compiled side by side before anything is launched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextvars import ContextVar

import pytest
import torch

from aioengine.kernels import compile_ahead
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


class FakeJIT:
    """A kernel as Triton launches it, with or without a device."""

    def __init__(self) -> None:
        self.only_compiled: list[bool] = []

    def run(self, *, grid: tuple[int, ...], warmup: bool) -> None:
        self.only_compiled.append(warmup)


@pytest.fixture
def fake_jit(monkeypatch: pytest.MonkeyPatch) -> type[FakeJIT]:
    @contextlib.contextmanager
    def mode(pool: Executor) -> Iterator[None]:
        yield

    monkeypatch.setattr(compile_ahead, "AsyncCompileMode", mode)
    monkeypatch.setattr(compile_ahead, "JITFunction", FakeJIT, raising=False)
    monkeypatch.setattr(compile_ahead, "active_mode", ContextVar("mode", default=None), raising=False)
    monkeypatch.setattr(FakeJIT, "run", FakeJIT.run)  # put back whatever happens
    return FakeJIT


def in_a_thread(work: contextlib.AbstractContextManager[None] | None, kernel: FakeJIT) -> threading.Thread:
    """Launches the kernel in another thread, within `work`."""

    def launch() -> None:
        with work or contextlib.nullcontext():
            kernel.run(grid=(1,), warmup=False)

    thread = threading.Thread(target=launch)
    thread.start()
    return thread


def test_launches_of_other_threads_run_as_ever(fake_jit: type[FakeJIT]) -> None:
    own, others = fake_jit(), fake_jit()
    with compiled_together():
        own.run(grid=(1,), warmup=False)
        in_a_thread(None, others).join()
    own.run(grid=(1,), warmup=False)
    assert own.only_compiled == [True, False] and others.only_compiled == [False]


def test_two_that_compile_at_once_leave_launches_as_they_were(fake_jit: type[FakeJIT]) -> None:
    launch, own, others = fake_jit.run, fake_jit(), fake_jit()
    with compiled_together():
        thread = in_a_thread(compiled_together(), others)
        thread.join(0.1)
        assert others.only_compiled == []  # it waits for its turn
        own.run(grid=(1,), warmup=False)
    thread.join()
    assert fake_jit.run is launch
    assert own.only_compiled == [True] and others.only_compiled == [True]
