"""Faults put into the code on purpose: `python -m tests.simulation.mutations` shows that the simulation sees them.

Each one (`faults`) is made in a copy, the one extension module concerned is compiled again, and a process that
imports the copy runs seeds until a rule is broken: the fault is seen. If no step ends any more it has hung, which
nobody would overlook either. A fault that nobody notices is missed, and so is one that is still making steps when its
time is over; that, and a fault that no longer applies, makes the command fail. Needs Cython and a C compiler and takes
minutes, so pytest does not run it. The installed package must be that of this checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aioengine
from tests.simulation.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PACKAGE = Path(aioengine.__file__).parent
LIMIT_S = 900.0
"""Time for all seeds."""
STILL_S = 60.0
"""Without a step, after which a process has hung."""
NUM_SEEDS = 800
NUM_STEPS = 150
SEEN, HUNG, MISSED = "seen", "hung", "MISSED"
CYTHON_ARGS = (
    "-3", "-Xfreethreading_compatible=False", "-Xcdivision=True", "-Xinitializedcheck=False",
    "-Xboundscheck=False", "-Xwraparound=False",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Tries all faults, or those whose description contains a word; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations", description=__doc__)
    parser.add_argument("--only", default="", help="Only faults whose description or file contains this.")
    args = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if args.only in f"{fault.what} {fault.path}"]
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="aioengine-mutations-") as folder:
        snapshot = take_snapshot(Path(folder))
        for fault in faults:
            begun = time.monotonic()
            kind, how = try_fault(fault, snapshot)
            kinds[kind] += 1
            print(
                f"{kind:6} {time.monotonic() - begun:4.0f} s  {fault.what} ({Path(fault.path).name}): {how}", flush=True
            )
    print(f"of {len(faults)} faults {kinds[SEEN]} were seen, {kinds[HUNG]} hung, {kinds[MISSED]} were missed")
    return 1 if kinds[MISSED] else 0


@dataclass(frozen=True)
class Snapshot:
    """The code as it was at the start, whatever happens to the checkout meanwhile."""

    folder: Path
    """Room for a package with a fault."""
    sources: Path
    """`fastcore` as Cython finds it, without faults."""
    package: Path
    """The installed package."""
    simulation: Path
    """The root over `tests`."""


def take_snapshot(folder: Path) -> Snapshot:
    """Copies everything that is needed."""
    snapshot = Snapshot(folder, folder / "sources", folder / "clean", folder / "root")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, snapshot.package, ignore=skip)
    shutil.copytree(ROOT / "fastcore", snapshot.sources / "aioengine" / "fastcore", ignore=skip)
    (snapshot.sources / "aioengine" / "__init__.pxd").touch()
    for name in ("simulation", "oracle"):
        shutil.copytree(ROOT / "tests" / name, snapshot.simulation / "tests" / name, ignore=skip)
    (snapshot.simulation / "tests" / "__init__.py").touch()
    return snapshot


def try_fault(fault: Fault, snapshot: Snapshot) -> tuple[str, str]:
    """What becomes of a fault, and how."""
    copy = snapshot.folder / "faulty" / "aioengine"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(snapshot.package, copy)
    is_compiled = fault.path.startswith("fastcore/")
    source = (snapshot.sources / "aioengine" if is_compiled else copy.parent) / fault.path
    text = source.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        return MISSED, f"applies {text.count(fault.right)} times: write it anew"
    source.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    if is_compiled:
        try:
            for module in modules_with(source):
                compile_module(module, snapshot, copy / "fastcore")
        finally:
            source.write_text(text, encoding="utf-8")
    return run_seeds(copy.parent, snapshot.simulation)


def modules_with(source: Path) -> list[Path]:
    """The sources of the modules that hold what a file says: itself, or all that inline what a .pxd defines."""
    if source.suffix == ".pyx":
        return [source]
    taken = f"from aioengine.fastcore.{source.stem} cimport"
    return [p for p in source.parent.glob("*.pyx") if p.stem == source.stem or taken in p.read_text(encoding="utf-8")]


def compile_module(source: Path, snapshot: Snapshot, target: Path) -> None:
    """Builds one extension module of the core and puts it in place of the copy's."""
    name = source.stem
    c_file = snapshot.folder / f"{name}.c"
    module = f"aioengine.fastcore.{name}"
    subprocess.run(
        [sys.executable, "-m", "cython", *CYTHON_ARGS, "-I", snapshot.sources, "--module-name", module,
         source, "-o", c_file],
        check=True,
    )  # fmt: skip
    built = target / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_paths()["include"]
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run(
        [*compiler, "-shared", "-fPIC", "-O1", "-w", "-DNDEBUG", f"-I{include}", c_file, "-o", built], check=True
    )


def run_seeds(package_parent: Path, simulation: Path) -> tuple[str, str]:
    """Runs seeds in a process that imports the changed package."""
    steps = simulation / "steps"
    steps.write_bytes(b"")
    code = (
        f"import sys; sys.path[:0] = [{str(package_parent)!r}, {str(simulation)!r}]\n"
        "import aioengine; from tests.simulation.mutations import first_violation\n"
        f"assert aioengine.__file__.startswith({str(package_parent)!r}), aioengine.__file__\n"
        f"print(first_violation({str(steps)!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=simulation
    )
    try:
        return verdict(process, lambda: steps.stat().st_size)
    finally:
        process.kill()
        process.wait()


def verdict(process: subprocess.Popen[str], num_steps: Callable[[], int]) -> tuple[str, str]:
    """What becomes of a process that runs seeds, whose steps can be counted from outside."""
    begun, before = time.monotonic(), -1
    while True:
        try:
            printed, errors = process.communicate(timeout=STILL_S)
            break
        except subprocess.TimeoutExpired:
            count = num_steps()
        if count == before:
            return HUNG, f"no step in {STILL_S:.0f} s after {count} steps"
        if time.monotonic() - begun > LIMIT_S:
            return MISSED, f"no rule was broken in {LIMIT_S:.0f} s and {count} steps, and they go on"
        before = count
    if process.returncode < 0:
        return SEEN, f"the process died of signal {-process.returncode}"
    if process.returncode > 0:
        return MISSED, f"did not run: {errors.strip().splitlines()[-1]}"
    found = printed.strip()
    return (SEEN, found) if found != "None" else (MISSED, f"not in {NUM_SEEDS} seeds")


def first_violation(steps: str) -> str | None:
    """What the first seed says that breaks a rule; called in the process with the fault.

    Each step adds a byte to the file `steps`.
    """
    from tests.simulation.batch import run_batch

    with Path(steps).open("ab", buffering=0) as file:
        for seed in range(NUM_SEEDS):
            for _, what in run_batch([seed], NUM_STEPS, on_step=lambda: file.write(b".")).failures:
                return f"seed {seed}: {' '.join(what.split())[:110]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
