"""Drafters: who guesses the tokens that a step is to verify."""

from collections.abc import Iterable
from typing import Final, final

from aioengine.fastcore.request import Request

LIMIT: Final[int]
"""Most drafts of a row in one step."""

class Drafter:
    """Base of drafters; `propose` is to be overridden."""

    def propose(self, request: Request, most: int) -> Iterable[int]:
        """Up to `most` token ids that may follow the request's tokens and what is in flight (`drafts_in_flight`)."""

@final
class NgramDrafter(Drafter):
    """Drafts what followed the last occurrence of the longest n-gram that a text ends with (prompt lookup decoding).

    Args:
        most_tokens, least_tokens: lengths of n-grams, 1 to 16.

    Raises:
        ValueError: lengths out of range or out of order.
    """

    longest: int
    shortest: int

    def __init__(self, *, most_tokens: int, least_tokens: int = 1) -> None: ...
