"""Short cuts of the pool for what is common: whoever takes one does what is done without it."""

from __future__ import annotations

import random

import pytest

from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.request import Request

NUM_BLOCKS, BLOCK_SIZE = 120, 2


class Caller:
    """Random requests for prompts that begin alike, from a pool that evicts all the time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.prompts: list[list[int]] = []
        for _ in range(12):
            root = self._rng.choice(self.prompts)[: self._rng.randrange(1, 120)] if self.prompts else []
            self.prompts.append([*root, *(self._rng.randrange(50) for _ in range(self._rng.randrange(1, 130)))])

    def prompt(self) -> list[int]:
        return self._rng.choice(self.prompts)

    def step(self, kv: KVManager, running: list[Request], prompt: list[int], leaving: int) -> list[int]:
        """Lets one request go and another come; returns its table."""
        if running and leaving % 2:
            kv.release(running.pop(leaving % len(running)))
        request = Request("r", prompt, max_tokens=1)
        hits = kv.match(request)
        if not kv.admit(request, hits, len(prompt)):
            while running:
                kv.release(running.pop())
            hits = kv.match(request)
            assert kv.admit(request, hits, len(prompt))
        kv.publish(request, len(prompt))
        running.append(request)
        return request.block_ids()


@pytest.mark.parametrize("hash_algo", ["xxh3_128", "sha256"])
@pytest.mark.parametrize("seed", range(8))
def test_a_request_that_waits_finds_what_a_new_one_finds(seed: int, hash_algo: str) -> None:
    """It tries the blocks that it found last; they may be evicted, published anew, or behind a gap now."""
    caller, rng = Caller(seed), random.Random(seed)
    kv = KVManager(NUM_BLOCKS, BLOCK_SIZE, hash_algo=hash_algo)
    running: list[Request] = []
    waiting = [Request("w", prompt, max_tokens=1) for prompt in caller.prompts]
    found = set()
    for _ in range(300):
        caller.step(kv, running, caller.prompt(), rng.randrange(1000))
        at = rng.randrange(len(waiting))
        new = Request("n", caller.prompts[at], max_tokens=1)
        hits = kv.match(waiting[at])
        found.add((at, hits))
        assert hits == kv.match(new)
        tables = []
        for request in (waiting[at], new):
            if hits and kv.admit(request, kv.match(request), hits * BLOCK_SIZE):
                tables.append(request.block_ids())
                kv.release(request)
        assert len(tables) != 2 or tables[0] == tables[1]
        if rng.random() < 0.1:
            waiting[at] = Request("w", caller.prompts[at], max_tokens=1)
    kv.check(running)
    assert len(found) > 2 * len(waiting)


@pytest.mark.parametrize("seed", range(8))
def test_victims_are_the_same_whether_somebody_is_told_of_them_or_not(seed: int) -> None:
    """With a journal each victim is taken alone, without one many at once."""
    caller, rng = Caller(seed), random.Random(seed)
    silent, told = (KVManager(NUM_BLOCKS, BLOCK_SIZE, root_seed=b"r") for _ in range(2))
    journal = told.start_journal()
    running: tuple[list[Request], list[Request]] = ([], [])
    for _ in range(300):
        prompt, leaving = caller.prompt(), rng.randrange(1000)
        tables = [caller.step(kv, own, prompt, leaving) for kv, own in zip((silent, told), running, strict=True)]
        assert tables[0] == tables[1]
        assert silent.pool.free_ids() == told.pool.free_ids()
    silent.check(running[0])
    told.check(running[1])
    assert silent.num_evicted_blocks == told.num_evicted_blocks > 500
    assert sum(entry[0] == "removed" for entry in journal.take()) >= 500
