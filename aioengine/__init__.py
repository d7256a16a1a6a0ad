"""aioengine: an async-first inference engine for large language models.

The public face: `AsyncEngine`, `EngineConfig`, `SamplingParams`, `RequestOutput` and the exceptions.
A program that embeds the engine uses these and nothing else.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, distribution


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
