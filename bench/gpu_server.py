"""Measures `aioengine serve` over HTTP on one GPU, beside vLLM's figures.

    python -m aioengine.bench.gpu_server [--out DIR] [--model NAME] [--device cuda] [SERVE FLAGS ...]

    O1   256 requests at once, 512 words in, 128 tokens out, streamed
    O2   400 requests, Poisson arrivals at 20 per second, the same sizes
    O3   16 requests one after another, the same sizes

The model is a shape with random weights; its tokenizer is made here, one token for each of random words, so that
every token is text and every step of a request is an event. The client is one asyncio process on plain sockets;
`null` runs it against a server that answers at once, which shows what the client can take. vLLM's figures, in
`ANCHORS` below, are of vLLM 0.26.0 with its defaults on one H200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aioengine.bench.report import machine, require_cuda
from aioengine.bench.workloads import Timeline, percentile, summarize

INPUT_WORDS, OUTPUT_TOKENS = 512, 128
ANCHORS = {
    "O1": {
        "output_tokens_per_s": 6334,
        "ttft_p50_ms": 1901,
        "ttft_p99_ms": 3285,
        "itl_p50_ms": 13.4,
        "itl_p99_ms": 201,
    },
    "O2": {"output_tokens_per_s": 2465, "ttft_p50_ms": 63, "ttft_p99_ms": 109, "itl_p50_ms": 5.6, "itl_p99_ms": 35.9},
    "O3": {
        "output_tokens_per_s": 202.5,
        "ttft_p50_ms": 22.3,
        "ttft_p99_ms": 26.5,
        "itl_p50_ms": 4.8,
        "itl_p99_ms": 5.36,
    },
}
"""vLLM 0.26.0, Llama-3.1-8B, one H200."""


def word_of(index: int) -> str:
    """A lower-case word for every number, no two equal."""
    letters = []
    index += 26**3
    while index:
        index, letter = divmod(index, 26)
        letters.append(chr(97 + letter))
    return "".join(letters)


def make_tokenizer(folder: Path, vocab_size: int) -> list[str]:
    """Writes a byte-level tokenizer whose tokens are the bytes and then words; returns the words."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [word_of(i) for i in range(vocab_size - len(alphabet))]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("\u0120" + word for word in words)])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], ignore_merges=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    return words


