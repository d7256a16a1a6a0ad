"""`aioengine bench replay`: what share of prompt tokens the prefix cache gives, by eviction policy and size.

Drives the real KV manager with requests in order and no model: look up the prompt, take blocks for prompt and output,
publish them, and let go when `--concurrency` later requests have come. Sizes are shares of what the
trace would fill if nothing were ever evicted; the hit rate of that is the most there is.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.progress import track

from aioengine.bench.report import check_output_file, print_table, write_json
from aioengine.bench.traces import SYNTHETIC, Arrival, read_trace
from aioengine.errors import InvalidConfig
from aioengine.fastcore.kv_manager import KVManager
from aioengine.fastcore.request import Request

POLICIES: tuple[Literal["lru", "cost"], ...] = ("lru", "cost")
MAX_CONTEXT_COST = 1e6
"""What the KV manager takes."""
Row = dict[str, Any]
FILE_FORMAT = (
    'A file has one JSON object per line: {"token_ids": [...], "num_output": N}, where the last N are generated, '
    'or {"hash_ids": [...], "input_length": N} as in Mooncake\'s public traces, where each id stands for '
    "--hash-block-size tokens; arrival or timestamp, if given, orders the requests."
)


@dataclass(slots=True)
class Outcome:
    """What one pass over a trace amounts to."""

    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_refused: int = 0
    """Requests that the whole pool could not hold."""
    num_cached_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench replay`."""
    names = ", ".join(SYNTHETIC)
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        help=f"One of {names}, or a file of JSON lines (default: {names}).",
    )
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2, 0.5],
        help="Pool sizes as shares of what the trace would fill.",
    )  # fmt: skip
    parser.add_argument("--num-requests", type=int, help="Most requests of a trace (synthetic ones by default 6000).")
    parser.add_argument("--concurrency", type=int, default=16, help="Requests that hold blocks at once (default: 16).")
    parser.add_argument("--block-size", type=int, default=16, help="Tokens per KV block (default: 16).")
    parser.add_argument("--hash-block-size", type=int, default=512, help="Tokens per hash id in a file (default: 512).")
    parser.add_argument(
        "--context-cost", type=float, default=1e-4,
        help="What a token of context adds to the cost of computing one, as a share (default: 0.0001).",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="Of the synthetic traces.")
    parser.add_argument("--plot", metavar="FILE", help="Also draw hit rates over pool sizes; needs matplotlib.")


async def run_replay(args: argparse.Namespace) -> None:
    """Replays every trace at every size under every policy."""
    if not all(0 < budget <= 1 for budget in args.budgets):
        raise InvalidConfig("--budgets must be above 0 and at most 1", param="budgets")
    num_requests = 1 if args.num_requests is None else args.num_requests
    if min(args.concurrency, args.block_size, args.hash_block_size, num_requests) < 1:
        raise InvalidConfig("--num-requests, --concurrency and block sizes must be at least 1")
    if not 0 <= args.context_cost < MAX_CONTEXT_COST:
        raise InvalidConfig(f"--context-cost must be at least 0 and below {MAX_CONTEXT_COST:g}", param="context_cost")
    if args.plot:
        check_plot(args.plot)
    rows: list[Row] = []
    for name in args.traces or SYNTHETIC:
        some = replay_trace(name, load_trace(name, args), args)
        print_table(f"prefix cache, {name}: share of prompt tokens that hit, %", some)
        rows += some
    write_json(args.json, {"benchmark": "replay", "rows": rows})
    if args.plot:
        plot(rows, args.plot)


def load_trace(name: str, args: argparse.Namespace) -> list[Arrival]:
    """The requests of a synthetic trace or of a file."""
    if name in SYNTHETIC:
        return list(SYNTHETIC[name](args.num_requests or 6000, args.seed))
    if not Path(name).exists():
        raise InvalidConfig(f"there is no trace {name}: neither a file nor one of {', '.join(SYNTHETIC)}")
    return read_trace(Path(name), args.hash_block_size, args.num_requests)


def replay_trace(name: str, trace: Sequence[Arrival], args: argparse.Namespace) -> list[Row]:
    """One row per pool size."""
    num_tokens = sum(len(arrival.token_ids) for arrival in trace)
    longest = max(len(arrival.token_ids) for arrival in trace)
    size, live = args.block_size, args.concurrency
    whole = replay(trace, KVManager(2 + len(trace) + num_tokens // size, size), live)
    rows = []
    for budget in track(args.budgets, name, transient=True):
        num_blocks = 2 + max(int(budget * whole.num_cached_blocks), -(-longest // size))
        row: Row = {"trace": name, "budget": budget, "blocks": num_blocks}
        for policy in POLICIES:
            kv = KVManager(num_blocks, size, eviction_policy=policy, context_cost=args.context_cost)
            row[policy] = round(100 * replay(trace, kv, live).hit_rate, 3)
        row["cost_over_lru"] = f"{100 * (row['cost'] / row['lru'] - 1):+.1f} %" if row["lru"] else "-"
        row["nothing_evicted"] = round(100 * whole.hit_rate, 3)
        rows.append(row)
    return rows


def replay(trace: Iterable[Arrival], kv: KVManager, concurrency: int) -> Outcome:
    """One pass over a trace with an empty cache at its start."""
    outcome = Outcome()
    live: deque[Request] = deque()
    for i, arrival in enumerate(trace):
        num_tokens, num_prompt = len(arrival.token_ids), arrival.num_prompt
        request = Request(str(i), arrival.token_ids, max_tokens=1)
        if len(live) == concurrency:
            kv.release(live.popleft())
        num_hits = kv.match(request)
        while not kv.admit(request, num_hits, num_tokens) and live:
            kv.release(live.popleft())  # what the pool cannot hold at once runs one after the other
            num_hits = kv.match(request)
        outcome.num_prompt_tokens += num_prompt
        if not request.block_ids():
            outcome.num_refused += 1
            continue
        # At least one prompt token is computed, as in the engine.
        outcome.num_hit_tokens += min(num_hits, (num_prompt - 1) // kv.block_size) * kv.block_size
        kv.publish(request, num_tokens)
        live.append(request)
    while live:
        kv.release(live.popleft())
    outcome.num_cached_blocks = kv.prefix_map.num_entries
    return outcome


def check_plot(path: str) -> None:
    """Refuses a picture that could not be drawn, before anything is replayed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidConfig("--plot needs the package matplotlib: pip install 'aioengine[bench]'", param="plot")
    check_output_file("--plot", path)
    from matplotlib.backend_bases import FigureCanvasBase  # optional

    kinds = FigureCanvasBase.get_supported_filetypes()
    kind = Path(path).suffix.removeprefix(".")
    if kind and kind.lower() not in kinds:
        raise InvalidConfig(f"--plot {path}: {kind} is none of {', '.join(sorted(kinds))}", param="plot")


def plot(rows: Sequence[Row], path: str) -> None:
    """Hit rate over pool size, one picture per trace."""
    import matplotlib  # optional

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["trace"] for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(4 * len(names), 3.5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        some = [row for row in rows if row["trace"] == name]
        for policy in POLICIES:
            axis.plot([row["budget"] for row in some], [row[policy] for row in some], marker="o", label=policy)
        axis.axhline(some[0]["nothing_evicted"], color="grey", linestyle="--", label="nothing evicted")
        axis.set(title=Path(name).name, xlabel="pool, share of the trace", ylabel="prompt tokens hit, %", xscale="log")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
