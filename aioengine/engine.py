"""AsyncEngine: the engine's public face and the owner of everything inside it.

It starts and closes the parts; a prompt goes through `intake.py` into `live.py`, which queues it in the
scheduler, while `loop.py` runs the steps. It runs on the caller's event loop, installs no signal handlers,
forks nothing, and leaves no thread, task, descriptor or memory behind when closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from aioengine.cache_admin import CacheAdmin
from aioengine.config import EngineConfig, ResolvedConfig, hash_root_seed, slow_switches
from aioengine.determinism import DECLARED, check_demand
from aioengine.errors import EngineClosed, EngineDead, EngineError, InvalidConfig, InvalidRequest, QueueFull
from aioengine.fastcore.drafts import NgramDrafter
from aioengine.fastcore.scheduler import Scheduler
from aioengine.intake import ChatOptions, Intake, PreparedRequest
from aioengine.kv_connector import StoreFeed
from aioengine.kv_events import KVEvents
from aioengine.live import LiveRequests
from aioengine.loop import StepLoop
from aioengine.metrics import DraftStats, EngineMetrics, EngineStats, LagMonitor
from aioengine.outputs import RequestStream, StreamedOutput
from aioengine.startup import Loading, LoadParts, Parts, run_in_thread
from aioengine.types import Determinism, Prompt, SamplingParams

if TYPE_CHECKING:
    from aioengine.fastcore.step_buffer import StepPlan
    from aioengine.runner import MemoryReport, StepResult

logger = logging.getLogger(__name__)

STALL_S = 120.0
"""Without a completed step for this long while there is work, the engine calls itself stalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What callers may want to know about the model served."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What comes with a prompt beside sampling and chat options; see `AsyncEngine.submit()`."""

    request_id: str | None
    priority: int
    cache_salt: str | None
    determinism: str | None