async def request(port: int, body: dict[str, Any]) -> Timeline:
    """One streamed completion; the times of its events with a choice.

    Raises:
        RuntimeError: the answer is no stream, or has not all tokens.
    """
    payload = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    line = Timeline(time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
        usage: dict[str, int] = {}
        while True:
            event = await reader.readline()
            if event.startswith(b"data: {"):
                if b'"choices":[{' in event:
                    line.token_times_s.append(time.perf_counter())
                else:
                    usage = json.loads(event[6:])["usage"]
            elif event.startswith(b"data: [DONE]"):
                break
            elif not event:
                raise RuntimeError("the stream ended early")
    finally:
        writer.close()
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (INPUT_WORDS, OUTPUT_TOKENS):
        raise RuntimeError(f"other tokens than asked for: {usage}")
    line.num_prompt_tokens = usage["prompt_tokens"]
    return line


class Load:
    """Makes requests of fresh random words against one port."""

    def __init__(self, port: int, words: Sequence[str], model: str) -> None:
        self._port, self._words, self._model = port, words, model
        self._rng = random.Random(1)

    def send(self) -> asyncio.Task[Timeline]:
        body = {
            "model": self._model,
            "prompt": " " + " ".join(self._rng.choices(self._words, k=INPUT_WORDS)),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return asyncio.create_task(request(self._port, body))

    async def at_once(self, count: int) -> dict[str, Any]:
        return await self._run([0.0] * count)

    async def poisson(self, count: int, per_s: float) -> dict[str, Any]:
        return await self._run([self._rng.expovariate(per_s) for _ in range(count)])

    async def one_by_one(self, count: int) -> dict[str, Any]:
        begun = time.perf_counter()
        lines = [await self.send() for _ in range(count)]
        return self._report(lines, time.perf_counter() - begun)

    async def _run(self, waits_s: Sequence[float]) -> dict[str, Any]:
        begun, due_s, tasks = time.perf_counter(), 0.0, []
        for wait_s in waits_s:
            due_s += wait_s
            if (delay_s := begun + due_s - time.perf_counter()) > 0:
                await asyncio.sleep(delay_s)
            tasks.append(self.send())
        lines = await asyncio.gather(*tasks)
        return self._report(lines, time.perf_counter() - begun)

    @staticmethod
    def _report(lines: Sequence[Timeline], elapsed_s: float) -> dict[str, Any]:
        found = dict(summarize(lines, elapsed_s))
        events = int(found["output_tokens"] or 0)
        found["events"] = events
        found["output_tokens"] = tokens = OUTPUT_TOKENS * len(lines)  # checked against each answer's usage
        found["output_tokens_per_s"] = round(tokens / elapsed_s, 2)
        found["events_per_s"] = round(events / elapsed_s, 1)
        found["longest_gap_ms"] = round(1000 * max((g for line in lines for g in line.gaps_s), default=0.0), 2)
        ttfts = [line.ttft_s for line in lines]
        found["ttft_p90_ms"] = round(1000 * (percentile(ttfts, 90) or 0.0), 2)
        return found


class Server:
    """`aioengine serve` in a process of its own."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        self._flags, self._log = flags, log

    async def __aenter__(self) -> Server:
        self.begun_s = time.perf_counter()
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "aioengine", "serve", "--port", "0", *self._flags,
                stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            print("   " + line.rstrip(), flush=True)
            if line.startswith("URL"):
                self.port = int(line.rsplit(":", 1)[1].split("/")[0])
            if line.startswith("ready"):
                break
        else:
            raise RuntimeError(f"the server ended: {self._log.read_text()[-3000:]}")
        self.ready_s = time.perf_counter() - self.begun_s
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()

    def memory(self) -> dict[str, float]:
        """Resident memory of the process, MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return {
            name: round(int(fields[name].split()[0]) / 1024, 1) for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")
        }


def null_server(ready: Any) -> None:
    """Answers every request at once with all its events."""
    event = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1,"model":"null",'
    event += b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
    usage %= INPUT_WORDS, OUTPUT_TOKENS

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(OUTPUT_TOKENS):
            writer.write(event)
        writer.write(usage)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def measure_client(words: Sequence[str]) -> dict[str, Any]:
    """O1 against the null server."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=null_server, args=(theirs,), daemon=True)
    process.start()
    try:
        port = await asyncio.to_thread(ours.recv)
        return await Load(port, words, "null").at_once(256)
    finally:
        process.terminate()
        process.join()


async def run(args: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """All workloads; prints each as it is done."""
    report: dict[str, Any] = {"command": sys.argv, "machine": machine(), "model": args.model}

    def show(name: str, found: dict[str, Any]) -> None:
        report[name] = found
        print(f"-- {name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
        for key, anchor in ANCHORS.get(name, {}).items():
            print(f"     {key:22} {found[key]:>10}   vLLM {anchor}", flush=True)
        if args.out is not None:
            (args.out / "gpu_server.json").write_text(json.dumps(report, indent=1))

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = make_tokenizer(folder, args.vocab_size)
        show("null", await measure_client(words))
        own = ["--model", f"shape:{args.model}", "--load-format", "dummy", "--device", args.device]
        own += ["--tokenizer", str(folder), "--max-model-len", str(args.max_model_len)]
        async with Server([*own, *flags], folder / "log") as server:
            report["ready_s"] = round(server.ready_s, 2)
            load = Load(server.port, words, f"shape:{args.model}")
            show("warm-up", await load.at_once(min(32, args.requests)))
            await asyncio.sleep(args.rest_s)
            workloads = {
                "O1": lambda: load.at_once(args.requests),
                "O2": lambda: load.poisson(min(400, 4 * args.requests), 20.0),
                "O3": lambda: load.one_by_one(min(16, args.requests)),
            }
            for name in args.workloads.split(","):
                show(name, await workloads[name]())
            show("host memory, MiB", server.memory())
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-model-len", type=int, default=40000)
    parser.add_argument("--workloads", default="O3,O2,O1", help="in this order; may repeat, the last of a name is kept")
    parser.add_argument("--requests", type=int, default=256, help="requests of O1; fewer shrink the others too")
    parser.add_argument("--rest-s", type=float, default=15.0, help="idle seconds before measuring: graphs are captured")
    args, flags = parser.parse_known_args()
    if args.device == "cuda":
        require_cuda("gpu_server")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    asyncio.run(run(args, flags))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
