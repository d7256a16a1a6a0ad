"""`aioengine serve`: from flags to a running server, and from a signal to an exit code."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from aioengine.api.server import Server, listen, on_signals, url_of
from aioengine.cli.flags import engine_config, server_config
from aioengine.cli.startup_report import startup_report
from aioengine.config import ServerConfig
from aioengine.errors import InvalidConfig
from aioengine.preflight import check_options

if TYPE_CHECKING:
    from aioengine.engine import AsyncEngine

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(args: argparse.Namespace) -> Coroutine[None, None, int]:
    """Serves until told to stop. The address is bound first, before torch is imported: a taken port costs no seconds.

    What comes before the coroutine runs outside the loop, so that Ctrl-C ends it at once.

    Raises:
        EngineError: the configuration, the address or (from the coroutine) the model cannot be used.
    """
    engine_options, server_options = engine_config(args), server_config(args)
    server_options.effective_admin_key()  # a missing key costs no loading
    if engine_options.runtime.determinism == "offline":
        raise InvalidConfig(
            "determinism=offline is for aioengine generate and for programs: when requests arrive over HTTP depends on "
            "time; serve with --determinism batch-invariant",
            param="determinism",
        )
    level = "debug" if args.debug else server_options.log_level
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    sock = listen(server_options.host, server_options.port)
    try:
        check_options(engine_options, cuda_available=None)
        from aioengine.engine import AsyncEngine  # imports torch
    except BaseException:
        sock.close()
        raise
    imports_s = time.perf_counter() - args.begun_s
    return _serve(lambda: AsyncEngine(engine_options, on_stage=_log_stage), server_options, sock, imports_s)


async def _serve(
    make_engine: Callable[[], AsyncEngine], server_options: ServerConfig, sock: socket.socket, imports_s: float
) -> int:
    serving = asyncio.current_task()
    assert serving is not None
    server: Server | None = None

    def stop() -> None:
        if server is None:
            serving.cancel()  # still loading: there is nothing to finish
        else:
            server.stop()

    with sock, on_signals(stop):
        try:
            async with make_engine() as engine:
                # What was loaded stays: a full collection that walked it would hold all streams for a tenth of a
                # second. The process is ours here; the library leaves its caller's collector alone.
                gc.collect()
                gc.freeze()
                report = startup_report(engine, server_options, url_of(sock), imports_s)
                server = Server(engine, server_options, on_started=lambda: print(report, flush=True))
                try:
                    return await server.run_on(sock)
                finally:
                    gc.unfreeze()  # or the interpreter ends without it, and native modules report leaks
        except asyncio.CancelledError:
            if server is not None:
                raise
            print("aioengine: stopped while loading", file=sys.stderr)
            return EXIT_INTERRUPTED


def _log_stage(stage: str) -> None:
    logger.info("%s", stage)
