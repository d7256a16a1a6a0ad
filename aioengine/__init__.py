"""aioengine: an async-first inference engine for large language models.

The public face: `AsyncEngine`, `EngineConfig`, `SamplingParams`, `RequestOutput` and the exceptions.
A program that embeds the engine uses these and nothing else.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING


def _find_built_package() -> None:
    """Lets a checkout whose folder shadows the installed package use the installed one.

    Python started in the checkout finds this folder first, but the compiled modules and the sibling
    folders (`fastcore`, `kernels`, `api`, `bench`) are only in the installed package.
    """
    if importlib.util.find_spec(__name__ + ".fastcore") is not None:
        return
    try:
        installed = distribution("aioengine").locate_file("aioengine")
    except PackageNotFoundError:
        raise ImportError("aioengine is not built; run `pip install .` in its checkout first") from None
    __path__[:] = [str(installed)]


_find_built_package()

from aioengine.config import EngineConfig  # noqa: E402
from aioengine.errors import (  # noqa: E402
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    EngineError,
    InvalidConfig,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    QueueFull,
    RequestTimeout,
    UnknownModel,
)
from aioengine.types import RequestOutput, SamplingParams  # noqa: E402

if TYPE_CHECKING:
    from aioengine.engine import AsyncEngine

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "ContextLengthExceeded",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "InvalidConfig",
    "InvalidRequest",
    "ModelLoadError",
    "ModelNotFound",
    "QueueFull",
    "RequestOutput",
    "RequestTimeout",
    "SamplingParams",
    "UnknownModel",
]


def __getattr__(name: str) -> object:
    # The engine pulls in torch, which takes seconds to import; `aioengine --help` must not wait for it.
    if name == "AsyncEngine":
        from aioengine.engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
