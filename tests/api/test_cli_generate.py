"""`aioengine generate`: reading prompts, order, concurrency, failures of single lines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from aioengine.cli.generate import Job, answer_all, as_chat, read_jobs, stream_text
from aioengine.determinism import DECLARED
from aioengine.errors import EngineDead, InvalidConfig, InvalidRequest
from tests.api.fake_engine import EOS, FakeEngine, assert_all_settled


async def lines_of(engine: FakeEngine, jobs: list[Job], **overrides: object) -> tuple[list[Any], int]:
    written: list[bytes] = []
    num_failed = await answer_all(engine, jobs, overrides, written.append)
    assert_all_settled(engine)
    return [json.loads(line) for line in b"".join(written).splitlines()], num_failed


def test_plain_lines_are_prompts() -> None:
    assert read_jobs("f", "a b\n\n{ not json\r\n", False, None) == [Job(0, "a b"), Job(1, "{ not json")]


def test_json_lines_are_prompts_with_fields() -> None:
    text = (
        '{"prompt": "a", "temperature": 0, "id": 7}\n{"messages": [{"role": "user", "content": "b"}]}\n'
        '{"prompt": [1, 2], "seed": null}\n'
    )
    assert read_jobs("f", text, False, None) == [
        Job(0, "a", {"temperature": 0}, 7),
        Job(1, [{"role": "user", "content": "b"}]),
        Job(2, [1, 2]),
    ]


def test_chat_wraps_prompts_but_not_messages() -> None:
    text = '{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}'
    first, second = read_jobs("f", text, True, "be brief")
    assert first.prompt == as_chat("a", "be brief")
    assert second.prompt == [{"role": "user", "content": "b"}]
    assert read_jobs("f", "a", True, None)[0].prompt == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f holds no prompts"),
        ("\n \n", "f holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', "f:2: not valid JSON"),
        ('{"prompt": "a"}\n\n[1]', "f:3: not a JSON object"),
        ('{"prompt": "a", "determinism": "full"}', "f:1: determinism='full' must be offline or batch-invariant"),
        ('{"prompt": "a", "determinism": ["offline"]}', "f:1: determinism=['offline'] must be"),
        ('{"prompts": "a"}', "f:1: unknown field prompts"),
        ('{"id": 1}', "f:1: give either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "f:1: give either prompt or messages"),
        ('{"messages": ["a"]}', "f:1: messages must be a list of objects"),
        ('{"prompt": 1}', "f:1: prompt must be a string"),
        ('{"prompt": "a", "top_p": 2}', "f:1: top_p=2 must be"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_jobs("f", text, False, None)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("mode", ["none", "batch-invariant", "offline"])
async def test_a_line_may_demand_determinism(mode: str) -> None:
    text = '{"prompt": "a"}\n{"prompt": "a", "determinism": "batch-invariant", "temperature": 0}'
    engine = FakeEngine()
    engine.determinism = DECLARED[mode]
    lines, num_failed = await lines_of(engine, read_jobs("f", text, False, None))
    assert lines[0]["text"] == " one two three"
    if mode == "batch-invariant":
        assert num_failed == 0 and lines[1]["text"] == " one two three"
    else:
        assert num_failed == 1 and lines[1]["param"] == "determinism"
        assert "determinism=batch-invariant is unavailable" in str(lines[1]["error"])


async def test_results_keep_the_order_although_later_prompts_finish_first() -> None:
    engine = FakeEngine(lambda ids, i: [65] * (60 if ids[-1] == ord("0") else 1) + [EOS])
    lines, num_failed = await lines_of(engine, [Job(i, str(i), id=f"id{i}") for i in range(5)])
    assert [(line["index"], line["id"]) for line in lines] == [(i, f"id{i}") for i in range(5)]
    assert [len(line["text"]) for line in lines] == [60, 1, 1, 1, 1]
    assert num_failed == 0


async def test_a_line_has_everything_and_choices_have_a_line_each() -> None:
    lines, _ = await lines_of(FakeEngine(), [Job(0, "x")], n=2)
    assert lines[0] == {
        "index": 0,
        "choice": 0,
        "text": " one two three",
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "completion_tokens": 4,
    }
    assert (lines[1]["choice"], lines[1]["text"]) == (1, " one two three1")


async def test_logprobs_are_written_when_asked() -> None:
    job = Job(0, "x", {"logprobs": 1, "prompt_logprobs": 0, "max_tokens": 1})
    (line,), _ = await lines_of(FakeEngine(), [job])
    assert line["logprobs"] == [
        {"token_id": 258, "token": " one", "logprob": -1.0, "rank": 7}
        | {"top": [{"token_id": 65, "token": "A", "logprob": -0.625, "rank": 1}]}
    ]
    assert line["prompt_logprobs"] == [
        None,
        {"token_id": 120, "token": "x", "logprob": -0.0, "rank": 7, "top": []},
    ]


async def test_a_line_overrides_the_flags() -> None:
    engine = FakeEngine()
    await lines_of(engine, [Job(0, "x", {"temperature": 0.5}), Job(1, "x")], temperature=0.1)
    assert [s.params.temperature for s in engine.submitted] == [0.5, 0.1]


async def test_a_refused_prompt_does_not_stop_the_others() -> None:
    lines, num_failed = await lines_of(FakeEngine(), [Job(0, "x"), Job(1, ""), Job(2, "y")])
    assert num_failed == 1
    assert lines[1] == {"index": 1, "error": "the prompt is empty: it has no tokens", "param": "prompt"}
    assert [line.get("text") for line in lines] == [" one two three", None, " one two three"]


async def test_no_more_than_the_window_is_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.cli.generate.WINDOW", 3)
    engine = FakeEngine()
    engine.max_waiting = 3  # a fourth would be refused
    lines, num_failed = await lines_of(engine, [Job(i, str(i)) for i in range(20)])
    assert (len(lines), num_failed) == (20, 0)


async def test_offline_all_prompts_are_queued_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.cli.generate.WINDOW", 2)
    engine = FakeEngine()
    engine.determinism = DECLARED["offline"]
    jobs = [Job(0, "x"), Job(1, "", id="bad"), Job(2, "y", {"top_p": 0.5}), Job(3, "z", {"top_p": 7}), Job(4, "w")]
    lines, num_failed = await lines_of(engine, jobs, temperature=0.1)
    assert engine.num_together == [4] and num_failed == 2
    assert [line.get("text") for line in lines] == [" one two three", None, " one two three", None, " one two three"]
    assert (lines[1]["id"], lines[1]["param"], lines[3]["param"]) == ("bad", "prompt", "top_p")
    assert [(s.params.temperature, s.params.top_p) for s in engine.submitted] == [(0.1, 1.0), (0.1, 0.5), (0.1, 1.0)]


@pytest.mark.parametrize("mode", ["none", "offline"])
async def test_cancelling_aborts_everything(mode: str) -> None:
    engine = FakeEngine()
    engine.determinism = DECLARED[mode]
    engine.hold()
    jobs = [Job(i, str(i)) for i in range(4)]
    task = asyncio.create_task(answer_all(engine, jobs, {}, lambda _: None))
    await engine.wait_until(lambda: len(engine.live) == 4)
    task.cancel()
    await asyncio.wait((task,))
    assert_all_settled(engine)


async def test_one_prompt_is_streamed() -> None:
    written: list[str] = []
    await stream_text(FakeEngine(), Job(0, "x"), {}, written.append)
    assert written == [" one", " two", " three", "", "\n"]
    written.clear()
    await stream_text(FakeEngine(), Job(0, "x"), {"n": 2}, written.append)
    assert "".join(written) == "[0]  one two three\n[1]  one two three1\n"


async def test_one_prompt_that_fails_raises() -> None:
    with pytest.raises(InvalidRequest):
        await stream_text(FakeEngine(), Job(0, ""), {}, print)
    engine = FakeEngine()
    engine.fail_after = 1
    with pytest.raises(EngineDead):
        await stream_text(engine, Job(0, "x"), {}, lambda _: None)
    assert_all_settled(engine)
