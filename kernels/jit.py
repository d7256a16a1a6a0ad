"""The one place that knows whether Triton kernels can run here.

Owns the guarded import of triton; every kernel file takes `jit`, `tl` and `triton` from here. Without triton
the decorated kernels exist but cannot be launched, and `unavailable_reason` says why. Called by all of
`kernels/` and by the device that chooses between references and kernels.
"""

from __future__ import annotations

from collections.abc import Callable
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


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, or the plain function where triton is missing (it is then never launched)."""
    return kernel if MISSING is not None else triton.jit(kernel)


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
