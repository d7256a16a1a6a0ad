"""The governed cache: evict, quarantine, pin, lease, prewarm and reset prefixes by name, with a record of each.

`engine.cache` is an instance. A prefix is named by what a request would send: text, token ids or chat messages,
and its `cache_salt`; a tenant by its salt alone. Every operation replies exact, degraded (with the reason) or
refused, and its reply is kept in a bounded audit log. The work on blocks is done by `fastcore/cache_control.pyx`;
here are names, expiry and the books. Everything runs on the event loop's thread, between two steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from aioengine.errors import ContextLengthExceeded, InvalidRequest
from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.kv_connector import KVConnector
from aioengine.types import CacheReply, CacheStats, CacheStatus, Prompt

logger = logging.getLogger(__name__)

MAX_AUDIT_RECORDS = 1000
MAX_QUARANTINED = 1000
MAX_LEASE_S = 366 * 86400.0
MAX_BOOKED_CHARS = 200
"""So much of a salt or a pin's id is written down: the audit log must stay small, whatever callers send."""

OFF = "prefix caching is off; start with --enable-prefix-caching"
INEXACT = (
    "the name ends inside a block, and the tokens of cached blocks are kept only with --enable-partial-block-reuse, "
    "and only for models whose layers all share one block table"
)


class CacheAdmin:
    """Operations on one engine's prefix cache.

    Args:
        render: token ids of a prompt, as for a request.
        compute: computes a prompt for the cache alone; returns when that is done.
        connector: keeps blocks outside the pool; what is evicted goes there, too.
        wake: called when blocks may have become free.
        clock: measures leases.
        wall_clock: dates audit records.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        render: Callable[..., Awaitable[list[int]]],
        compute: Callable[[list[int], str | None], Awaitable[None]],
        *,
        connector: KVConnector | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._control = CacheControl(scheduler, connector)
        self._render = render
        self._compute = compute
        self._wake = wake
        self._clock = clock
        self._wall_clock = wall_clock
        self._is_on = scheduler.kv.hasher is not None
        self._expiry: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._audit: deque[CacheReply] = deque(maxlen=MAX_AUDIT_RECORDS)
        self._num_audited = 0

    # ---- evicting ---------------------------------------------------------------------------------------

    async def evict(
        self,
        prompt: Prompt | None = None,
        *,
        cache_salt: str | None = None,
        start: int | None = None,
        require_exact: bool = False,
        **chat: Any,
    ) -> CacheReply:
        """Takes a span of a prefix out of the cache, with everything that was computed after it.

        Other prefixes stay, also those that share what comes before the span, and so does what comes before it in
        this one: the reply's `num_cached_tokens`. Requests that run on evicted blocks go on; nobody else can hit
        those blocks. Pins on them end.

        Args:
            prompt: the prefix up to the end of the span; without one, everything under `cache_salt` goes.
            start: the span's first token; by default only what has the whole prefix in view goes. Blocks go as
                a whole, so a span takes what else is in the block where it begins.
            require_exact: refuse rather than evict more than was named.
            chat: options of the chat template, as in `engine.render()`; no generation prompt by default.
        """
        name = await self._name_or_salt(prompt, cache_salt, start, chat)
        return self._evict("evict", name, cache_salt, start, require_exact)

    async def quarantine(
        self,
        prompt: Prompt | None = None,
        *,
        cache_salt: str | None = None,
        start: int | None = None,
        require_exact: bool = False,
        **chat: Any,
    ) -> CacheReply:
        """Evicts a span as `evict()` does and keeps it out of the cache from now on, until `lift()`.

        Requests may still send it; what they compute with it in view is never shared. What comes before the span
        is shared on, see `num_cached_tokens`. Without a prompt, everything under `cache_salt` is meant.
        """
        name = await self._name_or_salt(prompt, cache_salt, start, chat)
        if self._is_on and self._control.num_barred >= MAX_QUARANTINED:
            reason = f"{MAX_QUARANTINED} spans are in quarantine already; lift some"
            facts = self._facts(name, cache_salt)
            return self._book("quarantine", "refused", reason=reason, start=start, **facts)
        reply = self._evict("quarantine", name, cache_salt, start, require_exact)
        if reply.status != "refused":
            self._control.bar(name)
        return reply

    async def lift(
        self,
        prompt: Prompt | None = None,
        *,
        cache_salt: str | None = None,
        start: int | None = None,
        **chat: Any,
    ) -> CacheReply:
        """Ends a quarantine; the span must be named as it was then."""
        name = await self._name_or_salt(prompt, cache_salt, start, chat)
        found = self._control.lift(name)
        reason = None if found else "no such span is in quarantine"
        return self._book(
            "lift",
            "exact" if found else "refused",
            reason=reason,
            start=start,
            **self._facts(name, cache_salt),
        )

    def _evict(
        self, action: str, name: NamedPrefix, cache_salt: str | None, start: int | None, require_exact: bool
    ) -> CacheReply:
        before = self._num_offloaded()
        done = self._control.evict(name, require_exact=require_exact) if self._is_on else None
        facts = {"start": start, **self._facts(name, cache_salt)}
        if done is None:
            return self._book(action, "refused", reason=INEXACT if self._is_on else OFF, **facts)
        is_exact, num_blocks, num_in_use, num_requests, num_broken = done
        self._forget_broken_leases()
        return self._book(
            action,
            "exact" if is_exact else "degraded",
            reason=None if is_exact else f"{INEXACT}: every block that continues the same prefix was evicted",
            note=_rest_note(facts["num_cached_tokens"]) if start is None else None,
            num_blocks=num_blocks,
            num_offloaded_blocks=before - self._num_offloaded(),
            num_blocks_in_use=num_in_use,
            num_requests=num_requests,
            num_pins_broken=num_broken,
            **facts,
        )

    def take_back(self, request: Request) -> None:
        """Evicts what a request whose row failed in a step not settled yet may have spoiled."""
        num_blocks, num_broken = self._control.take_back(request)
        if num_blocks:
            self._forget_broken_leases()
            logger.warning(
                "request %s failed on the device: %d cached blocks were evicted, %d pins broken",
                request.request_id,
                num_blocks,
                num_broken,
            )

    async def reset(self, *, force: bool = False) -> CacheReply:
        """Forgets every cached prefix.

        Args:
            force: end pins and preempt running requests, which compute everything again and answer the same;
                without it the reset is refused while any block is in use.
        """
        if not self._is_on:
            return self._book("reset", "refused", reason=OFF)
        num_requests, num_pins, before = self._scheduler.num_running, len(self._control.pins), self._num_offloaded()
        num_blocks = self._control.reset(force=force)
        if num_blocks is None:
            reason = f"blocks are in use by {num_requests} running requests and {num_pins} pins; force ends that"
            return self._book("reset", "refused", reason=reason)
        self._forget_broken_leases()
        broken = num_pins if force else 0
        return self._book(
            "reset",
            "exact",
            num_blocks=num_blocks,
            num_offloaded_blocks=before - self._num_offloaded(),
            num_requests=num_requests if force else 0,
            num_pins_broken=broken,
        )

    # ---- keeping ----------------------------------------------------------------------------------------

    async def pin(
        self, prompt: Prompt, *, cache_salt: str | None = None, require_exact: bool = False, **chat: Any
    ) -> CacheReply:
        """Keeps the cached full blocks of a prefix from being evicted until `unpin()`.

        Degraded if only its beginning is cached (`prewarm()` caches it); refused if nothing is, or if a request
        of the greatest length would not fit any more.
        """
        name = await self._name(prompt, cache_salt, None, chat)
        return self._pin("pin", name, cache_salt, require_exact, None)

    async def lease(
        self,
        prompt: Prompt,
        ttl_s: float,
        *,
        cache_salt: str | None = None,
        require_exact: bool = False,
        **chat: Any,
    ) -> CacheReply:
        """A pin that ends by itself after `ttl_s` seconds."""
        if not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or not 0 < ttl_s <= MAX_LEASE_S:
            raise InvalidRequest(f"ttl_s={ttl_s!r} must lie between 0 and {MAX_LEASE_S:g} seconds", param="ttl_s")
        name = await self._name(prompt, cache_salt, None, chat)
        return self._pin("lease", name, cache_salt, require_exact, float(ttl_s))

    async def unpin(self, pin_id: str) -> CacheReply:
        """Ends a pin or a lease."""
        num_blocks = self._control.unpin(pin_id)
        self._expiry.pop(pin_id, None)
        reason = None if num_blocks else f"there is no pin {_booked(pin_id)}"
        status: CacheStatus = "exact" if num_blocks else "refused"
        return self._book("unpin", status, reason=reason, num_blocks=num_blocks, pin_id=pin_id)

    def _pin(
        self, action: str, name: NamedPrefix, cache_salt: str | None, require_exact: bool, ttl_s: float | None
    ) -> CacheReply:
        self.expire()
        num_full = self._control.whole_blocks(name)
        refusal: str | None = None
        pinned: tuple[str, int] | None = None
        if not self._is_on:
            refusal = OFF
        elif num_full == 0:
            refusal = f"{name.num_tokens} tokens fill no block of {name.block_size}"
        elif require_exact and self._control.pinnable_blocks(name) < num_full:
            refusal = f"not all of the prefix is {self._what_lacks(name, num_full)}"
        else:
            try:
                pinned = self._control.pin(name)
                refusal = None if pinned else f"nothing of the prefix is {self._what_lacks(name, 1)}"
            except ValueError as error:
                refusal = str(error)
        if pinned is None:
            return self._book(action, "refused", reason=refusal, **self._facts(name, cache_salt))
        pin_id, num_blocks = pinned
        if ttl_s is not None:
            self._expiry[pin_id] = self._clock() + ttl_s
            self._arm()
        is_whole = num_blocks == num_full
        missing = f"{num_full - num_blocks} of its {num_full} blocks are not {self._what_lacks(name, num_full)}"
        return self._book(
            action,
            "exact" if is_whole else "degraded",
            reason=None if is_whole else missing,
            num_held_tokens=num_blocks * name.block_size,
            num_blocks=num_blocks,
            pin_id=pin_id,
            expires_in_s=ttl_s,
            **self._facts(name, cache_salt),
        )

    def _what_lacks(self, name: NamedPrefix, num_blocks: int) -> str:
        """What not all of the first blocks of a prefix are, or they could be pinned, and what to do."""
        if self._control.cached_blocks(name) >= num_blocks:
            return "settled: steps in flight compute or load them; ask again"
        return "cached; prewarm it first"

    async def prewarm(self, prompt: Prompt, *, cache_salt: str | None = None, **chat: Any) -> CacheReply:
        """Computes a prefix into the cache. Until a request hits it, it is the first to make room."""
        token_ids = await self._token_ids(prompt, cache_salt, chat)
        name = self._named(token_ids, cache_salt, None)
        num_full = self._control.whole_blocks(name)
        if not self._is_on or num_full == 0:
            reason = f"{name.num_tokens} tokens fill no block of {name.block_size}" if self._is_on else OFF
            return self._book("prewarm", "refused", reason=reason, **self._facts(name, cache_salt))
        before = self._control.cached_blocks(name)
        if before < num_full:
            await self._compute(token_ids, cache_salt)
        num_cached = self._control.cached_blocks(name)
        is_whole = num_cached == num_full
        missing = f"only {num_cached} of its {num_full} blocks are cached: the pool is full or a span is in quarantine"
        return self._book(
            "prewarm",
            "exact" if is_whole else "degraded",
            reason=None if is_whole else missing,
            num_blocks=max(0, num_cached - before),
            **self._facts(name, cache_salt),
        )

    # ---- expiry -----------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Ends the leases whose time is over; returns how many. A timer does this, too."""
        now_s = self._clock()
        over = [pin_id for pin_id, at_s in self._expiry.items() if at_s <= now_s]
        for pin_id in over:
            del self._expiry[pin_id]
            self._book("expire", "exact", num_blocks=self._control.unpin(pin_id), pin_id=pin_id)
        return len(over)

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """Sets the timer to the lease that ends first."""
        self.close()
        if self._expiry:
            delay_s = max(0.0, min(self._expiry.values()) - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        self._arm()

    def _forget_broken_leases(self) -> None:
        for pin_id in [pin_id for pin_id in self._expiry if pin_id not in self._control.pins]:
            del self._expiry[pin_id]

    # ---- looking ----------------------------------------------------------------------------------------

    def audit(self, limit: int = MAX_AUDIT_RECORDS) -> list[CacheReply]:
        """The newest records, oldest first; the log keeps the last 1000."""
        return list(self._audit)[-limit:] if limit > 0 else []

    def stats(self) -> CacheStats:
        """Sizes, pins and counters."""
        self.expire()
        kv, control, now_s = self._scheduler.kv, self._control, self._clock()
        return CacheStats(
            enabled=self._is_on,
            block_size=kv.block_size,
            num_blocks=kv.pool.num_blocks - 1,
            num_free_blocks=kv.pool.num_free,
            num_cached_blocks=kv.prefix_map.num_entries,
            num_evicted_blocks=kv.num_evicted_blocks,
            num_offloaded_blocks=self._num_offloaded(),
            num_pinned_blocks=control.num_pinned_blocks,
            max_pinned_blocks=control.max_pinned_blocks,
            num_quarantined=control.num_barred,
            pins={pin_id: len(blocks) for pin_id, blocks in control.pins.items()},
            leases={pin_id: at_s - now_s for pin_id, at_s in self._expiry.items()},
        )

    # ---- inside -----------------------------------------------------------------------------------------

    async def _name(
        self, prompt: Prompt, cache_salt: str | None, start: int | None, chat: dict[str, Any]
    ) -> NamedPrefix:
        return self._named(await self._token_ids(prompt, cache_salt, chat), cache_salt, start)

    async def _name_or_salt(
        self, prompt: Prompt | None, cache_salt: str | None, start: int | None, chat: dict[str, Any]
    ) -> NamedPrefix:
        """The prefix that was named; without a prompt, the name of everything under a salt."""
        if prompt is not None:
            return await self._name(prompt, cache_salt, start, chat)
        _check_salt(cache_salt)
        if not cache_salt:
            raise InvalidRequest("name a prompt, a cache_salt or both; reset forgets everything", param="prompt")
        if start is not None or any(chat.values()) or chat.get("add_special_tokens") is not None:
            raise InvalidRequest("start and chat options need a prompt", param="prompt" if start is None else "start")
        nothing = np.empty(0, dtype=np.int32)
        return NamedPrefix(nothing, self._scheduler.kv.block_size, cache_salt=salt_bytes(cache_salt))

    async def _token_ids(self, prompt: Prompt, cache_salt: str | None, chat: dict[str, Any]) -> list[int]:
        _check_salt(cache_salt)
        token_ids = await self._render(prompt, **{"add_generation_prompt": False, **chat})
        if len(token_ids) > self._scheduler.max_model_len:  # ids as such are measured before; text is not
            raise ContextLengthExceeded(
                f"the prefix has {len(token_ids)} tokens and no request can have more than "
                f"max_model_len={self._scheduler.max_model_len}",
                param="prompt",
            )
        return token_ids

    def _named(self, token_ids: list[int], cache_salt: str | None, start: int | None) -> NamedPrefix:
        if start is not None and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
            raise InvalidRequest(f"start={start!r} must be the position of a token", param="start")
        if start is not None and start >= len(token_ids):
            raise InvalidRequest(f"start={start} is not a token of a prefix of {len(token_ids)} tokens", param="start")
        return NamedPrefix(
            np.array(token_ids, dtype=np.int32),
            self._scheduler.kv.block_size,
            cache_salt=salt_bytes(cache_salt),
            start=-1 if start is None else start,
        )

    def _facts(self, name: NamedPrefix, cache_salt: str | None) -> dict[str, Any]:
        """What every reply about a prefix says of it, as it is now."""
        num_cached = self._control.cached_blocks(name) + self._control.loadable_blocks(name) if self._is_on else 0
        num_tokens = num_cached * name.block_size
        return {"cache_salt": cache_salt, "num_tokens": name.num_tokens, "num_cached_tokens": num_tokens}

    def _num_offloaded(self) -> int:
        """Blocks that are kept outside the pool."""
        return 0 if self._connector is None else self._connector.stats().num_blocks

    def _book(self, action: str, status: CacheStatus, **facts: Any) -> CacheReply:
        """Writes the reply of an operation down and returns it."""
        self._num_audited += 1
        facts |= {name: _booked(facts[name]) for name in ("cache_salt", "pin_id") if facts.get(name)}
        reply = CacheReply(audit_id=self._num_audited, at_s=self._wall_clock(), action=action, status=status, **facts)
        self._audit.append(reply)
        logger.info("cache: %s", {k: v for k, v in dataclasses.asdict(reply).items() if v not in (None, 0)})
        self._wake()
        return reply


def _rest_note(num_cached_tokens: int) -> str | None:
    """What whoever names a prefix and no start of a span may take for gone."""
    if not num_cached_tokens:
        return None
    return (
        f"{num_cached_tokens} tokens of it are still cached: others may begin so; "
        "start=0 takes all of it, also for others that begin so"
    )


def _booked(text: str) -> str:
    return text if len(text) <= MAX_BOOKED_CHARS else f"{text[:MAX_BOOKED_CHARS]}... ({len(text)} characters)"


def _check_salt(cache_salt: object) -> None:
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequest(f"cache_salt must be text, got {cache_salt!r}", param="cache_salt")


def salt_bytes(cache_salt: str | None) -> bytes:
    """A request's salt as it enters the hash of its first block."""
    return (cache_salt or "").encode("utf-8", "surrogatepass")
