"""KV events: replaying them gives the index exactly, however it came about; batches, gaps, the wire."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from aioengine.config import CacheConfig
from aioengine.errors import InvalidConfig
from aioengine.fastcore.cache_control import CacheControl
from aioengine.fastcore.named_prefix import NamedPrefix
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.kv_events import (
    SUBSCRIBER_BATCHES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    KVEvents,
    parse_config,
)

BLOCK_SIZE = 2


class Index:
    """What a router knows: block hash -> hash of its parent and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}

    def apply(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                assert parent is None or parent in self.blocks
                for i, block_hash in enumerate(event.block_hashes):
                    assert block_hash not in self.blocks
                    ids = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                    self.blocks[block_hash], parent = (parent, tuple(ids)), block_hash
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.blocks[block_hash]
            else:
                self.blocks.clear()


def make(num_blocks: int = 24, **options: object) -> tuple[Scheduler, KVEvents]:
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=20,
        **options,  # type: ignore[arg-type]
    )
    config = CacheConfig(kv_events_config='{"enable_kv_cache_events": true}')
    events = KVEvents.start(config, scheduler.kv)
    assert events is not None
    return scheduler, events


def check(scheduler: Scheduler, index: Index) -> None:
    """The index holds every block of the map and no other, under the hashes that its tokens have."""
    prefix_map = scheduler.kv.prefix_map
    assert len(index.blocks) == prefix_map.num_entries
    assert scheduler.kv.hasher is not None
    for block_hash, (parent, _) in index.blocks.items():
        block_id = prefix_map.find_bytes(block_hash)
        assert block_id and prefix_map.tree.parent_of(block_id) == (prefix_map.find_bytes(parent) if parent else 0)


def path_of(index: Index, block_hash: bytes) -> list[int]:
    """All tokens up to a block."""
    parent, ids = index.blocks[block_hash]
    return [*(path_of(index, parent) if parent else []), *ids]


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize("hash_algo", ["xxh3_128", "sha256"])
@pytest.mark.parametrize("seed", range(8))
def test_replaying_all_events_gives_the_index(seed: int, policy: str, hash_algo: str) -> None:
    """N4: any mixture of requests, aborts, evictions, resets; the batches go over the wire and back."""
    rng = random.Random(seed)
    scheduler, events = make(
        eviction_policy=policy, hash_algo=hash_algo, enable_partial_block_reuse=bool(seed % 2), max_in_flight=2
    )
    control, index, live, in_flight = CacheControl(scheduler), Index(), [], []
    decoder = msgspec.msgpack.Decoder(EventBatch)
    expected = 0
    for turn in range(150):
        if rng.random() < 0.4:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            request = Request(str(turn), ids, max_tokens=rng.randint(0, 5), ignore_eos=True)
            scheduler.add(request)
            live.append(request)
        if rng.random() < 0.05 and live:
            scheduler.abort(rng.choice(live))
        if rng.random() < 0.05:
            name = np.array([rng.randrange(2) for _ in range(rng.randint(1, 6))], dtype=np.int32)
            control.evict(NamedPrefix(name, BLOCK_SIZE))
        if rng.random() < 0.02:
            control.reset(force=True)
        if len(in_flight) < 2 and (plan := scheduler.schedule()) is not None:
            in_flight.append(plan)
        elif in_flight:
            plan = in_flight.pop(0)
            scheduler.update(plan, np.array([rng.randrange(2) for _ in range(plan.num_samples)], dtype=np.int32))
        before = events.next_number
        events.publish()
        for number, batch in events.recent(before):
            assert number == expected
            expected += 1
            index.apply(decoder.decode(events.encode(batch)).events)
        check(scheduler, index)
    assert expected > 20
    for block_hash in index.blocks:
        ids = path_of(index, block_hash)
        assert scheduler.kv.hasher is not None
        assert scheduler.kv.hasher.chain(ids, BLOCK_SIZE)[-1] == block_hash


def run_one(scheduler: Scheduler, *ids: int, **options: object) -> None:
    scheduler.add(Request("r", ids, max_tokens=0, **options))  # type: ignore[arg-type]
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, np.zeros(0, dtype=np.int32))


def test_blocks_of_one_prompt_are_told_together_with_their_keys() -> None:
    scheduler, events = make()
    run_one(scheduler, 1, 2, 3, 4, 5, 6, extra_keys=b"adapter", cache_salt=b"secret")
    run_one(scheduler, 1, 2, 3, 4, 5, 6, extra_keys=b"adapter", cache_salt=b"secret")
    events.publish()
    events.publish()  # nothing happened: no batch
    ((number, batch),) = events.recent(0)
    (stored,) = batch.events
    assert isinstance(stored, BlockStored) and number == 0 and events.next_number == 1
    assert (stored.parent_block_hash, stored.token_ids, stored.block_size) == (None, [1, 2, 3, 4, 5, 6], 2)
    assert len(stored.block_hashes) == 3 and stored.extra_keys == b"adapter"
    assert b"secret" not in events.encode(batch)
    assert msgspec.msgpack.decode(events.encode(batch))[1][0][0] == "BlockStored"
    CacheControl(scheduler).reset()
    events.publish()
    assert events.recent(1)[0][1].events == [AllBlocksCleared()]


