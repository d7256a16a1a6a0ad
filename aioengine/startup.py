"""From a configuration to loaded parts: files, tokenizer, weights, KV pool, scheduler.

Runs in a thread, because reading and packing weights would block the loop for seconds. Every stage is timed;
the breakdown is printed at start and shown by `aioengine info`. Called by `engine.py` only, through `Loading`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from aioengine.checkpoint import ModelSpec, open_checkpoint
from aioengine.config import EngineConfig, ResolvedConfig, resolve, usable_cores
from aioengine.determinism import fingerprint
from aioengine.errors import EngineClosed
from aioengine.fastcore import native
from aioengine.model_source import resolve_model
from aioengine.preflight import check_options, read_chat_template
from aioengine.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from aioengine.kv_layout import KVLayout
    from aioengine.runner import Runner

T = TypeVar("T")


@dataclass(slots=True)
class Timings:
    """Seconds per stage of the start, in order."""

    stages: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to the stage `name`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - begun

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.stages.items())
        return f"{parts}, in all {sum(self.stages.values()):.2f} s"


@dataclass(slots=True, kw_only=True)
class Parts:
    """What an engine is made of, loaded and ready to run."""

    spec: ModelSpec
    resolved: ResolvedConfig
    served_name: str
    tokenizer: Tokenizer | None
    chat_templates: Mapping[str, str]
    generation_defaults: Mapping[str, object]
    eos_token_ids: tuple[int, ...]
    runner: Runner
    num_blocks: int
    timings: Timings
    fingerprint: str = ""
    """Changes with everything that results depend on."""


LoadParts = Callable[[EngineConfig, Callable[[str], None], Callable[[], None]], Parts]
"""Takes the configuration, a callback that names stages, and one that raises to give up."""


class Loading:
    """The thread of a start, which can be given up while it works.

    What it loaded belongs to `run()`, or, if it was abandoned before that, to the thread, which closes it.
    """

    def __init__(self, load: LoadParts | None = None) -> None:
        self._load_parts = load or load_parts
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._parts: Parts | None = None

    def abandon(self) -> None:
        """Makes the thread stop at its next stage or tensor."""
        with self._lock:
            self._is_abandoned = True

    async def run(self, config: EngineConfig, on_stage: Callable[[str], None]) -> Parts:
        """Loads in a thread; when cancelled it returns at once and the thread ends by itself.

        Raises:
            EngineClosed: it was abandoned.
        """
        try:
            await run_in_thread(lambda: self._load(config, on_stage))
            self._check()
        except BaseException:
            self.abandon()
            if self._parts is not None:
                await self._parts.runner.close()
            raise
        assert self._parts is not None
        return self._parts

    def _load(self, config: EngineConfig, on_stage: Callable[[str], None]) -> None:
        parts = self._load_parts(config, on_stage, self._check)
        with self._lock:
            if not self._is_abandoned:
                self._parts = parts
                return
        asyncio.run(parts.runner.close())
        self._check()

    def _check(self) -> None:
        if self._is_abandoned:
            raise EngineClosed("the engine was closed while it started")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Runs blocking work in a thread of its own, so that none stays behind in the loop's default pool."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    thread = threading.Thread(target=run, name="aioengine-start", daemon=True)
    thread.start()
    try:
        return await future
    finally:
        if future.done() and not future.cancelled():
            thread.join()


def load_parts(
    config: EngineConfig, on_stage: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Parts:
    """Loads everything; blocking. `check` is called often and raises to give up.

    Raises:
        InvalidConfig, ModelNotFound, ModelLoadError: with a sentence that says what to do.
    """
    timings = Timings()
    check()
    with timings.stage("torch"):
        import torch
    check_options(config, cuda_available=torch.cuda.is_available())
    on_stage("locating the model")
    with timings.stage("locate"):
        files = resolve_model(config.model, on_fetch=on_stage)
    check()
    on_stage("reading the checkpoint")
    with timings.stage("open"):
        checkpoint = open_checkpoint(files, config.model)
    resolved = resolve(
        config,
        model_max_len=checkpoint.config.context_length,
        model_dtype=checkpoint.config.dtype,
        cuda_available=torch.cuda.is_available(),
        num_cores=usable_cores(),
    )
    from aioengine.device import asked_blocks, available_memory_bytes, create_device  # these need torch, see above
    from aioengine.host_pages import check_host_memory
    from aioengine.kv_host_tier import num_host_blocks
    from aioengine.kv_layout import layout_of
    from aioengine.loader import load_model, make_runner

    layout = layout_of(checkpoint.config, resolved)
    # A tier that this model or this machine cannot have costs no loading.
    check_host_memory(num_host_blocks(layout, resolved) * layout.block_bytes)
    if resolved.device == "cpu":
        resolved = fit_context(config, resolved, layout, available_memory_bytes())
    else:  # how much a GPU has left is known only after its profile run; whether what was asked for can be, now
        asked_blocks(layout, config.cache)
    with timings.stage("tokenizer"):
        source = checkpoint.tokenizer_source
        tokenizer = load_tokenizer(source) if source is not None else None
        own_template = read_chat_template(config.model)
    check()
    on_stage("loading the weights")
    device = create_device(resolved)
    try:
        loaded = load_model(checkpoint, resolved, device, lambda _done, _total: check())
        timings.stages.update(loaded.timings_s)
        with timings.stage("pool and warm-up"):
            runner = make_runner(loaded, layout, resolved, config.cache, device)
        resolved = dataclasses.replace(resolved, max_model_len=runner.memory.max_model_len)
    except BaseException:
        device.close()
        raise
    is_dummy = config.model.load_format == "dummy" or checkpoint.files.format == "shape"
    isa = native.isa() if resolved.device == "cpu" else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return Parts(
        spec=checkpoint.config,
        resolved=resolved,
        served_name=config.model.served_model_name or checkpoint.config.name,
        tokenizer=tokenizer,
        chat_templates=checkpoint.chat_templates if own_template is None else {"default": own_template},
        generation_defaults=checkpoint.generation_defaults,
        eos_token_ids=_end_tokens(checkpoint.config, tokenizer),
        runner=runner,
        num_blocks=runner.memory.num_blocks,
        timings=timings,
        fingerprint=fingerprint(checkpoint, resolved, isa, config.model.seed if is_dummy else None),
    )


def fit_context(
    config: EngineConfig, resolved: ResolvedConfig, layout: KVLayout, available_bytes: int
) -> ResolvedConfig:
    """The configuration with `max_model_len` lowered to what the KV pool holds, unless it was asked for.

    Raises:
        InvalidConfig: it was asked for and does not fit.
    """
    from aioengine.device import cpu_num_blocks, limit_context

    num_blocks = cpu_num_blocks(layout, resolved, config.cache, available_bytes)
    return limit_context(resolved, layout.longest_request(num_blocks - 1))


def _end_tokens(spec: ModelSpec, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every token that ends an answer, by the checkpoint and by its tokenizer."""
    own = tokenizer.eos_token_ids if tokenizer is not None else ()
    return tuple(i for i in dict.fromkeys((*spec.eos_token_ids, *own)) if i < spec.vocab_size)
