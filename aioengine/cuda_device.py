"""A GPU: its operations, its memory, and how the KV pool is sized from what a profile run leaves free.

Imported only when a configuration resolves to cuda. `CudaDevice` is made by `device.py`, `make_cuda_runner` is
called by `loader.py`, both in the thread that loads.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence

import torch

from aioengine.buckets import token_buckets
from aioengine.config import CacheConfig, ResolvedConfig
from aioengine.cuda_pages import CudaPages, staging_bytes
from aioengine.cuda_runner import CudaRunner
from aioengine.device import (
    EagerForward,
    ForwardPass,
    MemoryReport,
    layer_caches,
    limit_context,
    most_blocks,
)
from aioengine.errors import InvalidConfig
from aioengine.fastcore import native, step_buffer
from aioengine.graphs import StepForward
from aioengine.kernels.jit import unavailable_reason
from aioengine.kv_host_tier import KVHostTier, num_host_blocks
from aioengine.kv_layout import KVLayout
from aioengine.layers.ops_cuda import CudaOps
from aioengine.model_spec import ModelSpec
from aioengine.models import Model

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

GRAPH_RESERVE_BYTES = 1 << 30
"""Kept free for captured graphs and for what libraries allocate at their first use."""


_free_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
"""Streams of closed devices. Libraries keep a workspace for every stream, so streams are used again."""


class CudaDevice:
    """The current GPU. All work runs on `stream`, which no other open device has."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        """
        Raises:
            InvalidConfig: a type the kernels do not compute with, or no Triton or CUDA driver to run them.
        """
        if resolved.dtype not in DTYPES:
            raise InvalidConfig(
                f"dtype={resolved.dtype} is not available on a GPU, which computes in 16 bits; "
                "use --dtype bfloat16 or float16",
                param="dtype",
            )
        if resolved.kv_cache_dtype != resolved.dtype:
            raise InvalidConfig(
                f"kv_cache_dtype={resolved.kv_cache_dtype} is not available beside dtype={resolved.dtype}; use auto",
                param="kv_cache_dtype",
            )
        if resolved.block_size & (resolved.block_size - 1):
            raise InvalidConfig(f"block_size={resolved.block_size} must be a power of two on a GPU", param="block_size")
        self.device = torch.device("cuda", torch.cuda.current_device())
        reason = unavailable_reason(self.device) or native.completion_unavailable()
        if reason is not None:
            raise InvalidConfig(f"device=cuda cannot be used: {reason}", param="device")
        self.dtype = DTYPES[resolved.dtype]
        free = _free_streams.setdefault(self.device, [])
        self.stream = free.pop() if free else torch.cuda.Stream(self.device)
        self._is_open = True
        self._ops = CudaOps(self.device, self.dtype)

    @property
    def ops(self) -> CudaOps:
        return self._ops

    def available_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def allocate_kv_cache(self, layout: KVLayout, num_blocks: int) -> list[torch.Tensor]:
        shape = (num_blocks, math.prod(layout.page_shape(0)))
        tensors = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(layout.num_tensors)]
        return layer_caches(tensors, layout)

    def forward_pass(
        self, model: Model, kv_caches: Sequence[torch.Tensor], layout: KVLayout, max_num_tokens: int
    ) -> ForwardPass:
        """Eager: what is replayed is the whole step, unpacking and choice included (`graphs.py`)."""
        return EagerForward(model, kv_caches, layout.group_of_layer, self._ops)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            _free_streams[self.device].append(self.stream)
        gc.collect()  # a model and its layers may refer to each other
        torch.cuda.empty_cache()


def make_cuda_runner(
    model: Model,
    spec: ModelSpec,
    weights_bytes: int,
    layout: KVLayout,
    resolved: ResolvedConfig,
    cache: CacheConfig,
    device: CudaDevice,
) -> CudaRunner:
    """Profiles the largest step, gives the KV pool what is left, captures the decode graphs.

    Raises:
        InvalidConfig: the pool would not hold one request of `max_model_len`, or there is no memory for the host tier.
    """
    torch.cuda.synchronize(device.device)  # weights were filled on the default stream
    max_in_flight = 2 if resolved.async_scheduling else 1
    max_blocks = -(-resolved.max_model_len // resolved.block_size)
    ring = step_buffer.StepBuffer(
        1,
        resolved.max_num_seqs,
        resolved.max_num_batched_tokens,
        resolved.block_size,
        max_blocks * len(layout.groups),
        len(layout.groups),
    ).ring
    kv_caches = device.allocate_kv_cache(layout, 2)
    with torch.no_grad(), torch.cuda.stream(device.stream):
        forward = StepForward(
            model,
            spec,
            device.ops,
            kv_caches,
            layout=layout,
            max_num_seqs=resolved.max_num_seqs,
            max_blocks=max_blocks,
            buffer_words=ring.shape[1],
            buckets=_buckets(resolved),
            num_speculative_tokens=resolved.num_speculative_tokens,
            uses_cudnn=resolved.attention_backend != "triton",
        )
        check_attention(resolved.attention_backend, forward.cudnn_refusal)
        forward.compile_ahead(resolved.max_num_batched_tokens)
        num_blocks = cache.num_gpu_blocks_override or _num_blocks(spec, layout, forward, resolved, cache, device)
        resolved = limit_context(resolved, layout.longest_request(num_blocks - 1))
        kv_caches[:] = device.allocate_kv_cache(layout, num_blocks)
        connector = _host_tier(layout, resolved, kv_caches, device)
    memory = MemoryReport(
        weights_bytes=weights_bytes,
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=resolved.max_model_len,
        num_host_blocks=num_host_blocks(layout, resolved),
    )
    logger.info(
        "attention: paged Triton kernel%s",
        f" alone ({forward.cudnn_refusal})" if forward.cudnn_refusal else ", cuDNN for long prefill chunks",
    )
    runner = CudaRunner(
        model,
        forward,
        device,
        memory,
        device.stream,
        vocab_size=spec.vocab_size,
        max_num_seqs=resolved.max_num_seqs,
        max_in_flight=max_in_flight,
        max_chunk=min(resolved.max_num_batched_tokens, resolved.max_model_len),
        poll_us=resolved.completion_poll_us,
        capture=resolved.graph_capture,
        connector=connector,
    )
    runner.warm_up()
    return runner


def _host_tier(
    layout: KVLayout, resolved: ResolvedConfig, kv_caches: Sequence[torch.Tensor], device: CudaDevice
) -> KVHostTier | None:
    """The tier that was asked for, its kernels compiled."""
    num_slots = num_host_blocks(layout, resolved)
    if not num_slots:
        return None
    pages = CudaPages(layout, num_slots, kv_caches, device.stream)
    pages.warm_up()
    return KVHostTier(pages, num_slots)


def check_attention(backend: str, cudnn_refusal: str | None) -> None:
    """
    Raises:
        InvalidConfig: cuDNN was asked for by name, and there is a reason why it cannot be had.
    """
    if backend == "cudnn" and cudnn_refusal is not None:
        raise InvalidConfig(
            f"attention_backend=cudnn cannot be had: {cudnn_refusal}; use auto", param="attention_backend"
        )


def _buckets(resolved: ResolvedConfig) -> tuple[int, ...]:
    """Sizes that steps are padded to; none at -O0."""
    if resolved.graph_capture == "never":
        return ()
    largest = max(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    if resolved.graph_sizes is not None:
        return (*(size for size in resolved.graph_sizes if size < largest), largest)
    return token_buckets(resolved.max_num_seqs, resolved.max_num_batched_tokens)


def _num_blocks(
    spec: ModelSpec,
    layout: KVLayout,
    forward: StepForward,
    resolved: ResolvedConfig,
    cache: CacheConfig,
    device: CudaDevice,
) -> int:
    """Blocks of the pool: the size asked for, else what the largest step leaves of the allowed share."""
    pool_bytes = cache.kv_cache_memory_bytes
    if pool_bytes is None:
        torch.cuda.reset_peak_memory_stats(device.device)
        before = torch.cuda.memory_allocated(device.device)
        forward.profile(resolved.max_num_batched_tokens)
        device.stream.synchronize()
        peak = torch.cuda.max_memory_allocated(device.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device.device)
        others = total - free - torch.cuda.memory_reserved(device.device)
        # cuDNN's path gathers the keys and values of a whole context, twice over while it copies.
        gathered = 3 * resolved.max_model_len * spec.num_kv_heads * 2 * spec.head_dim * device.dtype.itemsize
        allowed = int(total * cache.gpu_memory_utilization)
        # Captured graphs keep the activations of the largest step once more, in a pool of their own.
        staged = staging_bytes(layout, num_host_blocks(layout, resolved))
        pool_bytes = allowed - others - peak - (peak - before) - gathered - staged - GRAPH_RESERVE_BYTES
    num_blocks = min(pool_bytes // layout.block_bytes, most_blocks(layout))
    if num_blocks < 2:
        raise InvalidConfig(
            f"{pool_bytes} bytes are left for a KV pool of blocks of {layout.block_bytes} bytes; raise "
            "--gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs",
            param="gpu_memory_utilization",
        )
    return int(num_blocks)