async def test_a_slow_subscriber_sees_a_gap_and_stops_nobody() -> None:
    scheduler, events = make()
    quick: list[int] = []

    async def read_all() -> None:
        async for number, _ in events.subscribe():
            quick.append(number)

    reading = asyncio.create_task(read_all())
    await asyncio.sleep(0)
    slow = events.subscribe(0)
    run_one(scheduler, 1, 2)
    events.publish()
    assert (await anext(slow))[0] == 0
    for i in range(SUBSCRIBER_BATCHES + 20):
        run_one(scheduler, 100 + i, 7)
        events.publish()
        await asyncio.sleep(0)
    numbers = [(await anext(slow))[0] for _ in range(SUBSCRIBER_BATCHES - 1)]
    run_one(scheduler, 5, 5)
    events.publish()
    numbers += [(await anext(slow))[0] for _ in range(2)]
    assert numbers[-1] - numbers[-2] > 1  # lost in between, and it shows
    await asyncio.sleep(0)
    assert quick == list(range(SUBSCRIBER_BATCHES + 22))
    reading.cancel()
    await asyncio.wait((reading,))
    await slow.aclose()  # type: ignore[attr-defined]
    assert events._subscribers == []


async def test_the_end_reaches_readers_quick_and_slow_and_late() -> None:
    scheduler, events = make()
    waiting, slow = events.subscribe(), events.subscribe(0)
    next_one = asyncio.ensure_future(anext(waiting, None))
    await asyncio.sleep(0)
    run_one(scheduler, 1, 2)
    events.publish()
    assert [(await one)[0] for one in (next_one, anext(slow))] == [0, 0]  # type: ignore[index]
    for i in range(SUBSCRIBER_BATCHES + 20):
        run_one(scheduler, 100 + i, 7)
        events.publish()
    run_one(scheduler, 5, 5)
    await events.close()
    assert [number async for number, _ in slow][-1] == SUBSCRIBER_BATCHES
    assert len([item async for item in waiting]) == SUBSCRIBER_BATCHES
    assert [number async for number, _ in events.subscribe(events.next_number - 1)] == [events.next_number - 1]
    assert events._subscribers == []


async def test_over_zeromq_with_a_replay_of_what_was_missed() -> None:
    zmq = pytest.importorskip("zmq")
    zmq_asyncio = pytest.importorskip("zmq.asyncio")
    scheduler, _ = make()
    with zmq_asyncio.Context() as context:
        probe = context.socket(zmq.PUB)
        ports = [probe.bind_to_random_port("tcp://127.0.0.1") for _ in range(2)]
        probe.close(linger=0)
        await asyncio.sleep(0.05)
        endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        config = CacheConfig(
            kv_events_config=msgspec.json.encode(
                {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": endpoint,
                    "replay_endpoint": replay,
                    "topic": "kv",
                }
            ).decode()
        )
        events = KVEvents.start(config, scheduler.kv)
        assert events is not None
        run_one(scheduler, 1, 2, 3, 4)
        events.publish()  # before anybody listens
        listener = context.socket(zmq.SUB)
        listener.connect(endpoint)
        listener.subscribe(b"kv")
        numbers, index, decoder = [], Index(), msgspec.msgpack.Decoder(EventBatch)
        async with asyncio.timeout(30):
            for i in range(1000):
                run_one(scheduler, 10 + i, 11)
                events.publish()
                if await listener.poll(20):
                    break
            topic, number, payload = await listener.recv_multipart()
            assert topic == b"kv" and decoder.decode(payload).events
            asking = context.socket(zmq.DEALER)
            asking.connect(replay)
            await asking.send_multipart((b"", (0).to_bytes(8, "big")))
            while True:
                _, number, payload = await asking.recv_multipart()
                if not payload:
                    break
                numbers.append(int.from_bytes(number, "big"))
                index.apply(decoder.decode(payload).events)
        assert numbers == list(range(events.next_number))
        check(scheduler, index)
        for socket in (listener, asking):
            socket.close(linger=0)
        await events.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "kv_events_config cannot be used"),
        ("[]", "it is not a JSON object"),
        ('{"enable": true}', "enable is unknown; there are enable_kv_cache_events, publisher"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"enable_kv_cache_events": "yes"}', "bool"),
        ('{"buffer_steps": 0}', "buffer_steps and hwm must be at least 1"),
        ('{"buffer_steps": 9223372036854775808}', "and at most 2147483647"),
        ('{"hwm": 2147483648}', "and at most 2147483647"),
    ],
)
def test_a_bad_configuration_is_explained(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        parse_config(text)


async def test_events_that_cannot_be_had_stop_the_start() -> None:
    scheduler, _ = make()
    on = '"enable_kv_cache_events": true'
    assert KVEvents.start(CacheConfig(), scheduler.kv) is None
    assert KVEvents.start(CacheConfig(kv_events_config="{}"), scheduler.kv) is None
    with pytest.raises(InvalidConfig, match="need --enable-prefix-caching"):
        KVEvents.start(CacheConfig(kv_events_config=f"{{{on}}}", enable_prefix_caching=False), scheduler.kv)
    with pytest.raises(InvalidConfig, match="KV events cannot be published"):
        text = f'{{{on}, "publisher": "zmq", "endpoint": "tcp://nowhere"}}'
        KVEvents.start(CacheConfig(kv_events_config=text), scheduler.kv)


def test_without_pyzmq_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _ = make()
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'aioengine\[events\]'"):
        text = '{"enable_kv_cache_events": true, "publisher": "zmq"}'
        KVEvents.start(CacheConfig(kv_events_config=text), scheduler.kv)
