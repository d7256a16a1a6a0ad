"""Speculative decoding on the command line: the flag, what is told of it, and what is refused."""

from __future__ import annotations

import json

import pytest

from aioengine.cli import EXIT_USAGE, main, make_parser
from aioengine.cli.flags import engine_config

ASKED = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "disable_by_batch_size": 0}'


def test_the_flag_reaches_the_configuration() -> None:
    args = make_parser().parse_args(["serve", "--speculative-config", ASKED])
    assert engine_config(args).scheduler.speculative_config == ASKED


def test_info_tells_how_drafts_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["info", "shape:smollm2-135m", "--load-format", "dummy", "--device", "cpu"]
    assert main([*shape, "--json", "--speculative-config", ASKED]) == 0
    told = json.loads(capsys.readouterr().out)["run"]["speculation"]
    assert told == {"num_tokens": 6, "lookup_max": 4, "lookup_min": 4, "batch_limit": 0}
    assert main([*shape, "--speculative-config", ASKED]) == 0
    assert "ngram, up to 6 drafts a step by the last 4 tokens\n" in capsys.readouterr().out
    assert main(shape) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert rows["speculation"].strip() == "none"


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "x"], ["info"]])
def test_a_method_that_there_is_not_is_refused_at_once(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = [*command, "--speculative-config", '{"method": "eagle3", "model": "m", "num_speculative_tokens": 3}']
    assert main([*line, "--model", "shape:smollm2-135m", "--load-format", "dummy"]) == EXIT_USAGE
    error = "speculative_config cannot be used: the method 'eagle3' is not supported yet; there is \"ngram\""
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "remark"),
    [
        ("--num-speculative-tokens", "--speculative-config takes it"),
        ("--speculative-model", "--speculative-config has the method ngram, which needs no model"),
    ],
)
def test_older_flags_say_which_one_to_take(flag: str, remark: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", flag, "3"])
    assert remark in capsys.readouterr().err
