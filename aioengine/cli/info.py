"""`aioengine info`: versions, devices, what the checkpoint says, and how many tokens of KV would fit.

Reads headers only: no weights are loaded and nothing is started.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import math
import platform
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
import torch

from aioengine.checkpoint import Checkpoint, load_checkpoint
from aioengine.cli.flags import engine_config
from aioengine.cli.startup_report import aligned, mebibytes
from aioengine.config import EngineConfig, ResolvedConfig, resolve, usable_cores
from aioengine.determinism import DECLARED
from aioengine.device import available_memory_bytes, cpu_num_blocks, processor_name
from aioengine.fastcore import native
from aioengine.kv_host_tier import num_host_blocks
from aioengine.kv_layout import layout_of
from aioengine.speculation import Speculation
from aioengine.startup import fit_context

PACKAGES = ("torch", "triton", "numpy", "uvloop", "starlette", "uvicorn", "tokenizers", "gguf")


async def run(args: argparse.Namespace) -> int:
    """Prints the facts, as tables or as JSON.

    Raises:
        EngineError: the model cannot be found or read, or the options do not fit.
    """
    logging.basicConfig(level="DEBUG" if args.debug else "WARNING", stream=sys.stderr)
    facts = await asyncio.to_thread(collect_facts, engine_config(args))
    if args.json:
        sys.stdout.buffer.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        print("\n\n".join(f"{title}\n{aligned(rows)}" for title, rows in shown_facts(facts).items()))
    return 0


def collect_facts(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """All facts by section; blocking."""
    checkpoint = load_checkpoint(config.model)
    resolved = resolve(
        config,
        model_max_len=checkpoint.config.context_length,
        model_dtype=checkpoint.config.dtype,
        cuda_available=torch.cuda.is_available(),
        num_cores=usable_cores(),
    )
    return {
        "versions": _versions(),
        "devices": _devices(),
        "model": _model_facts(checkpoint),
        "run": _run_facts(config, resolved, checkpoint),
    }


def _versions() -> dict[str, Any]:
    versions = {"aioengine": version("aioengine"), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue  # triton comes with GPU builds of torch only
    return versions


def _devices() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": {
            "name": processor_name(),
            "num_cores": usable_cores(),
            "isa": native.isa(),
            "available_bytes": available_memory_bytes(),
        },
        "cuda": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    }


def _model_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    spec, tensors = checkpoint.config, checkpoint.tensors()
    kinds = Counter[str]()
    for tensor in tensors.values():
        kinds[tensor.kind] += math.prod(tensor.shape)
    return {
        "name": spec.name,
        "architecture": spec.architecture,
        "num_parameters": sum(kinds.values()),
        "parameters_by_type": dict(kinds.most_common()),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "context_length": spec.context_length,
        "sliding_window": spec.sliding_window,
        "has_chat_template": checkpoint.chat_template is not None,
        "sampling_defaults": dict(checkpoint.generation_defaults),
    }


def _run_facts(config: EngineConfig, resolved: ResolvedConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """How it would run now; on a GPU the pool gets what the weights leave, which only loading tells."""
    spec = checkpoint.config
    layout = layout_of(spec, resolved)
    num_kv_tokens = None
    if resolved.device == "cpu":
        available_bytes = available_memory_bytes()
        resolved = fit_context(config, resolved, layout, available_bytes)
        num_blocks = cpu_num_blocks(layout, resolved, config.cache, available_bytes)
        num_kv_tokens = layout.num_kv_tokens(num_blocks - 1, resolved.max_model_len)
    return {
        "device": resolved.device,
        "num_threads": resolved.num_threads,
        "dtype": resolved.dtype,
        "kv_cache_dtype": resolved.kv_cache_dtype,
        "kv_bytes_per_token": layout.bytes_per_token,
        "kv_groups": str(layout),
        "num_kv_tokens": num_kv_tokens,
        "num_host_tokens": num_host_blocks(layout, resolved) * layout.block_size,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": resolved.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "speculation": None if resolved.speculation is None else dataclasses.asdict(resolved.speculation),
        "determinism": dataclasses.asdict(DECLARED[resolved.determinism]),
    }


def shown_facts(facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, object]]:
    """The facts as rows of text."""
    cpu, model, run = facts["devices"]["cpu"], facts["model"], facts["run"]
    cores = f"{cpu['num_cores']} cores, {cpu['isa']}, {mebibytes(cpu['available_bytes'])} free"
    devices: dict[str, object] = {"cpu": f"{cpu['name']}, {cores}"}
    for i, gpu in enumerate(facts["devices"]["cuda"]):
        devices[f"cuda:{i}"] = f"{gpu['name']}, {mebibytes(gpu['memory_bytes'])}"
    by_type = ", ".join(f"{kind} {count / 1e6:,.1f} M" for kind, count in model["parameters_by_type"].items())
    defaults = ", ".join(f"{k}={v}" for k, v in model["sampling_defaults"].items())
    fits = run["num_kv_tokens"] if run["num_kv_tokens"] is not None else "known once the weights are loaded"
    return {
        "versions": facts["versions"],
        "devices": devices,
        "model": {
            "name": f"{model['name']} ({model['architecture']})",
            "parameters": f"{model['num_parameters'] / 1e6:,.1f} M ({by_type})",
            "layers": f"{model['num_layers']}, hidden size {model['hidden_size']}",
            "heads": f"{model['num_heads']} of size {model['head_dim']}, {model['num_kv_heads']} for KV",
            "vocabulary": f"{model['vocab_size']} tokens",
            "context": f"{model['context_length']} tokens",
            "chat template": "yes" if model["has_chat_template"] else "no",
            "sampling defaults": defaults or "neutral",
        },
        "as it would run": {
            "device": f"{run['device']}, {run['num_threads']} threads, {run['dtype']}",
            "KV per token": f"{run['kv_bytes_per_token']} bytes ({run['kv_cache_dtype']})",
            "KV cache": run["kv_groups"],
            "KV tokens that fit": fits,
            "host tier": f"{run['num_host_tokens']} tokens" if run["num_host_tokens"] else "none",
            "context": f"{run['max_model_len']} tokens per request",
            "batch": f"{run['max_num_seqs']} requests, {run['max_num_batched_tokens']} tokens per step",
            "speculation": Speculation(**run["speculation"]) if run["speculation"] else "none",
            "determinism": "{level} ({reason})".format(**run["determinism"]),
        },
    }
