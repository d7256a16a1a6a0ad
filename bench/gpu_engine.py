"""Checks and measures the whole engine on one GPU, beside those of vLLM 0.26.0.

    python -m aioengine.bench.gpu_engine [--out DIR] [--models NAME,...] [--sections NAME,...] [--set OPTION=VALUE ...]

Models are shapes with random bfloat16 weights. The figures beside ours, in `ANCHORS` below, were measured with vLLM
0.26.0, its defaults and the same workloads on one H200. Prompts are random ids drawn anew for each run; greedy and
ignore_eos unless a workload says otherwise. One failing section is reported and the rest goes on; each says whether
it ran tuned, cold or unobserved (`conditions.py`). Writes gpu_engine.json to --out after every section and prints one
line per figure.

Sections without a figure of vLLM: `compare` (graphs against eager steps), `steps` (host and device time
of decode steps, idle device), `mixed` (W5 cold, W1 and W6 once more, their steps by size), `draws` (what sampling
adds to a step of 256 rows), `host` (kernels of a step). Set options of the engine with --set, e.g.
`--set max_num_batched_tokens=16384`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, EngineConfig, SamplingParams
from aioengine.bench.conditions import Conditions, comparison_class, counted
from aioengine.bench.gpu_steps import StepProbe
from aioengine.bench.report import machine, peak_memory_bytes, require_cuda
from aioengine.bench.workloads import Job, random_prompts, run_jobs

# (figure, whether more is better) by model: vLLM 0.26.0 on one H200.
ANCHORS: dict[str, dict[str, tuple[float, bool]]] = {
    "qwen3-0.6b": {
        "W3 b1 ms/token": (1.85, False),
        "W3 b1 prefill ms": (9.9, False),
        "W3 b8 ms/token": (1.95, False),
        "W3 b8 prefill ms": (31.5, False),
        "W3 b64 ms/token": (3.50, False),
        "W3 b64 prefill ms": (51.2, False),
        "W2 out tok/s": (26506, True),
        "W6 out tok/s": (19719, True),
        "W1 out tok/s": (16446, True),
        "W5 cold s": (0.867, False),
        "W5 warm s": (0.851, False),
        "W7 prefill tok/s": (115393, True),
        "start s": (100.6, False),
    },
    "llama-3.1-8b": {
        "W3 b1 ms/token": (4.89, False),
        "W3 b1 prefill ms": (17.2, False),
        "W3 b8 ms/token": (5.04, False),
        "W3 b8 prefill ms": (52.9, False),
        "W3 b64 ms/token": (5.90, False),
        "W3 b64 prefill ms": (214.8, False),
        "W2 out tok/s": (19003, True),
        "W6 out tok/s": (9798, True),
        "W1 out tok/s": (4001, True),
        "W5 cold s": (1.309, False),
        "W5 warm s": (1.148, False),
        "W7 prefill tok/s": (27672, True),
        "start s": (105.0, False),
    },
}
SECTIONS = ("start", "W3", "W2", "W7", "W5", "W6", "W1", "steps", "mixed", "draws", "host")
SEEDS = iter(range(1, 1 << 30))


class Report:
    """Collects figures and writes them after each section."""

    def __init__(self, out: Path | None) -> None:
        self.out = out
        self.data: dict[str, Any] = {"command": sys.argv, "machine": machine(), "card": card(), "figures": {}}

    def add(self, model: str, name: str, value: float) -> None:
        """One figure, printed beside vLLM's."""
        anchor = ANCHORS.get(model, {}).get(name)
        line = f"{model:13} {name:18} {value:12,.3f}"
        entry: dict[str, Any] = {"value": value}
        if anchor is not None:
            ratio = value / anchor[0] if anchor[1] else anchor[0] / value
            entry |= {"anchor": anchor[0], "times_better": ratio}
            line += f"   vLLM {anchor[0]:10,.3f}   {ratio:5.2f} x"
        self.data["figures"].setdefault(model, {})[name] = entry
        print(line, flush=True)
        self.write()

    def note(self, model: str, name: str, value: Any) -> None:
        """Figures that vLLM has none of; a list of rows is printed as a table."""
        self.data.setdefault("details", {})[f"{model} {name}"] = value
        rows = value if isinstance(value, list) else [value]
        print(f"-- {model}: {name}", flush=True)
        if isinstance(value, list) and rows:
            print("   " + " ".join(f"{key:>18}" for key in rows[0]), flush=True)
        for row in rows:
            if isinstance(value, list):
                print("   " + " ".join(f"{cell:>18}" for cell in row.values()), flush=True)
            else:
                print("   " + ", ".join(f"{key} {cell}" for key, cell in row.items()), flush=True)
        self.write()

    def ran(self, model: str, section: str, conditions: Conditions, took_s: float) -> None:
        """Says of a section that has ended whether its figures may be compared (`conditions.py`)."""
        runs = self.data.setdefault("runs", {})
        run_class = conditions.run_class()
        runs[f"{model} {section}"] = {"class": run_class, **asdict(conditions)}
        self.data["comparison"] = comparison_class(run["class"] for run in runs.values())
        why = "" if run_class == "tuned" else f": {conditions}"
        print(f"   ({section} took {took_s:.1f} s, {run_class}{why})", flush=True)
        self.write()

    def fail(self, model: str, section: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self.data.setdefault("failures", {})[f"{model} {section}"] = text
        print(f"{model} {section} FAILED: {text[-1500:]}", flush=True)
        self.write()

    def write(self) -> None:
        if self.out is not None:
            self.data["peak_host_bytes"] = peak_memory_bytes()
            (self.out / "gpu_engine.json").write_text(json.dumps(self.data, indent=1))


def card() -> str:
    """Name, driver and memory as the driver tells them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def config(model: str, **options: Any) -> EngineConfig:
    """The engine of a model as vLLM's figures were measured."""
    chosen: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cuda",
        "max_model_len": 40000,
        "gpu_memory_utilization": 0.85,
        "log_stats_interval_s": 0,
    }
    return EngineConfig(model=f"shape:{model}", **(chosen | options))


