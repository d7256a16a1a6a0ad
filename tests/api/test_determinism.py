"""Declared determinism over HTTP and from the command line: what is told, demanded and refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioengine.cli import EXIT_USAGE, main
from aioengine.cli.startup_report import startup_report
from aioengine.config import ServerConfig
from aioengine.determinism import DECLARED
from tests.api.conftest import MakeClient, running_server
from tests.api.fake_engine import FakeEngine
from tests.engine.conftest import MakeEngine, make_engine, tiny_folder, tiny_model

__all__ = ["make_engine", "tiny_folder", "tiny_model"]

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_not_declared_is_unavailable(
    make_client: MakeClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    client = make_client()
    for fields in ({"temperature": 0}, {"seed": 3}, {}):  # none of them declares anything
        asked = {**body, **fields, "stream": stream, "determinism": "batch-invariant"}
        response = await client.post(path, json=asked)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "determinism")
        assert "is unavailable: the operator has declared nothing" in error["message"]
        assert "--determinism batch-invariant" in error["message"]
    response = await client.post(path, json={**body, "determinism": "sometimes"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "determinism")
    assert (await client.post(path, json={**body, "determinism": None})).status_code == 200


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_what_was_declared_is_told_and_kept(
    make_client: MakeClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.determinism, engine.fingerprint = DECLARED["batch-invariant"], "feedfacecafe"
    client = make_client()
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["determinism"]["level"] == "batch-invariant" and "greedy and seeded" in card["determinism"]["reason"]
    for demand in ("offline", "batch-invariant"):
        for fields in ({"temperature": 0}, {"seed": 3, "temperature": 1}):
            answer = (await client.post(path, json={**body, **fields, "determinism": demand})).json()
            assert answer["system_fingerprint"].endswith("-feedfacecafe")
        response = await client.post(path, json={**body, "temperature": 1, "determinism": demand})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "seed")


@pytest.mark.slow
async def test_equal_bits_over_http_whatever_else_is_asked(make_engine: MakeEngine) -> None:
    body = {"prompt": "A prompt of some length, to be cut into chunks.", "max_tokens": 16, "ignore_eos": True}
    body |= {"logprobs": 3, "determinism": "batch-invariant"}
    answers = []
    for budget in (512, 20):
        async with (
            make_engine(determinism="batch-invariant", max_num_batched_tokens=budget) as engine,
            running_server(engine, log_level="warning") as running,
            httpx.AsyncClient(base_url=running.url, timeout=120) as client,
        ):

            async def ask(**fields: object) -> Any:
                answer = (await client.post("/v1/completions", json={**body, **fields})).json()
                return answer["choices"][0], answer["system_fingerprint"]

            others = [asyncio.create_task(ask(prompt="x" * (9 + n), temperature=0)) for n in range(8)]
            answers += [await ask(temperature=0), await ask(temperature=0.0)]
            answers += [await ask(temperature=1, seed=5), await ask(temperature=1, seed=5)]
            await asyncio.gather(*others)
    assert answers[0] == answers[1] == answers[4] == answers[5]
    assert answers[2] == answers[3] == answers[6] == answers[7] and answers[2] != answers[0]


def test_the_start_report_and_info_tell(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    report = startup_report(engine, ServerConfig(), "http://h:1", 1.0)  # type: ignore[arg-type]
    assert "unavailable (the operator has declared nothing)" in report
    shape = ["info", "shape:smollm2-135m", "--load-format", "dummy", "--device", "cpu", "--json"]
    assert main([*shape, "--determinism", "offline"]) == 0
    told = json.loads(capsys.readouterr().out)["run"]["determinism"]
    assert told == {"level": "offline", "reason": DECLARED["offline"].reason}
    assert main(shape[:-1]) == 0
    assert "unavailable (the operator has declared nothing)" in capsys.readouterr().out


def test_offline_is_not_for_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--determinism", "offline", "--model", "nowhere"]) == EXIT_USAGE
    assert "serve with --determinism batch-invariant" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_repeats_itself_offline(tiny_folder: Path, tmp_path: Path, capfdbinary: Any) -> None:
    lines = [{"prompt": "word " * (1 + i % 7), "max_tokens": 4 + i % 9, "temperature": 1.0} for i in range(40)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["generate", "--model", str(tiny_folder), "--file", str(file), "--num-gpu-blocks-override", "20"]
    written = []
    for seed in ("0", "0", "1"):
        assert main([*argv, "--max-num-seqs", "4", "--determinism", "offline", "--seed", seed]) == 0
        written.append(capfdbinary.readouterr().out)
    assert written[0] == written[1] != written[2] and written[0].count(b"\n") == 40
