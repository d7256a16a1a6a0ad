"""KV events: what the prefix index gains and loses, told to routers in other processes.

After each step, and each operation on the cache, the journal of the index becomes one numbered batch. A batch goes
to every subscriber in this process (the SSE route) and, with the publisher `zmq`, out as msgpack in vLLM's form:
the frames (topic, number as 8 bytes big endian, [time, events]). Replaying all batches rebuilds the index.
With several KV groups it is the first one's index: what the others have cached hangs on its blocks.

Nobody is waited for: a subscriber that is too slow loses batches and sees it by a gap in the numbers; the last
`buffer_steps` batches can be asked for again. Off by default; then none of this exists.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from aioengine.config import CacheConfig
from aioengine.errors import InvalidConfig
from aioengine.fastcore.key_tails import key_parts
from aioengine.fastcore.kv_journal import KVJournal
from aioengine.fastcore.kv_manager import KVManager

if TYPE_CHECKING:
    from aioengine.fastcore.kv_journal import Entry

logger = logging.getLogger(__name__)

MOST = 2**31 - 1
"""Largest number that a socket option takes."""

SUBSCRIBER_BATCHES = 1000
"""So many batches wait for a subscriber in this process before it loses some."""

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks that can be hit from now on, each the parent of the next."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """None where the first one begins a prompt."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    extra_keys: bytes | None = None
    """Adapter and the like, as in the request."""
    media: list[list[tuple[bytes, int]]] | None = None
    """Per block the media items in it: identifier, and where the item begins relative to the block; None where all
    blocks have none."""


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks that cannot be hit any more."""

    block_hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Nothing can be hit any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one step."""

    ts: float
    """Unix time."""
    events: list[KVEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The fields of `--kv-events-config`, as in vLLM."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


def parse_config(text: str) -> KVEventsConfig:
    """Reads `--kv-events-config`.

    Raises:
        InvalidConfig: no JSON object, an unknown field, or a value of the wrong type or range.
    """
    known = ", ".join(f.name for f in fields(KVEventsConfig))
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("it is not a JSON object")
        if unknown := sorted(set(given) - {f.name for f in fields(KVEventsConfig)}):
            raise ValueError(f"{unknown[0]} is unknown; there are {known}")
        config = msgspec.convert(given, KVEventsConfig)
        if min(config.buffer_steps, config.hwm) < 1 or max(config.buffer_steps, config.hwm) > MOST:
            raise ValueError(f"buffer_steps and hwm must be at least 1 and at most {MOST}")
    except (ValueError, msgspec.ValidationError) as error:
        raise InvalidConfig(f"kv_events_config cannot be used: {error}", param="kv_events_config") from None
    return config


@dataclass(slots=True, eq=False)
class _Subscriber:
    queue: asyncio.Queue[tuple[int, EventBatch] | None]
    """What waits for the reader; None ends the subscription."""


class KVEvents:
    """Numbers, keeps and hands out the batches of one engine. Used on the event loop's thread."""

    def __init__(self, config: KVEventsConfig, journal: KVJournal, block_size: int) -> None:
        self.config = config
        self._journal = journal
        self._block_size = block_size
        self._encoder = msgspec.msgpack.Encoder()
        self._recent: deque[tuple[int, EventBatch]] = deque(maxlen=config.buffer_steps)
        self._subscribers: list[_Subscriber] = []
        self._next_number = 0
        self._is_over = False
        self._zmq = _ZmqPublisher(config, self) if config.publisher == "zmq" else None

    @staticmethod
    def wanted(config: CacheConfig) -> KVEventsConfig | None:
        """What the configuration asks for; None if that is nothing.

        Raises:
            InvalidConfig: it cannot be, whatever the machine.
        """
        parsed = parse_config(config.kv_events_config) if config.kv_events_config is not None else None
        if parsed is None or not parsed.enable_kv_cache_events:
            return None
        if not config.enable_prefix_caching:
            raise InvalidConfig("KV events need --enable-prefix-caching", param="kv_events_config")
        if parsed.publisher == "zmq" and importlib.util.find_spec("zmq") is None:
            raise InvalidConfig(
                "the publisher zmq needs pyzmq: pip install 'aioengine[events]'", param="kv_events_config"
            )
        return parsed

    @classmethod
    def start(cls, config: CacheConfig, kv: KVManager) -> KVEvents | None:
        """Starts what the configuration asks for; None if that is nothing.

        Raises:
            InvalidConfig: it cannot be done.
        """
        wanted = cls.wanted(config)
        return None if wanted is None else cls(wanted, kv.start_journal(), kv.block_size)

    @property
    def next_number(self) -> int:
        """The number that the next batch will have."""
        return self._next_number

    def publish(self) -> None:
        """Makes a batch of what happened since the last one, if anything did."""
        entries = self._journal.take()
        if not entries:
            return
        batch = EventBatch(time.time(), list(events_of(entries, self._block_size)))
        item = (self._next_number, batch)
        self._next_number += 1
        self._recent.append(item)
        for subscriber in self._subscribers:
            if subscriber.queue.qsize() < SUBSCRIBER_BATCHES:
                subscriber.queue.put_nowait(item)
        if self._zmq is not None:
            self._zmq.send(item[0], self._encoder.encode(batch))

    def recent(self, start: int) -> list[tuple[int, EventBatch]]:
        """The batches still kept, from a number on."""
        return [item for item in self._recent if item[0] >= start]

    def encode(self, batch: EventBatch) -> bytes:
        """A batch as msgpack."""
        return self._encoder.encode(batch)

    async def subscribe_json(self, start: int | None = None) -> AsyncIterator[bytes]:
        """The same as JSON objects with `number`, `ts` and `events`; hashes and keys in hexadecimal."""
        async for number, batch in self.subscribe(start):
            events = [_plain(event) for event in batch.events]
            yield msgspec.json.encode({"number": number, "ts": batch.ts, "events": events})

    async def subscribe(self, start: int | None = None) -> AsyncIterator[tuple[int, EventBatch]]:
        """Batches as they come, with their numbers; with `start` those from that number on that are still kept.

        A gap in the numbers means that batches were lost, because the reader was too slow or they are too old.
        Ends when the engine does.
        """
        subscriber = _Subscriber(asyncio.Queue())
        if self._is_over:
            subscriber.queue.put_nowait(None)
        self._subscribers.append(subscriber)
        try:
            for item in self.recent(start) if start is not None else ():
                yield item
            while (next_item := await subscriber.queue.get()) is not None:
                yield next_item
        finally:
            self._subscribers.remove(subscriber)

    def end_subscriptions(self) -> None:
        """Publishes what is left and ends every subscription of this process, or a server waits for its readers."""
        self.publish()
        if not self._is_over:
            self._is_over = True
            for subscriber in self._subscribers:
                subscriber.queue.put_nowait(None)

    async def close(self) -> None:
        """Publishes what is left, ends the subscriptions and closes the sockets."""
        self.end_subscriptions()
        if self._zmq is not None:
            await self._zmq.close()


def _plain(event: KVEvent) -> dict[str, object]:
    """An event with names for its fields and text for its bytes."""
    plain: dict[str, object] = {"type": type(event).__name__}
    for name, value in msgspec.structs.asdict(event).items():
        if name == "block_hashes":
            value = [block_hash.hex() for block_hash in value]
        if name == "media" and value is not None:
            value = [[(identifier.hex(), begin) for identifier, begin in items] for items in value]
        plain[name] = value.hex() if isinstance(value, bytes) else value
    return plain


def events_of(entries: list[Entry], block_size: int) -> Iterator[KVEvent]:
    """Journal entries as events; blocks that follow each other are told together."""
    event: KVEvent | None = None
    for entry in entries:
        if entry[0] == "stored":
            _, block_hash, parent, token_ids, tail = entry
            keys, _, items = key_parts(tail)  # the salt is nobody's business
            extra_keys, media = keys or None, [items] if items else None
            if (
                isinstance(event, BlockStored)
                and (event.block_hashes[-1], event.extra_keys) == (parent, extra_keys)
                and (event.media is None) == (media is None)
            ):
                event.block_hashes.append(block_hash)
                event.token_ids += token_ids
                if event.media is not None:
                    event.media.append(items)
                continue
            new: KVEvent = BlockStored([block_hash], parent, token_ids, block_size, extra_keys=extra_keys, media=media)
        elif entry[0] == "removed":
            if isinstance(event, BlockRemoved):
                event.block_hashes.append(entry[1])
                continue
            new = BlockRemoved([entry[1]])
        else:
            new = AllBlocksCleared()
        if event is not None:
            yield event
        event = new
    if event is not None:
        yield event


class _ZmqPublisher:
    """A PUB socket, which drops what a slow reader does not take, and a ROUTER socket that repeats batches."""

    def __init__(self, config: KVEventsConfig, events: KVEvents) -> None:
        import zmq
        import zmq.asyncio

        self._events = events
        self._topic = config.topic.encode()
        self._again = zmq.Again
        self._context = zmq.asyncio.Context()
        self._replying: asyncio.Task[None] | None = None
        self._replay: Any = None
        self._socket = zmq.Context(self._context).socket(zmq.PUB)
        try:
            self._socket.set(zmq.SNDHWM, config.hwm)
            self._socket.bind(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)  # of a shadow of the context, which does not know it
            self._context.destroy(linger=0)
            raise InvalidConfig(f"KV events cannot be published: {error}", param="kv_events_config") from None
        if self._replay is not None:
            self._replying = asyncio.create_task(self._reply(), name="aioengine-kv-events")

    def send(self, number: int, payload: bytes) -> None:
        """Sends a batch, or drops it: never waits."""
        try:
            self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload), flags=1)  # NOBLOCK
        except self._again:
            logger.warning("KV event batch %d was dropped: the socket takes no more", number)

    async def _reply(self) -> None:
        """Answers (identity, empty, first number) with every batch still kept from there, then END_OF_REPLAY."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("a request for KV events must be an empty frame and 8 bytes, not %d frames", len(frames))
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, batch in self._events.recent(start):
                await self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), self._events.encode(batch)))
            await self._replay.send_multipart((client, b"", END_OF_REPLAY, b""))

    async def close(self) -> None:
        """Closes both sockets; what is under way is sent for at most a tenth of a second."""
        if self._replying is not None:
            self._replying.cancel()
            await asyncio.wait((self._replying,))
        self._socket.close(linger=100)
        if self._replay is not None:
            self._replay.close(linger=100)
        self._context.destroy()
