"""One run: the real scheduler, requests, streams and step loop under a virtual clock, driven by a script.

Only the device, the callers and time are made up. After every launch and every settled step all records are held
against each other, and what can be seen from outside against the rules; at the end every request has had
exactly its own text and one final output, and nothing is left: no block, row, task or stream.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aioengine.errors import ContextLengthExceeded, EngineClosed, EngineDead, EngineError
from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan
from aioengine.fastcore.token_ids import pack_token_ids
from aioengine.intake import PreparedRequest
from aioengine.live import LiveRequests
from aioengine.loop import StepLoop
from aioengine.metrics import EngineMetrics, EngineStats
from aioengine.outputs import RequestStream
from aioengine.runner import StepResult
from aioengine.types import RequestOutput, SamplingParams
from tests.oracle.kv import NaiveKV
from tests.simulation.clock import VirtualLoop
from tests.simulation.device import SimDevice
from tests.simulation.drafting import SimDrafter
from tests.simulation.script import Abort, Add, Cancel, Close, DeviceFails, Event, Govern, Options, Reset, Script
from tests.simulation.tier import SimTier
from tests.simulation.truth import EOS, VOCAB_SIZE, OneCharTokens, Truth, stem_tokens

SMALL_POOL = 64
"""Blocks up to which the order of the free list is checked after every step."""


@dataclass
class Report:
    """What a run amounts to. `digest` is equal for equal runs."""

    num_steps: int = 0
    digest: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Violation(AssertionError):
    """A rule was broken, at a time of the run."""

    def __init__(self, cause: BaseException, at: float) -> None:
        super().__init__(f"{type(cause).__name__} at {at:.3f} s: {cause}")
        self.at = at


def run(script: Script, on_step: Callable[[], object] = lambda: None) -> Report:
    """Runs a script to its end; `on_step` is called when a step is settled.

    Raises:
        Violation: something broke a rule.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_World(script, on_step).run())
    except Exception as error:
        raise Violation(error, loop.time()) from error
    finally:
        loop.run_until_complete(_cancel_all())
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def naive_kv(options: Options) -> NaiveKV:
    """For its arithmetic over groups; it has no blocks."""
    return NaiveKV(
        2,
        options["block_size"],
        kv_groups=options["kv_groups"],
        max_step_tokens=most_step_tokens(options),
    )


def most_step_tokens(options: Options) -> int:
    """Tokens of a request in one step at most, those included by which it may begin earlier."""
    own = options["max_num_scheduled_tokens"] or options["max_num_batched_tokens"]
    return max(own, 1 + options["drafter"][0] * options["max_in_flight"] if options["drafter"] else 0)


