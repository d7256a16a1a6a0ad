"""Who runs in the next step, with how many tokens; what happens when a step is over."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from aioengine.fastcore.admission import Admission
from aioengine.fastcore.drafts import Drafter
from aioengine.fastcore.groups import Group
from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.remote_kv import KVConnector
from aioengine.fastcore.request import Request
from aioengine.fastcore.step_buffer import StepBuffer, StepPlan

@final
class Scheduler:
    """Decides each step and settles it. Not thread-safe: one event loop owns it.

    Args:
        num_blocks: KV blocks of the pool, the null block included.
        max_num_seqs: rows of the batch.
        max_num_batched_tokens: most tokens of input in one step (the input budget).
        max_model_len: most tokens of a request, prompt and output.
        max_num_active_seqs: most running requests; 0 = one per row. Can be changed later.
        max_num_scheduled_tokens: most tokens given out in one step (the token budget); 0 = the input budget.
        long_prefill_token_threshold: most tokens of a request in a step while it is not alone; 0 = no limit.
        adaptive_long_prefill_threshold: raise that to the input budget divided by the number of requests.
        max_num_partial_prefills: most running requests whose prompt takes further steps; 0 = no limit.
        max_long_partial_prefills: most of those with more tokens left than the threshold; 0 = no limit.
            Shorter prompts pass long ones that wait for this.
        full_sequence_must_fit: admit a request only if all its tokens known fit, beside what running prompts
            still need.
        watermark: share of the blocks that must stay free when a request is admitted while others run.
        priority_ageing_s: seconds of waiting that make a request one level more important; 0 = never.
        target_itl_s: how long a step may take while somebody waits for a next token; prompts get what decodes
            leave of it, by step times that `observe_step` reports. 0 = as long as its tokens take.
        max_in_flight: most steps (1 to 4) that may be launched and not yet updated.
        clock: seconds, for ageing and `Request.scheduled_s`.
        root_seed: root of the block hashes. None: random for xxh3_128, a fixed public string for sha256.
        eviction_policy: which cached block goes first: the one unused longest, or the least worth.
        context_cost: under the policy cost, what a token of context adds to the cost of computing a token.
        enable_partial_block_reuse: where prompts part inside a block, copy its equal beginning; for one group.
        kv_groups: (kind, size, scale) of every group of layers with a block table of its own; kind is full, sliding
            or chunked, size the window or chunk in tokens (0 for full), scale the group's block size divided by
            `block_size`. The first one is ("full", 0, 1). With more than one group hits are whole blocks of all.
        stale_output: what becomes of tokens that are sampled in steps in flight while their request is preempted.
            deliver: they are appended when their step is updated, and the request starts again only then. drop: they
            are forgotten, the request need not wait, and computes them anew.
        kv_connector: a store of KV outside the pool. What it has behind the local hits of a request that starts is
            loaded instead of computed (`StepPlan.loads`), if that is a whole block at least. Blocks that a
            preemption frees are then handed out only when the steps in flight were updated. Needs prefix caching and
            one KV group.
        drafter: guesses tokens that decodes verify beside the one they need, with input and blocks nobody else needs.
        num_speculative_tokens: most drafts of a row in a step, up to `drafts.LIMIT`; above 0 exactly with a drafter.
        draft_batch_limit: while more requests run nobody has drafts; 0 = no limit.

    Raises:
        ValueError: a limit that cannot work, or a connector where it cannot.
        TypeError: a connector that cannot be asked.
    """

    kv: KVManager
    admission: Admission
    step_buffer: StepBuffer
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_scheduled_tokens: int
    max_model_len: int
    max_in_flight: int
    max_total: int
    """Tokens at which a request ends with "length": the context window, or what the whole pool can hold."""
    last_step: int
    """Id of the newest step."""
    prefix_queries_tokens: int
    """Tokens of the requests that looked into the prefix cache, counted once per request."""
    prefix_hit_tokens: int
    """How many of those were found."""
    num_preemptions_total: int
    num_reset_preemptions_total: int
    num_urgent_preemptions_total: int
    """Those of them that made way for a more important request that waited."""
    num_load_preemptions_total: int
    """And those whose request ran on blocks that could not be loaded."""
    num_drafts_total: int
    """Rows with drafts whose step is over."""
    num_draft_tokens_total: int
    num_accepted_tokens_total: int
    """Drafts that were what the model chose."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_active_seqs: int = 0,
        max_num_scheduled_tokens: int = 0,
        policy: Literal["fcfs", "priority"] = "fcfs",
        enable_prefix_caching: bool = True,
        hash_algo: Literal["xxh3_128", "sha256"] = "xxh3_128",
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        adaptive_long_prefill_threshold: bool = False,
        max_num_partial_prefills: int = 0,
        max_long_partial_prefills: int = 0,
        full_sequence_must_fit: bool = False,
        watermark: float = 0.0,
        priority_ageing_s: float = 0.0,
        target_itl_s: float = 0.0,
        max_in_flight: int = 1,
        clock: Callable[[], float] = ...,
        root_seed: bytes | None = None,
        eviction_policy: Literal["lru", "cost"] = "lru",
        context_cost: float = 0.0,
        enable_partial_block_reuse: bool = False,
        kv_groups: Sequence[Group] = ...,
        stale_output: Literal["deliver", "drop"] = "deliver",
        kv_connector: KVConnector | None = None,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
        draft_batch_limit: int = 0,
    ) -> None: ...
    @property
    def max_num_active_seqs(self) -> int:
        """Most running requests. A lower value interrupts nobody: no request starts until fewer run."""
    @max_num_active_seqs.setter
    def max_num_active_seqs(self, value: int) -> None: ...
    def add(self, request: Request, *, ready: bool = True) -> None:
        """Queues a new request; with `ready=False` it is held back until `set_ready` and blocks nobody.

        Raises:
            ValueError: it was added before, or can never fit the context window or the pool.
        """
    def set_ready(self, request: Request) -> None:
        """Moves a held request to its place in the queue; does nothing in another state."""
    def finish(self, request: Request, reason: str) -> None:
        """Ends a request in whatever state it is; does nothing if it has ended.

        Blocks and row are free at once unless a step in flight contains the request.
        """
    def abort(self, request: Request) -> None:
        """Ends a request with "abort"."""
    def fail_all(self) -> list[Request]:
        """Ends everything live with "error", frees all blocks and forgets the steps in flight."""
    def schedule(self) -> StepPlan | None:
        """Decides the next step; None if nothing can run now.

        Raises:
            RuntimeError: `max_in_flight` steps are not updated yet.
        """
    def update(
        self, plan: StepPlan, token_ids: npt.NDArray[np.int32], lost_blocks: Iterable[int] = ()
    ) -> list[Request]:
        """Settles the oldest step in flight with its sampled tokens, one per sample of the plan.

        Args:
            lost_blocks: ids of `plan.loads` that could not be loaded. They leave the cache with all that was computed
                after them; requests that have read them are preempted and compute it anew, what steps in flight
                sample for them is dropped, and those that were to load them do not ask the connector again.

        Returns:
            the requests that gained a token or ended, in plan order; rows of requests that ended while the
            step was in flight are skipped, and so are those in `plan.dropped_rows`.

        Raises:
            RuntimeError: the plan is not the oldest step in flight.
            ValueError: the number of tokens is wrong, one is negative, or a lost block was not to be loaded. Nothing
                has changed then.
        """
    def take_stores(self) -> list[tuple[bytes, int]]:
        """(block hash, block id) of blocks that were computed and indexed since the last call, each once.

        To be called after each `update`: only then do the blocks still hold that for certain, until the next step is
        launched. Blocks whose step is in flight come later, loaded ones never; empty without a connector.
        """
    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Says how long a step took, from the settlement before it to its own; before its `update`."""
    def step_cost_stats(self) -> dict[str, float] | None:
        """What was learned about the time of steps, see `StepCost.stats`; None without a target."""
    def has_work(self) -> bool:
        """Whether anything runs, waits (not held) or is in flight."""
    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forgets all cached prefixes; False, and nothing changes, while any block has an owner.

        Args:
            force: preempt what runs and forget in any case; pins must have ended before.
        """
    @property
    def num_external_query_tokens(self) -> int:
        """Tokens behind local hits that a connector was asked for, counted once per request."""
    @property
    def num_external_hit_tokens(self) -> int:
        """How many of those were to be loaded; `prefix_hit_tokens` does not count them."""
    @property
    def num_lost_blocks(self) -> int:
        """Blocks that could not be loaded."""
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int:
        """Waiting requests, the preempted and held ones included."""
    @property
    def num_in_flight_steps(self) -> int: ...
    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner, cached prefixes included."""
    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
    def running_requests(self) -> list[Request]:
        """In order of admission."""
    def waiting_requests(self) -> list[Request]:
        """In the order in which they will be admitted, without the held ones."""
    def check_invariants(self) -> None:
        """Raises AssertionError if any two records of the state contradict each other."""
