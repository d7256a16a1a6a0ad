"""How options are checked and completed, without any model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aioengine.config import SLOW_SWITCHES, EngineConfig, ResolvedConfig, resolve, slow_switches
from aioengine.errors import InvalidConfig


def resolved(**options: object) -> ResolvedConfig:
    return resolve(
        EngineConfig(**options), model_max_len=4096, model_dtype="bfloat16", cuda_available=False, num_cores=2
    )


def test_inner_limits_default_to_the_outer_ones() -> None:
    config = resolved(max_num_seqs=7, max_num_batched_tokens=300)
    assert (config.max_num_active_seqs, config.max_num_scheduled_tokens) == (7, 300)
    config = resolved(max_num_seqs=7, max_num_active_seqs=3, max_num_scheduled_tokens=100)
    assert (config.max_num_active_seqs, config.max_num_scheduled_tokens) == (3, 100)


@pytest.mark.parametrize(
    ("options", "threshold"),
    [
        ({}, 0),
        ({"long_prefill_token_threshold": 99}, 99),
        ({"max_num_partial_prefills": 1}, 0),
        ({"max_num_partial_prefills": 2}, 163),
        ({"max_num_partial_prefills": 2, "max_long_partial_prefills": 1}, 163),
        ({"max_num_partial_prefills": 2, "max_model_len": 10}, 1),
        ({"max_num_partial_prefills": 4, "long_prefill_token_threshold": 50}, 50),
    ],
)
def test_several_unfinished_prompts_need_a_threshold_and_get_one(options: dict[str, object], threshold: int) -> None:
    assert resolved(**options).long_prefill_token_threshold == threshold


WHOLE = {"enable_chunked_prefill": False}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"max_num_seqs": 4, "max_num_active_seqs": 5}, "max_num_active_seqs", "above max_num_seqs=4"),
        ({"max_num_scheduled_tokens": 600}, "max_num_scheduled_tokens", "above max_num_batched_tokens=512"),
        ({"max_num_scheduled_tokens": 63}, "max_num_scheduled_tokens", "below the 64 requests that may run"),
        (
            {**WHOLE, "max_num_scheduled_tokens": 512, "max_num_batched_tokens": 4096},
            "max_num_scheduled_tokens",
            "must reach max_model_len=4096",
        ),
        ({**WHOLE, "long_prefill_token_threshold": 5}, "long_prefill_token_threshold", "needs chunked prefill"),
        ({**WHOLE, "max_num_partial_prefills": 5}, "max_num_partial_prefills", "needs chunked prefill"),
        ({**WHOLE, "target_itl_ms": 20.0}, "target_itl_ms", "needs chunked prefill"),
        ({"target_itl_ms": 0.0}, "target_itl_ms", "must lie between 0.1 and 600000"),
        ({"max_long_partial_prefills": 1}, "max_long_partial_prefills", "needs long_prefill_token_threshold"),
        ({"adaptive_long_prefill_threshold": True}, "adaptive_long_prefill_threshold", "needs long_prefill_token_"),
        (
            {"max_long_partial_prefills": 3, "max_num_partial_prefills": 2},
            "max_long_partial_prefills",
            "above max_num_partial_prefills=2",
        ),
        ({"priority_ageing_s": 5.0}, "priority_ageing_s", "needs --scheduling-policy priority"),
        ({"watermark": 1.0}, "watermark", "must lie between 0 and 0.99"),
        ({"watermark": float("nan")}, "watermark", "must lie between 0 and 0.99"),
    ],
)
def test_scheduler_options_that_contradict_each_other_are_refused(
    options: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        resolved(**options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "level", "capture", "sizes"),
    [
        ({}, 2, "idle", None),
        ({"optimization_level": 0}, 0, "never", None),
        ({"optimization_level": 1}, 1, "first use", None),
        ({"optimization_level": 3}, 3, "start", None),
        ({"optimization_level": 3, "enforce_eager": True}, 0, "never", None),
        ({"optimization_level": 0, "cudagraph_capture_sizes": "8, 1,8"}, 0, "first use", (1, 8)),
        ({"optimization_level": 3, "cudagraph_capture_sizes": "64"}, 3, "start", (64,)),
    ],
)
def test_flags_win_over_the_optimization_level(
    options: dict[str, object], level: int, capture: str, sizes: tuple[int, ...] | None
) -> None:
    config = resolved(**options)
    assert (config.optimization_level, config.graph_capture, config.graph_sizes) == (level, capture, sizes)


def test_what_helps_debugging_and_costs_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """P8."""
    for name in SLOW_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert slow_switches() == []
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("TRITON_DEBUG", "0")
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    assert slow_switches() == ["CUDA_LAUNCH_BLOCKING=1", "NCCL_DEBUG=TRACE"]


@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_an_attention_backend_is_of_a_gpu(backend: str) -> None:
    """F5: chosen by name or by the engine; what cannot be had is refused."""
    given = EngineConfig(model="m", attention_backend=backend)
    sizes = {"model_max_len": 4096, "model_dtype": "bfloat16", "num_cores": 1}
    assert resolve(given, cuda_available=True, **sizes).attention_backend == backend
    with pytest.raises(InvalidConfig, match=f"attention_backend={backend} is of a GPU"):
        resolve(given, cuda_available=False, **sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_capture_sizes": "8", "enforce_eager": True}, "contradict"),
        ({"cudagraph_capture_sizes": "8,x"}, "numbers of tokens"),
        ({"cudagraph_capture_sizes": "0,8"}, "numbers of tokens"),
        ({"cudagraph_capture_sizes": ""}, "numbers of tokens"),
    ],
)
def test_sizes_that_cannot_be_captured_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        resolved(**options)
    assert caught.value.param == "cudagraph_capture_sizes"


@pytest.mark.parametrize(
    ("options", "held", "limit"),
    [
        ({}, 4096, ("the model's context window", None)),
        ({"max_model_len": 4096, "num_gpu_blocks_override": 9}, 4096, ("the model's context window", None)),
        ({"max_model_len": 100}, 100, ("as configured", "max_model_len")),
        ({}, 100, ("all that the KV pool holds", "kv_cache_memory_bytes")),
        ({"kv_cache_memory_bytes": 9}, 100, ("all that the KV pool holds", "kv_cache_memory_bytes")),
        (
            {"kv_cache_memory_bytes": 9, "num_gpu_blocks_override": 9},
            100,
            ("all that the KV pool holds", "num_gpu_blocks_override"),
        ),
    ],
)
def test_what_limits_the_context_is_known(options: dict[str, object], held: int, limit: tuple[str, str | None]) -> None:
    config = replace(resolved(**options), max_model_len=held)  # as lowered to what the pool holds
    assert config.context_limit(4096) == limit


def test_a_gpu_s_pool_is_sized_by_its_share_of_memory() -> None:
    for options, option in (({}, "gpu_memory_utilization"), ({"kv_cache_memory_bytes": 9}, "kv_cache_memory_bytes")):
        made = resolve(
            EngineConfig(**options), model_max_len=4096, model_dtype="bfloat16", cuda_available=True, num_cores=2
        )
        assert made.pool_option == option
