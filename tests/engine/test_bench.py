"""`aioengine bench` end to end on a tiny model: tables on the terminal, figures with their machine in a file."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from aioengine.cli import main
from tests.models.tiny import make_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint("llama3-scaling", folder)
    return folder


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("latency --batch-size 1 3 --input-len 8 --output-len 6 --repeats 1", "rows"),
        ("throughput --num-prompts 6 --input-len 12 --prefix-len 4 --output-len 5 --repeats 2", "runs"),
    ],
)
def test_a_benchmark_prints_and_writes_what_it_measured(
    line: str, key: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert main(["bench", *line.split(), "--model", str(folder), "--json", str(report)]) == 0
    assert line.split()[0] in capfd.readouterr().out
    figures = orjson.loads(report.read_bytes())
    assert len(figures[key]) == 2
    assert figures["machine"]["versions"]["torch"]
    assert figures["peak_memory_bytes"] > 0


def test_speculation_is_measured_beside_the_same_without(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    asked = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    line = ["bench", "speculation", "--model", str(folder), "--max-model-len", "256", "--speculative-config", asked]
    assert main([*line, "--concurrency", "1", "2", "--output-len", "24", "--repeats", "2", "--json", str(report)]) == 0
    told = capfd.readouterr().out
    assert f"with drafts: {asked}" in told and "24 out, output tokens/s" in told
    figures = orjson.loads(report.read_bytes())
    assert figures["speculative_config"] == asked
    assert [(row["workload"], row["at_once"]) for row in figures["rows"]] == [
        ("copy", 1),
        ("copy", 2),
        ("free", 1),
        ("free", 2),
    ]
    for row in figures["rows"]:
        assert row["equal"] == f"{2 * row['at_once']} of {2 * row['at_once']}"
        assert row["ratio"] > 0 and row["tokens_per_step"] > 0
    assert any(row["accepted"] for row in figures["rows"])


def test_speculation_that_cannot_be_is_refused_before_anything_is_measured(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", "speculation", "--model", str(folder)]
    assert main([*line, "--speculative-config", '{"method": "medusa"}']) == 2
    assert "the method 'medusa' is not supported yet" in capfd.readouterr().err
    assert main([*line, "--concurrency", "0"]) == 2
    assert "--output-len and --concurrency must be at least 1" in capfd.readouterr().err


def test_the_core_is_measured_beside_plain_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    small = "--parts pool objects host --num-seqs 3 --input-len 20 --output-len 9 --steps 300 --repeats 1"
    assert main(["bench", "core", *small.split(), "--json", str(report)]) == 0
    figures = orjson.loads(report.read_bytes())
    assert {row["operation"] for row in figures["pool"]} >= {"allocate", "free", "touch", "look up"}
    assert all(row["ratio"] > 0 for row in figures["pool"])
    assert 0 < figures["memory"]["aioengine_bytes_per_block"] < figures["memory"]["plain_python_bytes_per_block"]
    assert figures["objects"]["memory_blocks_after"] - figures["objects"]["memory_blocks_before"] < 100
    offline, generated = figures["host"]
    assert (offline["outputs_per_request"], offline["requests"], generated["requests"]) == (1, 3, 3)


def test_a_trace_is_replayed_under_both_policies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Q2: at fixed budgets, from the command line, with a plot."""
    report, picture = tmp_path / "report.json", tmp_path / "report.png"
    line = f"replay flood --num-requests 150 --budgets 0.1 1 --concurrency 2 --plot {picture} --json {report}"
    assert main(["bench", *line.split()]) == 0
    small, whole = orjson.loads(report.read_bytes())["rows"]
    assert small["lru"] < whole["lru"] == whole["cost"] == whole["nothing_evicted"]
    assert picture.stat().st_size > 1000
    assert main(["bench", "replay", "nowhere"]) == 2
    assert "there is no trace nowhere" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{trace} --num-requests 0", "--num-requests, --concurrency and block sizes must be at least 1"),
        ("chat --num-requests 0", "--num-requests, --concurrency and block sizes must be at least 1"),
        ("{trace} --context-cost -1", "--context-cost must be at least 0"),
        ("{trace} --context-cost nan", "--context-cost must be at least 0"),
        ("{trace} --context-cost 1e6", "--context-cost must be at least 0"),
        ("{trace} --json {folder}/none/report.json", "there is no folder {folder}/none"),
        ("{trace} --json {folder}", "{folder} is a folder"),
        ("{trace} --plot {folder}/none/picture.png", "there is no folder {folder}/none"),
        ("{trace} --plot {folder}/picture.foo", "foo is none of"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_is(
    line: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text('{"token_ids": [1, 2, 3]}')
    names = {"trace": tmp_path / "t.jsonl", "folder": tmp_path}
    assert main(["bench", "replay", *line.format(**names).split()]) == 2
    told = capfd.readouterr()
    assert why.format(**names) in told.err and not told.out


@pytest.mark.parametrize("line", ["--steps 0", "--output-len 0", "--num-seqs 4 0"])
def test_nothing_to_measure_is_refused(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "core", *line.split()]) == 2
    assert "--steps, --output-len and --num-seqs must be at least 1" in capfd.readouterr().err


def test_a_bad_line_is_one_sentence(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--prefix-len", "9", "--input-len", "4", "--model", str(folder)]) == 2
    assert "--prefix-len must not be above --input-len" in capfd.readouterr().err