class _Watched:
    """The scheduler as the step loop sees it: every step that it makes is checked first."""

    def __init__(self, scheduler: Scheduler, options: Options, tier: SimTier | None) -> None:
        self._scheduler = scheduler
        self._tier = tier
        self._by_priority = options["policy"] == "priority"
        self._ageing_s = options["priority_ageing_s"]
        self._uses_all = options["long_prefill_token_threshold"] == options["target_itl_s"] == 0
        gates = ("watermark", "full_sequence_must_fit", "max_num_partial_prefills", "max_long_partial_prefills")
        self._has_gates = any(options[name] for name in gates) or not options["enable_chunked_prefill"]
        limits_long = options["max_num_partial_prefills"] or options["max_long_partial_prefills"]
        self._kv = naive_kv(options)
        self._passable = options["long_prefill_token_threshold"] if limits_long else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self) -> StepPlan | None:
        """Makes a step."""
        scheduler = self._scheduler
        num_before, num_urgent = scheduler.num_preemptions_total, scheduler.num_urgent_preemptions_total
        num_running = scheduler.num_running
        alone = num_running + scheduler.num_waiting == 1
        if self._tier is not None:
            self._tier.is_scheduling = True
        plan = scheduler.schedule()
        if self._tier is not None:
            self._tier.is_scheduling = False
        scheduler.check_invariants()
        if plan is None:
            stuck = scheduler.num_in_flight_steps == 0 and (scheduler.num_running or scheduler.waiting_requests())
            assert not stuck, f"nothing runs although something could: {scheduler.waiting_requests()}"
            return None
        num_needed = plan.num_tokens - plan.num_drafts
        assert num_needed <= scheduler.max_num_scheduled_tokens, f"{plan}: INV-27"
        assert plan.num_tokens <= scheduler.max_num_batched_tokens, f"{plan}: INV-27"
        assert scheduler.num_running <= scheduler.max_num_active_seqs, f"{plan}: INV-27"
        num_victims = scheduler.num_preemptions_total - num_before
        if num_victims and plan.joined:
            assert scheduler.num_urgent_preemptions_total - num_urgent == num_victims, f"{plan}: INV-30"
            assert len(plan.joined) == 1, f"{plan} admitted others than the one it preempted for (INV-30)"
        if plan.joined:
            self._check_order(plan)
        if self._uses_all and num_needed < scheduler.max_num_scheduled_tokens:
            self._check_nothing_is_left(plan, num_victims)
        if alone:
            num_new, request = plan.num_new(0) - plan.num_drafts, plan.requests[0]
            missing = request.num_tokens + request.num_in_flight - plan.num_computed(0)
            missing -= plan.num_samples  # what it samples now is in flight already
            assert num_new == min(missing, scheduler.max_num_scheduled_tokens), f"{request} was cut alone (INV-28)"
        return plan

    def _check_nothing_is_left(self, plan: StepPlan, num_victims: int) -> None:
        """With budget left, nobody who runs waits for tokens (INV-31), and nobody waits who could start."""
        if self._scheduler.num_in_flight_steps > 1:
            return  # blocks may be on their way back, or a last token
        for request in self._scheduler.running_requests():
            samples = request in plan.sample_requests
            missing = request.num_tokens + request.num_in_flight - request.num_computed_tokens - samples
            if missing and num_victims and self._blocks_for_one_more(request) > self._scheduler.num_free_blocks:
                continue  # what victims leave of the budget takes free blocks, no more victims
            assert missing == 0, f"{request} could have had {missing} tokens more in {plan} (INV-31)"
        waiting = self._scheduler.waiting_requests()
        if (
            num_victims
            or not waiting
            or self._has_gates
            or self._scheduler.num_running >= self._scheduler.max_num_active_seqs
            or (plan.num_drafts and len(self._kv.groups) > 1)  # what fell out of a window came back behind admission
        ):
            return
        # What a copy of this step reads was held until the step was made.
        num_tokens = waiting[0].num_tokens
        blocks = sum(self._kv.blocks_for(num_tokens, g) for g in range(len(self._kv.groups))) + plan.num_copies
        assert blocks >= self._scheduler.num_free_blocks, f"{waiting[0]} could have started in {plan}"

    def _blocks_for_one_more(self, request: Request) -> int:
        """Blocks that a running request needs for its next token."""
        reached = request.num_computed_tokens
        groups = range(len(self._kv.groups))
        return sum(self._kv.blocks_for(reached + 1, g) - self._kv.blocks_for(reached, g) for g in groups)

    def _check_order(self, plan: StepPlan) -> None:
        """Nobody was passed by one who came later or is less important (INV-34)."""
        waiting = [r for r in self._scheduler.waiting_requests() if not self._may_be_passed(r)]
        if not waiting:
            return
        ranks = [self._rank(request) for request in (waiting[0], *plan.joined)]
        assert ranks[0] > max(ranks[1:]), f"{plan.joined} passed {waiting[0]} (INV-34)"

    def _rank(self, request: Request) -> tuple[float, int]:
        if not self._by_priority:
            return (0, request.sampling.arrival)
        if self._ageing_s == 0:
            return (request.priority, request.sampling.arrival)
        return (request.priority * self._ageing_s + request.arrival_s, request.sampling.arrival)

    def _may_be_passed(self, request: Request) -> bool:
        """Whether it is a long prompt where only so many of those may be unfinished at once."""
        return 0 < self._passable < request.num_tokens


