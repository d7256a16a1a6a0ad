"""What Triton would have compiled for the launches of a piece of code, seen in its interpreter.

A kernel is compiled once for each set of constants, types, and kinds of the arguments that it is specialized on:
whether an integer is 1 or a multiple of 16, and whether a pointer is at one.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

Kernels = dict[tuple[str, tuple[object, ...]], set[tuple[object, ...]]]
"""By name and constants: the kinds of the other arguments."""


@contextlib.contextmanager
def recorded_kernels() -> Iterator[Kernels]:
    """The kernels that launches within would have needed."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter's test")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    found: Kernels = defaultdict(set)
    run = interpreter.InterpretedFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        signature = inspect.signature(self.fn)
        known = {name: value for name, value in options.items() if name in signature.parameters}
        constants, kinds = [], []
        for name, value in signature.bind(*args, **known).arguments.items():
            if "constexpr" in str(signature.parameters[name].annotation) or value is None:
                constants.append((name, value))
            elif isinstance(value, torch.Tensor):
                is_free = name in (self.kwargs.get("do_not_specialize_on_alignment") or ())
                kinds.append((name, value.dtype, is_free or value.data_ptr() % 16 == 0))
            elif isinstance(value, int):
                is_free = name in (self.kwargs.get("do_not_specialize") or ())
                kinds.append((name, "int" if is_free else 1 if value == 1 else value % 16 == 0))
        found[self.fn.__name__, tuple(constants)].add(tuple(kinds))
        return run(self, *args, grid=grid, warmup=warmup, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", record)
        yield found
