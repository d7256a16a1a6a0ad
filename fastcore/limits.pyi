"""What a step and the requests in it may have: the numbers of the configuration, checked."""

from typing import final

def clip_tokens(num_tokens: int, threshold: int, token_budget: int, num_computed: int, max_model_len: int) -> int:
    """How many of `num_tokens` new tokens a request gets; threshold 0 means no threshold."""

@final
class Limits:
    """Made by the scheduler, whose arguments these are.

    Args:
        pool_tokens: tokens whose KV the pool holds.

    Raises:
        ValueError: a limit that cannot work.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_scheduled_tokens: int
    max_model_len: int
    max_in_flight: int
    max_total: int

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_active_seqs: int,
        max_num_scheduled_tokens: int,
        enable_chunked_prefill: bool,
        long_prefill_token_threshold: int,
        adaptive_long_prefill_threshold: bool,
        max_in_flight: int,
        pool_tokens: int,
    ) -> None: ...
    @property
    def max_num_active_seqs(self) -> int: ...
    @max_num_active_seqs.setter
    def max_num_active_seqs(self, value: int) -> None: ...
