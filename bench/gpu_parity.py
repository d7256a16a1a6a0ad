"""Whether a GPU says what the CPU says: a real checkpoint's greedy tokens and log-probabilities on both.

    python -m aioengine.bench.gpu_parity prepare CHECKPOINT.gguf DIR [--layers N] [--part-mib M]
    python -m aioengine.bench.gpu_parity check DIR [--dtypes float16,bfloat16]

`prepare` runs where the checkpoint is: it writes what the CPU path (float32) answers to DIR/expected.json, with the
gap between the two likeliest tokens at every step, and the model beside it in parts that a slow wire can carry one
by one; with --layers a model of the first layers only, weights as they are stored. `check` runs on the GPU: greedy
tokens, captured and eager, may differ from the CPU's only where that gap is within rounding, and so may the likeliest
token at each position when the GPU reads the CPU's answer. Exits with 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, EngineConfig, SamplingParams
from aioengine.bench.report import require_cuda

NUM_TOKENS, MAX_LEN = 64, 1024
TOLERANCE = {"float16": 0.08, "bfloat16": 0.5}
"""Gap between the two likeliest log-probabilities below which rounding may swap them."""
TEXTS = (
    "Once upon a time, in a village by the sea, there lived",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n",
    "Die Straße nach 東京 führt über naïve Cafés — und weiter: ",
    "1, 1, 2, 3, 5, 8, 13,",
    "The capital of France is",
    "Q: What is 12 times 12?\nA:",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "import numpy as np\n\n\nclass Matrix:\n    def __init__(self,",
    "In 1969, the first people to walk on the Moon were",
    "The quick brown fox jumps over the lazy dog near the old stone bridge. " * 45,
    "Water boils at a lower temperature on mountains because " * 20,
)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def config(model: Path, device: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(model), device=device, max_model_len=MAX_LEN, block_size=16, num_gpu_blocks_override=1200,
        enable_prefix_caching=False, log_stats_interval_s=0.0, **options,
    )  # fmt: skip


async def answer(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[Any], Any]:
    """Tokens, their log-probabilities, those of the prompt."""
    tokens: list[int] = []
    logprobs: list[Any] = []
    scored = None
    async for output in await engine.submit(prompt, params):
        tokens += output.delta_token_ids
        logprobs += output.delta_logprobs or []
        scored = output.prompt_logprobs or scored
    return tokens, logprobs, scored


# ---- where the checkpoint is ------------------------------------------------------------------------------------


def first_layers(source: Path, target: Path, num_layers: int) -> None:
    """Writes the checkpoint with its first layers only."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        value = num_layers if key == f"{architecture}.block_count" else field.contents()
        writer.add_key_value(key, value, kind, inner)
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] != "blk" or int(parts[1]) < num_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split(source: Path, folder: Path, part_bytes: int) -> int:
    """Writes the file in parts; returns how many."""
    data = source.read_bytes()
    starts = range(0, len(data), part_bytes)
    for i, start in enumerate(starts):
        (folder / f"model.part{i}").write_bytes(data[start : start + part_bytes])
    return len(starts)


