"""Fixtures that several kinds of tests share, and how long property tests search.

Hypothesis is short and repeatable by default; --hypothesis-profile=long searches for minutes. Without a GPU,
Triton kernels run in Triton's interpreter: that is chosen here, because it must be before the first import of
a kernel file, and other folders' tests import some.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from aioengine.config import ModelConfig
from aioengine.model_source import resolve_model

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "short",
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("short"), max_examples=3000, derandomize=False, print_blob=True)
settings.load_profile("short")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The mark `gpu` is enough: without a GPU such a test is skipped."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of the default model, fetched into the user's cache if it is not there.

    Tests that ask for it are to be marked `slow`.
    """
    path = resolve_model(ModelConfig(model="smollm2")).path
    assert path is not None
    return path
