"""Speculative decoding as an operator asks for it: the fields of `--speculative-config`, read and checked.

Owns what the option says, not what comes of it: drafts are made by the core (`fastcore/drafts.pyx`), given out by the
scheduler and verified by the runner. Like `config.py`, which calls it, it imports nothing of ours but the errors.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass

from aioengine.errors import InvalidConfig

METHOD = "ngram"
"""The one there is: drafts are copied from the request's own text."""

MOST_DRAFTS = 16
MOST_LOOKUP = 16
MOST_REQUESTS = 2**31 - 1

DEFAULT_LOOKUP = (3, 5)
"""prompt_lookup_min and prompt_lookup_max where neither is given."""

DEFAULT_BATCH_LIMIT = 32
"""Above that a step's tokens have a price of their own, and drafts that are rejected take more than others save."""

FIELDS = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made and who gets them. `str()` of it is what reports show."""

    num_tokens: int
    """Most drafts of a request in one step."""
    lookup_max: int
    """So many last tokens of a request are looked for in its text before them, ..."""
    lookup_min: int
    """... then fewer and fewer, down to so many."""
    batch_limit: int
    """With more requests running than this nobody gets drafts; 0 for no limit."""

    def __str__(self) -> str:
        last = str(self.lookup_max)
        if self.lookup_min < self.lookup_max:
            last = f"{self.lookup_min} to {last}"
        tokens = "token" if last == "1" else "tokens"
        limit = f"; none with more than {self.batch_limit} requests running" if self.batch_limit else ""
        drafts = "one draft" if self.num_tokens == 1 else f"up to {self.num_tokens} drafts"
        return f"{METHOD}, {drafts} a step by the last {last} {tokens}{limit}"


def parse(text: str | None) -> Speculation | None:
    """Reads `--speculative-config`; None if nothing was asked for.

    Raises:
        InvalidConfig: no JSON object, a method that there is not, an unknown field, or a value of the wrong type or
            range.
    """
    if text is None:
        return None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"it is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise _refusal(f"it is not a JSON object such as {_example()}")
    # The method comes first: others have fields of their own, which are then not what is wrong.
    if "method" not in given:
        raise _refusal(f'method is missing; give "method": "{METHOD}"')
    if given["method"] != METHOD:
        raise _refusal(f'the method {given["method"]!r} is not supported yet; there is "{METHOD}"')
    for name in given:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FIELDS)}"
            raise _refusal(f"{name} is unknown; {hint}")
    if given.get("num_speculative_tokens") is None:
        raise _refusal(f"num_speculative_tokens is missing; give the most drafts of a request in a step, {_example()}")
    num_tokens = _integer(given, "num_speculative_tokens", 1, MOST_DRAFTS)
    lookup_min, lookup_max = (_integer(given, f"prompt_lookup_{end}", 1, MOST_LOOKUP) for end in ("min", "max"))
    if lookup_min is None and lookup_max is None:
        lookup_min, lookup_max = DEFAULT_LOOKUP
    lookup_min, lookup_max = lookup_min or lookup_max, lookup_max or lookup_min
    batch_limit = _integer(given, "disable_by_batch_size", 0, MOST_REQUESTS)
    assert num_tokens is not None and lookup_min is not None and lookup_max is not None
    if lookup_min > lookup_max:
        raise _refusal(f"prompt_lookup_min={lookup_min} is above prompt_lookup_max={lookup_max}")
    return Speculation(num_tokens, lookup_max, lookup_min, DEFAULT_BATCH_LIMIT if batch_limit is None else batch_limit)


def _integer(given: dict[str, object], name: str, low: int, high: int) -> int | None:
    """A field, None if it was not given; null counts as not given."""
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refusal(f"{name}={json.dumps(value)} must be an integer from {low} to {high}")
    return value


def _example() -> str:
    return f'{{"method": "{METHOD}", "num_speculative_tokens": 4}}'


def _refusal(why: str) -> InvalidConfig:
    return InvalidConfig(f"speculative_config cannot be used: {why}", param="speculative_config")
