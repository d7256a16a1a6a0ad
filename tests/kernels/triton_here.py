"""Whether Triton kernels can run here: every kernel test asks this one function."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels.jit import MISSING, unavailable_reason


def need_triton(device: torch.device) -> None:
    """Skips the test where triton is not installed; anything else that keeps kernels from running fails it."""
    if MISSING is not None:
        pytest.skip(MISSING)
    assert unavailable_reason(device) is None
