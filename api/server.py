"""uvicorn on the engine's own event loop: sockets, signals, drain, exit code.

uvicorn's own signal handling is switched off, because at the first signal it stops listening: probes and late
clients would see a refused connection instead of 503. Used by `aioengine serve` and by the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from aioengine.api.app import create_app
from aioengine.api.face import Engine
from aioengine.config import ServerConfig
from aioengine.errors import InvalidConfig

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Idle connections stay open longer than the usual 60 s of load balancers, so that these close first."""

LAST_WORDS_S = 2.0
"""After the drain, slow clients get at least this long to read the end of their answers."""

EXIT_OK, EXIT_FAILED = 0, 1

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not accept yet: a port that is taken is found out before the model is loaded.

    Raises:
        InvalidConfig: the address cannot be bound.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise InvalidConfig(f"cannot listen on host {host!r}: {error.strerror}", param="host") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}", param="port") from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """The address of a bound socket as a client writes it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, with one thing mended: when a client leaves that has pipelined a request behind a
    running one, uvicorn tells only the newest; here each of them learns it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._earlier: list[RequestResponseCycle] = []

    def on_headers_complete(self) -> None:
        """A request has begun; the one before it may still be answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._earlier = [c for c in self._earlier if not c.response_complete]
            self._earlier.append(self.cycle)
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        for cycle in self._earlier:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._earlier.clear()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """Serves one engine until it is told to stop, or until the engine dies."""

    def __init__(self, engine: Engine, config: ServerConfig, *, on_started: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(engine, config),
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=config.log_level == "debug",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._engine = engine
        self._drain_timeout_s = config.drain_timeout_s
        self._on_started = on_started
        self._draining: asyncio.Task[None] | None = None
        self._is_forced = False

    async def run_on(self, sock: socket.socket) -> int:
        """Serves on a bound socket; returns the exit code of the process."""
        try:
            await self.serve(sockets=[sock])
        finally:
            if self._draining is not None:
                self._draining.cancel()
                (failure,) = await asyncio.gather(self._draining, return_exceptions=True)
                if isinstance(failure, Exception):
                    logger.error("the drain failed", exc_info=failure)
        if self._engine.health() == "dead":
            logger.error("the engine has failed; exiting")
            return EXIT_FAILED
        return EXIT_FAILED if self._is_forced else EXIT_OK

    def stop(self) -> None:
        """First call: refuse new requests and finish the running ones. Second call: end them now."""
        if self._draining is None:
            logger.info("draining: running requests have %g s to finish", self._drain_timeout_s)
            self._draining = asyncio.create_task(self._drain(), name="aioengine-drain")
            return
        logger.warning("stopping now; running requests are cut off")
        self._is_forced = self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        begun_s = time.monotonic()
        try:
            await self._engine.drain(self._drain_timeout_s)
        finally:
            left_s = self._drain_timeout_s - (time.monotonic() - begun_s)
            self.config.timeout_graceful_shutdown = math.ceil(max(left_s, LAST_WORDS_S))
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        await super().startup(sockets)
        if self._on_started is not None:
            self._on_started()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to stop: yes, if the engine is dead."""
        if self._engine.health() == "dead" and not self.should_exit:
            self.config.timeout_graceful_shutdown = math.ceil(max(self._drain_timeout_s, LAST_WORDS_S))
            return True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's: see `on_signals`."""
        yield


@contextlib.contextmanager
def on_signals(handler: Callable[[], None]) -> Iterator[None]:
    """Calls `handler` on the loop at the first two SIGINT or SIGTERM; later ones kill as usual."""
    loop = asyncio.get_running_loop()
    num_seen = 0

    def handle() -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 2:
            restore()
        handler()

    def restore() -> None:
        for signum in SIGNALS:
            loop.remove_signal_handler(signum)

    for signum in SIGNALS:
        loop.add_signal_handler(signum, handle)
    try:
        yield
    finally:
        restore()
