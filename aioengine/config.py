"""Every option of the engine and the server, each documented once.

A field here is the library's keyword, the command-line flag (`max_num_seqs` -> `--max-num-seqs`), the line
in `--help` and the row in the README. Names and meanings equal vLLM's where the meaning is equal. Groups
are frozen; `resolve()` turns "not given" into concrete values once, from the model and the hardware, and
nothing writes to a configuration afterwards. This is the only file that reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from aioengine.errors import InvalidConfig
from aioengine.speculation import Speculation
from aioengine.speculation import parse as parse_speculation

MIB = 1 << 20
GIB = 1 << 30

Dtype = Literal["float32", "bfloat16", "float16"]
CaptureTime = Literal["never", "first use", "idle", "start"]
CAPTURE_TIMES: tuple[CaptureTime, ...] = ("never", "first use", "idle", "start")
"""By optimization level: when CUDA graphs are captured."""


def option(default: Any, help: str, *, metavar: str | None = None) -> Any:
    """A configuration field: its default and the one sentence that documents it everywhere."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how its weights, tokenizer and defaults are read."""

    model: str = option("smollm2", "Folder, GGUF file, Hugging Face id, or the built-in name smollm2.")
    tokenizer: str | None = option(None, "Folder or Hugging Face id of another tokenizer than the model's.")
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face id.")
    served_model_name: str | None = option(None, "Name that the API shows and accepts; by default the model's.")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = option(
        "auto", "How weights are read; dummy fills them with random numbers."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Type of activations: auto is float32 on a CPU, the checkpoint's 16-bit type on a GPU."
    )
    max_model_len: int | None = option(None, "Longest prompt plus output in tokens; by default the model's own.")
    generation_config: Literal["auto", "neutral"] = option(
        "auto", "Sampling defaults from the model's generation_config.json, or neutral ones."
    )
    max_logprobs: int = option(
        20, "Most log-probabilities per token that a request may ask for, in its prompt too; -1 sets no limit."
    )
    chat_template: str | None = option(None, "File with a Jinja chat template that replaces the model's.")
    seed: int = option(0, "Seed of dummy weights and of the seeds given to requests without one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "Tokens per KV block.")
    enable_prefix_caching: bool = option(
        True, "Reuse the KV of equal prompt beginnings, also among requests that arrive together."
    )
    prefix_caching_hash_algo: Literal["xxh3_128", "sha256"] = option(
        "xxh3_128",
        "Block hash: xxh3_128 has a random root per process; sha256 has a fixed one that processes can share.",
    )
    enable_partial_block_reuse: bool = option(
        True,
        "Where a prompt parts from a cached one inside a block, copy the equal tokens instead of computing them."
        " Models with several KV groups reuse whole blocks only.",
    )
    eviction_policy: Literal["lru", "cost"] = option(
        "lru",
        "Cached prefix that goes first: lru the one unused longest, cost the one whose loss costs least "
        "(work to compute it again x hits).",
    )
    kv_events_config: str | None = option(
        None,
        'JSON: tell routers what is cached, e.g. {"enable_kv_cache_events": true, "publisher": "zmq"}; '
        "also endpoint, replay_endpoint, topic, buffer_steps, hwm.",
        metavar="JSON",
    )
    gpu_memory_utilization: float = option(0.9, "Share of the GPU's memory that the engine may use.")
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV pool in bytes; by default 512 MiB or one full context on a CPU, what is left on a GPU."
    )
    num_gpu_blocks_override: int | None = option(None, "Number of KV blocks, whatever the memory.")
    kv_offloading_size: float | None = option(
        None,
        "Host memory in GiB, or with a unit, that keeps the KV of prefixes evicted from the pool, to be loaded instead "
        "of computed again; by default there is none.",
        metavar="GIB",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Type of stored keys and values; auto is the type of the activations."
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False, "Keep the KV of the whole context in every layer, also in layers that read a window of it only."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs in a step, and with how many tokens."""

    max_num_batched_tokens: int | None = option(
        None, "Most tokens in one step; by default 512 on a CPU and 8192 on a GPU."
    )
    max_num_seqs: int | None = option(None, "Most requests running at once; by default 64 on a CPU and 512 on a GPU.")
    max_num_scheduled_tokens: int | None = option(
        None, "Most tokens that the scheduler gives out in one step; by default max_num_batched_tokens."
    )
    max_num_active_seqs: int | None = option(
        None,
        "Most requests running at once, where that is to be below max_num_seqs, for which memory and CUDA graphs are "
        "sized; by default max_num_seqs.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "First come first served, or smaller priority number first."
    )
    priority_ageing_s: float = option(
        0.0, "Seconds of waiting that make a request one priority level more important; 0 leaves priorities alone."
    )
    enable_chunked_prefill: bool = option(True, "Split long prompts over several steps.")
    long_prefill_token_threshold: int = option(
        0,
        "Most prompt tokens of one request in a step while others wait or run; 0 sets no limit, or 4 % of "
        "max_model_len where max_num_partial_prefills is above 1.",
    )
    adaptive_long_prefill_threshold: bool = option(
        False, "Raise the threshold to max_num_batched_tokens divided by the number of requests, if that is more."
    )
    target_itl_ms: float | None = option(
        None,
        "Longest time between two tokens of an answer: prompts get what decodes leave of it in each step, by a step "
        "time learned while running; by default steps are filled up to the token budget.",
    )
    max_num_partial_prefills: int | None = option(
        None, "Most prompts in progress over several steps at once; by default there is no limit."
    )
    max_long_partial_prefills: int | None = option(
        None,
        "How many of these may have more than long_prefill_token_threshold tokens left; shorter prompts pass the "
        "others.",
    )
    scheduler_reserve_full_isl: bool = option(
        True, "Start a request only if the KV of all its tokens fits, not just that of its first chunk."
    )
    watermark: float = option(0.0, "Share of the KV blocks that stays free when a request starts while others run.")
    stale_output: Literal["deliver", "drop"] = option(
        "deliver",
        "Tokens in flight when their request is preempted: deliver them before it starts again, or drop them, "
        "start it at once and compute them anew, which may preempt more where the pool is short.",
    )
    async_scheduling: bool | None = option(None, "Schedule one step ahead of the device; by default on a GPU only.")
    speculative_config: str | None = option(
        None,
        'JSON: let steps verify drafts of several tokens, e.g. {"method": "ngram", "num_speculative_tokens": 4}; also '
        "prompt_lookup_max, prompt_lookup_min, disable_by_batch_size.",
        metavar="JSON",
    )
    max_waiting_requests: int | None = option(
        None, "Refuse new requests with 429 while this many wait; by default there is no limit."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Where and how the engine runs."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "Device that runs the model.")
    num_threads: int | None = option(None, "Threads of a CPU device; by default all cores this process may use.")
    optimization_level: Literal[0, 1, 2, 3] = option(
        2,
        "0 runs every step eagerly; 1 captures CUDA graphs at first use, 2 likely ones at start and the rest in idle "
        "time, 3 all at start.",
    )
    enforce_eager: bool = option(False, "Run every step eagerly, whatever the optimization level.")
    cudagraph_capture_sizes: str | None = option(
        None, "Comma-separated numbers of tokens that steps are padded to and captured for; by default a dense list."
    )
    attention_backend: Literal["auto", "triton", "cudnn"] = option(
        "auto",
        "On a GPU: triton leaves all attention to the paged kernel; cudnn gives long prefill chunks to cuDNN, or "
        "refuses to start where it cannot; auto does so where it can.",
    )
    completion_poll_us: int = option(
        300, "On a GPU, ask for a step's end in every turn of the loop while it is due within this time; 0 only sleeps."
    )
    determinism: Literal["none", "offline", "batch-invariant"] = option(
        "none",
        "What the operator promises, and requests may demand: offline, that the same calls give the same steps and "
        "answers (aioengine generate, programs); batch-invariant, that greedy and seeded answers do not depend on what "
        "else runs. On a CPU only.",
    )
    log_stats_interval_s: float = option(10.0, "Seconds between log lines about queues and cache; 0 for none.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server of `aioengine serve`."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    api_key: str | None = option(None, "Bearer token that clients must send; by default AIOENGINE_API_KEY.")
    enable_admin: bool = option(False, "Serve the admin routes; they need an admin key.")
    admin_api_key: str | None = option(None, "Bearer token of the admin routes; by default AIOENGINE_ADMIN_KEY.")
    max_request_bytes: int = option(16 * MIB, "Largest request body.")
    allow_origins: str | None = option(None, "Comma-separated origins that browsers may call from, or *.")
    drain_timeout_s: float = option(30.0, "Seconds that running requests may take to finish at shutdown.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least severe messages to log.")

    def effective_api_key(self) -> str | None:
        """The key to ask for: the flag, else the environment variable AIOENGINE_API_KEY."""
        return self.api_key or os.environ.get("AIOENGINE_API_KEY") or None

    def effective_admin_key(self) -> str | None:
        """The key of the admin routes, None if they are off.

        Raises:
            InvalidConfig: they are on without a key, or a key was given and they are off.
        """
        if not self.enable_admin:
            if self.admin_api_key:
                raise InvalidConfig("admin_api_key is for admin routes; add --enable-admin", param="admin_api_key")
            return None
        key = self.admin_api_key or admin_key_from_environment()
        if not key:
            raise InvalidConfig(
                "enable_admin needs a key: give --admin-api-key or set AIOENGINE_ADMIN_KEY", param="enable_admin"
            )
        return key


def admin_key_from_environment() -> str | None:
    """AIOENGINE_ADMIN_KEY, if it is set."""
    return os.environ.get("AIOENGINE_ADMIN_KEY") or None


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "runtime": RuntimeConfig,
}


@dataclass(frozen=True, slots=True, init=False)
class EngineConfig:
    """All options of an engine, in groups.

    Options are given flat, by the names of the groups' fields, as on the command line::

        EngineConfig(model="smollm2", max_num_seqs=16)

    Raises:
        InvalidConfig: an unknown option, or a value of the wrong type or out of range.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    runtime: RuntimeConfig

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        options["model"] = model
        owners = {f.name: group for group, cls in GROUPS.items() for f in dataclasses.fields(cls)}
        chosen: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
        for name, value in options.items():
            if name not in owners:
                near = difflib.get_close_matches(name, owners, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise InvalidConfig(f"unknown option {name}{hint}", param=name)
            chosen[owners[name]][name] = value
        for group, cls in GROUPS.items():
            made = cls(**chosen[group])
            check_group(made)
            object.__setattr__(self, group, made)


def flag_name(name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def option_fields(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a group with their resolved types, in order: what flags and tables are made from."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        yield f, hints[f.name]


def allowed_values(hint: Any) -> tuple[Any, ...] | None:
    """The values of a `Literal`, or None for other types."""
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else None


def without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); other types -> (itself, False)."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        return rest[0], True
    return hint, False


_RANGES: dict[str, tuple[float, float]] = {
    "max_model_len": (1, 2**31 - 1),
    "block_size": (1, 1024),
    "gpu_memory_utilization": (0.01, 1.0),
    "kv_cache_memory_bytes": (1, 2**50),
    "num_gpu_blocks_override": (2, 2**31 - 1),
    "kv_offloading_size": (1e-6, 2**20),
    "max_num_batched_tokens": (1, 2**20),
    "max_num_seqs": (1, 2**16),
    "priority_ageing_s": (0, 86400),
    "target_itl_ms": (0.1, 600000),
    "max_num_scheduled_tokens": (1, 2**20),
    "max_num_active_seqs": (1, 2**16),
    "long_prefill_token_threshold": (0, 2**31 - 1),
    "max_num_partial_prefills": (1, 2**16),
    "max_long_partial_prefills": (1, 2**16),
    "watermark": (0, 0.99),
    "max_waiting_requests": (1, 2**31 - 1),
    "num_threads": (1, 1024),
    "completion_poll_us": (0, 1_000_000),
    "log_stats_interval_s": (0, 86400),
    "port": (0, 65535),
    "max_request_bytes": (1024, 2**40),
    "drain_timeout_s": (0, 86400),
    "seed": (0, 2**63 - 1),
    "max_logprobs": (-1, 2**31 - 1),
}


def check_group(group: object) -> None:
    """Checks the type and range of every field of a configuration group.

    Raises:
        InvalidConfig: with the option's name, what was given and what is allowed.
    """
    for f, hint in option_fields(type(group)):
        value = getattr(group, f.name)
        inner, optional = without_none(hint)
        if value is None and optional:
            continue
        choices = allowed_values(inner)
        if choices is not None:
            if value not in choices or isinstance(value, bool):
                allowed = ", ".join(map(str, choices))
                raise InvalidConfig(f"{f.name}={value!r} must be one of {allowed}", param=f.name)
            continue
        accepted = (int, float) if inner is float else inner
        if not isinstance(value, accepted) or (isinstance(value, bool) and inner is not bool):
            raise InvalidConfig(f"{f.name}={value!r} must be of type {inner.__name__}", param=f.name)
        if f.name in _RANGES:
            low, high = _RANGES[f.name]
            if not low <= value <= high:
                unit = " GiB" if f.name == "kv_offloading_size" else ""
                raise InvalidConfig(
                    f"{f.name}={value:g}{unit} must lie between {low:g} and {high:g}{unit}", param=f.name
                )


def cache_home() -> Path:
    """Folder of downloaded and compiled files: `AIOENGINE_CACHE`, else `XDG_CACHE_HOME`/aioengine or ~/.cache."""
    own = os.environ.get("AIOENGINE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioengine"


SLOW_SWITCHES = (
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_DEBUG",
    "PYTHONASYNCIODEBUG",
    "TORCH_LOGS",
    "TORCH_SHOW_DISPATCH_TRACE",
    "TRITON_DEBUG",
)
"""Environment variables that help to find a hang or a fault, and cost time or flood the log while they are set."""


def slow_switches() -> list[str]:
    """Those of `SLOW_SWITCHES` that are on, as NAME=value."""
    values = ((name, os.environ.get(name, "")) for name in SLOW_SWITCHES)
    return [f"{name}={value}" for name, value in values if value not in ("", "0")]


def hash_root_seed() -> bytes | None:
    """Root of the block hashes from PYTHONHASHSEED, so that processes agree on them; None if it is not set."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return None if seed in ("", "random") else hashlib.sha256(b"aioengine " + seed.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The concrete numbers an engine runs with; made once by `resolve()` and printed at start."""

    device: Literal["cpu", "cuda"]
    num_threads: int
    dtype: Dtype
    kv_cache_dtype: Dtype
    max_model_len: int
    is_max_model_len_given: bool
    """Whether it was asked for, so that it must not be lowered."""
    pool_option: str
    """The option that sizes the KV pool, or would."""
    block_size: int
    kv_offloading_bytes: int
    """Host memory behind the KV pool; 0 for none."""
    hybrid_kv_cache: bool
    """Layers with a window keep no more than it, where others keep everything."""
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_scheduled_tokens: int
    max_num_active_seqs: int
    long_prefill_token_threshold: int
    async_scheduling: bool
    speculation: Speculation | None = None
    """None: there are no drafts."""
    optimization_level: int
    graph_capture: CaptureTime
    graph_sizes: tuple[int, ...] | None
    """Tokens that steps are padded to, ascending; None leaves the choice to the device."""
    attention_backend: Literal["auto", "triton", "cudnn"]
    completion_poll_us: int
    determinism: Literal["none", "offline", "batch-invariant"]

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a request in one step; 0 for no speculation."""
        return 0 if self.speculation is None else self.speculation.num_tokens

    def context_limit(self, model_max_len: int) -> tuple[str, str | None]:
        """What set `max_model_len`, in words, and the option that raises it, if one does."""
        if self.max_model_len >= model_max_len:
            return "the model's context window", None
        if self.is_max_model_len_given:
            return "as configured", "max_model_len"
        return "all that the KV pool holds", self.pool_option


def usable_cores() -> int:
    """Cores this process may run on, also inside a container with an affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve(
    config: EngineConfig, *, model_max_len: int, model_dtype: str, cuda_available: bool, num_cores: int
) -> ResolvedConfig:
    """Fills in every option that was not given. Pure: the same arguments give the same result.

    Args:
        model_max_len: the context window of the checkpoint, tokens.
        model_dtype: the checkpoint's own float type (``float32``, ``bfloat16`` or ``float16``).

    Raises:
        InvalidConfig: the options contradict each other, the model or the hardware.
    """
    device = config.runtime.device
    if device == "auto":
        device = "cuda" if cuda_available else "cpu"
    if device == "cuda" and not cuda_available:
        raise InvalidConfig("device=cuda, but PyTorch sees no CUDA device; use --device cpu", param="device")
    if device == "cpu" and config.runtime.attention_backend != "auto":
        raise InvalidConfig(
            f"attention_backend={config.runtime.attention_backend} is of a GPU; a CPU has its own kernel: use auto",
            param="attention_backend",
        )
    own_dtype = "float32" if device == "cpu" else model_dtype
    dtype = cast(Dtype, own_dtype if config.model.dtype == "auto" else config.model.dtype)
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    on_cpu = device == "cpu"
    if on_cpu:
        _check_cpu_types(dtype, kv_dtype)
    max_model_len = config.model.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise InvalidConfig(
            f"max_model_len={max_model_len} is above the model's context window of {model_max_len}",
            param="max_model_len",
        )
    max_num_seqs = config.scheduler.max_num_seqs or (64 if on_cpu else 512)
    budget = config.scheduler.max_num_batched_tokens or max(512 if on_cpu else 8192, max_num_seqs)
    if budget < max_num_seqs:
        if config.scheduler.max_num_seqs is not None:
            raise InvalidConfig(
                f"max_num_batched_tokens={budget} is below max_num_seqs={max_num_seqs}: "
                "every running request needs one token per step",
                param="max_num_batched_tokens",
            )
        max_num_seqs = budget
    if not config.scheduler.enable_chunked_prefill and budget < max_model_len:
        if config.scheduler.max_num_batched_tokens is not None:
            raise InvalidConfig(
                f"without chunked prefill, max_num_batched_tokens={budget} must reach max_model_len={max_model_len}",
                param="max_num_batched_tokens",
            )
        budget = max_model_len
    if config.scheduler.priority_ageing_s > 0 and config.scheduler.scheduling_policy != "priority":
        raise InvalidConfig(
            f"priority_ageing_s={config.scheduler.priority_ageing_s} needs --scheduling-policy priority",
            param="priority_ageing_s",
        )
    _check_determinism(config, device)
    scheduled_tokens, active_seqs = _inner_limits(config.scheduler, budget, max_num_seqs, max_model_len)
    async_scheduling = config.scheduler.async_scheduling
    level, graph_capture, graph_sizes = _graphs(config.runtime)
    return ResolvedConfig(
        device=device,
        num_threads=config.runtime.num_threads or num_cores,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        max_model_len=max_model_len,
        is_max_model_len_given=config.model.max_model_len is not None,
        pool_option=_pool_option(config.cache, on_cpu),
        block_size=config.cache.block_size,
        kv_offloading_bytes=_kv_offloading_bytes(config),
        hybrid_kv_cache=not config.cache.disable_hybrid_kv_cache_manager,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_num_scheduled_tokens=scheduled_tokens,
        max_num_active_seqs=active_seqs,
        long_prefill_token_threshold=_long_prefill_threshold(config.scheduler, max_model_len),
        async_scheduling=not on_cpu if async_scheduling is None else async_scheduling,
        speculation=parse_speculation(config.scheduler.speculative_config),
        optimization_level=level,
        graph_capture=graph_capture,
        graph_sizes=graph_sizes,
        attention_backend=config.runtime.attention_backend,
        completion_poll_us=config.runtime.completion_poll_us,
        determinism=config.runtime.determinism,
    )


def _pool_option(cache: CacheConfig, on_cpu: bool) -> str:
    for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if getattr(cache, name) is not None:
            return name
    return "kv_cache_memory_bytes" if on_cpu else "gpu_memory_utilization"


def _kv_offloading_bytes(config: EngineConfig) -> int:
    size = config.cache.kv_offloading_size
    if size is None:
        return 0
    for is_off, reason in (
        (not config.cache.enable_prefix_caching, "keeps cached prefixes, and prefix caching is off"),
        (
            config.runtime.determinism == "offline",
            "loads what steps of another shape computed, and determinism=offline promises the same steps for the same "
            "calls",
        ),
    ):
        if is_off:
            raise InvalidConfig(
                f"kv_offloading_size={size:g} {reason}; leave one of them out", param="kv_offloading_size"
            )
    return int(size * GIB)


def _check_cpu_types(dtype: Dtype, kv_cache_dtype: Dtype) -> None:
    for option, value in (("dtype", dtype), ("kv_cache_dtype", kv_cache_dtype)):
        if value != "float32":
            raise InvalidConfig(
                f"{option}={value} is not available on a CPU, which computes in float32; use auto", param=option
            )


def _check_determinism(config: EngineConfig, device: str) -> None:
    """Refuses to promise what the device or other options would break."""
    mode = config.runtime.determinism
    if mode != "none" and device == "cuda":
        reason = (
            "matrix products and attention there sum in an order that depends on the number of rows"
            if mode == "batch-invariant"
            else "which graphs and kernels a step runs there depends on time, and on them the last bits of its results"
        )
        raise InvalidConfig(
            f"determinism={mode} is not available on a GPU: {reason}; use --device cpu or leave it out",
            param="determinism",
        )
    if mode == "offline":
        for name in ("priority_ageing_s", "target_itl_ms"):
            value = getattr(config.scheduler, name)
            if value:
                raise InvalidConfig(
                    f"{name}={value} makes steps depend on the clock, and determinism=offline promises that they do "
                    "not; leave one of them out",
                    param=name,
                )


def _inner_limits(
    scheduler: SchedulerConfig, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> tuple[int, int]:
    """max_num_scheduled_tokens and max_num_active_seqs, each within the limit that memory is sized for."""
    tokens = scheduler.max_num_scheduled_tokens or max_num_batched_tokens
    seqs = scheduler.max_num_active_seqs or max_num_seqs
    if seqs > max_num_seqs:
        raise InvalidConfig(
            f"max_num_active_seqs={seqs} is above max_num_seqs={max_num_seqs}, the rows there are",
            param="max_num_active_seqs",
        )
    if tokens > max_num_batched_tokens:
        raise InvalidConfig(
            f"max_num_scheduled_tokens={tokens} is above max_num_batched_tokens={max_num_batched_tokens}, "
            "the largest step there is",
            param="max_num_scheduled_tokens",
        )
    if tokens < seqs:
        raise InvalidConfig(
            f"max_num_scheduled_tokens={tokens} is below the {seqs} requests that may run: "
            "every running request needs one token per step; lower --max-num-active-seqs or --max-num-seqs",
            param="max_num_scheduled_tokens",
        )
    if not scheduler.enable_chunked_prefill and tokens < max_model_len:
        raise InvalidConfig(
            f"without chunked prefill, max_num_scheduled_tokens={tokens} must reach max_model_len={max_model_len}",
            param="max_num_scheduled_tokens",
        )
    return tokens, seqs


def _long_prefill_threshold(scheduler: SchedulerConfig, max_model_len: int) -> int:
    """long_prefill_token_threshold, after the options that depend on it were checked."""
    threshold, partial = scheduler.long_prefill_token_threshold, scheduler.max_num_partial_prefills
    long = scheduler.max_long_partial_prefills
    if not scheduler.enable_chunked_prefill:
        for name in (
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "target_itl_ms",
        ):
            if getattr(scheduler, name):
                raise InvalidConfig(f"{name}={getattr(scheduler, name)} needs chunked prefill", param=name)
    if threshold == 0 and partial is not None and partial > 1:
        threshold = max(1, max_model_len * 4 // 100)
    if long is not None and partial is not None and long > partial:
        raise InvalidConfig(
            f"max_long_partial_prefills={long} is above max_num_partial_prefills={partial}",
            param="max_long_partial_prefills",
        )
    for name, given in (
        ("max_long_partial_prefills", long),
        ("adaptive_long_prefill_threshold", scheduler.adaptive_long_prefill_threshold),
    ):
        if given and threshold == 0:
            raise InvalidConfig(f"{name} needs long_prefill_token_threshold: it says what a long prompt is", param=name)
    return threshold


def _graphs(runtime: RuntimeConfig) -> tuple[int, CaptureTime, tuple[int, ...] | None]:
    """The level in force, when graphs are captured and for which sizes; explicit flags win over the level."""
    level = 0 if runtime.enforce_eager else runtime.optimization_level
    given = runtime.cudagraph_capture_sizes
    if given is None:
        return level, CAPTURE_TIMES[level], None
    if runtime.enforce_eager:
        raise InvalidConfig(
            "cudagraph_capture_sizes and enforce_eager contradict each other: an eager engine captures nothing",
            param="cudagraph_capture_sizes",
        )
    try:
        sizes = tuple(sorted({int(size) for size in given.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise InvalidConfig(
            f"cudagraph_capture_sizes={given!r} must be numbers of tokens, separated by commas",
            param="cudagraph_capture_sizes",
        )
    return level, CAPTURE_TIMES[max(level, 1)], sizes
