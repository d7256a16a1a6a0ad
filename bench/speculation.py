"""`aioengine bench speculation`: the same requests with and without drafts, in turns, in one run.

Two workloads: `copy` goes on with a text that stands in the prompt, which drafts are for; `free` begins a story, where
they hit by chance. Of a model without a tokenizer both are random ids. Prompts are in the prefix cache, and requests
like those have been answered, before anything is timed, so that decoding is what is measured. Each engine is closed
before the other one starts; both see equal prompts and seeds, so that answers can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aioengine import AsyncEngine, SamplingParams
from aioengine.bench.report import print_table, write_json
from aioengine.bench.workloads import random_prompts
from aioengine.cli.flags import engine_config
from aioengine.cli.parser import whole_number
from aioengine.errors import InvalidConfig

DEFAULT_CONFIG = '{"method": "ngram", "num_speculative_tokens": 4}'

WORKLOADS = ("copy", "free")
SIDES = ("drafts", "plain")
"""Drafts come first: their options are refused before anything was run."""

PASSAGE_SENTENCES = 8
PASSAGE_LEN = 96
"""In ids, where there is no tokenizer; the prompt of `copy` is a little more than twice that."""

WHO = ("baker", "teacher", "sailor", "painter", "farmer", "doctor", "miller", "printer")
WHERE = ("Lyon", "Oslo", "Porto", "Vienna", "Cork", "Turin", "Leiden", "Gdansk")
WHAT = ("blue lamps", "old maps", "wooden chairs", "red apples", "silver spoons", "green bottles", "small clocks")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

Prompt = str | list[int]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """What one engine made of one workload."""

    token_ids: list[list[int]]
    """Per request."""
    elapsed_s: float
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(map(len, self.token_ids))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench speculation`; `--speculative-config` is the engine's."""
    parser.add_argument(
        "--concurrency",
        type=whole_number,
        nargs="+",
        metavar="N",
        default=[1, 8],
        help="Requests at once (default: 1 8).",
    )
    parser.add_argument(
        "--output-len", type=whole_number, metavar="N", default=128, help="Output tokens (default: 128)."
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="Sampling temperature, with seeds (default: 0).")


async def run_speculation(args: argparse.Namespace) -> None:
    """Runs both sides `--repeats` times in turns and reports medians."""
    if min(args.output_len, *args.concurrency) < 1:
        raise InvalidConfig("--output-len and --concurrency must be at least 1")
    asked = getattr(args, "speculative_config", DEFAULT_CONFIG)
    texts = {"drafts": asked, "plain": None}
    runs: dict[str, list[dict[tuple[str, int], Run]]] = {side: [] for side in SIDES}
    name = ""
    for _ in range(args.repeats):
        for side in SIDES:
            config = engine_config(argparse.Namespace(**{**vars(args), "speculative_config": texts[side]}))
            async with AsyncEngine(config) as engine:
                name = engine.model.name
                runs[side].append(await _run_all(engine, args))
    rows = [
        compare(workload, concurrency, *([run[workload, concurrency] for run in runs[side]] for side in SIDES))
        for workload in WORKLOADS
        for concurrency in args.concurrency
    ]
    print(f"plain, and with drafts: {asked}")
    title = f"speculation, {name}: {args.output_len} out, output tokens/s, median of {args.repeats}"
    print_table(title, rows)
    report = {"benchmark": "speculation", "speculative_config": asked, "temperature": args.temperature}
    write_json(args.json, {**report, "output_len": args.output_len, "median_of": args.repeats, "rows": rows})


