"""`aioengine serve`: from flags to a running server, and from a signal to an exit code."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import socket
import sys
import time

from aioengine.api.server import Server, listen, on_signals, url_of
from aioengine.cli.flags import engine_config, server_config
from aioengine.cli.startup_report import startup_report
from aioengine.config import EngineConfig, ServerConfig
from aioengine.engine import AsyncEngine
from aioengine.errors import InvalidConfig

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


async def run(args: argparse.Namespace) -> int:
    """Serves until told to stop. The address is bound first: a taken port costs no loading.

    Raises:
        EngineError: the configuration, the address or the model cannot be used.
    """
    imports_s = time.perf_counter() - args.begun_s
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
    with listen(server_options.host, server_options.port) as sock:
        return await _serve(engine_options, server_options, sock, imports_s)


async def _serve(
    engine_options: EngineConfig, server_options: ServerConfig, sock: socket.socket, imports_s: float
) -> int:
    serving = asyncio.current_task()
    assert serving is not None
    server: Server | None = None

    def stop() -> None:
        if server is None:
            serving.cancel()  # still loading: there is nothing to finish
        else:
            server.stop()

    with on_signals(stop):
        try:
            async with AsyncEngine(engine_options, on_stage=_log_stage) as engine:
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
