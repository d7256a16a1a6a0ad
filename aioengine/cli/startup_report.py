"""The lines that `aioengine serve` prints when it is ready: what runs where, which limits and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aioengine.config import ServerConfig

if TYPE_CHECKING:
    from aioengine.engine import AsyncEngine

SHOWN_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


def startup_report(engine: AsyncEngine, config: ServerConfig, url: str, imports_s: float) -> str:
    """One aligned line per fact. `imports_s` is what Python's imports took before the engine existed."""
    resolved, memory = engine.resolved, engine.memory_report
    stages = {"imports": imports_s, **engine.startup_timings}
    groups = f"{memory.kv_groups}; " if memory.kv_groups else ""
    pool = f"{mebibytes(memory.kv_cache_bytes)}, {resolved.kv_cache_dtype}"
    tier = f"{memory.num_host_tokens} tokens fit ({mebibytes(memory.host_bytes)})"
    place = f"{resolved.device}, {resolved.num_threads} threads" if resolved.device == "cpu" else resolved.device
    rows = {
        "URL": f"{url}/v1",
        "model": f"{engine.model.name} ({engine.model.architecture})",
        "device": f"{place}, {resolved.dtype}",
        "context": f"{resolved.max_model_len} tokens per request",
        "KV cache": f"{groups}{memory.num_kv_tokens} tokens fit ({pool})",
        **({"host tier": tier} if memory.num_host_blocks else {}),
        "weights": mebibytes(memory.weights_bytes),
        "batch": f"{resolved.max_num_seqs} requests, {resolved.max_num_batched_tokens} tokens per step",
        **({"speculation": resolved.speculation} if resolved.speculation else {}),
        "sampling": sampling_line(engine),
        "determinism": f"{engine.determinism.level} ({engine.determinism.reason})",
        "API key": "required" if config.effective_api_key() else "not required",
        "admin routes": "on" if config.effective_admin_key() else "off",
        "ready in": f"{sum(stages.values()):.2f} s ({', '.join(f'{k} {v:.2f}' for k, v in stages.items())})",
    }
    return aligned(rows)


def aligned(rows: Mapping[str, object]) -> str:
    """Names and values as two columns."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def mebibytes(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def sampling_line(engine: AsyncEngine) -> str:
    """The values a request without its own gets, and who decided them."""
    params = engine.sampling_params()
    values = {name: getattr(params, name) for name in SHOWN_DEFAULTS}
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    recommended = ", ".join(engine.default_sampling)
    source = f"{recommended} from the model" if recommended else "neutral"
    return f"{shown} ({source})"
