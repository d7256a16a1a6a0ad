"""Traces for `bench replay`: requests in order, as token ids, made from a seed or read from a file.

A synthetic trace stands for a kind of traffic: what is shared, how popularity is spread, what is never seen again.
A file has one JSON object per line: `token_ids` (with `num_output` of them generated), or `hash_ids` and
`input_length` as in Mooncake's public traces, where each id stands for `hash_block_size` tokens and equal ids in equal
places for equal prefixes; `arrival` or `timestamp` gives the order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from aioengine.errors import InvalidConfig

Ints = NDArray[np.int32]
VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: prompt and output, and how many of the tokens are prompt."""

    token_ids: Ints
    num_prompt: int


class _Text:
    """Draws texts that nobody has seen before."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def new(self, length: int) -> Ints:
        return self._rng.integers(0, VOCAB_SIZE, max(1, length), dtype=np.int32)


class _Popularity:
    """Draws an index with Zipf's law; exponent 0 is uniform."""

    def __init__(self, rng: random.Random, count: int, exponent: float) -> None:
        self._rng = rng
        self._indices = range(count)
        self._cumulative = list(accumulate((i + 1) ** -exponent for i in range(count)))

    def draw(self) -> int:
        return self._rng.choices(self._indices, cum_weights=self._cumulative)[0]


def chat(num_requests: int, seed: int) -> Iterator[Arrival]:
    """Multi-turn chats of many users at once, over a few system prompts; most chats are short, some go on."""
    rng, text = random.Random(seed), _Text(seed)
    systems = [text.new(rng.randint(100, 1200)) for _ in range(12)]
    popular = _Popularity(rng, len(systems), 1.0)
    chats: list[Ints] = []
    for _ in range(num_requests):
        if len(chats) < 100 or rng.random() < 0.15:
            chats.append(systems[popular.draw()])
        # The more recent a chat, the sooner its user answers.
        at = len(chats) - 1 - min(len(chats) - 1, int(rng.expovariate(1 / 60)))
        prompt = np.concatenate([chats[at], text.new(rng.randint(10, 150))])
        whole = np.concatenate([prompt, text.new(rng.randint(20, 250))])
        yield Arrival(whole, len(prompt))
        if rng.random() < 0.25 or len(whole) > 6000:
            del chats[at]
        else:
            chats[at] = whole


def agents(num_requests: int, seed: int) -> Iterator[Arrival]:
    """Agents with long tool descriptions in common; each task is a few calls whose context grows and is then over."""
    rng, text = random.Random(seed), _Text(seed)
    kinds = [text.new(rng.randint(1000, 4000)) for _ in range(40)]
    popular = _Popularity(rng, len(kinds), 1.1)
    tasks: list[Ints] = []
    for _ in range(num_requests):
        if len(tasks) < 24 or rng.random() < 0.1:
            tasks.append(np.concatenate([kinds[popular.draw()], text.new(rng.randint(20, 200))]))
        at = rng.randrange(len(tasks))
        prompt = tasks[at]
        whole = np.concatenate([prompt, text.new(rng.randint(20, 120))])
        yield Arrival(whole, len(prompt))
        if rng.random() < 0.2 or len(whole) > 9000:
            del tasks[at]
        else:
            tasks[at] = np.concatenate([whole, text.new(rng.randint(50, 600))])  # what the tool said


def rag(num_requests: int, seed: int) -> Iterator[Arrival]:
    """One instruction, then a document out of many of which a few are hot, sometimes a second one, then a question."""
    rng, text = random.Random(seed), _Text(seed)
    instruction = text.new(200)
    documents = [text.new(rng.randint(400, 3000)) for _ in range(600)]
    popular = _Popularity(rng, len(documents), 1.0)
    for _ in range(num_requests):
        parts = [instruction, documents[popular.draw()]]
        if rng.random() < 0.3:
            parts.append(documents[popular.draw()])
        prompt = np.concatenate([*parts, text.new(rng.randint(10, 60))])
        yield Arrival(np.concatenate([prompt, text.new(rng.randint(20, 200))]), len(prompt))


def flood(num_requests: int, seed: int) -> Iterator[Arrival]:
    """Hot prompts all the time, and now and then a flood of long ones that nobody asks for again."""
    rng, text = random.Random(seed), _Text(seed)
    hot = [text.new(rng.randint(500, 2500)) for _ in range(60)]
    popular = _Popularity(rng, len(hot), 0.8)
    left = 0
    for _ in range(num_requests):
        if left == 0 and rng.random() < 0.01:
            left = rng.randint(20, 80)
        if left:
            left -= 1
            prompt = text.new(rng.randint(1000, 4000))
        else:
            prompt = np.concatenate([hot[popular.draw()], text.new(rng.randint(10, 100))])
        yield Arrival(np.concatenate([prompt, text.new(rng.randint(20, 150))]), len(prompt))


def uniform(num_requests: int, seed: int) -> Iterator[Arrival]:
    """Prompts of one length, all equally popular: nothing to be clever about."""
    rng, text = random.Random(seed), _Text(seed)
    prompts = [text.new(1024) for _ in range(200)]
    for _ in range(num_requests):
        prompt = np.concatenate([prompts[rng.randrange(len(prompts))], text.new(32)])
        yield Arrival(np.concatenate([prompt, text.new(64)]), len(prompt))


SYNTHETIC: dict[str, Callable[[int, int], Iterator[Arrival]]] = {
    "chat": chat,
    "agents": agents,
    "rag": rag,
    "flood": flood,
    "uniform": uniform,
}


def read_trace(path: Path, hash_block_size: int, limit: int | None = None) -> list[Arrival]:
    """The requests of a file, in order of arrival.

    Raises:
        InvalidConfig: the file cannot be read, or a line is no request; says which.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidConfig(f"cannot read the trace {path}: {error.strerror}") from None
    timed = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
            when = float(record.get("arrival", record.get("timestamp", number)))
            if not math.isfinite(when):
                raise ValueError(f"it arrives at {when}")
            timed.append((when, number, _arrival(record, hash_block_size)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidConfig(f"{path}, line {number} is no request of a trace: {error}") from None
    if not timed:
        raise InvalidConfig(f"the trace {path} has no requests")
    timed.sort(key=lambda item: item[:2])
    return [arrival for _, _, arrival in timed[:limit]]


def _arrival(record: dict[str, object], hash_block_size: int) -> Arrival:
    if "token_ids" in record:
        token_ids = _ids(record["token_ids"])
        num_output = int(str(record.get("num_output", 0)))
        if not 0 <= num_output < len(token_ids):
            raise ValueError(f"num_output={num_output} of {len(token_ids)} tokens")
        return Arrival(token_ids, len(token_ids) - num_output)
    if "hash_ids" not in record:
        raise ValueError("it has neither token_ids nor hash_ids")
    hash_ids = _ids(record["hash_ids"])
    token_ids = np.repeat(hash_ids, hash_block_size)
    length = int(str(record.get("input_length", len(token_ids))))
    if not len(token_ids) - hash_block_size < length <= len(token_ids):
        raise ValueError(f"input_length={length} does not fit {len(hash_ids)} blocks of {hash_block_size} tokens")
    return Arrival(token_ids[:length], length)


def _ids(values: object) -> Ints:
    if not isinstance(values, Sequence) or not values:
        raise ValueError(f"{str(values)[:40]!r} is not a list of ids")
    ids = np.array(values)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError("ids must be integers from 0 to 2147483647")
    return ids.astype(np.int32)
