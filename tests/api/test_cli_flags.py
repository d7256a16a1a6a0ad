"""Flags, help and exit codes of the command, without any model."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest

from aioengine.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, flags, main, make_parser
from aioengine.cli.flags import (
    SAMPLING_HELP,
    engine_config,
    flag_table,
    sampling_overrides,
    server_config,
)
from aioengine.config import GROUPS, EngineConfig, ServerConfig, flag_name, option_fields
from aioengine.errors import InvalidConfig, ModelNotFound
from aioengine.types import SamplingParams

ALL_FIELDS = [(f, hint) for cls in (*GROUPS.values(), ServerConfig) for f, hint in option_fields(cls)]


def help_of(capsys: pytest.CaptureFixture[str], command: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_every_option_has_a_flag_in_help_and_a_row_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    text, table = help_of(capsys, "serve"), flag_table()
    for field, _ in ALL_FIELDS:
        flag = flag_name(field.name)
        assert field.name == "model" or flag in text
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{flag}`")]
        assert field.metadata["help"] in row
    assert "(default: smollm2)" in text.replace("\n", " ")


@pytest.mark.parametrize("command", ["chat", "generate", "info"])
def test_other_commands_take_the_engines_flags(capsys: pytest.CaptureFixture[str], command: str) -> None:
    text = help_of(capsys, command)
    assert "--max-num-seqs" in text
    assert "--port" not in text


def test_flags_that_are_not_given_leave_the_defaults() -> None:
    args = make_parser().parse_args(["serve"])
    assert engine_config(args) == EngineConfig()
    assert server_config(args) == ServerConfig()


def test_flags_reach_the_configuration() -> None:
    args = make_parser().parse_args(
        ["serve", "some/model", "--max-num-seqs", "7", "--no-enable-prefix-caching", "--async-scheduling"]
        + [
            "--dtype",
            "float32",
            "--optimization-level",
            "0",
            "--gpu-memory-utilization",
            "0.5",
            "--port",
            "0",
        ]
    )
    config = engine_config(args)
    assert config.model.model == "some/model"
    assert config.scheduler.max_num_seqs == 7
    assert config.cache.enable_prefix_caching is False
    assert config.scheduler.async_scheduling is True
    assert config.runtime.optimization_level == 0
    assert config.cache.gpu_memory_utilization == 0.5
    assert server_config(args).port == 0


def test_the_model_may_be_a_flag_but_not_two_models() -> None:
    assert engine_config(make_parser().parse_args(["chat", "--model", "a"])).model.model == "a"
    assert engine_config(make_parser().parse_args(["chat", "a", "--model", "a"])).model.model == "a"
    with pytest.raises(InvalidConfig, match="two models"):
        engine_config(make_parser().parse_args(["chat", "a", "--model", "b"]))


def test_sampling_flags_are_fields_of_sampling_params() -> None:
    assert set(SAMPLING_HELP) <= {f.name for f in dataclasses.fields(SamplingParams)}
    args = make_parser().parse_args(
        ["generate", "x", "--temperature", "0", "--stop", "a", "--stop", "b", "--ignore-eos", "--top-k", "3"]
    )
    assert sampling_overrides(args) == {
        "temperature": 0.0,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "top_k": 3,
    }
    assert SamplingParams(**sampling_overrides(args)).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["nonsense"],
        ["serve", "--no-such-flag"],
        ["serve", "--port", "x"],
        ["serve", "--dtype", "int8"],
        ["generate"],
        ["generate", "x", "--file", "y"],
    ],
)
def test_wrong_usage_exits_with_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line)
    assert stop.value.code == EXIT_USAGE
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (InvalidConfig("port=70000 is too large"), EXIT_USAGE, "port=70000 is too large"),
        (ModelNotFound("no such model"), EXIT_FAILED, "no such model"),
        (ValueError("odd"), EXIT_FAILED, "unexpected ValueError: odd (--debug shows where)"),
    ],
)
def test_errors_become_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    sentence: str,
) -> None:
    async def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(flags, "run", fail)
    assert main(["flags"]) == code
    assert capsys.readouterr().err == f"aioengine: error: {sentence}\n"
    assert main(["flags", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_has_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(flags, "run", interrupted)
    assert main(["flags"]) == EXIT_INTERRUPTED


def test_the_table_is_printed_by_an_unlisted_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags"]) == 0
    assert capsys.readouterr().out == flag_table() + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("line", [["--help"], ["--version"], ["serve", "--help"], ["generate", "--help"]])
def test_help_and_version_import_nothing_heavy(line: list[str]) -> None:
    script = (
        "import sys\nfrom aioengine.cli import main\n"
        f"try:\n    main({line!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'starlette', 'uvicorn', 'rich', 'tokenizers'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: []\n")


def test_bench_is_imported_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    class Bench:
        @staticmethod
        def main(argv: list[str]) -> int:
            called.append(argv)
            return 3

    def import_module(name: str) -> object:
        assert name == "aioengine.bench.main"
        return Bench

    monkeypatch.setattr("aioengine.cli.importlib.import_module", import_module)
    run: Callable[[list[str]], int] = main
    assert run(["bench", "latency", "--help"]) == 3
    assert called == [["latency", "--help"]]
