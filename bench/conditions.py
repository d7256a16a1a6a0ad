"""Whether a measured run may be compared with another: warm all through, or with something of a first time in it.

A kernel that is compiled while requests wait, or a graph captured then, is a cost of the start and not of the work.
So each run says what it was: `tuned` if everything was ready, `cold` if something was not, and `diagnostic` if nobody
looked, which is another thing than having looked and found nothing. One run that is not tuned spoils a comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

RunClass = Literal["tuned", "cold", "diagnostic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What was seen of a run; None is not seen."""

    num_compiled: int | None
    """Kernels compiled, or loaded from disk, while it ran."""
    num_captured: int | None
    """Graphs captured while it ran."""
    is_warm: bool | None
    """Nothing that the engine prepares ahead was left to do when it began."""
    has_cache: bool | None
    """The prefix cache was on, as it is by default."""

    def run_class(self) -> RunClass:
        """What kind of run it was."""
        if self.num_compiled or self.num_captured or self.is_warm is False or self.has_cache is False:
            return "cold"
        if None in (self.num_compiled, self.num_captured, self.is_warm, self.has_cache):
            return "diagnostic"
        return "tuned"


def comparison_class(runs: Iterable[RunClass]) -> RunClass:
    """What figures of several runs are worth beside each other: as little as the worst of them."""
    classes = set(runs)
    if "cold" in classes:
        return "cold"
    return "tuned" if classes == {"tuned"} else "diagnostic"


class CompileCount:
    """Kernels that Triton has compiled or loaded since `counted()` began; None where it does not tell."""

    def __init__(self, number: int | None) -> None:
        self.number = number


@contextmanager
def counted() -> Iterator[CompileCount]:
    """Counts compilations by Triton's own hook; whoever had set it is still called."""
    try:
        from triton import knobs

        runtime: Any = knobs.runtime
        before = runtime.jit_post_compile_hook
    except (ImportError, AttributeError):
        yield CompileCount(None)
        return
    count = CompileCount(0)

    def tell(**facts: Any) -> Any:
        assert count.number is not None
        count.number += 1
        return before(**facts) if before is not None else None

    runtime.jit_post_compile_hook = tell
    try:
        yield count
    finally:
        runtime.jit_post_compile_hook = before
