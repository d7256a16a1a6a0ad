"""Where kernel tests run: on the GPU when there is one, else in Triton's interpreter on the CPU.

The interpreter must be chosen before any kernel file is imported, by whatever test comes first: the root
conftest sets TRITON_INTERPRET. Tests take `device`, `dtype` and `run` ("reference" or "triton").
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_here import need_triton

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
        need_triton(device)
    return request.param


@pytest.fixture(autouse=True)
def device_float_rules():
    """The interpreter computes with numpy, which warns where a device quietly gives infinity or NaN."""
    with np.errstate(all="ignore"):
        yield
