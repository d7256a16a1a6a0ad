"""The record of one request."""

from collections.abc import Sequence
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from aioengine.fastcore.key_tails import Media

@final
class Siblings:
    """Requests with one prompt, such as the n choices of a call; made empty and given to each of them."""

    num_prompt_tokens: int

    def __init__(self) -> None: ...

@final
class Request:
    """One request from intake to its end.

    Args:
        prompt_token_ids: a list or an integer array; copied.
        max_tokens: most output tokens; 0 computes the prompt and finishes with "length" without sampling.
        min_tokens: eos and stop ids do not end the output before it has this many tokens.
        extra_keys: enters the hash of every block (adapter name and the like).
        cache_salt: enters the hash of the first block, and through the chain all others.
        media: items of the prompt as (first token, number of tokens, identifier), in order; each enters the hashes
            of the blocks that it overlaps, and through the chain all after them. For multimodal models to come:
            the engine's intake passes none yet.
        skip_prefix_cache: do not read the prefix cache; full blocks are still offered to others.
        wants_prompt_logits: rows of its prompt carry PROMPT_LOGITS; implies not reading the cache.
        prewarms: computes for the cache alone: its blocks are the first to be evicted until somebody hits them.
        takes_drafts: tokens drafted for it may be verified several in a step; not for one whose logits are edited by
            what came before.
        sampling, stream: kept for the runner and the engine, not looked at.
        siblings: requests with the same prompt, keys and media, which is then computed once for all of them.

    Raises:
        ValueError: an empty prompt, a negative token id or a negative limit; a media item without tokens or
            identifier, out of order, overlapping another or not within the prompt; siblings that differ, or want
            prompt logits.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    priority: int
    """Smaller is more important."""
    arrival_s: float
    skip_prefix_cache: bool
    wants_prompt_logits: bool
    prewarms: bool
    takes_drafts: bool
    sampling: object
    stream: Any
    siblings: Siblings | None
    num_tokens: int
    """Tokens known on the host: prompt and output."""
    row: int
    """Its row of the persistent batch, -1 while it has none."""
    num_computed_tokens: int
    """Positions whose KV is computed or will be by the steps in flight, if all drafts in flight are accepted; 0 again
    after a preemption."""
    num_in_flight: int
    """Output tokens that the device has sampled or will sample in steps not updated yet, without dropped ones, if all
    drafts are accepted."""
    num_preemptions: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache, or at a sibling, when it was admitted first."""
    num_matched: int
    """Tokens that the last look for a computed prefix found."""
    copy_source: int
    """Block to copy because the prefix ends inside of one; 0 = none."""
    copy_target: int
    """Where the copy goes in the step being made; 0 = nowhere."""
    finish_reason: Literal["stop", "length", "abort", "error"] | None

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        eos_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        arrival_s: float = 0.0,
        extra_keys: bytes = b"",
        cache_salt: bytes = b"",
        media: Media = (),
        skip_prefix_cache: bool = False,
        wants_prompt_logits: bool = False,
        prewarms: bool = False,
        takes_drafts: bool = True,
        sampling: object = None,
        stream: object = None,
        siblings: Siblings | None = None,
    ) -> None: ...
    @property
    def num_output_tokens(self) -> int:
        """Output tokens known on the host."""
    @property
    def status(self) -> Literal["new", "held", "waiting", "running", "preempted", "finished"]:
        """Where it is in its life."""
    @property
    def stop_token_id(self) -> int | None:
        """The id from `stop_token_ids` that ended it; None if something else did, such as an eos id."""
    @property
    def scheduled_s(self) -> float | None:
        """When it was scheduled first, by the scheduler's clock."""
    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens known so far, prompt and output."""
    def drafts_in_flight(self) -> list[list[int]]:
        """The drafts of each step in flight that samples for it, oldest first."""
    def output_ids_from(self, start: int) -> list[int]:
        """Output tokens from the `start`-th one on."""
    num_more: int
    """Groups behind the first one that it has a table of."""

    def block_ids(self, group: int = 0) -> list[int]:
        """The block table of a group: logical block -> block id; 0 where a block fell out of the window."""
