"""The line of `aioengine cache`: which operation, on which prefix, at which server."""

from __future__ import annotations

import argparse
from typing import Any

from aioengine.cli.parser import Parser

OPERATIONS = {
    "reset": "Forget every cached prefix.",
    "evict": "Take a span, and everything computed after it, out of the cache.",
    "quarantine": "Evict a span and keep it out of the cache until it is lifted.",
    "lift": "End a quarantine; name the span as it was then.",
    "pin": "Keep a cached prefix from being evicted.",
    "lease": "Keep it for some time.",
    "unpin": "End a pin or a lease.",
    "prewarm": "Compute a prefix into the cache; until somebody hits it, it is the first to make room.",
    "audit": "Show what was done, oldest first.",
    "stats": "Show sizes, pins and counters.",
}
NAMING = {"evict", "quarantine", "lift", "pin", "lease", "prewarm"}
WITH_START = {"evict", "quarantine", "lift"}
WITH_EXACT = {"evict", "quarantine", "pin", "lease"}


def add_cache_arguments(parser: Parser) -> None:
    """One subcommand per operation; which server may be said before it or after it."""
    _add_server(parser)
    operations = parser.add_subparsers(dest="operation", required=True, metavar="OPERATION")
    for name, summary in OPERATIONS.items():
        operation = operations.add_parser(name, help=summary, description=summary, **_usage(name))
        _add_server(operation, default=argparse.SUPPRESS)  # or it would undo what stands before the operation
        operation.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="Show tracebacks and log everything."
        )
        if name in NAMING:
            _add_name(operation, with_all=name in WITH_START)
        if name in WITH_START:
            operation.add_argument(
                "--start",
                type=int,
                metavar="TOKEN",
                help="First token of the span; by default only what was computed with the whole prefix in view is "
                "meant, and 0 means all of the prefix.",
            )
        if name in WITH_EXACT:
            operation.add_argument(
                "--require-exact", action="store_true", help="Refuse rather than do more or less than was named."
            )
        if name == "lease":
            operation.add_argument("--ttl-s", type=float, required=True, metavar="SECONDS", help="How long.")
        if name == "unpin":
            operation.add_argument("pin_id", metavar="PIN", help="What pin or lease replied as pin_id.")
        if name == "reset":
            operation.add_argument(
                "--force", action="store_true", help="End pins and preempt running requests; they compute again."
            )
        if name == "audit":
            operation.add_argument("--limit", type=int, default=100, help="Most records (default: 100).")


def _usage(name: str) -> dict[str, str]:
    """What an operation cannot do without, for its line of usage, and what to say of arguments beyond that."""
    if name not in NAMING:
        return {"takes": "PIN"} if name == "unpin" else {}
    every = " | --all --cache-salt SALT" if name in WITH_START else ""
    ttl = " --ttl-s SECONDS" if name == "lease" else ""
    return {
        "takes": f"(PROMPT | --token-ids IDS | --messages FILE{every}){ttl}",
        "stray": "one PROMPT is taken, in quotes",
    }


def _add_server(parser: Parser, **default: Any) -> None:
    parser.add_argument(
        "--url",
        help="Address of the server (default: http://127.0.0.1:8000).",
        **{"default": "http://127.0.0.1:8000", **default},
    )
    parser.add_argument(
        "--admin-key", metavar="KEY", help="Admin key of the server; by default AIOENGINE_ADMIN_KEY.", **default
    )


def _add_name(operation: Parser, *, with_all: bool) -> None:
    name = operation.add_mutually_exclusive_group(required=True)
    name.add_argument("prompt", nargs="?", metavar="PROMPT", help="The prefix as text.")
    name.add_argument("--token-ids", metavar="IDS", help="The prefix as comma-separated token ids.")
    name.add_argument(
        "--messages", metavar="FILE", help="The prefix as a JSON list of chat messages; - reads standard input."
    )
    if with_all:
        name.add_argument("--all", action="store_true", help="All prefixes of the tenant that --cache-salt names.")
    operation.add_argument("--cache-salt", metavar="SALT", help="The tenant whose prefix is meant.")
