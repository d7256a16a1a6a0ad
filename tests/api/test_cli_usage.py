"""What the command says to a line it cannot run: whose line it was, what was meant, and no more than that."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aioengine.bench.main import make_parser as make_bench_parser
from aioengine.cli import EXIT_FAILED, EXIT_USAGE, main, make_parser
from aioengine.cli.flags import engine_config, flag_name
from aioengine.cli.parser import REMARKS, UNSUPPORTED, whole_number
from aioengine.config import GROUPS, ServerConfig, option_fields

NAMING = "(PROMPT | --token-ids IDS | --messages FILE"


@pytest.mark.parametrize(
    ("line", "usage", "error"),
    [
        ("serve --prot 1", "serve [MODEL] [options]", " serve: error: there is no option --prot; did you mean --port?"),
        ("chat --prot=1", "chat [MODEL] [options]", " chat: error: there is no option --prot"),
        ("info --xyzzy", "info [MODEL] [options]", " info: error: there is no option --xyzzy"),
        ("serve a b", "serve [MODEL] [options]", " serve: error: too many arguments: 'b'"),
        (
            "serve --tensor-parallel-size 2 --prot 1",
            "serve [MODEL] [options]",
            " serve: error: --tensor-parallel-size is not supported yet; there is no option --prot; "
            "did you mean --port?",
        ),
        (
            "serve --trust_remote_code",
            "serve [MODEL] [options]",
            " serve: error: --trust_remote_code is not supported yet: nothing that comes with a model is run",
        ),
        (
            "generate",
            "generate (PROMPT | --file FILE) [options]",
            " generate: error: one of the arguments PROMPT --file is required",
        ),
        (
            "generate smollm2 Hello",
            "generate (PROMPT | --file FILE) [options]",
            " generate: error: too many arguments: 'Hello'; one PROMPT is taken, in quotes; the model is named with "
            "--model MODEL",
        ),
        (
            "bench latency smollm2",
            "bench latency [options]",
            " bench latency: error: too many arguments: 'smollm2'; the model is named with --model MODEL",
        ),
        ("bench core x", "bench core [options]", " bench core: error: too many arguments: 'x'"),
        (
            "bench latncy",
            "bench BENCHMARK [options]",
            " bench: error: argument BENCHMARK: 'latncy' is none of latency, throughput, transformers, speculation, "
            "core, replay; did you mean latency?",
        ),
        (
            "bench replay --budget-s 1",
            "bench replay [TRACE ...] [options]",
            " bench replay: error: there is no option --budget-s; did you mean --budgets?",
        ),
        (
            "cache lease a b --ttl-s 3",
            f"cache lease {NAMING}) --ttl-s SECONDS [options]",
            " cache lease: error: too many arguments: 'b'; one PROMPT is taken, in quotes",
        ),
        (
            "cache evict --stat 4 x",
            f"cache evict {NAMING} | --all --cache-salt SALT) [options]",
            " cache evict: error: there is no option --stat; did you mean --start?",
        ),
        (
            "srve",
            "COMMAND [options]",
            ": error: argument COMMAND: 'srve' is none of serve, chat, generate, info, cache, bench; "
            "did you mean serve?",
        ),
        ("flags x", "flags [options]", " flags: error: too many arguments: 'x'"),
        (
            "serve --dtype float15",
            "serve [MODEL] [options]",
            " serve: error: argument --dtype: 'float15' is none of auto, float32, bfloat16, float16; "
            "did you mean float16?",
        ),
    ],
)
def test_a_wrong_line_gets_one_line_of_usage_and_one_of_error(
    line: str, usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == EXIT_USAGE
    first, second, *rest = capsys.readouterr().err.splitlines()
    assert (first, rest) == (f"usage: aioengine {usage}", [])
    assert second == f"aioengine{error}"


def test_flags_said_to_be_unsupported_are_no_options() -> None:
    options = {flag_name(field.name) for cls in (*GROUPS.values(), ServerConfig) for field, _ in option_fields(cls)}
    assert not UNSUPPORTED & options
    assert set(REMARKS) <= UNSUPPORTED
    asked = (
        "tensor-parallel-size pipeline-parallel-size trust-remote-code disable-log-requests quantization enable-lora"
    )
    asked += " speculative-model swap-space cpu-offload-gb"
    assert {f"--{name}" for name in asked.split()} <= UNSUPPORTED


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8192", 8192),
        ("-1", -1),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25600),
        ("2m", 2_000_000),
        ("2M", 2 << 20),
        ("1g", 10**9),
        ("1G", 1 << 30),
        ("1t", 10**12),
        ("1T", 1 << 40),
    ],
)
def test_numbers_may_end_in_a_unit(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "8q", "8kk", "8 k b", "1.5", "1.5K", "-1k", "1e3", "8kB", "\u0664k8"])
def test_other_numbers_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no whole number; write 8192, 8k .8000. or 8K .8192."):
        whole_number(text)


def test_units_reach_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    line = "serve --max-model-len 4K --kv-cache-memory-bytes 1G --max-num-batched-tokens 2k"
    config = engine_config(make_parser().parse_args(line.split()))
    assert config.model.max_model_len == 4096
    assert config.cache.kv_cache_memory_bytes == 1 << 30
    assert config.scheduler.max_num_batched_tokens == 2000
    assert make_parser().parse_args(["generate", "x", "--max-tokens", "1k"]).max_tokens == 1000
    with pytest.raises(SystemExit):
        main(["serve", "--max-model-len", "8q"])
    assert "argument --max-model-len: '8q' is no whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("serve", ["--model MODEL", "N may end in k, m, g"]),
        ("chat", ["--model MODEL", "N may end in k, m, g"]),
        ("info", ["--model MODEL", "N may end in k, m, g"]),
        ("generate", ["--model TEXT", "N may end in k, m, g"]),
        ("bench latency", ["--model TEXT", "N may end in k, m, g"]),
        ("bench speculation", ["--model TEXT", "--concurrency", "--speculative-config JSON"]),
        ("bench replay", ['{"token_ids": [...]', '{"hash_ids": [...]', "--hash-block-size"]),
        ("cache", ["--url URL", "evict", "prewarm"]),
        ("cache evict", ["--url URL", "--start TOKEN"]),
    ],
)
def test_help_tells_what_is_needed(line: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*line.split(), "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("line", ["cache --url {url} --admin-key k stats", "cache stats --url {url} --admin-key k"])
def test_the_server_is_named_before_or_after_the_operation(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:1"
    assert main(line.format(url=url).split()) == EXIT_FAILED
    assert f"{url}/admin/cache/stats cannot be reached" in capsys.readouterr().err


def test_the_readmes_commands_are_understood() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", readme, re.DOTALL | re.MULTILINE))
    commands = re.findall(r"^(?:.* && )?((?:aioengine|cache) .*)", script, re.MULTILINE)
    assert len(commands) > 15
    for command in commands:
        name, *line = shlex.split(command.rstrip("&"), comments=True)
        line = ["cache", *line] if name == "cache" else line
        if line[0] == "bench":
            make_bench_parser().parse_args(line[1:])
        else:
            make_parser().parse_args(line)
    files = re.findall(r"<< 'END'\n(.*?)\nEND$", script, re.DOTALL | re.MULTILINE)
    assert [[message["role"] for message in json.loads(text)] for text in files] == [["system"], ["system", "user"]]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("module", ["gpu_engine", "gpu_server"])
def test_what_measures_a_gpu_says_that_there_is_none(module: str) -> None:
    command = [sys.executable, "-m", f"aioengine.bench.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{module}: error: it measures a GPU, and PyTorch sees no CUDA device here\n"
