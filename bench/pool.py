"""The pool part of `bench core`: nanoseconds per block of what a scheduler asks of the KV manager.

Two managers do the same work on the same prompts in the same run: `fastcore`'s `KVManager`, and `NaiveManager` in
plain Python. Both are called as their schedulers call them, once per request, ours from compiled code: a request goes
in, its block table comes out (int32 in C on our side, a list of block objects on the other). The operations, in order:

    allocate              admit a request that hits nothing, nothing cached yet
    hash and publish      hash its full blocks and make them findable
    free                  release it
    hash and look up      match a new request of the same prompt: hash its blocks, find them all
    look up               match it again, the hashes being known, as in each step that it waits
    touch                 admit it with those hits: one owner more per block, off the free list
    allocate by eviction  admit another request that hits nothing, all free blocks being cached

The pool is as large as a real one, and requests come as to a server: so many at a time as have 8,192 blocks together
are made, worked on, and released in random order, until the whole pool was walked through. So what is known of a
request is in a core's caches, as where a scheduler looks at it in every step, and what is known of a block is not:
the pool was last there a round ago, and its free list leads to and fro. A manager lives through all repeats, as a
server's does: the first one, which is not counted, takes its memory from the system and blocks that lie in order. The
garbage collector is off while the clock runs.

The plain-Python manager does nothing that ours does not; ours also keeps the tree of what continues what, which an
eviction follows, and looks for duplicates when it publishes and frees. What bounds ours: in an eviction the bucket of
each victim, which lies anywhere in an array too large for a core's own caches; in hashing xxh3 itself, each block's
hash waiting for its parent's.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aioengine.bench import naive_pool
from aioengine.bench.naive_pool import NaiveManager, NaivePool, NaiveRequest
from aioengine.fastcore import pool_calls
from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.request import Request

BLOCK_SIZE = 16
POOL_BLOCKS = 131_072
PROMPT_TOKENS = (512, 32_768)
COHORT_BLOCKS = 8192
VOCAB_SIZE = 32_000

Row = dict[str, Any]
Prompts = npt.NDArray[np.int32]


def pool_rows(repeats: int) -> list[Row]:
    """Nanoseconds per block of each operation, ours and plain Python's: medians."""
    return [row for num_tokens in PROMPT_TOKENS for row in _rows_of(num_tokens, repeats)]


def _rows_of(num_tokens: int, repeats: int) -> list[Row]:
    core, plain_python = KVManager(POOL_BLOCKS, BLOCK_SIZE), NaiveManager(POOL_BLOCKS, BLOCK_SIZE)
    ours: list[dict[str, float]] = []
    naive: list[dict[str, float]] = []
    for seed in range(repeats + 1):  # the first one warms up
        prompts, others = _prompts(num_tokens, seed), _prompts(num_tokens, seed + 1_000_000)
        ours.append(_time_manager(core, pool_calls, _requests, prompts, others, seed))
        naive.append(_time_manager(plain_python, naive_pool, _naive_requests, prompts, others, seed))
    rows = []
    for name in ours[0]:
        mine, plain = (statistics.median(run[name] for run in runs[1:]) for runs in (ours, naive))
        rows.append(
            {
                "prompt_tokens": num_tokens,
                "operation": name,
                "aioengine_ns": round(mine, 1),
                "plain_python_ns": round(plain, 1),
                "ratio": round(plain / mine, 1),
                "aioengine_per_s": round(1e9 / mine),
            }
        )
    return rows


def _prompts(num_tokens: int, seed: int) -> Prompts:
    """As many prompts as fill the pool; one token more each, because the last one is always computed."""
    count = (POOL_BLOCKS - 1) // (num_tokens // BLOCK_SIZE)
    return np.random.default_rng(seed).integers(100, VOCAB_SIZE, (count, num_tokens + 1), dtype=np.int32)


class _Stopwatch:
    """Nanoseconds of named operations, over all blocks."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}

    def time(self, name: str, work: Callable[..., object], *args: object) -> None:
        """Runs the work once; with the collector off."""
        begun = time.perf_counter_ns()
        work(*args)
        self.ns[name] = self.ns.get(name, 0) + time.perf_counter_ns() - begun


def _requests(rows: Prompts) -> list[Request]:
    return [Request(str(i), row, max_tokens=1) for i, row in enumerate(rows)]


def _naive_requests(rows: Prompts) -> list[NaiveRequest]:
    return [NaiveRequest(row.tolist()) for row in rows]


def _time_manager(
    kv: Any, calls: Any, requests_of: Callable[[Prompts], list[Any]], prompts: Prompts, others: Prompts, seed: int
) -> dict[str, float]:
    """Times all operations of a manager of either kind, and leaves it without anything cached.

    `calls` is the module that calls it for many requests: `pool_calls` or `naive_pool`.
    """
    watch, rng = _Stopwatch(), random.Random(seed)
    length = prompts.shape[1] - 1
    num_hits = length // BLOCK_SIZE
    at_a_time = COHORT_BLOCKS // num_hits
    starts = range(0, len(prompts), at_a_time)
    gc.collect()
    gc.disable()
    for start in starts:
        requests = requests_of(prompts[start : start + at_a_time])
        watch.time("allocate", calls.admit_all, kv, requests, 0, length)
        watch.time("hash and publish", calls.publish_all, kv, requests, length)
        rng.shuffle(requests)
        watch.time("free", calls.release_all, kv, requests)
    for start in rng.sample(starts, len(starts)):
        requests = requests_of(prompts[start : start + at_a_time])
        watch.time("hash and look up", calls.match_all, kv, requests)
        watch.time("look up", calls.match_all, kv, requests)
        assert all(kv.match(request) == num_hits for request in requests), "a prompt is not cached"
        watch.time("touch", calls.admit_all, kv, requests, num_hits, length)
        rng.shuffle(requests)
        calls.release_all(kv, requests)
    for start in starts:
        requests = requests_of(others[start : start + at_a_time])
        watch.time("allocate by eviction", calls.admit_all, kv, requests, 0, length)
        calls.publish_all(kv, requests, length)
        rng.shuffle(requests)
        calls.release_all(kv, requests)
    gc.enable()
    # What the prompts left unused of the pool is less than one of them.
    assert sum(kv.match(request) for request in requests_of(prompts)) < num_hits, "the prompts are still cached"
    assert kv.reset(), "a block has an owner still"
    return {name: ns / (len(prompts) * num_hits) for name, ns in watch.ns.items()}


def memory_row() -> Row:
    """Bytes per block, every block cached: all of the core's arrays, and plain Python's objects."""
    ours, kv = _traced(lambda: KVManager(POOL_BLOCKS, BLOCK_SIZE, enable_partial_block_reuse=True))
    plain, _ = _traced(_full_naive_pool)
    return {
        "aioengine_bytes_per_block": round(ours / kv.pool.num_blocks, 1),
        "plain_python_bytes_per_block": round(plain / POOL_BLOCKS, 1),
        "ratio": round(plain / ours, 1),
    }


def _full_naive_pool() -> NaivePool:
    pool = NaivePool(POOL_BLOCKS)
    blocks = pool.allocate(POOL_BLOCKS - 1)
    pool.publish(blocks, [i.to_bytes(16, "little") for i in range(len(blocks))])
    pool.release_all(blocks)
    return pool


def _traced(make: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that are still allocated once something was made."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        return tracemalloc.get_traced_memory()[0], made
    finally:
        tracemalloc.stop()
