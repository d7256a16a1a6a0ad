"""The line of `aioengine cache`: which operation, on which prefix, at which server."""

from __future__ import annotations

import argparse

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


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per operation."""
    operations = parser.add_subparsers(dest="operation", required=True, metavar="OPERATION")
    for name, summary in OPERATIONS.items():
        operation = operations.add_parser(name, help=summary, description=summary)
        operation.add_argument(
            "--url", default="http://127.0.0.1:8000", help="Address of the server (default: http://127.0.0.1:8000)."
        )
        operation.add_argument(
            "--admin-key", metavar="KEY", help="Admin key of the server; by default AIOENGINE_ADMIN_KEY."
        )
        if name in NAMING:
            _add_name(operation, with_all=name in WITH_START)
        if name in WITH_START:
            operation.add_argument(
                "--start",
                type=int,
                metavar="TOKEN",
                help="First token of the span; by default only what has the whole prefix in view is meant.",
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


def _add_name(operation: argparse.ArgumentParser, *, with_all: bool) -> None:
    name = operation.add_mutually_exclusive_group(required=True)
    name.add_argument("prompt", nargs="?", metavar="PROMPT", help="The prefix as text.")
    name.add_argument("--token-ids", metavar="IDS", help="The prefix as comma-separated token ids.")
    name.add_argument(
        "--messages", metavar="FILE", help="The prefix as a JSON list of chat messages; - reads standard input."
    )
    if with_all:
        name.add_argument("--all", action="store_true", help="All prefixes of the tenant that --cache-salt names.")
    operation.add_argument("--cache-salt", metavar="SALT", help="The tenant whose prefix is meant.")
