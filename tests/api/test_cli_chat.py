"""`aioengine chat`: turns, commands, stopping an answer; once in a real terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from aioengine.cli.chat import HELP, Conversation, Session
from aioengine.errors import EngineDead
from tests.api.fake_engine import FakeEngine, assert_all_settled

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": " one two three"}


def session_over(engine: FakeEngine, lines: Iterable[str], system: str | None = None) -> tuple[Session, list[str]]:
    written: list[str] = []
    rest = iter(lines)

    async def read_line() -> str | None:
        return next(rest, None)

    return Session(Conversation(engine, {"temperature": 0.0}, system), read_line, written.append), written


def prompts(engine: FakeEngine) -> list[object]:
    return [options["prompt"] for options in engine.options]


async def test_answers_are_streamed_and_remembered() -> None:
    engine = FakeEngine()
    session, written = session_over(engine, ["hi", "", "  ", "hi"], system="be brief")
    await session.run()
    system = {"role": "system", "content": "be brief"}
    assert prompts(engine) == [[system, USER], [system, USER, ANSWER, USER]]
    assert written == [" one", " two", " three", "", "\n"] * 2
    assert engine.submitted[0].params.temperature == 0.0
    assert_all_settled(engine)


async def test_reset_forgets_and_exit_leaves() -> None:
    engine = FakeEngine()
    session, written = session_over(engine, ["hi", "/reset", "hi", "/exit", "hi"])
    await session.run()
    assert prompts(engine) == [[USER], [USER]]
    assert "(new conversation)\n" in written


async def test_system_message_can_be_set_and_removed() -> None:
    engine = FakeEngine()
    session, _ = session_over(engine, ["/system talk like a cat", "hi", "/system", "hi"])
    await session.run()
    assert prompts(engine) == [[{"role": "system", "content": "talk like a cat"}, USER], [USER]]


async def test_other_commands_give_help_but_paths_are_questions() -> None:
    engine = FakeEngine()
    session, written = session_over(engine, ["/what", "/etc/passwd is what?"])
    await session.run()
    assert written[0] == HELP + "\n"
    assert prompts(engine) == [[{"role": "user", "content": "/etc/passwd is what?"}]]


async def test_an_interrupt_stops_the_answer_and_keeps_what_was_said() -> None:
    engine = FakeEngine()
    engine.hold()
    engine.release(2)
    session, written = session_over(engine, ["hi", "hi"])
    task = asyncio.create_task(session.run())
    await engine.wait_until(lambda: " two" in written)
    session.interrupt()
    await engine.wait_until(lambda: len(engine.submitted) == 2)
    engine.release(10)
    await task
    assert prompts(engine)[1] == [USER, {"role": "assistant", "content": " one two"}, USER]
    assert written[2] == " (stopped)\n"
    assert_all_settled(engine)


async def test_an_interrupt_before_the_first_token_is_no_answer() -> None:
    engine = FakeEngine()
    engine.hold()
    session, written = session_over(engine, ["hi"])
    task = asyncio.create_task(session.run())
    await engine.wait_blocked()
    session.interrupt()
    await task
    assert written == [" (stopped)\n"]
    assert_all_settled(engine)


async def test_an_interrupt_at_the_prompt_tells_how_to_leave() -> None:
    session, written = session_over(FakeEngine(), [])
    session.interrupt()
    assert "/exit" in written[0]


async def test_a_refused_question_is_told_and_forgotten() -> None:
    engine = FakeEngine()
    engine.model = type(engine.model)(max_model_len=40)
    session, written = session_over(engine, ["x" * 100, "hi"])
    await session.run()
    assert "max_model_len is 40" in written[0]
    assert prompts(engine) == [[USER]]


async def test_a_dead_engine_ends_the_session() -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    session, _ = session_over(engine, ["hi"])
    with pytest.raises(EngineDead):
        await session.run()
    assert_all_settled(engine)


FAKE_MAIN = """
import sys, types
sys.path.insert(0, {root!r})
from tests.api.fake_engine import FakeEngine
engine = FakeEngine(lambda ids, i: [258, 259, 257])
def make(config, **_):
    return engine
sys.modules["aioengine.engine"] = types.SimpleNamespace(AsyncEngine=make)
from aioengine.cli import main
if {slow}:
    engine.hold(); engine.release(2)
raise SystemExit(main({argv!r}))
"""


def command(*argv: str, slow: bool = False) -> list[str]:
    root = str(Path(__file__).parents[2])
    return [sys.executable, "-c", FAKE_MAIN.format(root=root, argv=list(argv), slow=slow)]


@pytest.mark.slow
def test_over_a_pipe() -> None:
    done = subprocess.run(command("chat"), input="hi\n/reset\nagain", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == " one two\n(new conversation)\n one two\n"


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, line: list[str]) -> None:
        self._fd, child = pty.openpty()
        self.process = subprocess.Popen(line, stdin=child, stdout=child, stderr=child, start_new_session=True)
        os.close(child)
        self.seen = ""

    def read_until(self, text: str) -> None:
        while text not in self.seen:
            ready, _, _ = select.select([self._fd], [], [], 60)
            assert ready, f"waited for {text!r}, saw {self.seen!r}"
            try:
                self.seen += os.read(self._fd, 4096).decode()
            except OSError:  # the other end is closed
                raise AssertionError(f"waited for {text!r}, saw {self.seen!r}") from None
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> int:
        code = self.process.wait(60)
        os.close(self._fd)
        return code


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves() -> None:
    terminal = Terminal(command("chat", slow=True))
    terminal.read_until(">>> ")
    terminal.type("hi\n")
    terminal.read_until(" two")
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until("(stopped)")
    terminal.read_until(">>> ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until("(Ctrl-D or /exit leaves)")
    terminal.type("\x04")
    assert terminal.close() == 0