def jobs(engine: AsyncEngine, count: int, length: int, output_len: int, prefix_len: int = 0) -> list[Job]:
    """Fresh random prompts."""
    prompts = random_prompts(count, length, vocab_size(engine), next(SEEDS), prefix_len=prefix_len)
    return [Job(prompt, output_len) for prompt in prompts]


def vocab_size(engine: AsyncEngine) -> int:
    return engine.model.vocab_size


async def elapsed(engine: AsyncEngine, work: list[Job], temperature: float = 0.0) -> float:
    """Seconds until the last token of the last job; every job must have given all its tokens."""
    lines, seconds = await run_jobs(engine, work, temperature)
    for job, line in zip(work, lines, strict=True):
        if len(line.token_times_s) != job.output_len:
            raise RuntimeError(f"a request gave {len(line.token_times_s)} of {job.output_len} tokens")
    return seconds


async def run_w3(engine: AsyncEngine, model: str, report: Report) -> None:
    for batch in (1, 8, 64):
        await elapsed(engine, jobs(engine, batch, 128, 9))
        prefill, whole = [], []
        for _ in range(3):
            prefill.append(await elapsed(engine, jobs(engine, batch, 128, 1)))
            whole.append(await elapsed(engine, jobs(engine, batch, 128, 129)))
        first = statistics.median(prefill)
        report.add(model, f"W3 b{batch} prefill ms", 1000 * first)
        report.add(model, f"W3 b{batch} ms/token", 1000 * (statistics.median(whole) - first) / 128)


async def run_w1(engine: AsyncEngine, model: str, report: Report) -> None:
    report.add(model, "W1 out tok/s", 512 * 128 / await elapsed(engine, jobs(engine, 512, 1024, 128)))


async def run_w2(engine: AsyncEngine, model: str, report: Report) -> None:
    await elapsed(engine, jobs(engine, 256, 128, 16))
    seconds = [await elapsed(engine, jobs(engine, 256, 128, 512)) for _ in range(2)]
    report.add(model, "W2 out tok/s", 256 * 512 / statistics.median(seconds))


async def run_w5(engine: AsyncEngine, model: str, report: Report) -> None:
    work = jobs(engine, 128, 8192 + 64, 16, prefix_len=8192)
    report.add(model, "W5 cold s", await elapsed(engine, work))
    report.add(model, "W5 warm s", statistics.median([await elapsed(engine, work) for _ in range(2)]))


