"""Where kernel tests run: on the GPU when there is one, else in Triton's interpreter on the CPU.

The interpreter must be chosen before any kernel file is imported, hence the environment variable here, at the
import of the first file of this folder. Tests take `device`, `dtype` and `run` ("reference" or "triton").
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Triton's interpreter computes wrong dot products from bfloat16.
DTYPES = [torch.bfloat16] if torch.cuda.is_available() else [torch.float32, torch.float16]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["reference", "triton"])
def run(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "triton":
        from aioengine.kernels.jit import unavailable_reason

        reason = unavailable_reason(device)
        if reason is not None:
            pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def device_float_rules():
    """The interpreter computes with numpy, which warns where a device quietly gives infinity or NaN."""
    with np.errstate(all="ignore"):
        yield
