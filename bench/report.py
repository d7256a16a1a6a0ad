"""Tables on the terminal and JSON in files, with everything a figure needs to be believed.

A figure without machine, versions and command is worth nothing, so every report carries them.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from aioengine.config import usable_cores
from aioengine.device import processor_name
from aioengine.errors import InvalidConfig

PACKAGES = ("aioengine", "torch", "triton", "transformers", "numpy", "uvloop")


def machine() -> dict[str, Any]:
    """Processor, cores, GPU and versions."""
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"processor": processor_name(), "cores": usable_cores(), "gpus": gpus, "versions": versions}


def require_cuda(program: str) -> None:
    """Ends a program that measures a GPU where there is none, with one line and exit code 1."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"{program}: error: it measures a GPU, and PyTorch sees no CUDA device here")


def peak_memory_bytes() -> int:
    """The most memory this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows with equal keys as a table on standard output."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console().print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def check_output_file(flag: str, path: str | None) -> None:
    """Refuses a file that cannot be written, before hours of measuring end in nothing.

    Raises:
        InvalidConfig: its folder does not exist, it is a folder, or it may not be written.
    """
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise InvalidConfig(f"{flag} {path}: there is no folder {folder}")
    if Path(path).is_dir():
        raise InvalidConfig(f"{flag} {path} is a folder; give a file")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise InvalidConfig(f"{flag} {path} cannot be written: permission denied")


def write_json(path: str | None, report: Mapping[str, Any]) -> None:
    """Writes a report with machine and command beside it, if a file was asked for."""
    if path is None:
        return
    command = " ".join(["aioengine", "bench", *sys.argv[2:]])
    full = {"command": command, "machine": machine(), "peak_memory_bytes": peak_memory_bytes(), **report}
    Path(path).write_bytes(orjson.dumps(full, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
