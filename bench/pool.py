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

The pool is as large as a real one and each operation walks through all of it, so that none finds in a core's own
caches what the one before left there. Requests are released in random order, so the free list leads to and fro from
one request's blocks to another's. A manager lives through all repeats, as a server's does: the first one, which is
not counted, takes its memory from the system and blocks that lie in order. The garbage collector is off while the
clock runs.

The plain-Python manager does nothing that ours does not; ours also keeps the tree of what continues what, which an
eviction follows, and looks for duplicates when it publishes and frees. What bounds ours: with short prompts reading a
request's record, which is shared by 32 blocks; in an eviction the bucket of each victim, which lies anywhere in an
array too large for a core's own caches; in hashing xxh3 itself, each block's hash waiting for its parent's.
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
    """Nanoseconds per block of named operations."""

    def __init__(self, prompts: Prompts) -> None:
        count, length = prompts.shape
        self._num_blocks = count * (length // BLOCK_SIZE)
        self.ns: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        """Runs the work once, on all blocks."""
        gc.collect()
        gc.disable()
        begun = time.perf_counter_ns()
        work()
        self.ns[name] = (time.perf_counter_ns() - begun) / self._num_blocks
        gc.enable()


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
    first, again, other = requests_of(prompts), requests_of(prompts), requests_of(others)
    watch = _Stopwatch(prompts)
    length = prompts.shape[1] - 1
    num_hits = length // BLOCK_SIZE
    leaving = random.Random(seed).sample(range(len(first)), len(first))

    watch.time("allocate", lambda: calls.admit_all(kv, first, 0, length))
    watch.time("hash and publish", lambda: calls.publish_all(kv, first, length))
    first = [first[i] for i in leaving]
    watch.time("free", lambda: calls.release_all(kv, first))
    watch.time("hash and look up", lambda: calls.match_all(kv, again))
    watch.time("look up", lambda: calls.match_all(kv, again))
    assert all(kv.match(request) == num_hits for request in again), "a prompt is not cached"
    watch.time("touch", lambda: calls.admit_all(kv, again, num_hits, length))
    calls.release_all(kv, [again[i] for i in leaving])
    watch.time("allocate by eviction", lambda: calls.admit_all(kv, other, 0, length))
    # What the prompts left unused of the pool is less than one of them.
    assert sum(kv.match(request) for request in again) < num_hits, "the prompts are still cached"
    calls.release_all(kv, [other[i] for i in leaving])
    assert kv.reset(), "a block has an owner still"
    return watch.ns


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
