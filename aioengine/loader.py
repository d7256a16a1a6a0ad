"""From an opened checkpoint to a runner that takes steps: device, weights, KV pool, in that order.

Blocking; called in a thread by `startup.py`. Each stage is timed, and a failure leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aioengine.checkpoint import Checkpoint, ModelSpec, tensor_shapes
from aioengine.config import CacheConfig, ResolvedConfig
from aioengine.device import Device, MemoryReport, cpu_num_blocks
from aioengine.host_pages import CpuPages
from aioengine.kv_host_tier import KVHostTier, num_host_blocks
from aioengine.kv_layout import KVLayout
from aioengine.layers.rotary import cos_sin_table
from aioengine.models import Model, model_class
from aioengine.runner import CpuRunner, Runner
from aioengine.weights import load_weights

Progress = Callable[[int, int], None]
"""Told how many bytes of weights are loaded, of how many."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on a device."""

    model: Model
    spec: ModelSpec
    weights_bytes: int
    timings_s: Mapping[str, float]
    """Seconds per stage: weights, rotary."""


def load_model(
    checkpoint: Checkpoint,
    resolved: ResolvedConfig,
    device: Device,
    progress: Progress = lambda done, total: None,
) -> LoadedModel:
    """Packs a checkpoint's weights for a device and makes the model that computes with them.

    Raises:
        ModelLoadError: an unsupported architecture or rotary scaling, or tensors that do not fit the model.
    """
    spec = checkpoint.config
    family = model_class(spec.architecture)
    total = sum(raw.nbytes for raw in checkpoint.tensors().values())
    done = 0

    def on_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    begun = time.perf_counter()
    cos_sin = device.ops.table(
        cos_sin_table(
            rotary_dim=spec.rotary_dim,
            theta=spec.rope_theta,
            scaling=spec.rope_scaling,
            max_position_embeddings=spec.max_position_embeddings,
            num_positions=resolved.max_model_len,
        )
    )
    made_table = time.perf_counter()
    weights = load_weights(checkpoint.weights(), family.weight_slots(spec), tensor_shapes(spec), device.ops, on_bytes)
    model = family(spec, weights, cos_sin)
    timings_s = {"rotary": made_table - begun, "weights": time.perf_counter() - made_table}
    return LoadedModel(model, spec, weights.nbytes + cos_sin.nbytes, timings_s)


def make_runner(
    loaded: LoadedModel, layout: KVLayout, resolved: ResolvedConfig, cache: CacheConfig, device: Device
) -> Runner:
    """Allocates the KV pool and starts the runner, which then owns the device.

    Raises:
        InvalidConfig: the pool would be too small for a single block, or there is no memory for the host tier.
    """
    spec = loaded.spec
    if resolved.device == "cuda":
        from aioengine.cuda_device import CudaDevice, make_cuda_runner

        assert isinstance(device, CudaDevice)
        return make_cuda_runner(loaded.model, spec, loaded.weights_bytes, layout, resolved, cache, device)
    num_blocks = cpu_num_blocks(layout, resolved, cache, device.available_bytes())
    num_slots = num_host_blocks(layout, resolved)
    memory = MemoryReport(
        weights_bytes=loaded.weights_bytes,
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=resolved.max_model_len,
        num_host_blocks=num_slots,
    )
    kv_caches = device.allocate_kv_cache(layout, num_blocks)
    runner = CpuRunner(
        loaded.model,
        device,
        kv_caches,
        memory,
        vocab_size=spec.vocab_size,
        max_num_seqs=resolved.max_num_seqs,
        max_num_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        connector=KVHostTier(CpuPages(layout, num_slots, kv_caches), num_slots) if num_slots else None,
    )
    runner.warm_up()
    return runner
