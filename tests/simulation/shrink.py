"""Cuts a failing script down to a short one that still fails.

Events are dropped in ever smaller pieces, then what is left is made plainer: options, fields of requests, the
device's pace. Anything that still breaks a rule counts as the same failure.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from tests.simulation.script import OPTIONS, Add, Script
from tests.simulation.world import Violation, run

_PLAIN_FIELDS = {
    field.name: field.default for field in dataclasses.fields(Add) if field.default is not dataclasses.MISSING
}


def shrink(script: Script, limit_s: float = 60.0) -> tuple[Script, Violation]:
    """The shortest failing script that was found in `limit_s`, and how it fails."""
    deadline_s = time.monotonic() + limit_s
    failure = _failure(script)
    assert failure is not None, "the script does not fail"
    is_better = True
    while is_better:
        is_better = False
        for candidate in _simpler(script, failure):
            if time.monotonic() > deadline_s:
                return script, failure
            if (found := _failure(candidate)) is not None:
                script, failure, is_better = candidate, found, True
                break
    return script, failure


def _failure(script: Script) -> Violation | None:
    try:
        run(script)
    except Violation as violation:
        return violation
    return None


def _simpler(script: Script, failure: Violation) -> Iterator[Script]:
    """Scripts with a little less in them, the largest cuts first."""
    events = script.events
    before = tuple(event for event in events if event.at <= failure.at)
    if len(before) < len(events):
        yield dataclasses.replace(script, events=before)
    size = max(1, len(events) // 2)
    while True:
        for start in range(0, len(events), size):
            yield dataclasses.replace(script, events=events[:start] + events[start + size :])
        if size == 1:
            break
        size //= 2
    if script.step_seconds != (1.0,):
        yield dataclasses.replace(script, step_seconds=(1.0,))
    for name, option in OPTIONS.items():
        if script.options[name] != option.values[0]:
            plainer = {**script.options, name: option.values[0]}
            if all(plainer[n] == o.values[0] or o.needs(plainer) for n, o in OPTIONS.items()):
                yield dataclasses.replace(script, options=plainer)
    for i, event in enumerate(events):
        for simpler in _simpler_adds(event) if isinstance(event, Add) else ():
            yield dataclasses.replace(script, events=(*events[:i], simpler, *events[i + 1 :]))


def _simpler_adds(add: Add) -> Iterator[Add]:
    for name, plain in _PLAIN_FIELDS.items():
        if getattr(add, name) != plain:
            yield dataclasses.replace(add, **{name: plain})
    for name in ("length", "max_tokens"):
        value = getattr(add, name)
        for smaller in (value // 2, value - 1):
            if 1 <= smaller < value:
                yield dataclasses.replace(
                    add,
                    **{name: smaller},
                    min_tokens=min(add.min_tokens, smaller if name == "max_tokens" else add.max_tokens),
                )
