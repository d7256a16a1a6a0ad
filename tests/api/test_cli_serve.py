"""`aioengine serve` as a process: what it prints, and what signals do to it."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from aioengine.cli.startup_report import startup_report
from aioengine.config import ServerConfig
from aioengine.speculation import parse
from tests.api.fake_engine import FakeEngine, FakeMemory

pytestmark = pytest.mark.slow

MAIN = """
import atexit, gc, sys, types
sys.path.insert(0, {root!r})
def unfreeze(really=gc.unfreeze):
    print("frozen", gc.get_freeze_count(), flush=True)
    really()
gc.unfreeze = unfreeze
atexit.register(lambda: print("left", gc.get_freeze_count(), flush=True))
from tests.api.fake_engine import FakeEngine
engine = FakeEngine()
for name, value in {settings!r}.items():
    setattr(engine, name, value)
if {hold}:
    engine.hold()
def make(config, **_):
    print("loading", flush=True)
    return engine
sys.modules["aioengine.engine"] = types.SimpleNamespace(AsyncEngine=make)
from aioengine.cli import main
raise SystemExit(main(["serve", "--port", "0", *{argv!r}]))
"""


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""

    def read_until(self, prefix: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(prefix):
                return line
        raise AssertionError(f"no line {prefix!r}")

    def wait(self) -> int:
        return self.process.wait(60)


@contextmanager
def serving(*argv: str, hold: bool = False, is_ready: bool = True, **settings: object) -> Iterator[Process]:
    root = str(Path(__file__).parents[2])
    script = MAIN.format(root=root, argv=argv, settings=settings, hold=hold)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        served = Process(process)
        try:
            served.read_until("loading")
            if is_ready:
                served.url = served.read_until("URL").split()[-1].removesuffix("/v1")
            yield served
        finally:
            process.kill()


def test_the_report_says_what_runs_where() -> None:
    engine = FakeEngine(temperature=0.2, top_k=7)
    report = startup_report(engine, ServerConfig(api_key="k"), "http://h:1", 1.25)  # type: ignore[arg-type]
    rows = dict(line.split("  ", 1) for line in report.splitlines())
    assert {name.strip(): value.strip() for name, value in rows.items()} == {
        "URL": "http://h:1/v1",
        "model": "fake (FakeForCausalLM)",
        "device": "cpu, 2 threads, float32",
        "context": "4096 tokens per request",
        "KV cache": "12345 tokens fit (64 MiB, float32)",
        "weights": "3 MiB",
        "batch": "64 requests, 512 tokens per step",
        "sampling": "temperature=0.2, top_p=1.0, top_k=7, min_p=0.0, repetition_penalty=1.0 "
        "(temperature, top_k from the model)",
        "determinism": "unavailable (the operator has declared nothing)",
        "API key": "required",
        "admin routes": "off",
        "ready in": "2.00 s (imports 1.25, locate 0.25, weights 0.50)",
    }


def test_the_report_tells_of_the_host_tier() -> None:
    engine = FakeEngine()
    engine.memory_report = FakeMemory(num_host_blocks=40, num_host_tokens=640, host_bytes=10 << 20)
    report = startup_report(engine, ServerConfig(), "http://h:1", 1.25)  # type: ignore[arg-type]
    rows = dict(line.split("  ", 1) for line in report.splitlines())
    assert rows["host tier"].strip() == "640 tokens fit (10 MiB)"


def test_the_report_tells_of_speculation() -> None:
    engine = FakeEngine()
    speculation = parse('{"method": "ngram", "num_speculative_tokens": 4}')
    engine.resolved = dataclasses.replace(engine.resolved, speculation=speculation)
    report = startup_report(engine, ServerConfig(), "http://h:1", 1.25)  # type: ignore[arg-type]
    rows = dict(line.split("  ", 1) for line in report.splitlines())
    told = "ngram, up to 4 drafts a step by the last 3 to 5 tokens; none with more than 32 requests running"
    assert rows["speculation"].strip() == told


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_an_idle_server_cleanly(signum: signal.Signals) -> None:
    with serving() as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.process.send_signal(signum)
        assert server.wait() == 0


def test_the_collector_does_not_walk_what_was_loaded_again_and_again() -> None:
    with serving() as server:
        server.process.send_signal(signal.SIGTERM)
        assert int(server.read_until("frozen").split()[1]) > 10_000
        assert int(server.read_until("left").split()[1]) < 10_000  # or native modules report all of it as leaked
        assert server.wait() == 0


def test_the_second_signal_ends_a_busy_server_at_once() -> None:
    body = {"prompt": "x", "stream": True}
    with (
        serving(hold=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body),
    ):
        server.process.send_signal(signal.SIGTERM)
        while client.get("/health").json()["status"] != "draining":
            pass
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 1


def test_a_dead_engine_ends_the_process_with_an_error() -> None:
    with serving(state="dead") as server:
        assert server.wait() == 1


def test_a_signal_while_loading_stops_the_start() -> None:
    with serving(is_ready=False, load_forever=True) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 130


def test_a_taken_port_is_a_usage_error_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = [sys.executable, "-m", "aioengine", "serve", "--port", str(taken.getsockname()[1])]
        script = "import sys, types; sys.modules['aioengine.engine'] = types.SimpleNamespace(AsyncEngine=None)\n"
        script += f"from aioengine.cli import main; raise SystemExit(main({line[3:]!r}))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("aioengine: error: cannot listen on 127.0.0.1:")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "cannot listen on 127.0.0.1:"), (["--port", "0", "--chat-template", "nope.jinja"], "cannot read the chat")],
)
def test_no_torch_is_needed_to_find_a_port_taken_or_an_option_wrong(argv: list[str], message: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = ["serve", "--port", str(taken.getsockname()[1]), *argv]
        script = "import sys; sys.modules['torch'] = None\n"  # importing it fails
        script += f"from aioengine.cli import main; raise SystemExit(main({line!r}))"
        done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.startswith(f"aioengine: error: {message}")) == (2, True), done.stderr
