"""The `aioengine` command: parses the line, runs one subcommand, and turns errors into one sentence.

Nothing heavy is imported before a subcommand is known: `--help` and `--version` answer at once. Exit codes:
0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import version

from aioengine.cli.cache_arguments import add_cache_arguments
from aioengine.cli.flags import add_config_flags, add_model_argument, add_sampling_flags
from aioengine.cli.parser import Parser
from aioengine.config import GROUPS, ServerConfig
from aioengine.errors import EngineError, InvalidConfig

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

Command = Callable[[argparse.Namespace], Coroutine[None, None, int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        return _guarded(lambda: _bench(argv[1:]), debug="--debug" in argv)
    if argv[:1] == ["flags"]:
        args = _flags_parser().parse_args(argv[1:])
    else:
        args = make_parser().parse_args(argv)
    return _guarded(lambda: _run(args), debug=args.debug)


def make_parser() -> Parser:
    """The parser of every subcommand but `bench`, which parses its own line."""
    parser = Parser(prog="aioengine", takes="COMMAND", description="An async-first LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"aioengine {version('aioengine')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = _command(commands, "serve", "[MODEL]", "Serve a model over an OpenAI-compatible HTTP API.")
    add_model_argument(serve)
    add_config_flags(serve, {**GROUPS, "server": ServerConfig}, skip={"model"})

    chat = _command(commands, "chat", "[MODEL]", "Talk to a model in the terminal.")
    add_model_argument(chat)
    chat.add_argument("--system", metavar="TEXT", help="System message that opens the conversation.")
    add_sampling_flags(chat, skip={"n"})
    add_config_flags(chat, GROUPS, skip={"model"})

    generate = _command(
        commands,
        "generate",
        "(PROMPT | --file FILE)",
        "Answer one prompt, or a file of prompts.",
        stray="one PROMPT is taken, in quotes; the model is named with --model MODEL",
    )
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", metavar="PROMPT", help="The prompt.")
    source.add_argument(
        "--file",
        metavar="FILE",
        help="Prompts, one per line, or JSON lines with `prompt` or `messages`, an optional `id`, "
        "`determinism` and sampling fields; - reads standard input. Writes JSON lines in the same order.",
    )
    generate.add_argument("--chat", action="store_true", help="Take each prompt as a user's chat message.")
    generate.add_argument("--system", metavar="TEXT", help="System message; implies --chat.")
    generate.add_argument("--json", action="store_true", help="Write a JSON line instead of streamed text.")
    add_sampling_flags(generate)
    add_config_flags(generate, GROUPS)

    info = _command(commands, "info", "[MODEL]", "Show versions, devices, the model's facts and how many tokens fit.")
    add_model_argument(info)
    info.add_argument("--json", action="store_true", help="Write JSON.")
    add_config_flags(info, GROUPS, skip={"model"})

    summary = "Govern the prefix cache of a running server (started with --enable-admin)."
    cache = _command(commands, "cache", "OPERATION", summary)
    add_cache_arguments(cache)

    commands.add_parser("bench", help="Measure latency and throughput (see `aioengine bench --help`).")
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser], name: str, takes: str, summary: str, *, stray: str = ""
) -> Parser:
    parser = commands.add_parser(name, help=summary, description=summary, takes=takes, stray=stray)
    parser.add_argument("--debug", action="store_true", help="Show tracebacks and log everything.")
    return parser


def _flags_parser() -> Parser:
    """`flags` is for whoever changes the README: it stands in no list of commands."""
    parser = Parser(prog="aioengine flags", description="Print the tables of options for the README.")
    parser.set_defaults(command="flags")
    parser.add_argument("--debug", action="store_true", help="Show tracebacks.")
    return parser


def _run(args: argparse.Namespace) -> int:
    """Imports the subcommand's module and runs it on a uvloop."""
    args.begun_s = time.perf_counter()
    command: Command = importlib.import_module(f"aioengine.cli.{args.command}").run
    import uvloop  # not before a command is known

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(command(args))


def _bench(argv: list[str]) -> int:
    code: int = importlib.import_module("aioengine.bench.main").main(argv)
    return code


def _guarded(run: Callable[[], int], *, debug: bool) -> int:
    """Every error that reaches the top becomes one sentence and an exit code."""
    try:
        return run()
    except InvalidConfig as error:
        return _fail(str(error), EXIT_USAGE, debug)
    except EngineError as error:
        return _fail(str(error), EXIT_FAILED, debug)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; Python must not try to flush to it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        sentence = f"unexpected {type(error).__name__}: {error}"
        return _fail(sentence if debug else f"{sentence} (--debug shows where)", EXIT_FAILED, debug)


def _fail(sentence: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"aioengine: error: {sentence}", file=sys.stderr)
    return code
