"""Fixtures that several kinds of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioengine.config import ModelConfig
from aioengine.model_source import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of the default model, fetched into the user's cache if it is not there.

    Tests that ask for it are to be marked `slow`.
    """
    path = resolve_model(ModelConfig(model="smollm2")).path
    assert path is not None
    return path