class AsyncEngine:
    """An inference engine on the caller's event loop.

    Use it as a context manager::

        async with AsyncEngine(EngineConfig(model="smollm2")) as engine:
            async for out in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(out.delta, end="", flush=True)

    Args:
        config: the options; the default serves the built-in model on whatever device there is.
        on_stage: called from a thread with a few words when the start enters a new stage.
        load: makes the parts in place of the configured model's (benchmarks of the host alone).
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        on_stage: Callable[[str], None] = lambda _: None,
        load: LoadParts | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._on_stage = on_stage
        self._state = "new"
        self._parts: Parts | None = None
        self._failure: BaseException | None = None
        self._loading = Loading(load)
        self._closing: asyncio.Task[None] | None = None
        self._steps_task: asyncio.Task[None] | None = None
        self._log_task: asyncio.Task[None] | None = None
        self._one_call: asyncio.Lock | None = None
        """Offline, calls are queued one after the other."""

    # ---- life of the engine -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Loads the model (in a thread) and starts the step loop.

        Raises:
            InvalidConfig, ModelNotFound, ModelLoadError: nothing is left behind.
            EngineClosed: the engine was started before, or closed meanwhile.

        When cancelled it returns at once; the loading thread gives up at its next stage or tensor.
        """
        if self._state != "new":
            raise EngineClosed(f"the engine cannot be started: it is {self._state}")
        self._state = "starting"
        if switches := slow_switches():
            logger.warning("%s: this slows the engine or floods the log; unset it after debugging", ", ".join(switches))
        try:
            KVEvents.wanted(self.config.cache)  # a wrong option costs no loading
            parts = await self._loading.run(self.config, self._on_stage)
        except BaseException:
            self._state = "closed"
            raise
        try:
            self._assemble(parts)
        except BaseException:
            self._state = "closed"
            await parts.runner.close()
            raise
        self._parts = parts
        self._state = "ready"
        self._steps_task = asyncio.create_task(self._run_steps(), name="aioengine-steps")
        if self.config.runtime.log_stats_interval_s > 0:
            self._log_task = asyncio.create_task(self._log_stats(), name="aioengine-stats")

    def _assemble(self, parts: Parts) -> None:
        resolved, config = parts.resolved, self.config
        root_seed = hash_root_seed()
        if config.cache.prefix_caching_hash_algo != "sha256" and root_seed is None:
            # Hashes leave the process in KV events only: there it misleads a router that compares those of several
            # processes. To all others it is a fact, and no reason to be warned at every start.
            logger.log(
                logging.INFO if KVEvents.wanted(config.cache) is None else logging.WARNING,
                "block hashes have a random root: other processes cannot share this prefix cache, nor compare KV "
                "events; PYTHONHASHSEED or --prefix-caching-hash-algo sha256 would let them",
            )
        max_in_flight = 2 if resolved.async_scheduling else 1
        seeds = random.Random(config.model.seed)
        kv_groups = parts.runner.memory.layout.scheduler_groups
        self._one_call = asyncio.Lock() if resolved.determinism == "offline" else None
        reuses_partial_blocks = config.cache.enable_partial_block_reuse
        if reuses_partial_blocks and self._one_call is not None:
            # Which of many candidates are compared depends on a secret of the process.
            logger.info("prefixes are reused by whole blocks, so that every process does the same (determinism)")
            reuses_partial_blocks = False
        if reuses_partial_blocks and len(kv_groups) > 1:
            logger.info("prefixes are reused by whole blocks: layers with a window give back what lies between")
            reuses_partial_blocks = False
        drafts = resolved.speculation
        self._scheduler = Scheduler(
            num_blocks=parts.num_blocks,
            block_size=resolved.block_size,
            kv_groups=kv_groups,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_num_active_seqs=resolved.max_num_active_seqs,
            max_num_scheduled_tokens=resolved.max_num_scheduled_tokens,
            max_model_len=resolved.max_model_len,
            policy=config.scheduler.scheduling_policy,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            hash_algo=config.cache.prefix_caching_hash_algo,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            long_prefill_token_threshold=resolved.long_prefill_token_threshold,
            adaptive_long_prefill_threshold=config.scheduler.adaptive_long_prefill_threshold,
            max_num_partial_prefills=config.scheduler.max_num_partial_prefills or 0,
            max_long_partial_prefills=config.scheduler.max_long_partial_prefills or 0,
            full_sequence_must_fit=config.scheduler.scheduler_reserve_full_isl,
            watermark=config.scheduler.watermark,
            stale_output=config.scheduler.stale_output,
            priority_ageing_s=config.scheduler.priority_ageing_s,
            target_itl_s=(config.scheduler.target_itl_ms or 0.0) / 1000,
            max_in_flight=max_in_flight,
            root_seed=root_seed,
            enable_partial_block_reuse=reuses_partial_blocks,
            eviction_policy=config.cache.eviction_policy,
            context_cost=parts.spec.context_cost,
            kv_connector=parts.runner.connector,
            drafter=NgramDrafter(most_tokens=drafts.lookup_max, least_tokens=drafts.lookup_min) if drafts else None,
            num_speculative_tokens=resolved.num_speculative_tokens,
            draft_batch_limit=drafts.batch_limit if drafts else 0,
        )
        self._intake = Intake(
            parts.tokenizer,
            parts.chat_templates,
            max_model_len=resolved.max_model_len,
            context_limit=resolved.context_limit(parts.spec.context_length),
            max_logprobs=config.model.max_logprobs,
            vocab_size=parts.spec.vocab_size,
            eos_token_ids=parts.eos_token_ids,
            next_seed=lambda: seeds.getrandbits(63),
        )
        self._metrics = EngineMetrics(self.stats, parts.served_name)
        self._events = KVEvents.start(config.cache, self._scheduler.kv)
        connector = parts.runner.connector
        self._stores = None if connector is None else StoreFeed(self._scheduler, connector, parts.runner.store)
        self._live = LiveRequests(
            self._scheduler,
            self._metrics,
            parts.tokenizer,
            parts.eos_token_ids,
            take_back=lambda request: self._cache.take_back(request),
        )
        self._steps = StepLoop(
            self._scheduler,
            parts.runner,
            self._live.settle if self._events is None and self._stores is None else self._settle_and_pass_on,
            observe_step_s=self._metrics.step_time.observe,
            max_in_flight=max_in_flight,
            use_idle_time=parts.runner.use_idle_time,
        )
        self._lag = LagMonitor(self._metrics, self._scheduler.has_work)
        wake = self._steps.wake if self._events is None else self._wake_and_publish
        self._cache = CacheAdmin(self._scheduler, self.render, self._prewarm, connector=connector, wake=wake)
        self.model = ModelInfo(
            name=parts.served_name,
            architecture=parts.spec.architecture,
            max_model_len=resolved.max_model_len,
            vocab_size=parts.spec.vocab_size,
            has_chat_template=bool(parts.chat_templates) and parts.tokenizer is not None,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests and waits for the live ones; ends what is left at the deadline.

        Returns:
            Whether everything ended by itself.
        """
        if self._parts is None:
            return True
        if self._state == "ready":
            self._state = "draining"
        try:
            async with asyncio.timeout(timeout_s):
                await self._live.wait_empty()
        except TimeoutError:
            self._live.fail_all(EngineClosed("the engine shut down before the request was finished"))
            self._steps.wake()
            return False
        finally:
            if self._events is not None:
                self._events.end_subscriptions()
        return True

    async def close(self) -> None:
        """Ends everything: live requests, tasks, threads; gives memory back.

        May be called again, also while it runs: every call returns when all is over.
        """
        if self._closing is None:
            self._loading.abandon()
            was_started, self._state = self._parts is not None, "closed"
            if not was_started:
                return
            self._closing = asyncio.create_task(self._close(), name="aioengine-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._live.fail_all(EngineClosed("the engine was closed"))
        self._lag.close()
        self._cache.close()
        if self._log_task is not None:
            self._log_task.cancel()
            await asyncio.wait((self._log_task,))
        self._steps.stop()
        if self._steps_task is not None:
            await asyncio.wait((self._steps_task,))
        if self._events is not None:
            await self._events.close()
        await self._loaded.runner.close()
        await run_in_thread(self._intake.close)

    # ---- requests ---------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        determinism: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> RequestStream:
        """Validates a request and queues it.

        Args:
            prompt: text, token ids, or chat messages.
            params: how to sample; by default the model's own defaults.
            request_id: a label for logs and `abort()`; need not be unique.
            priority: smaller is more important; only under the priority policy.
            cache_salt: requests with different salts share no cached KV.
            determinism: refuse the request unless the operator has declared this (`engine.determinism`): offline
                or batch-invariant, which is enough for both.
            add_special_tokens: let the tokenizer add its own, such as a BOS; by default to texts only, because chat
                templates write them.

        Returns:
            An async iterator of `RequestOutput`; closing it aborts the request.

        Raises:
            InvalidRequest, ContextLengthExceeded: the request is at fault; nothing was allocated.
            QueueFull, EngineClosed, EngineDead: the engine cannot take it now, or ever.
        """
        chat = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            add_special_tokens=add_special_tokens,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        about = RequestOptions(request_id, priority, cache_salt, determinism)
        async with self._turn():
            self._check_accepting()
            arrived_s = time.monotonic()
            return self._queue(await self._prepare(prompt, params, about, chat), about, arrived_s)

    async def submit_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        determinism: str | None = None,
        **chat: Any,
    ) -> list[RequestStream | EngineError]:
        """Queues many requests together: in order, and all before the next step is made.

        Args:
            prompts: as in `submit()`, whose options this takes, for all of them.
            params: for all, or one for each.

        Returns:
            The stream of each prompt, or why it was refused; the others are queued all the same.

        Raises:
            InvalidRequest: there are not as many params as prompts.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts and {len(each)} params; give one for each", param="params")
        about, options = RequestOptions(request_id, priority, cache_salt, determinism), ChatOptions(**chat)

        async def prepare(prompt: Prompt, params: SamplingParams | None) -> PreparedRequest | EngineError:
            try:
                return await self._prepare(prompt, params, about, options)
            except EngineError as error:
                return error

        async with self._turn():
            self._check_accepting()
            arrived_s = time.monotonic()
            prepared = await asyncio.gather(*map(prepare, prompts, each))
            self._check_accepting()
            found: list[RequestStream | EngineError] = []
            for one in prepared:
                try:
                    found.append(one if isinstance(one, EngineError) else self._queue(one, about, arrived_s))
                except EngineError as error:
                    found.append(error)
            return found

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Offline, a call is queued when the engine has done with the one before; else nobody waits."""
        if self._one_call is None:
            yield
            return
        async with self._one_call:
            await self._steps.wait_idle()
            yield

    async def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, about: RequestOptions, chat: ChatOptions
    ) -> PreparedRequest:
        try:
            self._check_options(about)
            if params is not None and not isinstance(params, SamplingParams):
                raise InvalidRequest(f"params must be SamplingParams, got {type(params).__name__}", param="params")
            params = params or self.sampling_params()
            check_demand(about.determinism, self.determinism, params)
            return await self._intake.prepare(prompt, params, chat)
        except EngineError:
            self._metrics.requests_rejected += 1
            raise

    def _queue(self, prepared: PreparedRequest, about: RequestOptions, arrived_s: float) -> RequestStream:
        try:
            self._check_accepting()  # the engine may have been closed while the prompt was tokenized
            self._check_queue(len(prepared.plans))
            stream = self._live.add(
                prepared,
                about.request_id or f"req-{uuid.uuid4().hex}",
                priority=about.priority,
                cache_salt=about.cache_salt,
                arrived_s=arrived_s,
            )
        except EngineError:
            self._metrics.requests_rejected += 1
            raise
        self._lag.start()
        self._steps.wake()
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[StreamedOutput, None]:
        """The outputs of a request as they come: each a `RequestOutput`; takes the options of `submit()`.

        Cancelling the loop over it aborts the request and frees its blocks; so does leaving the loop early,
        as soon as Python finalizes the generator (`contextlib.aclosing` makes that moment exact).
        """
        stream = await self.submit(prompt, params, **options)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def abort(self, request_id: str) -> int:
        """Aborts every live request with this label; returns how many there were."""
        return self._live.abort_label(request_id) if self._parts is not None else 0

    async def render(self, prompt: Prompt, **options: Any) -> list[int]:
        """The token ids that `submit()` would compute; takes its chat options.

        Raises:
            InvalidRequest: as in `submit()`.
        """
        self._check_accepting()
        return await self._intake.render(prompt, ChatOptions(**options))

    @property
    def default_sampling(self) -> dict[str, object]:
        """Sampling values that the checkpoint recommends, used where a request gives none."""
        return dict(self._loaded.generation_defaults)

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's sampling defaults with these values on top; None means not given."""
        given = {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**{**self._loaded.generation_defaults, **given})

    @property
    def cache(self) -> CacheAdmin:
        """Operations on the prefix cache: evict, quarantine, pin, lease, prewarm, reset, audit."""
        self._check_started()
        return self._cache

    @property
    def kv_events(self) -> KVEvents | None:
        """What is cached and forgotten, step by step; None unless `kv_events_config` enables it."""
        self._check_started()
        return self._events

    def _settle_and_pass_on(self, plan: StepPlan, result: StepResult) -> None:
        """Settles a step; what it has cached is told to routers, and offered to the connector before the next one."""
        self._live.settle(plan, result)
        if self._events is not None:
            self._events.publish()
        if self._stores is not None:
            self._stores.offer()

    def _wake_and_publish(self) -> None:
        self._steps.wake()
        assert self._events is not None
        self._events.publish()

    async def _prewarm(self, token_ids: list[int], cache_salt: str | None) -> None:
        """Computes a prompt for the cache alone, behind all others that wait."""
        by_priority = self.config.scheduler.scheduling_policy == "priority"
        async with self._turn():
            self._check_accepting()
            self._check_queue(1)
            prepared = await self._intake.prepare(token_ids, SamplingParams(max_tokens=0), ChatOptions())
            stream = self._live.add(
                prepared,
                f"prewarm-{uuid.uuid4().hex}",
                priority=2**31 - 1 if by_priority else 0,
                cache_salt=cache_salt,
                arrived_s=time.monotonic(),
                prewarms=True,
            )
        self._lag.start()
        self._steps.wake()
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()

    # ---- state ------------------------------------------------------------------------------------------

    @property
    def resolved(self) -> ResolvedConfig:
        """The concrete numbers the engine runs with."""
        return self._loaded.resolved

    @property
    def determinism(self) -> Determinism:
        """What the operator has declared about answers; unavailable unless `determinism` was set."""
        return DECLARED[self._loaded.resolved.determinism]

    @property
    def fingerprint(self) -> str:
        """Changes with what results depend on: version, weights, types, device, determinism."""
        return self._loaded.fingerprint

    @property
    def memory_report(self) -> MemoryReport:
        """Bytes of weights and KV pool, and how many tokens fit."""
        return self._loaded.runner.memory

    @property
    def startup_timings(self) -> dict[str, float]:
        """Seconds per stage of the start."""
        return dict(self._loaded.timings.stages)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None if it has none."""
        return self._loaded.tokenizer

    def health(self) -> str:
        """One of starting, ready, draining, stalled, dead, closed. Answers at once."""
        is_busy = self._state in ("ready", "draining") and not self._steps.is_idle
        if is_busy and time.monotonic() - self._steps.last_progress_s > STALL_S:
            return "stalled"
        return "starting" if self._state == "new" else self._state

    def stats(self) -> EngineStats:
        """Queues, cache and counters at this moment."""
        self._check_started()
        scheduler, metrics, connector = self._scheduler, self._metrics, self._loaded.runner.connector
        num_usable = scheduler.num_blocks - 1
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            max_num_active_seqs=scheduler.max_num_active_seqs,
            num_blocks=scheduler.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            kv_cache_usage=1.0 - scheduler.num_free_blocks / num_usable,
            prefix_queries_tokens=scheduler.prefix_queries_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            num_evicted_blocks=scheduler.kv.num_evicted_blocks,
            num_cached_blocks=scheduler.kv.prefix_map.num_entries,
            num_pinned_blocks=len(scheduler.kv.pin_counts),
            external_queries_tokens=scheduler.num_external_query_tokens,
            external_hit_tokens=scheduler.num_external_hit_tokens,
            num_lost_blocks=scheduler.num_lost_blocks,
            connector=None if connector is None else connector.stats(),
            num_preemptions=scheduler.num_preemptions_total,
            num_urgent_preemptions=scheduler.num_urgent_preemptions_total,
            num_steps=self._steps.num_steps,
            drafts=DraftStats.of(scheduler) if self.resolved.speculation else None,
            step_cost=scheduler.step_cost_stats(),
            prompt_tokens=metrics.prompt_tokens,
            generation_tokens=metrics.generation_tokens,
            num_requests_finished=dict(metrics.finished),
            loop_lag_p99_s=metrics.loop_lag_p99_s(),
            completion_poll_s=self._loaded.runner.polled_s,
        )

    def set_max_num_active_seqs(self, value: int) -> None:
        """Changes how many requests may run at once, from the next step on.

        Requests that run already are not interrupted by a lower limit: they finish, and none starts before.

        Raises:
            InvalidConfig: it does not lie between 1 and max_num_seqs.
        """
        self._check_started()
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= self.resolved.max_num_seqs:
            raise InvalidConfig(
                f"max_num_active_seqs={value!r} must lie between 1 and max_num_seqs={self.resolved.max_num_seqs}",
                param="max_num_active_seqs",
            )
        self._scheduler.max_num_active_seqs = value
        self._steps.wake()

    def metrics_text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        self._check_started()
        return self._metrics.text()

    # ---- inside -----------------------------------------------------------------------------------------

    @property
    def _loaded(self) -> Parts:
        self._check_started()
        assert self._parts is not None
        return self._parts

    def _check_started(self) -> None:
        if self._parts is None:
            raise EngineClosed("the engine is not started; use `async with` or await start()")

    def _check_accepting(self) -> None:
        if self._state == "dead":
            raise EngineDead(f"the engine has failed: {self._failure}")
        if self._state != "ready":
            raise EngineClosed(f"the engine takes no requests: it is {self._state}")

    def _check_options(self, about: RequestOptions) -> None:
        """What else comes with a prompt; typed, but callers over the wire may pass anything."""
        priority = about.priority
        for name, text in (("request_id", about.request_id), ("cache_salt", about.cache_salt)):
            if text is not None and not isinstance(text, str):
                raise InvalidRequest(f"{name} must be text, got {text!r}", param=name)
        if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**31) <= priority < 2**31:
            raise InvalidRequest(f"priority must be an integer of 32 bits, got {priority!r}", param="priority")
        if priority and self.config.scheduler.scheduling_policy != "priority":
            raise InvalidRequest("priority needs an engine started with --scheduling-policy priority", param="priority")

    def _check_queue(self, num_new: int) -> None:
        limit, num_waiting = self.config.scheduler.max_waiting_requests, self._scheduler.num_waiting
        if limit is not None and num_new > limit:  # later would not help
            raise InvalidRequest(f"n={num_new} is above max_waiting_requests={limit}: no more may wait", param="n")
        if limit is not None and num_waiting + num_new > limit:
            raise QueueFull(f"{num_waiting} requests are waiting and the limit is {limit}; try again later")

    async def _run_steps(self) -> None:
        """The outermost frame of the step loop: whatever fails there fails the engine, loudly and once."""
        try:
            await self._steps.run()
        except Exception as error:
            logger.exception("the step loop failed; every request in flight fails")
            self._failure = error
            if self._state != "closed":
                self._state = "dead"
            self._live.fail_all(EngineDead(f"the engine has failed: {error}"))
            await self._steps.abandon()
            self._scheduler.fail_all()
            if self._events is not None:
                self._events.end_subscriptions()

    async def _log_stats(self) -> None:
        """One line per interval while something happens (checklist N11)."""
        before = self.stats()
        interval_s = self.config.runtime.log_stats_interval_s
        while True:
            await asyncio.sleep(interval_s)
            now = self.stats()
            if now.num_steps != before.num_steps:
                queries = now.prefix_queries_tokens - before.prefix_queries_tokens
                hits = now.prefix_hit_tokens - before.prefix_hit_tokens
                loads = now.external_hit_tokens - before.external_hit_tokens
                logger.info(
                    "running %d, waiting %d, KV %.1f %%, %.1f tokens/s generated, prefix hits %s%s%s",
                    now.num_running,
                    now.num_waiting,
                    100 * now.kv_cache_usage,
                    (now.generation_tokens - before.generation_tokens) / interval_s,
                    f"{100 * hits / queries:.0f} %" if queries else "none looked up",
                    f" and {100 * loads / queries:.0f} % loaded" if queries and loads else "",
                    "" if now.drafts is None else now.drafts.since(before.drafts).told(),
                )
            before = now
