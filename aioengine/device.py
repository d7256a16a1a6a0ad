"""Devices: what can run a model, how much memory it has, and the operations it offers.

A device owns its operations (`Ops`), hands out the KV pool and turns a model into a forward pass, recorded
once and replayed where it can be. It knows nothing of requests: those are the runner's. `startup.py` makes
one per engine, in a thread; the runner closes it.

What a CUDA device adds lives behind the same calls: `ops` from its kernels, `allocate_kv_cache` from what a
profile run left free, `forward_pass` as graphs captured per bucket of tokens, streams and step completion
inside its own runner.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from aioengine.config import CacheConfig, ResolvedConfig, flag_name
from aioengine.errors import InvalidConfig
from aioengine.fastcore import native
from aioengine.kv_layout import KVLayout
from aioengine.layers.context import AttentionMetadata, StepContext
from aioengine.layers.ops import Ops
from aioengine.layers.ops_cpu import CpuForward, CpuOps

if TYPE_CHECKING:
    from aioengine.models import Model

logger = logging.getLogger(__name__)

DEFAULT_POOL_BYTES = 512 << 20
POOL_SHARE = 0.4
"""Most of the available memory that a KV pool takes unless a size was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Where the memory went; printed at start. Set by `loader.py` or `cuda_device.py`."""

    weights_bytes: int
    layout: KVLayout
    """How the layers share the pool."""
    num_blocks: int
    """Blocks of the pool, the null block included."""
    max_model_len: int
    num_host_blocks: int = 0
    """Blocks that fit the tier of host memory behind the pool."""

    @property
    def kv_cache_bytes(self) -> int:
        """The whole pool. On a CPU untouched blocks occupy no memory yet."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return self.layout.bytes_per_token

    @property
    def host_bytes(self) -> int:
        """The host tier. On a CPU untouched blocks occupy no memory yet."""
        return self.num_host_blocks * self.layout.block_bytes

    @property
    def num_host_tokens(self) -> int:
        """Tokens whose KV fits the host tier."""
        return self.num_host_blocks * self.layout.block_size

    @property
    def kv_groups(self) -> str | None:
        """Which layers keep what, if they differ."""
        return str(self.layout) if len(self.layout.groups) > 1 else None

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit the pool, in requests as long as they may be."""
        return self.layout.num_kv_tokens(self.num_blocks - 1, self.max_model_len)


class ForwardPass(Protocol):
    """Computes the hidden states of a step, by replay where the device can record a forward pass."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Sequence[AttentionMetadata]
    ) -> torch.Tensor:
        """[T, H] after the final norm; valid until the next call. Writes the step's keys and values.

        Args:
            attention: by group of the cache's layout.
        """


class EagerForward:
    """Calls the model for every step, one operation after the other."""

    def __init__(
        self, model: Model, kv_caches: Sequence[torch.Tensor], group_of_layer: Sequence[int], ops: Ops
    ) -> None:
        self._model, self._kv_caches, self._group_of_layer, self._ops = model, kv_caches, group_of_layer, ops

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Sequence[AttentionMetadata]
    ) -> torch.Tensor:
        ctx = StepContext(self._ops, attention, self._kv_caches, self._group_of_layer)
        return self._model.forward(input_ids, positions, ctx)


class Device(Protocol):
    """Called from the thread that loads, before any step runs; `close` after the last one."""

    @property
    def ops(self) -> Ops:
        """Operations on this device's tensors and weights."""

    def available_bytes(self) -> int:
        """Memory that could still be taken now."""

    def allocate_kv_cache(self, layout: KVLayout, num_blocks: int) -> list[torch.Tensor]:
        """Per layer [num_blocks, num_kv_heads, block_size, 2 * head_dim], contents undefined.

        Layers of different groups share memory as the layout says.
        """

    def forward_pass(
        self, model: Model, kv_caches: Sequence[torch.Tensor], layout: KVLayout, max_num_tokens: int
    ) -> ForwardPass:
        """The model's forward pass over this cache in the fastest form that the configuration allows."""

    def close(self) -> None:
        """Gives back what the device holds apart from tensors. May be called twice."""


class CpuDevice:
    """The processor this program runs on."""

    def __init__(self, resolved: ResolvedConfig, ops: Ops | None = None) -> None:
        """
        Args:
            ops: other operations than the native ones, for comparison.
        """
        assert resolved.dtype == resolved.kv_cache_dtype == "float32", "resolve() refuses all others"
        native.set_num_threads(resolved.num_threads)
        self._ops = ops if ops is not None else CpuOps()
        self._records = ops is None and resolved.optimization_level > 0

    @property
    def ops(self) -> Ops:
        return self._ops

    def available_bytes(self) -> int:
        return available_memory_bytes()

    def allocate_kv_cache(self, layout: KVLayout, num_blocks: int) -> list[torch.Tensor]:
        shape = (layout.num_tensors, num_blocks, math.prod(layout.page_shape(0)))
        try:
            return layer_caches(torch.empty(shape, dtype=torch.float32).unbind(0), layout)
        except RuntimeError:
            raise InvalidConfig(
                f"there is no memory for a KV pool of {num_blocks} blocks ({4 * math.prod(shape) >> 20} MiB); "
                "lower --kv-cache-memory-bytes or --num-gpu-blocks-override",
                param="kv_cache_memory_bytes",
            ) from None

    def forward_pass(
        self, model: Model, kv_caches: Sequence[torch.Tensor], layout: KVLayout, max_num_tokens: int
    ) -> ForwardPass:
        if self._records:
            return CpuForward(model, kv_caches, layout.group_of_layer, max_num_tokens)
        return EagerForward(model, kv_caches, layout.group_of_layer, self._ops)

    def close(self) -> None:
        native.stop_threads()


