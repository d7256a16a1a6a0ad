"""Faults put into the code on purpose: `python -m tests.simulation.mutations` shows that the simulation sees them.

Each one is a change of one place. It is made in a copy, the one extension module concerned is compiled again, and a
process that imports the copy runs seeds until a rule is broken. A fault that no longer applies, or that
nobody notices, makes the command fail. Needs Cython and a C compiler and takes minutes, so pytest does not
run it. The installed package must be that of this checkout.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aioengine

ROOT = Path(__file__).parents[2]
PACKAGE = Path(aioengine.__file__).parent
LIMIT_S = 180.0
NUM_SEEDS = 800
NUM_STEPS = 150
CYTHON_ARGS = (
    "-3", "-Xfreethreading_compatible=False", "-Xcdivision=True", "-Xinitializedcheck=False",
    "-Xboundscheck=False", "-Xwraparound=False",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """In `path`, `right` stands exactly once and becomes `wrong`."""

    what: str
    path: str
    right: str
    wrong: str


FAULTS = (
    Fault(
        "skip the touch of hit blocks",
        "fastcore/kv_manager.pyx",
        "            self.take_hit(request, request.blocks[i])\n",
        "            pass\n",
    ),
    Fault("count free hits as free", "fastcore/kv_manager.pyx", "- num_hits + free_hits -", "- num_hits -"),
    Fault(
        "let a hit cover the last token",
        "fastcore/kv_manager.pyx",
        "most = (request.num_tokens - 1) // self.block_size",
        "most = request.num_tokens // self.block_size",
    ),
    Fault(
        "publish a partial block",
        "fastcore/kv_manager.pyx",
        "cdef int32_t full = num_computed // self.block_size",
        "cdef int32_t full = self.blocks_for(num_computed)",
    ),
    Fault(
        "keep the map entry of a block that is taken",
        "fastcore/prefix_map.pyx",
        "            if blocks[at].flags & HASHED:\n",
        "            if False:\n",
    ),
    Fault(
        "hash without the parent",
        "fastcore/block_hash.pyx",
        "&self.root if i == 0 else &hashes[i - 1],",
        "&self.root,",
    ),
    Fault(
        "release the shallowest block first",
        "fastcore/kv_manager.pyx",
        "for i in range(request.num_blocks - 1, -1, -1):",
        "for i in range(request.num_blocks):",
    ),
    Fault(
        "hash without the salt", "fastcore/request.pyx", "key_tail(extra_keys, cache_salt)", 'key_tail(extra_keys, b"")'
    ),
    Fault(
        "free a block that has another owner",
        "fastcore/block_pool.pyx",
        "        if block.num_refs > 0:\n            return 0\n        self.enlist",
        "        if block.num_refs > 1:\n            return 0\n        self.enlist",
    ),
    Fault(
        "leave a block that is hit in the free list",
        "fastcore/block_pool.pyx",
        "        if block.num_refs == 0:\n            unlink(self.blocks, block_id)\n",
        "        if block.num_refs == 0:\n",
    ),
    Fault(
        "return cached blocks at the wrong end",
        "fastcore/block_pool.pyx",
        "        if not block.flags & HASHED:\n            link(",
        "        if True:\n            link(",
    ),
    Fault(
        "forget a returned block",
        "fastcore/block_pool.pyx",
        "        self.enlist(block_id)\n        self.num_free += 1\n",
        "",
    ),
    Fault(
        "admit after a preemption",
        "fastcore/scheduler.pyx",
        "return self.num_victims == 0 and not waits",
        "return not waits",
    ),
    Fault("keep the budget of a victim", "fastcore/scheduler.pyx", "        self.budget += victim.step_tokens\n", ""),
    Fault(
        "keep the computed tokens of a victim", "fastcore/scheduler.pyx", "        victim.num_computed_tokens = 0\n", ""
    ),
    Fault("keep the sent table of a victim", "fastcore/scheduler.pyx", "        victim.num_sent_blocks = 0\n", ""),
    Fault(
        "publish what a victim had computed",
        "fastcore/scheduler.pyx",
        "if record.epoch == request.num_preemptions:",
        "if True:",
    ),
    Fault(
        "offer a prompt before its chunk is computed",
        "fastcore/kv_manager.pyx",
        "cdef int32_t reached = request.num_computed_tokens + request.step_tokens\n",
        "cdef int32_t reached = request.num_tokens\n",
    ),
    Fault(
        "copy from a block before it is written",
        "fastcore/kv_manager.pyx",
        "num_common(at, tokens, most) if self.is_settled(at) else 0",
        "num_common(at, tokens, most)",
    ),
    Fault("keep what a victim was to compute", "fastcore/scheduler.pyx", "        self.kv.take_back(victim)\n", ""),
    Fault(
        "cache what a failed row has computed",
        "aioengine/live.py",
        "            self._take_back(plan.requests[row])\n",
        "            pass\n",
    ),
    Fault(
        "take nothing back but the newest step",
        "fastcore/kv_manager.pyx",
        "request.num_proven = min(request.num_proven, request.num_matched)",
        "request.num_proven = request.num_tokens",
    ),
    Fault(
        "cache what was computed on evicted blocks",
        "fastcore/cache_control.pyx",
        "                self.kv.hold_back(request, name.span_block)\n",
        "                pass\n",
    ),
    Fault(
        "free the blocks of a step in flight",
        "fastcore/steps_in_flight.pyx",
        "if request.num_blocks and self.may_write(request):",
        "if False:",
    ),
    Fault(
        "never free what waited for a step in flight",
        "fastcore/steps_in_flight.pyx",
        "if not self.may_write(request):",
        "if False:",
    ),
    Fault(
        "one token more than asked for",
        "fastcore/scheduler.pyx",
        "known - request.num_prompt_tokens >= request.max_tokens",
        "known - request.num_prompt_tokens > request.max_tokens",
    ),
    Fault(
        "admit a victim whose tokens are in flight",
        "fastcore/scheduler.pyx",
        "if request is None or request.num_in_flight > 0:",
        "if request is None:",
    ),
    Fault(
        "let more important requests make way",
        "fastcore/preemption.pyx",
        "if victim.priority > urgent.priority and before(urgent, victim):",
        "if True:",
    ),
    Fault(
        "admit others after making way",
        "fastcore/scheduler.pyx",
        "                    self.give_rest()\n                break\n",
        "                    self.give_rest()\n",
    ),
    Fault("no fence for rows", "fastcore/rows.pyx", "if fence <= last_updated:", "if True:"),
    Fault("lose a row", "fastcore/rows.pyx", "self.num_fenced = kept", "self.num_fenced = 0 * kept"),
    Fault("the last come first", "fastcore/queues.pyx", "a.arrival < b.arrival", "a.arrival > b.arrival"),
    Fault(
        "send a block table with a gap",
        "fastcore/step_buffer.pyx",
        "    request.num_sent_blocks = request.num_blocks\n",
        "    request.num_sent_blocks = request.num_blocks + 1\n",
    ),
    Fault(
        "use a step buffer again too early",
        "fastcore/step_buffer.pyx",
        "cdef Py_ssize_t slot = step_id % self.num_slots",
        "cdef Py_ssize_t slot = 0",
    ),
    Fault(
        "break the links of the prefix map",
        "fastcore/prefix_map.pyx",
        "link[0] = self.behind[block_id]",
        "link[0] = NULL_BLOCK",
    ),
    Fault(
        "let a sibling's copy cover the last token",
        "fastcore/kv_manager.pyx",
        "min(request.num_prompt_tokens, request.num_tokens - 1)",
        "request.num_prompt_tokens",
    ),
    Fault(
        "keep the source of a copy for ever",
        "fastcore/kv_manager.pyx",
        "            self.pool.release(request.copy_source)\n            request.copy_source =",
        "            request.copy_source =",
    ),
    Fault(
        "let the source of a copy be a victim",
        "fastcore/kv_manager.pyx",
        "            self.take_hit(request, request.copy_source)\n",
        "            self.pool.blocks[request.copy_source].num_refs += 1\n",
    ),
    Fault(
        "share the block that is not full",
        "fastcore/kv_manager.pyx",
        "full = shared // self.block_size",
        "full = self.blocks_for(shared)",
    ),
    Fault(
        "copy from siblings that have not got so far",
        "fastcore/request.pyx",
        "if member.num_computed_tokens >= self.num_prompt_tokens:",
        "if member.num_computed_tokens > 0:",
    ),
    Fault(
        "take a tenant's block for another's",
        "fastcore/kv_manager.pyx",
        "return self.prefix_map.has_hash(block_id, &expected)",
        "return True",
    ),
    Fault(
        "find one token more than two blocks share",
        "fastcore/kv_manager.pyx",
        "                best = common\n",
        "                best = min(common + 1, most)\n",
    ),
    Fault(
        "send no copies",
        "fastcore/step_buffer.pyx",
        "        if request.copy_target != 0:\n",
        "        if request.copy_target < 0:\n",
    ),
    Fault(
        "a group's window that is one token short",
        "fastcore/groups.pyx",
        "(num_computed - g.size + 1) // g.block_size if",
        "(num_computed - g.size + 2) // g.block_size if",
    ),
    Fault(
        "a group's chunk that ends one token early",
        "fastcore/groups.pyx",
        "return num_computed // g.size * g.size // g.block_size",
        "return (num_computed + 1) // g.size * g.size // g.block_size",
    ),
    Fault(
        "count no window for a group",
        "fastcore/groups.pyx",
        "        if g.kind == SLIDING:\n",
        "        if False:\n",
    ),
    Fault(
        "leave the twins of other groups in the index",
        "fastcore/prefix_map.pyx",
        "            self.twins.leave_all(block_id)\n",
        "            pass\n",
    ),
    Fault(
        "keep the flag of a group's twin",
        "fastcore/twins.pyx",
        "        self.pool.blocks[block_id].flags = 0\n",
        "",
    ),
    Fault(
        "hit a prefix without the other groups' windows",
        "fastcore/group_tables.pyx",
        "            if at > first:\n",
        "            if False:\n",
    ),
    Fault(
        "hit a group's prefix inside of a coarse block",
        "fastcore/groups.pyx",
        "        self.alignment = scale * block_size\n",
        "        self.alignment = block_size\n",
    ),
    Fault(
        "hang a group's coarse block on its first hash",
        "fastcore/groups.pyx",
        "return (at + 1) * self.groups[group].scale - 1",
        "return at * self.groups[group].scale",
    ),
    Fault(
        "give a group's block out of the window back twice",
        "fastcore/group_tables.pyx",
        "            table.num_out = max(table.num_out, first)\n",
        "",
    ),
    Fault(
        "lose a group's block out of the window",
        "fastcore/group_tables.pyx",
        "                self.pool.release(table.blocks[i])\n                table.blocks[i] = NULL_BLOCK\n",
        "                table.blocks[i] = NULL_BLOCK\n",
    ),
    Fault(
        "skip the touch of other groups' hits",
        "fastcore/group_tables.pyx",
        "                    self.pool.hit(table.blocks[i])\n",
        "                    pass\n",
    ),
    Fault(
        "count other groups' free hits as free",
        "fastcore/group_tables.pyx",
        "                needed += self.pool.blocks[request.more[g - 1].blocks[i]].num_refs == 0\n",
        "                pass\n",
    ),
    Fault(
        "extend without counting other groups",
        "fastcore/kv_manager.pyx",
        "            missing += self.more.num_missing(request, num_tokens)\n",
        "",
    ),
    Fault(
        "send a group's table to the rows of another",
        "fastcore/step_buffer.pyx",
        "(g + 1) * row_stride + request.row",
        "g * row_stride + request.row",
    ),
    Fault(
        "send a group's table once more",
        "fastcore/step_buffer.pyx",
        "        table.num_sent = table.num_blocks\n",
        "",
    ),
    Fault(
        "an abort that frees nothing",
        "aioengine/live.py",
        "                self._scheduler.finish(choice.request, reason)\n                self._end_choice",
        "                self._end_choice",
    ),
    Fault(
        "run on after a stop text",
        "aioengine/live.py",
        '                    self._scheduler.finish(request, "stop")',
        "                    pass",
    ),
    Fault("deliver tokens twice", "aioengine/outputs.py", "= num_delivered + len(new_ids)", "= num_delivered"),
    Fault(
        "a last output that wakes nobody",
        "aioengine/outputs.py",
        "        if not self._is_queued and not stream.is_closed:\n            self._is_queued = True\n"
        "            stream._wake(self)\n",
        "",
    ),
    Fault("do not ring when a step is over", "aioengine/loop.py", "        done.add_done_callback(self._ring)\n", ""),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Tries all faults, or those whose description contains a word; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations", description=__doc__)
    parser.add_argument("--only", default="", help="Only faults whose description or file contains this.")
    args = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if args.only in f"{fault.what} {fault.path}"]
    num_seen = 0
    with tempfile.TemporaryDirectory(prefix="aioengine-mutations-") as folder:
        snapshot = take_snapshot(Path(folder))
        for fault in faults:
            begun = time.monotonic()
            is_seen, how = try_fault(fault, snapshot)
            num_seen += is_seen
            mark = "seen  " if is_seen else "MISSED"
            print(
                f"{mark} {time.monotonic() - begun:4.0f} s  {fault.what} ({Path(fault.path).name}): {how}", flush=True
            )
    print(f"{num_seen} of {len(faults)} faults were seen")
    return 0 if num_seen == len(faults) else 1


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


def try_fault(fault: Fault, snapshot: Snapshot) -> tuple[bool, str]:
    """Whether the simulation sees a fault, and how."""
    copy = snapshot.folder / "faulty" / "aioengine"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(snapshot.package, copy)
    is_compiled = fault.path.endswith(".pyx")
    source = (snapshot.sources / "aioengine" if is_compiled else copy.parent) / fault.path
    text = source.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        return False, f"applies {text.count(fault.right)} times: write it anew"
    source.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    if is_compiled:
        try:
            compile_module(source, snapshot, copy / "fastcore")
        finally:
            source.write_text(text, encoding="utf-8")
    return run_seeds(copy.parent, snapshot.simulation)


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


def run_seeds(package_parent: Path, simulation: Path) -> tuple[bool, str]:
    """Runs seeds in a process that imports the changed package."""
    code = (
        f"import sys; sys.path[:0] = [{str(package_parent)!r}, {str(simulation)!r}]\n"
        "import aioengine; from tests.simulation.mutations import first_violation\n"
        f"assert aioengine.__file__.startswith({str(package_parent)!r}), aioengine.__file__\n"
        "print(first_violation())"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=LIMIT_S, cwd=simulation
        )
    except subprocess.TimeoutExpired:
        return True, f"it does not end in {LIMIT_S:.0f} s"
    if done.returncode < 0:
        return True, f"the process died of signal {-done.returncode}"
    if done.returncode > 0:
        return False, f"did not run: {done.stderr.strip().splitlines()[-1]}"
    found = done.stdout.strip()
    return found != "None", found if found != "None" else f"not in {NUM_SEEDS} seeds"


def first_violation() -> str | None:
    """What the first seed says that breaks a rule; called in the process with the fault."""
    from tests.simulation.batch import run_batch

    for seed in range(NUM_SEEDS):
        for _, what in run_batch([seed], NUM_STEPS).failures:
            return f"seed {seed}: {' '.join(what.split())[:110]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
