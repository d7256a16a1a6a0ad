"""The engine without a device: what the host's own work costs per token and per step.

A runner that computes nothing and has every step's tokens at once takes the place of the model. What is left is
admission, scheduling, block bookkeeping, packing, output handling and the event loop: the ceiling that no
accelerator can lift. Three ways in: the bare scheduler, the step loop whose streams are read at the end (offline), and
the library's `generate()` with one task per request. Called by `core.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable

import numpy as np

from aioengine import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from aioengine.bench.workloads import random_prompts
from aioengine.checkpoint import open_checkpoint
from aioengine.config import resolve
from aioengine.device import MemoryReport
from aioengine.fastcore.step_buffer import StepPlan
from aioengine.kv_layout import layout_of
from aioengine.model_source import resolve_model
from aioengine.runner import Runner, StepResult
from aioengine.startup import Parts, Timings

MODEL = "shape:smollm2-135m"
"""Gives vocabulary and context window; its weights are never made."""
BLOCK_SIZE = 16


class NullRunner(Runner):
    """Completes each step within `launch`; every sampled token is the same."""

    polled_s = 0.0
    connector = None

    def __init__(self, memory: MemoryReport, token_id: int) -> None:
        self._memory = memory
        self._token_id = token_id

    @property
    def memory(self) -> MemoryReport:
        """Nothing but the number of blocks."""
        return self._memory

    def launch(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """As `Runner.launch`."""
        done: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        done.set_result(StepResult(np.full(plan.num_samples, self._token_id, np.int32)))
        return done

    def store(self, work: Callable[[], None]) -> None:
        """Never asked for: there is no connector."""

    def use_idle_time(self) -> bool:
        """Nothing can wait."""
        return False

    async def close(self) -> None:
        """Nothing is held."""


def load_null_parts(
    config: EngineConfig, on_stage: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Parts:
    """The parts of an engine that has a model's shape, no tokenizer, and no model."""
    checkpoint = open_checkpoint(resolve_model(config.model), config.model)
    spec = checkpoint.config
    resolved = resolve(
        config, model_max_len=spec.context_length, model_dtype=spec.dtype, cuda_available=False, num_cores=1
    )
    num_blocks = (
        config.cache.num_gpu_blocks_override or 2 + resolved.max_num_seqs * resolved.max_model_len // BLOCK_SIZE
    )
    memory = MemoryReport(
        weights_bytes=0,
        layout=layout_of(spec, resolved),
        num_blocks=num_blocks,
        max_model_len=resolved.max_model_len,
    )
    return Parts(
        spec=spec,
        resolved=resolved,
        served_name="no model",
        tokenizer=None,
        chat_templates={},
        generation_defaults={},
        eos_token_ids=(),
        runner=NullRunner(memory, spec.vocab_size - 1),
        num_blocks=num_blocks,
        timings=Timings(),
    )


def null_engine(num_seqs: int, num_blocks: int) -> AsyncEngine:
    """An engine that runs up to `num_seqs` requests, one step ahead, as on a GPU."""
    config = EngineConfig(
        MODEL,
        load_format="dummy",
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=num_blocks,
        block_size=BLOCK_SIZE,
        async_scheduling=True,
        log_stats_interval_s=0.0,
    )
    return AsyncEngine(config, load=load_null_parts)


async def run_host_only(
    num_seqs: int, input_len: int, output_len: int, *, reads_late: bool, seed: int
) -> dict[str, float]:
    """All requests at once; returns output tokens per second, steps, and time per step.

    Args:
        reads_late: the streams are read when everything has run (offline); else one task reads each with
            `generate()` as its tokens come.
    """
    num_blocks = 2 + num_seqs * -(-(input_len + output_len) // BLOCK_SIZE)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    async with null_engine(num_seqs, num_blocks) as engine:
        prompts = random_prompts(num_seqs, input_len, engine.model.vocab_size, seed)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        if reads_late:
            outputs = await _read_late(engine, prompts, params)
        else:
            outputs = await _read_as_they_come(engine, prompts, params)
        elapsed_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
        num_steps = engine.stats().num_steps
    num_tokens = sum(num for num, _ in outputs)
    assert num_tokens == num_seqs * output_len
    return {
        "output_tokens_per_s": round(num_tokens / elapsed_s),
        "per_cpu_s": round(num_tokens / cpu_s),
        "ms_per_step": round(1000 * elapsed_s / num_steps, 4),
        "steps": num_steps,
        "outputs_per_request": round(sum(n for _, n in outputs) / num_seqs, 1),
    }


async def _read_late(engine: AsyncEngine, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, int]]:
    streams = [await engine.submit(prompt, params) for prompt in prompts]
    await engine.drain(timeout_s=3600)
    return [await _count(stream) for stream in streams]


async def _read_as_they_come(
    engine: AsyncEngine, prompts: list[list[int]], params: SamplingParams
) -> list[tuple[int, int]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_count(engine.generate(prompt, params))) for prompt in prompts]
    return [task.result() for task in tasks]


async def _count(outputs: AsyncIterable[RequestOutput]) -> tuple[int, int]:
    """Tokens and outputs of one request."""
    num_tokens = num_outputs = 0
    async for output in outputs:
        num_tokens += len(output.delta_token_ids)
        num_outputs += 1
    return num_tokens, num_outputs
