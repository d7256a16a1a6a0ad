"""The one place that knows whether Triton kernels can run here.

Owns the guarded import of triton; every kernel file takes `jit`, `tl` and `triton` from here. Without triton
the decorated kernels exist but cannot be launched, and `unavailable_reason` says why. Called by all of
`kernels/` and by the device that chooses between references and kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

MISSING: str | None
if TYPE_CHECKING:
    triton: Any
    tl: Any
    MISSING = None
else:
    try:
        import triton
        import triton.language as tl

        MISSING = None
    except ImportError as error:

        class _NoTriton:
            """Stands for a missing triton while kernel files are being defined; never computes anything."""

            def __getattr__(self, name: str) -> _NoTriton:
                return self

            def __call__(self, *args: object, **kwargs: object) -> _NoTriton:
                return self

        triton = tl = _NoTriton()
        MISSING = f"triton cannot be imported ({error}); install triton>=3.2 or a GPU build of torch"

# Kernels run in Triton's interpreter, on CPU tensors: TRITON_INTERPRET=1 was set before this was imported.
INTERPRETED: bool = MISSING is None and bool(triton.knobs.runtime.interpret)


def jit(kernel: Callable[..., Any] | None = None, *, varying: Sequence[str] = (), unaligned: Sequence[str] = ()) -> Any:
    """`triton.jit`, or the plain function where triton is missing (it is then never launched).

    `varying` names integer arguments that change from batch to batch: they are never specialized on, so that
    a batch of 1 or of a multiple of 16 compiles nothing new. `unaligned` names pointers that may be at a multiple of
    16 bytes or not, as rows of a matrix are whose width is the batch's: likewise.
    """
    if kernel is None:
        return functools.partial(jit, varying=varying, unaligned=unaligned)
    if MISSING is not None:
        return kernel
    return triton.jit(kernel, do_not_specialize=varying, do_not_specialize_on_alignment=unaligned)


@jit
def wait_for_inputs(PDL: tl.constexpr):
    """Blocks until every kernel before this one has finished; only constants may be read earlier."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def let_next_start(PDL: tl.constexpr):
    """Lets the next kernel be placed on the device while this one runs; it waits for the results itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _has_dependent_launch(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of every launch: programmatic dependent launch (PDL) where the card has it.

    A kernel launched so may start while the one before it ends; each of ours therefore calls
    `wait_for_inputs` before it touches anything that another kernel writes, and in all its programs.
    """
    if device.type == "cuda" and _has_dependent_launch(device.index or 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def unavailable_reason(device: torch.device) -> str | None:
    """None when kernels can run on tensors of `device`, else one sentence saying why not."""
    if MISSING is not None:
        return MISSING
    if INTERPRETED or device.type == "cuda":
        return None
    return f"Triton kernels need a CUDA device; the tensors are on {device.type!r}"


def require_kernels(device: torch.device) -> None:
    """Raises with the reason when kernels cannot run on `device`; each launching function calls it first."""
    reason = unavailable_reason(device)
    if reason is not None:
        raise RuntimeError(reason)