def create_device(resolved: ResolvedConfig) -> Device:
    """The device that a configuration resolved to.

    Raises:
        InvalidConfig: it is not available in this build, or cannot do what the configuration asks.
    """
    if resolved.device == "cuda":
        from aioengine.cuda_device import CudaDevice  # Triton's import is only worth its time on a GPU

        return CudaDevice(resolved)
    return CpuDevice(resolved)


def layer_caches(tensors: Sequence[torch.Tensor], layout: KVLayout) -> list[torch.Tensor]:
    """Each layer's view of its tensor of the pool; a tensor is [num_blocks, ...]."""
    places = enumerate(layout.tensor_of_layer)
    return [tensors[i].view(len(tensors[i]), *layout.page_shape(layer)) for layer, i in places]


def most_blocks(layout: KVLayout) -> int:
    """Blocks whose slots an int32 can name."""
    return int((2**31 - 1) // max(layout.block_sizes))


def cpu_num_blocks(layout: KVLayout, resolved: ResolvedConfig, cache: CacheConfig, available_bytes: int) -> int:
    """How many KV blocks a CPU gets: as asked for, else 512 MiB or one full context within 40 % of memory.

    Raises:
        InvalidConfig: not even one block of tokens fits beside the null block, or there are too many blocks.
    """
    asked = asked_blocks(layout, cache)
    if asked is not None:
        return asked
    full_context = (layout.blocks_of(resolved.max_model_len) + 1) * layout.block_bytes
    pool_bytes = min(max(DEFAULT_POOL_BYTES, full_context), int(available_bytes * POOL_SHARE))
    return _blocks_in(pool_bytes, layout)


def asked_blocks(layout: KVLayout, cache: CacheConfig) -> int | None:
    """How many KV blocks were asked for, on whatever device; None if the device is to decide.

    Raises:
        InvalidConfig: not even one block of tokens fits beside the null block, or there are too many blocks.
    """
    if cache.num_gpu_blocks_override is not None:
        most = most_blocks(layout)
        if cache.num_gpu_blocks_override > most:
            raise InvalidConfig(
                f"num_gpu_blocks_override={cache.num_gpu_blocks_override} is above {most}, the most "
                f"for blocks of {max(layout.block_sizes)} tokens",
                param="num_gpu_blocks_override",
            )
        return cache.num_gpu_blocks_override
    return None if cache.kv_cache_memory_bytes is None else _blocks_in(cache.kv_cache_memory_bytes, layout)


def _blocks_in(pool_bytes: int, layout: KVLayout) -> int:
    num_blocks = min(pool_bytes // layout.block_bytes, most_blocks(layout))
    if num_blocks < 2:
        raise InvalidConfig(
            f"a KV pool of {pool_bytes} bytes holds fewer than two blocks of {layout.block_bytes} bytes; "
            "raise --kv-cache-memory-bytes or lower --block-size",
            param="kv_cache_memory_bytes",
        )
    return int(num_blocks)


def limit_context(resolved: ResolvedConfig, num_tokens: int) -> ResolvedConfig:
    """The configuration with `max_model_len` lowered to what a KV pool of `num_tokens` holds, unless it was asked for.

    Raises:
        InvalidConfig: it was asked for and does not fit, or not even one token does.
    """
    if num_tokens >= resolved.max_model_len:
        return resolved
    remedy = flag_name(resolved.pool_option)
    if num_tokens < 1:
        raise InvalidConfig(
            f"the KV pool does not hold one block for every group of layers; raise {remedy}",
            param=resolved.pool_option,
        )
    if resolved.is_max_model_len_given:
        raise InvalidConfig(
            f"max_model_len={resolved.max_model_len} does not fit: the KV pool holds {num_tokens} tokens; "
            f"lower --max-model-len or raise {remedy}",
            param="max_model_len",
        )
    logger.warning(
        "the KV pool holds %d tokens, so max_model_len is %d instead of the model's %d; %s makes the pool larger",
        num_tokens,
        num_tokens,
        resolved.max_model_len,
        remedy,
    )
    return dataclasses.replace(resolved, max_model_len=num_tokens)


def processor_name() -> str:
    """The processor as its maker calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def available_memory_bytes() -> int:
    """Memory this process could still take: the system's, or less under a control group's limit."""
    meminfo = Path("/proc/meminfo")
    available = 8 << 30
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        available = min(available, max(left, 0))
    return available
