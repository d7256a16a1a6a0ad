"""How large the KV pool becomes, what a CPU refuses, and what it reports."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest

from aioengine.config import CacheConfig, EngineConfig, ResolvedConfig, resolve
from aioengine.device import CpuDevice, available_memory_bytes, cpu_num_blocks, limit_context
from aioengine.errors import InvalidConfig
from aioengine.kv_layout import layout_of
from aioengine.model_spec import ModelSpec

GIB = 1 << 30
SPEC = ModelSpec(
    name="m",
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rotary_dim=64,
    max_position_embeddings=1 << 20,
    context_length=1 << 20,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    layer_windows=(None,) * 4,
    dtype="float32",
)
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
BLOCK_BYTES = 16 * TOKEN_BYTES


def resolved_for(max_model_len: int, **options: object) -> tuple[CacheConfig, ResolvedConfig]:
    config = EngineConfig(max_model_len=max_model_len, device="cpu", **options)
    resolved = resolve(config, model_max_len=1 << 20, model_dtype="bfloat16", cuda_available=False, num_cores=2)
    return config.cache, resolved


def blocks(max_model_len: int, available_bytes: int, **options: object) -> int:
    cache, resolved = resolved_for(max_model_len, **options)
    return cpu_num_blocks(layout_of(SPEC, resolved), resolved, cache, available_bytes)


def test_a_token_costs_its_keys_and_values_in_every_layer() -> None:
    assert layout_of(SPEC, resolved_for(1024)[1]).bytes_per_token == TOKEN_BYTES


def test_the_pool_is_half_a_gibibyte_by_default() -> None:
    assert blocks(1024, 64 * GIB) == 512 * (1 << 20) // BLOCK_BYTES


def test_the_pool_holds_one_full_context_beside_the_null_block() -> None:
    assert blocks(200_000, 64 * GIB) == 200_000 // 16 + 1


def test_the_pool_takes_no_more_than_its_share_of_the_memory_at_hand() -> None:
    assert blocks(1 << 20, 10 * GIB) == 4 * GIB // BLOCK_BYTES
    assert blocks(1024, GIB) == int(0.4 * GIB) // BLOCK_BYTES


def test_a_size_that_was_asked_for_is_taken() -> None:
    assert blocks(1024, GIB, num_gpu_blocks_override=7) == 7
    assert blocks(1024, GIB, kv_cache_memory_bytes=10 * BLOCK_BYTES + 5) == 10
    assert blocks(1024, GIB, kv_cache_memory_bytes=10 * BLOCK_BYTES, num_gpu_blocks_override=7) == 7


@pytest.mark.parametrize(("device", "remedy"), [("cpu", "--kv-cache-memory-bytes"), ("cuda", "--gpu-memory-util")])
def test_a_context_is_lowered_to_the_pool_unless_it_was_asked_for(
    device: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, asked = resolved_for(1000)
    option = {"cpu": "kv_cache_memory_bytes", "cuda": "gpu_memory_utilization"}[device]
    asked = replace(asked, device=device, pool_option=option)
    assert limit_context(asked, 1000) is asked
    with pytest.raises(InvalidConfig, match=f"max_model_len=1000 .* holds 999 tokens.*{remedy}"):
        limit_context(asked, 999)
    assert not caplog.records
    left = replace(asked, is_max_model_len_given=False)
    assert limit_context(left, 999).max_model_len == 999
    assert remedy in caplog.text and "999 instead of the model's 1000" in caplog.text
    with pytest.raises(InvalidConfig, match=f"one block for every group of layers; raise {remedy}"):
        limit_context(left, 0)


def test_a_pool_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="kv-cache-memory-bytes"):
        blocks(1024, GIB, kv_cache_memory_bytes=2 * BLOCK_BYTES - 1)


def test_more_slots_than_an_index_can_name_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="num_gpu_blocks_override"):
        blocks(1024, GIB, num_gpu_blocks_override=2**31 // 16)


@pytest.mark.parametrize("option", ["dtype", "kv_cache_dtype"])
def test_types_that_the_cpu_does_not_compute_in_are_refused(option: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{option}=float16 is not available on a CPU") as caught:
        resolved_for(1024, **{option: "float16"})
    assert caught.value.param == option


def test_the_kv_cache_has_the_contracts_shape_and_costs_nothing_untouched() -> None:
    _, resolved = resolved_for(1024)
    before = psutil.Process().memory_info().rss
    caches = CpuDevice(resolved).allocate_kv_cache(layout_of(SPEC, resolved), GIB // BLOCK_BYTES)
    assert psutil.Process().memory_info().rss - before < GIB // 4
    assert len(caches) == 4 and sum(cache.nbytes for cache in caches) == GIB
    assert caches[0].shape == (GIB // BLOCK_BYTES, 2, 16, 128) and caches[0].is_contiguous()


def test_memory_at_hand_is_known() -> None:
    assert (1 << 20) < available_memory_bytes() < (1 << 50)


def test_a_pool_that_no_memory_holds_is_told_by_its_size() -> None:
    _, resolved = resolved_for(1000)
    device = CpuDevice(resolved)
    try:
        with pytest.raises(InvalidConfig, match=r"no memory for a KV pool of 2147483647 blocks .* MiB"):
            large = replace(SPEC, num_layers=1000, layer_windows=(None,) * 1000)
            device.allocate_kv_cache(layout_of(large, resolved), 2**31 - 1)
    finally:
        device.close()
