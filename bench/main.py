"""`aioengine bench`: `latency`, `throughput`, `transformers` (the same work by it too), `speculation` (with and without
drafts), `core` and `replay`.

Each prints a table and, with `--json FILE`, writes all figures with machine, versions and command. Figures
are medians of `--repeats` runs after a warm-up. Options of the engine are those of `aioengine serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import statistics
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop

from aioengine.bench import core, replay, speculation
from aioengine.bench.report import check_output_file, peak_memory_bytes, print_table, write_json
from aioengine.bench.workloads import PEER_WORK, Job, median_run, random_prompts, run_jobs, summarize
from aioengine.cli.flags import add_config_flags, engine_config
from aioengine.cli.parser import Parser, whole_number
from aioengine.config import GROUPS
from aioengine.engine import AsyncEngine
from aioengine.errors import InvalidConfig


def main(argv: Sequence[str]) -> int:
    """Runs `aioengine bench ARGV`; returns the exit code."""
    args = make_parser().parse_args(argv)
    for name in ("input_len", "repeats"):
        if getattr(args, name, 1) < 1:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be at least 1")
    check_output_file("--json", args.json)
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, None]] = args.run
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(args))
    return 0


def make_parser() -> Parser:
    """The parser of all benchmarks."""
    parser = Parser(prog="aioengine bench", takes="BENCHMARK", description="Measure latency and throughput.")
    kinds = parser.add_subparsers(required=True, metavar="BENCHMARK")

    latency = _add(kinds, "latency", run_latency, "Time to prefill and time per token at fixed batch sizes.")
    latency.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], help="Batch sizes (default: 1 8).")
    _add_lengths(latency, input_len=128, output_len=128)

    throughput = _add(kinds, "throughput", run_throughput, "Many requests at once, or arriving at a rate.")
    _add_number(throughput, "--num-prompts", 64, "Requests (default: 64).")
    throughput.add_argument("--request-rate", type=float, help="Poisson arrivals per second; by default all at once.")
    _add_number(throughput, "--prefix-len", 0, "Equal tokens at the start of all prompts.")
    throughput.add_argument("--temperature", type=float, default=0.0, help="Sampling temperature (default: 0).")
    _add_lengths(throughput, input_len=128, output_len=64)

    _add(
        kinds,
        "transformers",
        run_transformers,
        "The same GGUF model by this engine and by transformers (float32), in one run, with ratios.",
    )
    summary = "The same requests with and without drafts (--speculative-config), in one run, with ratios."
    speculation.add_options(_add(kinds, "speculation", speculation.run_speculation, summary))
    summary = "Block pool, scheduler and host work alone, without a model."
    core.add_options(_add(kinds, "core", core.run_core, summary, engine=False))
    summary = "Hit rate of the prefix cache over traces, by eviction policy and size, without a model."
    traces = _add(
        kinds,
        "replay",
        replay.run_replay,
        summary,
        engine=False,
        repeats=False,
        takes="[TRACE ...]",
        details=replay.FILE_FORMAT,
    )
    replay.add_options(traces)
    return parser


async def run_latency(args: argparse.Namespace) -> None:
    """Runs each batch with 1 and with `output_len` outputs; the difference is the time per token."""
    rows = []
    if args.output_len < 2:
        raise InvalidConfig("--output-len must be at least 2 for a time per token")
    async with AsyncEngine(engine_config(args)) as engine:
        for batch_size in args.batch_size:
            prefills, per_token = [], []
            for repeat in range(args.repeats + 1):
                seed = 1000 * batch_size + repeat
                short = await _elapsed(engine, batch_size, args.input_len, 1, seed)
                long = await _elapsed(engine, batch_size, args.input_len, args.output_len, seed + 500)
                if repeat:  # the first one warms up
                    prefills.append(1000 * short)
                    per_token.append(1000 * (long - short) / (args.output_len - 1))
            token_ms = statistics.median(per_token)
            rows.append(
                {
                    "batch_size": batch_size,
                    "prefill_ms": round(statistics.median(prefills), 2),
                    "per_token_ms": round(token_ms, 3),
                    "decode_tokens_per_s": round(1000 * batch_size / token_ms, 1),
                }
            )
        title = f"latency, {engine.model.name}: {args.input_len} in, {args.output_len} out, median of {args.repeats}"
    print_table(title, rows)
    write_json(args.json, {"benchmark": "latency", "median_of": args.repeats, "rows": rows})


async def run_throughput(args: argparse.Namespace) -> None:
    """Runs all requests; the median run by output tokens per second is reported."""
    if args.prefix_len > args.input_len:
        raise InvalidConfig("--prefix-len must not be above --input-len")
    runs = []
    async with AsyncEngine(engine_config(args)) as engine:
        vocab_size = engine.model.vocab_size
        await _elapsed(engine, 2, args.input_len, 2, seed=99)
        for repeat in range(args.repeats):
            prompts = random_prompts(args.num_prompts, args.input_len, vocab_size, repeat, prefix_len=args.prefix_len)
            jobs = [Job(prompt, args.output_len) for prompt in prompts]
            lines, elapsed_s = await run_jobs(engine, jobs, args.temperature, args.request_rate, seed=repeat)
            runs.append(summarize(lines, elapsed_s))
        lag_s = engine.stats().loop_lag_p99_s
        title = f"throughput, {engine.model.name}: median of {args.repeats}"
    chosen = median_run(runs, "output_tokens_per_s")
    print_table(title, [{"figure": name, "value": value} for name, value in chosen.items()])
    report = {"benchmark": "throughput", "median_of": args.repeats, "median": chosen, "runs": runs}
    write_json(args.json, {**report, "loop_lag_p99_s": lag_s})


async def run_transformers(args: argparse.Namespace) -> None:
    """First the engine, then its peer, in one process; needs the package transformers and a GGUF model."""
    if importlib.util.find_spec("transformers") is None:
        raise InvalidConfig("`bench transformers` needs the package transformers: pip install 'aioengine[bench]'")
    async with AsyncEngine(engine_config(args)) as engine:
        runs = []
        for repeat in range(args.repeats + 1):
            seconds = {
                name: await _elapsed(engine, work.batch_size, work.input_len, work.output_len, 1000 * at + repeat)
                for at, (name, work) in enumerate(PEER_WORK.items())
            }
            runs.append({name: work.num_tokens / seconds[name] for name, work in PEER_WORK.items()})
        lag_s = engine.stats().loop_lag_p99_s
        peak = peak_memory_bytes()  # before the peer takes its own
    from aioengine.bench.transformers_peer import TransformersPeer  # after the engine's memory was read

    peer = TransformersPeer(args)
    peer_runs = peer.measure(args.repeats)
    ours, theirs = ({name: _median_of(r, name) for name in PEER_WORK} for r in (runs[1:], peer_runs[1:]))
    rows = [
        {
            "work": work.label,
            "aioengine": round(ours[name], 1),
            "transformers": round(theirs[name], 1),
            "ratio": round(ours[name] / theirs[name], 2),
        }
        for name, work in PEER_WORK.items()
    ]
    own_ratio = ours["decode16"] / ours["decode1"]
    print_table(f"aioengine and transformers (float32), median of {args.repeats}", rows)
    lag = f"{1000 * lag_s:.1f} ms" if lag_s is not None else "not measured"
    print(f"decode, 16 at once over one alone: {own_ratio:.2f}")
    print(f"peak memory of the engine {peak / 2**20:,.0f} MiB, event loop lag p99 {lag}")
    write_json(
        args.json,
        {
            "benchmark": "transformers",
            "median_of": args.repeats,
            "rows": rows,
            "decode16_over_decode1": own_ratio,
            "engine_peak_memory_bytes": peak,
            "loop_lag_p99_s": lag_s,
        },
    )


async def _elapsed(engine: AsyncEngine, batch_size: int, input_len: int, output_len: int, seed: int) -> float:
    prompts = random_prompts(batch_size, input_len, engine.model.vocab_size, seed)
    _, elapsed_s = await run_jobs(engine, [Job(prompt, output_len) for prompt in prompts])
    return elapsed_s


def _median_of(runs: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def _add(
    kinds: argparse._SubParsersAction[Parser],
    name: str,
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, None]],
    summary: str,
    *,
    engine: bool = True,
    repeats: bool = True,
    takes: str = "",
    details: str = "",
) -> Parser:
    stray = "the model is named with --model MODEL" if engine else ""
    parser = kinds.add_parser(
        name, help=summary, description=" ".join(filter(None, [summary, details])), takes=takes, stray=stray
    )
    parser.set_defaults(run=run)
    if repeats:
        parser.add_argument("--repeats", type=int, default=3, help="Runs whose median is reported (default: 3).")
    parser.add_argument("--json", metavar="FILE", help="Also write all figures, with machine and versions.")
    parser.add_argument("--debug", action="store_true", help="Show tracebacks.")
    if engine:
        add_config_flags(parser, GROUPS)
    return parser


def _add_lengths(parser: Parser, *, input_len: int, output_len: int) -> None:
    _add_number(parser, "--input-len", input_len, f"Prompt tokens (default: {input_len}).")
    _add_number(parser, "--output-len", output_len, f"Output tokens (default: {output_len}).")


def _add_number(parser: Parser, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=whole_number, metavar="N", default=default, help=text)
