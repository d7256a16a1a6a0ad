"""Options that nothing could be run with are refused before anything is fetched, opened or even imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from aioengine import startup
from aioengine.config import EngineConfig
from aioengine.engine import AsyncEngine
from aioengine.errors import InvalidConfig
from aioengine.preflight import check_options

ZMQ = '{"enable_kv_cache_events": true, "publisher": "zmq"}'

ALWAYS: list[tuple[dict[str, object], str]] = [
    ({"cudagraph_capture_sizes": "a,b"}, "cudagraph_capture_sizes"),
    ({"device": "cuda", "cudagraph_capture_sizes": "a,b"}, "cudagraph_capture_sizes"),
    ({"chat_template": "nope.jinja"}, "chat_template"),
    ({"chat_template": "{tmp}/broken.jinja"}, "chat_template"),
    ({"kv_events_config": ZMQ}, "kv_events_config"),
    ({"device": "cpu", "dtype": "bfloat16"}, "dtype"),
    ({"device": "cpu", "kv_cache_dtype": "float16"}, "kv_cache_dtype"),
    ({"device": "cuda", "determinism": "batch-invariant"}, "determinism"),
    ({"max_num_seqs": 4, "max_num_active_seqs": 5}, "max_num_active_seqs"),
    ({"priority_ageing_s": 1.0}, "priority_ageing_s"),
    ({"speculative_config": '{"method": "eagle3"}'}, "speculative_config"),
]
WITHOUT_A_GPU: list[tuple[dict[str, object], str]] = [({"device": "cuda"}, "device"), ({"dtype": "bfloat16"}, "dtype")]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Templates, and a machine without pyzmq."""
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    (tmp_path / "good.jinja").write_text("{{ messages[0].content }}")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "zmq" else find(name, *a))
    return tmp_path


def config_of(options: dict[str, object], folder: Path) -> EngineConfig:
    return EngineConfig(**{k: v.replace("{tmp}", str(folder)) if isinstance(v, str) else v for k, v in options.items()})


@pytest.mark.parametrize(("options", "param"), ALWAYS)
def test_what_no_machine_can_do_is_refused_before_the_gpu_is_looked_for(
    files: Path, options: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        check_options(config_of(options, files), cuda_available=None)
    assert caught.value.param == param


@pytest.mark.parametrize(("options", "param"), WITHOUT_A_GPU)
def test_what_needs_a_gpu_is_refused_when_there_is_none(files: Path, options: dict[str, object], param: str) -> None:
    config = config_of(options, files)
    check_options(config, cuda_available=None)
    check_options(config, cuda_available=True)
    with pytest.raises(InvalidConfig) as caught:
        check_options(config, cuda_available=False)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chat_template": "{tmp}/good.jinja"},
        {"max_model_len": 100_000},
        {"max_model_len": 100, "enable_chunked_prefill": False, "max_num_batched_tokens": 100, "max_num_seqs": 4},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"max_num_partial_prefills": 2, "max_long_partial_prefills": 1},
        {"kv_cache_memory_bytes": 1000},
    ],
)
@pytest.mark.parametrize("cuda_available", [None, False, True])
def test_what_only_the_model_can_tell_passes(
    files: Path, options: dict[str, object], cuda_available: bool | None
) -> None:
    check_options(config_of(options, files), cuda_available=cuda_available)


@pytest.mark.parametrize("options", [options for options, _ in [*ALWAYS, *WITHOUT_A_GPU]])
async def test_an_engine_looks_for_no_model_before(
    files: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(startup, "resolve_model", None)  # calling it would be another error
    with pytest.raises(InvalidConfig):
        await AsyncEngine(config_of(options, files)).start()
