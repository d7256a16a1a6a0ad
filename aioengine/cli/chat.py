"""`aioengine chat`: a conversation in the terminal, or over a pipe.

Ctrl-C stops the answer and keeps what was said of it; Ctrl-D or /exit leaves; /reset begins anew. The event
loop runs all the time; lines are read in a thread, because a terminal's line editing blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from aioengine.cli.flags import engine_config, sampling_overrides
from aioengine.errors import EngineDead, EngineError

if TYPE_CHECKING:
    from aioengine.api.face import Engine

HELP = "/exit or Ctrl-D leaves, /reset begins anew, /system TEXT sets the system message, Ctrl-C stops an answer."

ReadLine = Callable[[], Awaitable[str | None]]
"""Gives the next line without its end, or None at the end of the input."""


class Conversation:
    """The messages so far, and how the next answer is asked for."""

    def __init__(self, engine: Engine, sampling: dict[str, object], system: str | None = None) -> None:
        self._engine = engine
        self._sampling = sampling
        self.system = system
        self.messages: list[dict[str, object]] = []

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages.clear()

    async def ask(self, text: str) -> AsyncIterator[str]:
        """The answer in pieces. What came of it stays in the history even if it was stopped; a question
        that was refused does not.

        Raises:
            EngineError: the question was refused, or the engine failed.
        """
        question: dict[str, object] = {"role": "user", "content": text}
        messages = [*self.messages, question]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        params = self._engine.sampling_params(**self._sampling)
        stream = await self._engine.submit(messages, params)
        answer: list[str] = []
        try:
            async for output in stream:
                answer.append(output.delta)
                yield output.delta
        finally:
            await stream.abort()
            self.messages += [question, {"role": "assistant", "content": "".join(answer)}]


class Session:
    """Reads lines and writes answers until the input ends."""

    def __init__(self, conversation: Conversation, read_line: ReadLine, write: Callable[[str], None]) -> None:
        self._conversation = conversation
        self._read_line = read_line
        self._write = write
        self._answering: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Returns when the user leaves.

        Raises:
            EngineDead: there is nobody left to talk to.
        """
        while (line := await self._read_line()) is not None:
            command, _, rest = line.strip().partition(" ")
            if command in ("/exit", "/quit"):
                return
            if command == "/reset":
                self._conversation.reset()
                self._write("(new conversation)\n")
            elif command == "/system":
                self._conversation.system = rest or None
                self._conversation.reset()
                self._write("(new conversation with this system message)\n" if rest else "(no system message)\n")
            elif command.startswith("/") and " " not in command and command[1:].isalpha():
                self._write(HELP + "\n")
            elif command:
                await self._answer(line)

    def interrupt(self) -> None:
        """Ctrl-C: stops the answer, if there is one."""
        if self._answering is not None:
            self._answering.cancel()
        else:
            self._write("\n(Ctrl-D or /exit leaves)\n")

    async def _answer(self, line: str) -> None:
        self._answering = asyncio.create_task(self._write_answer(line))
        try:
            await asyncio.wait((self._answering,))
            if self._answering.cancelled():
                self._write(" (stopped)\n")
            else:
                self._answering.result()
        except EngineDead:
            raise
        except EngineError as error:
            self._write(f"({error})\n")
        finally:
            self._answering.cancel()
            self._answering = None

    async def _write_answer(self, line: str) -> None:
        async with contextlib.aclosing(self._conversation.ask(line)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                self._write(piece)
        self._write("\n")


async def run(args: argparse.Namespace) -> int:
    """Loads the model and talks until the user leaves.

    Raises:
        EngineError: the configuration or the model cannot be used, or the engine failed.
    """
    logging.basicConfig(level="DEBUG" if args.debug else "WARNING", stream=sys.stderr)
    config, sampling = engine_config(args), sampling_overrides(args)
    from aioengine.engine import AsyncEngine  # imports torch: not before the flags have been checked

    async with AsyncEngine(config) as engine:
        if sys.stdin.isatty():
            print(f"{engine.model.name}: {HELP}")
        session = Session(Conversation(engine, sampling, args.system), _read_line, _write)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, session.interrupt)
        try:
            await session.run()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _read_line() -> str | None:
    """One line, read in a daemon thread: a thread that waits for a terminal cannot be joined."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str | None] = loop.create_future()

    def deliver(line: str | None) -> None:
        if not future.done():
            future.set_result(line)

    def read() -> None:
        try:
            line: str | None = _blocking_line()
        except (EOFError, OSError, UnicodeDecodeError):
            line = None
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(deliver, line)

    threading.Thread(target=read, name="aioengine-stdin", daemon=True).start()
    return await future


def _blocking_line() -> str:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its line editing and history
        return input(">>> ")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
