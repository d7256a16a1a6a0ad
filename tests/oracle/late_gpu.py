"""CUDA as `CudaRunner` uses it, without a device: work waits in order and is done `delay` launches later.

Inside `torch.cuda.stream(...)` every `Tensor.copy_` is put off, as a device would; memory is read when the copy
is done, not when it was asked for, so that a buffer written too early shows. The forward pass is the model of
`device.py`, on the step buffer that reached the "device".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from aioengine import completion, cuda_runner
from aioengine.buckets import StepFacts
from aioengine.device import MemoryReport
from aioengine.fastcore import native, step_buffer
from aioengine.graphs import StepForward, StepOutput
from aioengine.kernels.choose import DrawTable
from aioengine.sampler import Choice
from tests.oracle.device import FakeDevice

PATIENCE = 20
"""Turns of the loop without a launch after which the oldest step ends anyhow."""


class LateGpu:
    """The queue of all streams, and the names in torch and the runner's module that lead to it.

    Args:
        delay: how many later steps are launched before one ends.
        puts_off: else all work is done when it is launched, and only told late: for a forward pass that is no fake.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, num_blocks: int, block_size: int, *, delay: int = 0, puts_off: bool = True
    ) -> None:
        self.delay = delay
        self.puts_off = puts_off
        self.model = FakeDevice(num_blocks, block_size)
        self.queue: deque[Callable[[], Any]] = deque()
        self.num_waiting = 0
        self.num_launched = 0
        gpu = self

        class Event:
            def __init__(self, **options: object) -> None:
                self.is_done = True

            def record(self, stream: object = None) -> None:
                self.is_done = False
                gpu.queue.append(lambda: setattr(self, "is_done", True))

            def query(self) -> bool:
                return self.is_done

            def synchronize(self) -> None:
                gpu.run_all()

            def elapsed_time(self, other: object) -> float:
                return 0.5

        class Stream:
            device = torch.device("cpu")
            cuda_stream = 0

            def __init__(self, device: object = None) -> None:
                pass

            def wait_event(self, event: object) -> None:
                pass  # one queue keeps all order

            def synchronize(self) -> None:
                gpu.run_all()

        class Completion(native.Completion):
            def enqueue(self, stream: int) -> None:
                gpu.num_waiting += 1
                gpu.num_launched += 1
                gpu.queue.append(lambda: self._end())

            def _end(self) -> bool:
                gpu.num_waiting -= 1
                self.signal()
                return True

        @contextlib.contextmanager
        def stream_context(stream: object) -> Iterator[None]:
            with _PutOff(gpu):
                yield

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", stream_context)
        patch.setattr(torch.cuda, "synchronize", self.run_all)
        patch.setattr(completion, "native", SimpleNamespace(Completion=Completion))
        self.stream: Any = Stream()

    def runner(
        self,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_in_flight: int,
        forward: StepForward | None = None,
        **options: Any,
    ) -> Any:
        """A real runner on this device, by default with a fake forward pass."""
        memory = MemoryReport(
            weights_bytes=0,
            layout=None,  # type: ignore[arg-type]
            num_blocks=2,
            max_model_len=1,
        )
        return cuda_runner.CudaRunner(
            SimpleNamespace() if forward is None else forward._model,  # type: ignore[arg-type]
            _LateForward(self, max_num_seqs) if forward is None else forward,  # type: ignore[arg-type]
            SimpleNamespace(close=lambda: None),  # type: ignore[arg-type]
            memory,
            self.stream,
            vocab_size=vocab_size,
            max_num_seqs=max_num_seqs,
            max_in_flight=max_in_flight,
            max_chunk=512,
            **options,
        )

    def finish_one(self) -> None:
        """Does the work of the oldest step."""
        while self.queue.popleft()() is not True:
            pass

    def run_all(self) -> None:
        """Does all work there is."""
        while self.queue:
            self.queue.popleft()()

    async def drive(self) -> None:
        """Ends steps as the delay says, for ever."""
        turns, seen = 0, 0
        while True:
            await asyncio.sleep(0)
            turns = turns + 1 if seen == self.num_launched else 0
            seen = self.num_launched
            if self.num_waiting > self.delay or (self.num_waiting and turns > PATIENCE):
                self.finish_one()
                turns = 0


class _PutOff(TorchFunctionMode):
    """Copies become work of the device; pinned memory is any memory."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.copy_ and self._gpu.puts_off:
            self._gpu.queue.append(lambda: torch.Tensor.copy_(*args) is None)
            return args[0]
        return function(*args, **kwargs)


class _LateForward:
    """The part of `StepForward` that the runner uses. The model's tokens are no draws, but how each row would have
    chosen is kept, as the device saw it when it came to the step."""

    def __init__(self, gpu: LateGpu, max_num_seqs: int) -> None:
        self._gpu = gpu
        self.sizes: list[Any] = []
        self.num_decode = 0
        self.buckets = SimpleNamespace(
            sizes=(1,),
            num_drafts=0,
            at_start=lambda: self.sizes[: 1 + self.num_decode],
            ahead=lambda: self.sizes,
        )
        self.prepared: list[Any] = []
        self.buffer = torch.zeros(4096, dtype=torch.int32)
        self.packed = torch.zeros((2, max_num_seqs), dtype=torch.int32)
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int32)
        self.draws = DrawTable.zeros(max_num_seqs, torch.device("cpu"))
        self.temperatures: deque[list[float]] = deque()
        """Of the samples of each step, in order."""

    def is_prepared(self, bucket: Any) -> bool:
        return bucket in self.prepared

    def prepare(self, bucket: Any) -> None:
        self.prepared.append(bucket)

    def warm_copies(self) -> None:
        pass

    def warm_long_chunks(self, max_chunk: int) -> Iterator[None]:
        self.prepared.append("long chunks")
        yield

    def run(self, facts: StepFacts, *, choice: Choice) -> StepOutput:
        assert choice == Choice.PLAIN
        self._gpu.queue.append(self._execute)
        return StepOutput(self.packed, None, None, True)  # type: ignore[arg-type]

    def _execute(self) -> None:
        words = self.buffer.numpy()
        header = words[: step_buffer.HEADER_WORDS].tolist()
        num_rows = header[step_buffer.HEADER_NUM_ROWS]
        plan = SimpleNamespace(
            buffer=words[: header[step_buffer.HEADER_TOTAL_WORDS]].copy(),
            step_id=header[step_buffer.HEADER_STEP_ID],
            num_rows=num_rows,
            num_tokens=header[step_buffer.HEADER_NUM_ROWS + 1],
            num_samples=header[step_buffer.HEADER_NUM_SAMPLES],
            num_copies=header[step_buffer.HEADER_NUM_COPIES],
            requests=[SimpleNamespace(request_id="", sampling=None)] * num_rows,
        )
        self._gpu.model.launch(plan)  # type: ignore[arg-type]
        _, samples = self._gpu.model.finish()
        self.packed.numpy()[0, : len(samples)] = samples
        self.packed.numpy()[1] = np.int32(0)
        self.temperatures.append(self.draws.temperature[StepFacts.of(plan.buffer).sample_rows].tolist())

    def close(self) -> None:
        pass