async def expect(model: Path) -> list[dict[str, Any]]:
    """What the CPU answers to every prompt."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    found = []
    async with AsyncEngine(config(model, "cpu")) as engine:
        for text in TEXTS:
            prompt = (await engine.render(text))[: MAX_LEN - NUM_TOKENS - 1]
            tokens, logprobs, _ = await answer(engine, prompt, params)
            gaps = [at.top[0].logprob - at.top[1].logprob for at in logprobs]
            found.append(
                {"prompt": prompt, "tokens": tokens, "logprobs": [at.chosen.logprob for at in logprobs], "gaps": gaps}
            )
    return found


def prepare(args: argparse.Namespace) -> int:
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        model = args.checkpoint
        if args.layers:
            model = Path(name) / "model.gguf"
            first_layers(args.checkpoint, model, args.layers)
        cases = asyncio.run(expect(model))
        num_parts = split(model, args.folder, args.part_mib << 20)
    told = {"checkpoint": args.checkpoint.name, "layers": args.layers, "parts": num_parts, "cases": cases}
    (args.folder / "expected.json").write_text(json.dumps(told))
    gaps = sorted(gap for case in cases for gap in case["gaps"])
    print(f"{num_parts} parts; {len(gaps)} tokens, the closest calls: {[round(gap, 4) for gap in gaps[:8]]}")
    return 0


# ---- on the GPU -------------------------------------------------------------------------------------------------


def compare_tokens(name: str, cases: list[dict[str, Any]], found: list[list[int]], tolerance: float) -> int:
    """Prints where greedy answers part; returns how many do so without a close call."""
    bad, lines = 0, []
    for i, (case, tokens) in enumerate(zip(cases, found, strict=True)):
        at = next((n for n, (a, b) in enumerate(zip(case["tokens"], tokens, strict=True)) if a != b), None)
        if at is not None:
            gap = case["gaps"][at]
            bad += gap > tolerance
            lines.append(f"prompt {i} from token {at}, gap {gap:.4f}{'  WRONG' if gap > tolerance else ''}")
    print(f"{name}: {len(cases) - len(lines)} of {len(cases)} answers equal; " + "; ".join(lines), flush=True)
    return bad


def compare_scores(name: str, cases: list[dict[str, Any]], scored: list[Any], tolerance: float) -> int:
    """The same for the likeliest tokens at each position of the CPU's answers; prints how far log-probabilities lie."""
    bad = swapped = 0
    off = []
    for case, positions in zip(cases, scored, strict=True):
        own = positions[len(case["prompt"]) :]
        for token, logprob, gap, at in zip(case["tokens"], case["logprobs"], case["gaps"], own, strict=True):
            off.append(abs(at.chosen.logprob - logprob))
            if at.top[0].token_id != token:
                swapped += 1
                bad += gap > tolerance
    print(
        f"{name}: {swapped} of {len(off)} likeliest tokens differ, {bad} without a close call; log-probabilities "
        f"differ by {sum(off) / len(off):.5f} on average, {max(off):.4f} at most",
        flush=True,
    )
    return bad


async def check_dtype(model: Path, cases: list[dict[str, Any]], device: str, dtype: str) -> int:
    tolerance, bad = TOLERANCE.get(dtype, 1e-3), 0
    for name, level in (("captured", 2), ("eager", 0)):
        async with AsyncEngine(config(model, device, dtype=dtype, optimization_level=level)) as engine:
            together = await asyncio.gather(*(answer(engine, case["prompt"], GREEDY) for case in cases))
            bad += compare_tokens(f"{dtype}, {name}, at once", cases, [tokens for tokens, _, _ in together], tolerance)
            if level:
                alone = [(await answer(engine, case["prompt"], GREEDY))[0] for case in cases]
                bad += compare_tokens(f"{dtype}, {name}, one by one", cases, alone, tolerance)
                params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
                reads = [await answer(engine, case["prompt"] + case["tokens"], params) for case in cases]
                bad += compare_scores(f"{dtype}, {name}, reading", cases, [scored for _, _, scored in reads], tolerance)
    return bad


def check(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        require_cuda("gpu_parity")
    told = json.loads((args.folder / "expected.json").read_text())
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model.gguf"
        with model.open("wb") as file:
            for i in range(told["parts"]):
                file.write((args.folder / f"model.part{i}").read_bytes())
        layers = f"first {told['layers']} layers" if told["layers"] else "all layers"
        print(f"{told['checkpoint']}, {layers}")
        bad = 0
        for dtype in args.dtypes.split(","):
            bad += asyncio.run(check_dtype(model, told["cases"], args.device, dtype))
    print(f"{bad} differences that rounding does not explain")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    ahead = commands.add_parser("prepare")
    ahead.add_argument("checkpoint", type=Path)
    ahead.add_argument("folder", type=Path)
    ahead.add_argument("--layers", type=int, default=0, help="keep the first so many layers; by default all")
    ahead.add_argument("--part-mib", type=int, default=55)
    ahead.set_defaults(run=prepare)
    there = commands.add_parser("check")
    there.add_argument("folder", type=Path)
    there.add_argument("--device", default="cuda")
    there.add_argument("--dtypes", default="float16,bfloat16")
    there.set_defaults(run=check)
    args = parser.parse_args()
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
