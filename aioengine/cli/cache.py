"""`aioengine cache`: sends one operation to a server's admin routes and prints the reply as JSON.

What the reply notes beside (much of a prefix may stay cached) is said on stderr, too.

Exit code 0 if it was done, exactly or degraded; 1 if it was refused or failed; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from aioengine.config import admin_key_from_environment
from aioengine.errors import EngineError, InvalidConfig

TIMEOUT_S = 600.0
"""A long prefix takes its time to be computed."""

READING = {"audit", "stats"}


async def run(args: argparse.Namespace) -> int:
    """Runs one operation.

    Raises:
        InvalidConfig: no key, or a name that cannot be read.
        EngineError: the server cannot be reached or does not know the operation, the key or the request.
    """
    key = args.admin_key or admin_key_from_environment()
    if not key:
        raise InvalidConfig("no admin key: give --admin-key or set AIOENGINE_ADMIN_KEY")
    if not key.isprintable():
        raise InvalidConfig("the admin key holds a line break or another character that no header can carry")
    status, body = await asyncio.to_thread(_send, _request(args, key))
    print(json.dumps(body, indent=2, ensure_ascii=False))
    if isinstance(body, dict) and body.get("note"):
        print(f"aioengine: note: {str(body['note']).replace('start=0', '--start 0')}", file=sys.stderr)
    return 0 if status == 200 else 1


def _request(args: argparse.Namespace, key: str) -> urllib.request.Request:
    try:
        parts = urllib.parse.urlsplit(args.url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidConfig(f"--url {args.url} must look like http://HOST:PORT")
    url = f"{args.url.rstrip('/').removesuffix('/v1')}/admin/cache/{args.operation}"
    # As UTF-8, in which the server has its key; urllib would make Latin-1 of it.
    headers: dict[str, Any] = {"Authorization": f"Bearer {key}".encode(), "Content-Type": "application/json"}
    if args.operation in READING:
        query = f"?limit={args.limit}" if args.operation == "audit" else ""
        return urllib.request.Request(url + query, headers=headers, method="GET")
    return urllib.request.Request(url, json.dumps(_body(args)).encode(), headers, method="POST")


def _body(args: argparse.Namespace) -> dict[str, object]:
    """The fields that were given."""
    fields = ("prompt", "cache_salt", "start", "require_exact", "ttl_s", "pin_id", "force")
    given = {field: getattr(args, field, None) for field in fields}
    body: dict[str, object] = {field: v for field, v in given.items() if v is not None and v is not False}
    if getattr(args, "all", False) and not args.cache_salt:
        raise InvalidConfig("--all needs the tenant: give --cache-salt; reset forgets everything")
    if getattr(args, "token_ids", None) is not None:
        try:
            body["prompt"] = [int(part) for part in args.token_ids.split(",")]
        except ValueError:
            raise InvalidConfig(f"--token-ids {args.token_ids!r} must be numbers with commas between") from None
    if getattr(args, "messages", None) is not None:
        body["messages"] = _read_messages(args.messages)
    return body


def _read_messages(source: str) -> object:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"--messages {source} cannot be read: {error}") from None


def _send(request: urllib.request.Request) -> tuple[int, object]:
    """Status and JSON of the answer; 409 is an answer, too."""
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        try:
            body = json.loads(text)
        except ValueError:
            body = None
        if error.code == 409 and isinstance(body, dict) and "status" in body:
            return error.code, body
        problem = body.get("error") if isinstance(body, dict) else None
        message = problem.get("message") if isinstance(problem, dict) else text[:200]
        hint = "; was the server started with --enable-admin?" if error.code == 404 else ""
        raise EngineError(f"the server answers {error.code}: {message}{hint}") from None
    except (http.client.HTTPException, ValueError) as error:
        raise EngineError(f"{request.full_url} does not answer as a server of aioengine: {error!r}") from None
    except (urllib.error.URLError, OSError) as error:
        raise EngineError(f"{request.full_url} cannot be reached: {getattr(error, 'reason', error)}") from None