def w6_jobs(seed: int = 0) -> list[Job]:
    """Prompts and lengths of W6; seed 0 gives those that vLLM had."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in range(256)]
    return [Job(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


async def run_w6(engine: AsyncEngine, model: str, report: Report) -> None:
    work = w6_jobs()
    await elapsed(engine, jobs(engine, 256, 64, 4), 0.6)
    seconds = await elapsed(engine, work, 0.6)
    report.add(model, "W6 out tok/s", sum(job.output_len for job in work) / seconds)


async def run_w7(engine: AsyncEngine, model: str, report: Report) -> None:
    await elapsed(engine, jobs(engine, 1, 32768, 1))  # cuDNN plans each shape at its first use
    seconds = [await elapsed(engine, jobs(engine, 1, 32768, 1)) for _ in range(3)]
    report.add(model, "W7 prefill tok/s", 32768 / statistics.median(seconds))


async def run_steps(engine: AsyncEngine, model: str, report: Report) -> None:
    """Host and device time of decode steps, and how long the device lies idle between them."""
    for batch in (1, 8, 64, 256):
        for kind, temperature in (("greedy", 0.0), ("drawn", 0.8)):
            work = jobs(engine, batch, 128, 65)
            await elapsed(engine, [Job(job.prompt[:100], 5) for job in work], temperature)
            with StepProbe(engine) as probe:
                await elapsed(engine, work, temperature)
            report.note(model, f"{kind} steps of {batch} rows", probe.decodes_of(batch))
    report.note(model, "host memory", memory())


async def run_mixed(engine: AsyncEngine, model: str, report: Report) -> None:
    """Steps of the workloads that mix prompts and decodes, by their number of tokens."""
    with StepProbe(engine) as probe:
        await elapsed(engine, jobs(engine, 1, 32768, 1))
    report.note(model, "W7, each step", probe.each())
    for name, work, temperature in (
        ("W5 cold", jobs(engine, 128, 8192 + 64, 16, prefix_len=8192), 0.0),
        ("W6", w6_jobs(next(SEEDS)), 0.6),
        ("W1, half of it", jobs(engine, 256, 1024, 128), 0.0),
    ):
        with StepProbe(engine) as probe:
            seconds = await elapsed(engine, work, temperature)
        report.note(model, f"{name}, steps by size", probe.by_size())
        report.note(model, f"{name}, all steps", {"seconds": round(seconds, 3), **probe.breakdown()})


async def run_draws(engine: AsyncEngine, model: str, report: Report) -> None:
    """What choosing tokens adds to the steps of 256 rows: device and wall time, by sampling parameters."""
    rows = []
    for name, options in (
        ("greedy", {"temperature": 0.0}),
        ("temperature", {"temperature": 0.6}),
        ("top-p", {"temperature": 0.6, "top_p": 0.95}),
        ("top-k", {"temperature": 0.6, "top_k": 50}),
        ("top-k, top-p", {"temperature": 0.6, "top_k": 50, "top_p": 0.95}),
        ("min-p", {"temperature": 0.6, "min_p": 0.05}),
        ("penalties", {"temperature": 0.6, "frequency_penalty": 0.5}),
        ("logprobs", {"temperature": 0.6, "logprobs": 1}),
    ):
        work = jobs(engine, 256, 100, 40)
        await sample_all(engine, [Job(job.prompt[:16], 3) for job in work], options)
        with StepProbe(engine) as probe:
            await sample_all(engine, work, options)
        found = probe.decodes_of(256)
        keep = ("device_us", "wall_us", "host_us", "launch_us", "idle_share")
        rows.append({"parameters": name, **{key: found.get(key) for key in keep}})
    report.note(model, "choosing tokens, 256 rows", rows)


async def sample_all(engine: AsyncEngine, work: list[Job], options: dict[str, Any]) -> None:
    """Runs all jobs with these sampling parameters."""

    async def one(job: Job) -> None:
        params = SamplingParams(max_tokens=job.output_len, ignore_eos=True, **options)
        async for _ in await engine.submit(job.prompt, params):
            pass

    await asyncio.gather(*(one(job) for job in work))


def memory() -> dict[str, float]:
    """Resident memory of this process, MiB: now and at most."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: round(int(fields[name].split()[0]) / 1024, 1) for name in ("VmRSS", "VmHWM", "RssAnon", "RssFile")}


