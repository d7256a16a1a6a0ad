"""Compiles the kernels of a forward pass side by side.

Triton compiles a kernel when it is first launched, one after the other; on a machine that has none in its cache a
start is mostly that. Within `compiled_together` its thread's launches compile in others and run nothing, so the same
pass that would launch them tells which ones there are. Used by `aioengine/graphs.py` before the first real pass.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from .jit import INTERPRETED, MISSING

MOST_THREADS = 16

_one_at_a_time = threading.RLock()
"""Held while launches are diverted: what two engines that start at once would put back is each other's diversion."""

if MISSING is None and not INTERPRETED:
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:  # before Triton 3.4: kernels are compiled by their first launches
        AsyncCompileMode = None
else:
    AsyncCompileMode = None


def can_compile_together() -> bool:
    """Whether this Triton compiles in threads."""
    return AsyncCompileMode is not None


@contextmanager
def compiled_together() -> Iterator[None]:
    """No launch of this thread within runs: what it would have written holds what it held before. All are compiled at
    the end. Launches of other threads run as ever: they may be those of another engine.

    Raises:
        RuntimeError: this Triton cannot; ask `can_compile_together` first.
    """
    if AsyncCompileMode is None:
        raise RuntimeError("this Triton does not compile in threads")
    own_thread = threading.get_ident()
    with _one_at_a_time, ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        launch = JITFunction.run

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            is_own = threading.get_ident() == own_thread
            return launch(self, *args, grid=grid, warmup=warmup or is_own, **options)

        try:
            with AsyncCompileMode(pool):
                JITFunction.run = compile_only
                try:
                    yield
                finally:
                    JITFunction.run = launch
        finally:
            active_mode.set(None)  # Triton 3.6 leaves it set when a kernel does not compile
