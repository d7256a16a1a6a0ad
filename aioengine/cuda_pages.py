"""Pages of pinned host memory beside a pool on a GPU.

Blocks are gathered from all layers by one kernel into a buffer on the device (`kernels/block_pack.py`), and the buffer
goes to the slots; or the other way. All copies between host and device are on one stream of their own, in the order in
which they were asked for, so that no slot is written before it was read, or read before it was written. The compute
stream waits for what it loads and goes on while a store travels, unless both buffers are full. Made by
`cuda_device.py`; called on the loop's thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from aioengine.errors import InvalidConfig
from aioengine.host_pages import allocate_slots, layer_pages
from aioengine.kernels.block_pack import BlockPacker
from aioengine.kv_layout import KVLayout

STAGING_BYTES = 64 << 20
"""Most bytes of a buffer on the device, but it holds one block at least."""
MAX_STAGED = 256
"""And most blocks in it."""


def staged_blocks(layout: KVLayout, num_slots: int) -> int:
    """Blocks in each of a GPU's buffers."""
    return max(1, min(STAGING_BYTES // layout.block_bytes, MAX_STAGED, num_slots))


def staging_bytes(layout: KVLayout, num_slots: int) -> int:
    """Device memory that a tier takes: two buffers for stores, one for loads."""
    return 3 * staged_blocks(layout, num_slots) * layout.block_bytes if num_slots else 0


@dataclass(slots=True)
class _Staging:
    """A buffer on the device, [staged_blocks, num_layers, page]."""

    blocks: torch.Tensor
    is_full: torch.cuda.Event
    """What was put into it is there."""
    is_read: torch.cuda.Event
    """And was taken out again."""


class CudaPages:
    """Pinned pages beside a pool on a GPU.

    Args:
        compute: the stream of the steps; `load` and `store` are called for what comes next on it.

    Raises:
        InvalidConfig: there is not so much memory, or it cannot be pinned.
    """

    def __init__(
        self, layout: KVLayout, num_slots: int, kv_caches: Sequence[torch.Tensor], compute: torch.cuda.Stream
    ) -> None:
        self._memory = allocate_slots(layout, num_slots, kv_caches[0].dtype)
        _pin(self._memory)
        self._unpin = weakref.finalize(self, _unpin, self._memory)
        self._compute = compute
        self._travel = torch.cuda.Stream(compute.device)
        self._pool = layer_pages(kv_caches)
        self._packer = BlockPacker(self._pool)
        shape = (staged_blocks(layout, num_slots), *self._memory.shape[1:])
        self._stagings = [
            _Staging(
                torch.empty(shape, dtype=self._memory.dtype, device=compute.device),
                torch.cuda.Event(),
                torch.cuda.Event(),
            )
            for _ in range(3)
        ]
        self._next = 0

    def load(self, slots: Sequence[int], block_ids: Sequence[int], /) -> None:
        """As `HostPages.load`; the compute stream waits for it."""
        staging = self._stagings[2]
        for begin in range(0, len(slots), len(staging.blocks)):
            part = slots[begin : begin + len(staging.blocks)]
            self._travel.wait_event(staging.is_read)
            with torch.cuda.stream(self._travel):
                for at, first, count in _runs(part):
                    staging.blocks[at : at + count].copy_(self._memory[first : first + count], non_blocking=True)
            staging.is_full.record(self._travel)
            self._compute.wait_event(staging.is_full)
            with torch.cuda.stream(self._compute):
                self._packer.unpack(staging.blocks, block_ids[begin : begin + len(part)])
            staging.is_read.record(self._compute)

    def store(self, block_ids: Sequence[int], slots: Sequence[int], /) -> None:
        """As `HostPages.store`; steps to come do not wait for it."""
        size = len(self._stagings[0].blocks)
        for begin in range(0, len(slots), size):
            staging = self._stagings[self._next]
            self._next = 1 - self._next
            part = slots[begin : begin + size]
            self._compute.wait_event(staging.is_read)
            with torch.cuda.stream(self._compute):
                self._packer.pack(block_ids[begin : begin + len(part)], staging.blocks)
            staging.is_full.record(self._compute)
            self._travel.wait_event(staging.is_full)
            with torch.cuda.stream(self._travel):
                for at, first, count in _runs(part):
                    self._memory[first : first + count].copy_(staging.blocks[at : at + count], non_blocking=True)
            staging.is_read.record(self._travel)

    def blank(self, block_ids: Sequence[int], /) -> None:
        """As `HostPages.blank`."""
        with torch.cuda.stream(self._compute):
            ids = torch.tensor(block_ids, device=self._compute.device)
            for layer in self._pool:
                layer.index_fill_(0, ids, 0)

    def warm_up(self) -> None:
        """Compiles the kernels, on the null block: what is stored of it is never loaded."""
        self.store([0], [0])
        with torch.cuda.stream(self._compute):
            self._packer.unpack(self._stagings[0].blocks, [0])
        self._compute.synchronize()

    def close(self) -> None:
        """As `HostPages.close`."""
        if self._unpin.alive:
            with suppress(RuntimeError):  # a device that failed says so again, and travels no more
                self._travel.synchronize()
            self._unpin()
            self._stagings.clear()
            self._pool.clear()
            self._packer.close()
            self._memory = torch.empty(0)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pieces of consecutive slots: position of the first one, the slot itself, how many."""
    at = 0
    while at < len(slots):
        count = 1
        while at + count < len(slots) and slots[at + count] == slots[at] + count:
            count += 1
        yield at, slots[at], count
        at += count


def _pin(memory: torch.Tensor) -> None:
    """Registered instead of allocated by torch, which rounds up to powers of two and keeps what is freed.

    Raises:
        InvalidConfig: the driver refuses.
    """
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        raise InvalidConfig(
            f"kv_offloading_size: {memory.nbytes >> 20} MiB of host memory cannot be pinned ({error}); lower "
            "--kv-offloading-size",
            param="kv_offloading_size",
        )


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
