"""The drafter of the simulation: it knows every text, and is wrong as often as a script wants."""

from __future__ import annotations

import random
from collections.abc import Iterable

from aioengine.fastcore.drafts import Drafter
from aioengine.fastcore.request import Request
from tests.simulation.truth import VOCAB_SIZE, Truth


class SimDrafter(Drafter):
    """Drafts a request's own text, from where the steps in flight will leave it.

    Args:
        share: of its tokens that are right.
    """

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._rng = random.Random(f"drafter {seed}")

    def propose(self, request: Request, most: int) -> Iterable[int]:
        """As `Drafter.propose`; now and then for another place, or fewer than it may."""
        rng, truth = self._rng, request.sampling
        assert isinstance(truth, Truth)
        count = rng.choice([most, most, rng.randint(0, most)])
        at = request.num_tokens + request.num_in_flight if rng.random() < 0.1 else self._expected_end(request, truth)
        truth.grow(at + count)
        drafts = truth.tokens[at : at + count]
        return [rng.randrange(VOCAB_SIZE) if rng.random() > self._share else token_id for token_id in drafts]

    def _expected_end(self, request: Request, truth: Truth) -> int:
        at = request.num_tokens
        for drafts in request.drafts_in_flight():
            truth.grow(at + len(drafts) + 1)
            for token_id in drafts:
                if token_id != truth.tokens[at]:
                    break
                at += 1
            at += 1
        return at
