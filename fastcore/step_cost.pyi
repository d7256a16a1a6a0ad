"""How long steps take, learned from those that ran; how many prompt tokens fit beside the decodes of a step."""

from collections.abc import Sequence
from typing import final

@final
class DecayedFit:
    """Non-negative least squares with exponential forgetting, for at most three features.

    Args:
        keep: weight of the past after each observation.
    """

    def __init__(self, num_features: int, keep: float) -> None: ...
    def observe(self, features: Sequence[float], value: float) -> None:
        """Adds one observation; its relative error counts."""
    def coefficients(self) -> list[float]:
        """One per feature, none negative."""

@final
class StepCost:
    """The model of step times behind `--target-itl-ms`; the scheduler makes and asks it.

    Args:
        target_s: how long a step may take while somebody waits for a next token.
        min_prompt_tokens: prompt tokens that go into every step whatever they cost.
    """

    target_s: float
    min_prompt_tokens: int
    num_observed: int
    """Steps learned from."""

    def __init__(self, target_s: float, min_prompt_tokens: int) -> None: ...
    def observe(self, step_id: int, seconds: float) -> None:
        """Learns how long a step took; ignores one that is unknown or took no time."""
    def stats(self) -> dict[str, float]:
        """What was learned: target_s, base_s, per_decode_s, per_context_token_s, per_prompt_token_s, per_pair_s,
        relative_error (root mean square) and num_observed."""