async def run_host(engine: AsyncEngine, model: str, report: Report) -> None:
    """Kernels of a decode step at batch 1 and 256, by device time, and the host time of a launch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for batch in (1, 256):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            await elapsed(engine, jobs(engine, batch, 16, 33))
        torch.cuda.synchronize()
        rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)[:14]
        print(f"-- {model}: kernels of 33 steps at batch {batch}, device time", flush=True)
        shown = [{"name": row.key[:80], "ms": row.self_device_time_total / 1000, "calls": row.count} for row in rows]
        for row in shown:
            print(f"   {row['ms']:9.3f} ms {row['calls']:6} x {row['name']}", flush=True)
        report.data.setdefault("profile", {})[f"{model} b{batch}"] = shown


WORKLOADS: dict[str, Callable[[AsyncEngine, str, Report], Awaitable[None]]] = {
    "W3": run_w3,
    "W2": run_w2,
    "W7": run_w7,
    "W5": run_w5,
    "W6": run_w6,
    "W1": run_w1,
    "steps": run_steps,
    "mixed": run_mixed,
    "draws": run_draws,
    "host": run_host,
}


async def captured(engine: AsyncEngine, model: str, report: Report) -> None:
    """Leaves the engine idle until all its graphs are captured, so that no figure has a capture in it."""
    runner: Any = engine._loaded.runner
    begun, before = time.perf_counter(), torch_reserved()
    for _ in range(2400):
        if not runner.has_idle_work:
            break
        await asyncio.sleep(0.05)
    took, forward = time.perf_counter() - begun, runner._forward
    added = (torch_reserved() - before) / 2**20
    report.note(
        model, "idle capture", {"seconds": round(took, 2), "graphs": forward.num_graphs, "MiB more": round(added, 1)}
    )


def torch_reserved() -> int:
    import torch

    return torch.cuda.memory_reserved()


async def measure(model: str, sections: list[str], report: Report, options: dict[str, Any]) -> None:
    """All workloads on one engine."""
    begun = time.perf_counter()
    async with AsyncEngine(config(model, **options)) as engine:
        await elapsed(engine, jobs(engine, 1, 16, 1))
        report.add(model, "start s", time.perf_counter() - begun)
        print(f"   {engine.memory_report}", flush=True)
        await captured(engine, model, report)
        report.note(model, "start, seconds", {name: round(s, 2) for name, s in engine.startup_timings.items()})
        for name in sections:
            if name in WORKLOADS:
                took = time.perf_counter()
                runner: Any = engine._loaded.runner
                is_warm, num_graphs = not runner.has_idle_work, runner._forward.num_graphs
                with counted() as compiled:
                    try:
                        await WORKLOADS[name](engine, model, report)
                    except Exception as error:
                        report.fail(model, name, error)
                conditions = Conditions(
                    num_compiled=compiled.number,
                    num_captured=runner._forward.num_graphs - num_graphs,
                    is_warm=is_warm,
                    has_cache=engine.config.cache.enable_prefix_caching,
                )
                report.ran(model, name, conditions, time.perf_counter() - took)


async def tokens(model: str, work: list[Job], **options: Any) -> list[list[int]]:
    """Greedy tokens of every job."""

    async def one(engine: AsyncEngine, job: Job) -> list[int]:
        found: list[int] = []
        params = SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=True)
        async for output in await engine.submit(job.prompt, params):
            found += output.delta_token_ids
        return found

    async with AsyncEngine(config(model, **options)) as engine:
        return await asyncio.gather(*(one(engine, job) for job in work))


async def compare(report: Report) -> None:
    """Graphs against eager steps, and one step ahead against waiting, on the tokens of mixed requests."""
    rng = random.Random(5)
    work = [Job([rng.randrange(100, 40000) for _ in range(rng.choice((3, 17, 100, 700)))], 40) for _ in range(16)]
    options = {"max_model_len": 4096, "kv_cache_memory_bytes": 2 << 30}
    eager = await tokens("smollm2-135m", work, optimization_level=0, **options)
    for name, more in (("graphs", {}), ("graphs, one at a time", {"async_scheduling": False})):
        other = await tokens("smollm2-135m", work, **options, **more)
        same = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
            for a, b in zip(eager, other, strict=True)
        ]
        report.add("smollm2-135m", f"{name}: equal to eager", sum(same) / sum(map(len, eager)))
        print(f"   first difference by request (40: none): {same}", flush=True)


def given_option(text: str) -> tuple[str, Any]:
    """Name and value of OPTION=VALUE: the value in JSON, or a word such as `triton` as it stands."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default="qwen3-0.6b,llama-3.1-8b")
    parser.add_argument("--sections", default="compare," + ",".join(SECTIONS))
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the engine")
    args = parser.parse_args()
    require_cuda("gpu_engine")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    sections = args.sections.split(",")
    options = dict(given_option(given) for given in args.set)
    report = Report(args.out)
    print(report.data["card"], flush=True)
    if "compare" in sections:
        try:
            asyncio.run(compare(report))
        except Exception as error:
            report.fail("smollm2-135m", "compare", error)
    for model in filter(None, args.models.split(",")):
        try:
            asyncio.run(measure(model, sections, report, options))
        except Exception as error:
            report.fail(model, "engine", error)
    report.write()
    return 1 if "failures" in report.data else 0


if __name__ == "__main__":
    raise SystemExit(main())