class _World:
    """Everything of one run. Made and used inside its event loop."""

    def __init__(self, script: Script, on_step: Callable[[], object]) -> None:
        self.script, self.on_step = script, on_step
        self.report = Report()
        self.texts: dict[str, list[int]] = {}
        """Prompt and answer by name, for those that follow."""
        self.readers: dict[str, asyncio.Task[None]] = {}
        self.labels: dict[str, str] = {}
        """Of the requests whose reader has not ended."""
        self.salts: dict[str, str] = {}
        self.media: dict[str, list[tuple[int, int, bytes]]] = {}
        self.barred: list[NamedPrefix] = []
        """In quarantine from some time on."""
        self.barred_salts: list[str] = []
        self.aborted: set[str] = set()
        self.is_over = False
        """The engine was closed or its device failed."""

    async def run(self) -> Report:
        """The whole run."""
        loop = asyncio.get_running_loop()
        script, options = self.script, dict(self.script.options)
        shares = options.pop("kv_connector")
        drafting = options.pop("drafter")
        if drafting is not None:
            most, share, limit = drafting
            options["drafter"] = SimDrafter(share, script.seed)
            options["num_speculative_tokens"], options["draft_batch_limit"] = most, limit
        self.tier = tier = None if shares is None else SimTier(*shares, script.seed)
        self.scheduler = scheduler = Scheduler(clock=loop.time, root_seed=b"simulation", kv_connector=tier, **options)
        self.control = CacheControl(scheduler)
        self.device = SimDevice(
            scheduler, options["kv_groups"], script.step_seconds, script.seed, tier, most_step_tokens(script.options)
        )
        self.live = LiveRequests(
            scheduler,
            EngineMetrics(_no_stats, "sim"),
            OneCharTokens(),
            (EOS,),
            take_back=self.control.take_back,
            clock=loop.time,
        )
        self.steps = StepLoop(
            _Watched(scheduler, script.options, tier),
            self.device,
            self._settle,
            max_in_flight=scheduler.max_in_flight,
            clock=loop.time,
        )
        self.broken: asyncio.Future[None] = loop.create_future()
        """Fails with what a reader or a callback found."""
        loop.set_exception_handler(lambda _, context: self._break(context.get("exception"), str(context["message"])))
        steps = asyncio.create_task(self._run_steps())
        driver = asyncio.create_task(self._drive())
        await asyncio.wait((steps, driver, self.broken), return_when=asyncio.FIRST_COMPLETED)
        if self.broken.done():
            self.broken.result()
        if driver.done():
            driver.result()
            self.steps.stop()
        await steps
        await driver
        if self.broken.done():
            self.broken.result()
        self._check_end()
        return self.report

    async def _run_steps(self) -> None:
        """As in `AsyncEngine`."""
        try:
            await self.steps.run()
        except EngineDead as error:
            assert self.device.is_failing, "the step loop failed by itself"
            self.live.fail_all(error)
            await self.steps.abandon()
            self.scheduler.fail_all()

    def _settle(self, plan: StepPlan, result: StepResult) -> None:
        self.report.num_steps += 1
        self.on_step()
        self.report.digest = zlib.crc32(result.token_ids.tobytes(), self.report.digest * 31 + plan.num_tokens)
        were_live = [request.status != "finished" for request in plan.requests]
        self.live.settle(plan, result)
        for row in self.device.read_lost.pop(plan.step_id):
            assert row in plan.dropped_rows or not were_live[row], f"{plan.requests[row]} is told what it read (I16)"
        self._store()
        self.device.settled_step = plan.step_id
        self.scheduler.check_invariants()
        self.device.check_fences()
        self.control.check()
        for name in self.barred:
            assert self.control.cached_blocks(name) <= name.span_block, "a span in quarantine is cached (INV-70)"
        for salt in self.barred_salts:
            assert not any(self._cached_under(salt)), "something under a salt in quarantine is cached (INV-70)"
        if self.scheduler.num_blocks <= SMALL_POOL:
            self._check_order_of_eviction()

    def _store(self) -> None:
        """Gives the tier what is new, as the step loop does."""
        stores = self.scheduler.take_stores()
        assert self.tier is not None or not stores
        hashes = [block_hash for block_hash, _ in stores]
        assert len(set(hashes)) == len(hashes), "a block is stored twice"
        find = self.scheduler.kv.prefix_map.find_bytes
        assert all(find(block_hash) == block_id for block_hash, block_id in stores), "what is stored is not indexed"
        self.device.store(stores)

    def _check_order_of_eviction(self) -> None:
        """What is cached goes after what is not, and under LRU a block goes before the one it continues (INV-23)."""
        pool, tree = self.scheduler.kv.pool, self.scheduler.kv.prefix_map.tree
        free = pool.free_ids()
        num_unhashed = next((i for i, block_id in enumerate(free) if pool.is_hashed(block_id)), len(free))
        cached = free[num_unhashed:]
        assert all(map(pool.is_hashed, cached)), f"{free}: a block without content goes after one with it (INV-23)"
        if self.script.options["eviction_policy"] == "lru":
            gone: set[int] = set()
            for block_id in cached:
                parent = tree.parent_of(block_id)
                assert parent not in gone, f"block {parent} goes before {block_id}, which continues it (INV-23)"
                gone.add(block_id)

    # ---- the script -------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        for event in self.script.events:
            if event.at > loop.time():
                await asyncio.sleep(event.at - loop.time())
            if self.is_over:
                break
            self._do(event)
            self.scheduler.check_invariants()
            self.device.check_fences()
            self.steps.wake()
        while self.readers:
            await asyncio.wait((next(iter(self.readers.values())),))
        await self.live.wait_empty()

    def _do(self, event: Event) -> None:
        match event:
            case Add():
                self._add(event)
            case Abort(label=label):
                self.aborted |= {name for name, other in self.labels.items() if other == label}
                self.live.abort_label(label)
            case Cancel(name=name):
                if name in self.readers:
                    self.readers[name].cancel()
            case Reset(force=force):
                is_free = self.scheduler.num_free_blocks == self.scheduler.num_blocks - 1
                assert (self.control.reset(force=force) is not None) == (is_free or force)
                assert not (is_free or force) or self.scheduler.kv.prefix_map.num_entries == 0
                self.report.counts["forced resets"] += force
            case Govern():
                self._govern(event)
            case Close():
                self.is_over = True
                self.live.fail_all(EngineClosed("closed, as the script wants"))
                self.steps.stop()
            case DeviceFails():
                self.is_over = self.device.is_failing = True

    def _govern(self, event: Govern) -> None:
        """Evicts, bars or pins a prefix of a text; what went must not be hit any more (INV-70)."""
        if event.name not in self.texts or self.scheduler.kv.hasher is None:
            return
        name = self._prefix(event.name, event.share)
        self.report.counts[event.what] += 1
        if event.what == "pin":
            self._pin(name)
            return
        salt = self.salts[event.name]
        others = [self._prefix(text) for text in self.texts if self.salts[text] != salt] if event.share == 0 else []
        kept = [self.control.cached_blocks(other) for other in others]
        self.control.evict(name)
        if event.share == 0:
            self.report.counts[f"{event.what} salt"] += 1
            assert not any(self._cached_under(salt)), f"{event} left a prefix behind (INV-70)"
            assert [self.control.cached_blocks(other) for other in others] == kept, (
                f"{event} took other tenants' blocks"
            )
        assert self.control.cached_blocks(name) <= name.span_block, f"{event} left its span behind (INV-70)"
        if event.what == "quarantine" and self.control.bar(name):
            if event.share == 0:
                self.barred_salts.append(salt)
            else:
                self.barred.append(name)

    def _prefix(self, text: str, share: float = 1.0) -> NamedPrefix:
        """The name of the beginning of a text; with no share of it, of all that is under its salt."""
        ids = self.texts[text][: max(1, int(len(self.texts[text]) * share))] if share else []
        salt, block_size = self.salts[text].encode(), self.scheduler.kv.block_size
        return NamedPrefix(pack_token_ids(ids, VOCAB_SIZE), block_size, cache_salt=salt, media=self.media[text])

    def _cached_under(self, salt: str) -> Iterator[int]:
        """How many blocks of each text under a salt would be hit."""
        return (self.control.cached_blocks(self._prefix(text)) for text in self.texts if self.salts[text] == salt)

    def _pin(self, name: NamedPrefix) -> None:
        num_blocks = self.control.cached_blocks(name) + self.control.num_pinned_blocks
        try:
            pinned = self.control.pin(name)
        except ValueError:
            # Other groups' blocks are pinned along.
            assert num_blocks > self.control.max_pinned_blocks or len(self.script.options["kv_groups"]) > 1
        else:
            # Blocks that another pin holds already are not more.
            assert self.control.num_pinned_blocks <= self.control.max_pinned_blocks
            num_pinned = pinned[1] if pinned else 0
            assert num_pinned <= self.control.cached_blocks(name)
            assert num_pinned == self.control.cached_blocks(name) or (
                self.tier is not None and self.scheduler.num_in_flight_steps
            )

    def _add(self, add: Add) -> None:
        prompt = self._prompt(add)
        params = SamplingParams(
            n=add.n,
            max_tokens=add.max_tokens,
            min_tokens=add.min_tokens,
            ignore_eos=add.ignore_eos,
            stop_token_ids=add.stop_ids,
            stop=(add.stop_text,) if add.stop_text else (),
            prompt_logprobs=0 if add.wants_prompt_logits else None,
        )
        truths = tuple(
            Truth(
                f"{add.name}.{i}", prompt, add.salt, i, params, add.max_tokens, self.scheduler.max_total, add.fails_at,
                arrival=self.report.counts["arrived"] + i, media=add.media,
            )
            for i in range(add.n)
        )  # fmt: skip
        self.report.counts["arrived"] += add.n
        prepared = PreparedRequest(
            prompt_token_ids=prompt,
            packed_token_ids=pack_token_ids(prompt, VOCAB_SIZE),
            params=params,
            max_tokens=add.max_tokens,
            plans=truths,
        )
        label = add.label or add.name
        media = [(start, length, name.encode()) for start, length, name in add.media]
        now_s = asyncio.get_running_loop().time()
        try:
            stream = self.live.add(
                prepared, label, priority=add.priority, cache_salt=add.salt, arrived_s=now_s, media=media
            )
        except ContextLengthExceeded:
            assert not self._fits(add), f"{add} was refused"
            self.report.counts["refused"] += 1
            return
        assert self._fits(add), f"{add} was taken and can never run"
        self.texts[add.name] = prompt + truths[0].output
        self.salts[add.name], self.media[add.name] = add.salt, media
        self.report.counts["with media"] += bool(media)
        self.labels[add.name] = label
        task = self.readers[add.name] = asyncio.create_task(self._read(add, stream, truths))
        task.add_done_callback(lambda task: self._reader_ended(add.name, stream, task))

    def _prompt(self, add: Add) -> list[int]:
        source = self.texts.get(add.follows or "")
        if source is None:
            source = stem_tokens(add.stem, add.shared)
        shared = source[: min(add.shared, add.length)]
        return shared + stem_tokens(zlib.crc32(add.name.encode()), add.length - len(shared))

    def _fits(self, add: Add) -> bool:
        options = self.script.options
        blocks = naive_kv(options).most_blocks(add.length + 1)
        return add.length + (add.max_tokens > 0) <= options["max_model_len"] and blocks < options["num_blocks"]

    # ---- the readers ------------------------------------------------------------------------------------

    def _reader_ended(self, name: str, stream: RequestStream, task: asyncio.Task[None]) -> None:
        stream.close()  # its task may have been cancelled before it began
        del self.readers[name], self.labels[name]
        if not task.cancelled() and task.exception() is not None:
            self._break(task.exception())

    def _break(self, error: BaseException | None, what: str = "") -> None:
        """Fails the run, if it has not failed before."""
        if not self.broken.done() and not self.broken.get_loop().is_closed():
            self.broken.set_exception(error or AssertionError(what))

    async def _read(self, add: Add, stream: RequestStream, truths: tuple[Truth, ...]) -> None:
        try:
            await self._read_outputs(add, stream, truths)
        except EngineError:
            may_fail = add.fails_at or self.is_over or any(truth.was_spoiled for truth in truths)
            assert may_fail, f"{add.name} failed and should not"
            self.report.counts["failed"] += 1

    async def _read_outputs(self, add: Add, stream: RequestStream, truths: tuple[Truth, ...]) -> None:
        token_ids: list[list[int]] = [[] for _ in truths]
        texts = [""] * len(truths)
        finals: set[int] = set()
        num_outputs = 0
        async for out in stream:
            index = out.index
            assert index not in finals, f"{add.name} got something after its last output"
            token_ids[index] += out.delta_token_ids
            texts[index] += out.delta
            if out.finish_reason is not None:
                finals.add(index)
                self._check_answer(truths[index], out, token_ids[index], texts[index], add.name in self.aborted)
                assert (out.usage is not None) == (len(finals) == len(truths))
                if out.usage is not None:
                    sizes = (add.length, sum(map(len, token_ids)))
                    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == sizes
            num_outputs += 1
            if num_outputs == add.leaves_after:
                self.report.counts["left"] += 1
                return
            if add.pace:
                await asyncio.sleep(add.pace)
        assert len(finals) == len(truths), f"{add.name} ended without a last output"

    def _check_answer(
        self, truth: Truth, out: RequestOutput, token_ids: list[int], text: str, may_be_aborted: bool
    ) -> None:
        self.report.counts[str(out.finish_reason)] += 1
        assert (out.token_ids, out.text) == (token_ids, text), f"{truth.name}: the deltas do not add up"
        if out.finish_reason == "abort":
            assert may_be_aborted, f"{truth.name} was aborted by nobody"
            assert token_ids == truth.output[: len(token_ids)], f"{truth.name} got {token_ids}, not {truth.output}"
            return
        got, wanted = (out.finish_reason, token_ids, text), (truth.reason, truth.output, truth.text)
        assert got == wanted, f"{truth.name} got {got}, not {wanted}"
        assert not truth.params.prompt_logprobs or truth.num_scored == len(truth.prompt)

    # ---- the end ----------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        scheduler, counts = self.scheduler, self.report.counts
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"
        assert len(self.live) == 0 and not self.labels, "a request is left"
        assert not scheduler.has_work() and scheduler.num_waiting == 0, "the scheduler has work"
        for pin_id in list(self.control.pins):
            self.control.unpin(pin_id)
        assert scheduler.num_free_blocks == scheduler.num_blocks - 1, "a block leaked"
        scheduler.check_invariants()
        assert scheduler.reset_prefix_cache() and scheduler.kv.prefix_map.num_entries == 0
        counts["preempted"] = scheduler.num_preemptions_total
        counts["made way"] = scheduler.num_urgent_preemptions_total
        counts["hit tokens"] = scheduler.prefix_hit_tokens
        counts["hit tokens of several groups"] = scheduler.prefix_hit_tokens * (scheduler.kv.more is not None)
        counts["copies"] = self.device.num_copies
        counts["accepted drafts"], counts["rejected drafts"] = self.device.num_accepted, self.device.num_rejected
        told = scheduler.num_accepted_tokens_total, scheduler.num_draft_tokens_total
        seen = self.device.num_accepted, self.device.num_accepted + self.device.num_rejected
        assert told == seen or self.is_over
        counts["spoiled"] = self.device.num_spoiled
        counts["loaded tokens"] = scheduler.num_external_hit_tokens
        counts["lost blocks"] = self.device.num_lost
        counts["preempted for lost blocks"] = scheduler.num_load_preemptions_total
        assert scheduler.num_external_query_tokens >= scheduler.num_external_hit_tokens
        assert scheduler.num_lost_blocks == self.device.num_lost or self.is_over


def _no_stats() -> EngineStats:
    raise NotImplementedError("nobody scrapes a simulated engine")