def compare(workload: str, concurrency: int, drafts: Sequence[Run], plain: Sequence[Run]) -> Row:
    """One row of the table: output tokens per second, and what came of drafts.

    The ratio is the median of those of neighbouring runs. A request gets one token in a step, and the drafts accepted.
    """
    rates = [[run.num_tokens / run.elapsed_s for run in side] for side in (plain, drafts)]
    num_drafted = sum(run.num_draft_tokens for run in drafts)
    num_accepted = sum(run.num_accepted_tokens for run in drafts)
    num_tokens = sum(run.num_tokens for run in drafts)
    return {
        "workload": workload,
        "at_once": concurrency,
        "plain": round(statistics.median(rates[0]), 1),
        "drafts": round(statistics.median(rates[1]), 1),
        "ratio": round(statistics.median(ours / theirs for theirs, ours in zip(*rates, strict=True)), 2),
        "accepted": round(num_accepted / num_drafted, 3) if num_drafted else None,
        "tokens_per_step": round(num_tokens / max(1, num_tokens - num_accepted), 2),
        "equal": share_of_equal(drafts, plain),
    }


def share_of_equal(drafts: Sequence[Run], plain: Sequence[Run]) -> str:
    """How many answers are the same with drafts as without, of all."""
    pairs = [
        (ours, theirs)
        for with_drafts, without in zip(drafts, plain, strict=True)
        for ours, theirs in zip(with_drafts.token_ids, without.token_ids, strict=True)
    ]
    return f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)}"


async def _run_all(engine: AsyncEngine, args: argparse.Namespace) -> dict[tuple[str, int], Run]:
    found = {}
    for workload in WORKLOADS:
        for concurrency in args.concurrency:
            prompts = prompts_of(workload, concurrency, engine)
            # First what computes the prompts, then what finds them in the cache: on a GPU the first step of a kind
            # takes longer than many others.
            await _run(engine, prompts, 1, args.temperature)
            await _run(engine, prompts, args.output_len, args.temperature)
            found[workload, concurrency] = await _run(engine, prompts, args.output_len, args.temperature)
    return found


def prompts_of(workload: str, count: int, engine: AsyncEngine) -> list[Prompt]:
    """Prompts of a workload, each different from the others, the same in every engine."""
    if engine.tokenizer is None:
        passages = random_prompts(count, PASSAGE_LEN, engine.model.vocab_size, seed=count)
        return [[*ids, *ids, *ids[:8]] if workload == "copy" else ids for ids in passages]
    rng = random.Random(count)
    texts: list[Prompt] = []
    for _ in range(count):
        sentences = [_sentence(rng) for _ in range(PASSAGE_SENTENCES)]
        passage = " ".join(sentences)
        begun = f"The {rng.choice(WHO)} from {rng.choice(WHERE)} had never seen so many {rng.choice(WHAT)}. That"
        texts.append(f"{passage}\n\n{passage}\n\n{sentences[0]}" if workload == "copy" else begun)
    return texts


def _sentence(rng: random.Random) -> str:
    who, buyer = rng.sample(WHO, 2)
    where, what, day = rng.choice(WHERE), rng.choice(WHAT), rng.choice(DAYS)
    return f"On {day} the {who} from {where} sold {rng.randrange(2, 100)} {what} to the {buyer}."


async def _run(engine: AsyncEngine, prompts: Sequence[Prompt], output_len: int, temperature: float) -> Run:
    """All prompts at once."""
    before = engine.stats()
    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_answer(engine, prompt, output_len, temperature, seed))
            for seed, prompt in enumerate(prompts)
        ]
    elapsed_s = time.perf_counter() - begun_s
    after = engine.stats()
    drafts = after.drafts.since(before.drafts) if after.drafts is not None else None
    return Run(
        [task.result() for task in tasks],
        elapsed_s,
        drafts.num_draft_tokens if drafts else 0,
        drafts.num_accepted_tokens if drafts else 0,
    )


async def _answer(engine: AsyncEngine, prompt: Prompt, output_len: int, temperature: float, seed: int) -> list[int]:
    params = SamplingParams(
        max_tokens=output_len, temperature=temperature, seed=seed, ignore_eos=True, skip_special_tokens=False
    )
    token_ids: list[int] = []
    async for output in await engine.submit(prompt, params):
        token_ids += output.delta_token_ids
    return token_ids
