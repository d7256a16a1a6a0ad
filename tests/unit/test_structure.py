"""Architecture that a test can hold: who imports whom, documented options, one version, a README that runs."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import aioengine
from aioengine.cli.flags import flag_table
from aioengine.config import GROUPS, ServerConfig, flag_name

ROOT = Path(__file__).resolve().parents[2]
PUBLIC_FACE = {"aioengine", "aioengine.engine", "aioengine.config", "aioengine.errors", "aioengine.types"}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "base"}

# Folder -> prefixes of our own modules that it may import.
ALLOWED = {
    "kernels": ("aioengine.kernels",),
    "api": ("aioengine.api", *sorted(PUBLIC_FACE)),
    "bench": ("aioengine.bench", "aioengine.cli", "aioengine.device", "aioengine.model_source", *sorted(PUBLIC_FACE)),
    "aioengine": ("aioengine",),
}
# What measures the parts themselves, or the engine around a runner that computes nothing.
INSIDE = {
    "bench/core.py": ("aioengine.fastcore",),
    "bench/host_only.py": (
        "aioengine.checkpoint",
        "aioengine.fastcore",
        "aioengine.kv_layout",
        "aioengine.runner",
        "aioengine.startup",
    ),
    "bench/pool.py": ("aioengine.fastcore",),
    "bench/replay.py": ("aioengine.fastcore",),
}
# Everything of ours may import these, which import hardly anything of ours.
LEAVES = {
    "types": {"aioengine.errors"},
    "config": {"aioengine.errors", "aioengine.speculation"},
    "errors": set(),
    "speculation": {"aioengine.errors"},
}


def _python_files(folder: str) -> Iterator[Path]:
    return (p for p in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in p.parts)


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of modules imported anywhere in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folders_import_only_what_they_may(folder: str) -> None:
    exact = {name for name in ALLOWED[folder] if name in PUBLIC_FACE}
    prefixes = tuple(name for name in ALLOWED[folder] if name not in PUBLIC_FACE or folder == "aioengine")
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in _python_files(folder)
        for name in _imports(path)
        if name.split(".")[0] == "aioengine"
        and name not in exact
        and not any(
            name == p or name.startswith(p + ".") for p in (*prefixes, *INSIDE.get(str(path.relative_to(ROOT)), ()))
        )
    ]
    assert not wrong


def test_the_core_knows_nothing_of_us_and_no_torch() -> None:
    wrong = []
    for path in sorted((ROOT / "fastcore").glob("*.py*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            match = re.match(r"\s*(?:from|import|cimport)\s+([\w.]+)", line)
            name = match[1] if match else ""
            if name == "torch" or (name.startswith("aioengine") and not name.startswith("aioengine.fastcore")):
                wrong.append(f"{path.name}: {line.strip()}")
    assert not wrong


def test_the_scheduler_knows_no_block() -> None:
    """A17: it asks the KV manager, which asks the groups' tables, and all of them the pool; nobody asks back."""
    layers = [
        {"block_pool", "block_tokens", "eviction", "prefix_map", "prefix_tree", "twins"},
        {"group_tables"},
        {"kv_manager"},
        {"admission", "preemption", "queues", "scheduler", "steps_in_flight"},
        {"cache_control"},  # moves named blocks between steps
    ]
    cimports = {
        name: {
            found
            for path in (ROOT / "fastcore").glob(f"{name}.p[xy][dx]")
            for found in re.findall(r"^from aioengine\.fastcore\.(\w+) cimport", path.read_text(encoding="utf-8"), re.M)
        }
        for layer in layers
        for name in layer
    }
    assert "kv_manager" in cimports["scheduler"] and "group_tables" in cimports["kv_manager"]
    for i, layer in enumerate(layers):
        above = set().union(*layers[i + 1 :])
        assert not [(name, cimports[name] & above) for name in layer if cimports[name] & above]
    below = layers[0] | layers[1]
    assert not [(name, cimports[name] & below) for name in layers[3] if cimports[name] & below]


def test_nothing_of_a_forward_pass_is_global() -> None:
    """INV-44: its context is an argument; nobody keeps one for all, by task or by thread."""
    for_all = re.compile(
        r"^\s*(global\b|(import|from) contextvars\b)|\bthreading\.local|from threading import .*\blocal", re.M
    )
    wrong = [
        str(path.relative_to(ROOT))
        for folder in ("aioengine/layers", "aioengine/models", "kernels")
        for path in _python_files(folder)
        if for_all.search(path.read_text(encoding="utf-8"))
    ]
    assert not wrong


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_the_leaf_modules_import_hardly_anything_of_ours(name: str) -> None:
    own = [i for i in _imports(ROOT / "aioengine" / f"{name}.py") if i.split(".")[0] == "aioengine"]
    assert set(own) <= LEAVES[name]


def test_only_config_reads_the_environment() -> None:
    """A child process may be given a copy of all of it; nobody else looks a variable up."""
    wrong = [
        str(path.relative_to(ROOT))
        for folder in ("aioengine", "api", "bench", "kernels")
        for path in _python_files(folder)
        if path.name != "config.py" and re.search(r"getenv|environ(\[|\.get)", path.read_text(encoding="utf-8"))
    ]
    assert not wrong


def test_no_file_is_named_after_nothing() -> None:
    names = {p.stem for folder in ("aioengine", "api", "bench", "kernels", "fastcore") for p in _python_files(folder)}
    assert not names & FORBIDDEN_NAMES


def test_public_names_are_exactly_the_documented_ones() -> None:
    assert set(aioengine.__all__) == {
        "AsyncEngine",
        "EngineConfig",
        "RequestOutput",
        "SamplingParams",
        *(n for n in dir(aioengine.errors) if isinstance(getattr(aioengine.errors, n), type)),
    }
    assert all(hasattr(aioengine, name) for name in aioengine.__all__)


@pytest.mark.parametrize("cls", [*GROUPS.values(), ServerConfig])
def test_every_option_has_a_sentence_and_a_row_in_the_readme(cls: type) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(cls):
        assert field.metadata["help"].endswith("."), field.name
        assert f"`{flag_name(field.name)}`" in readme, field.name


def test_the_readme_has_the_generated_tables() -> None:
    assert flag_table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_runs_the_readme_s_test_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = next(line for line in readme.splitlines() if line.endswith("pytest"))
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    build = re.search(r"version: '([\d.]+)'", (ROOT / "meson.build").read_text(encoding="utf-8"))
    assert build is not None
    assert project == build[1] == aioengine.__version__
