"""Pages of host memory: where a host tier (`kv_host_tier.py`) keeps bytes, and their copies to and from a CPU's pool.

    memory      [num_slots, num_layers, page]: a slot is one block of the pool, its layers behind each other, in the
                pool's own layout and type, so that it is one piece of memory

`cuda_pages.py` does the same for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aioengine.device import available_memory_bytes
from aioengine.errors import InvalidConfig
from aioengine.kv_layout import KVLayout


def check_host_memory(num_bytes: int, promised_bytes: int = 0) -> None:
    """
    Args:
        promised_bytes: what others have allocated and not written yet.

    Raises:
        InvalidConfig: the machine has not so much memory left for a host tier.
    """
    available = max(0, available_memory_bytes() - promised_bytes)
    if num_bytes > available:
        raise InvalidConfig(
            f"kv_offloading_size: {num_bytes >> 20} MiB of host memory cannot be had, {available >> 20} MiB are free; "
            "lower --kv-offloading-size",
            param="kv_offloading_size",
        )


def allocate_slots(layout: KVLayout, num_slots: int, dtype: torch.dtype, promised_bytes: int = 0) -> torch.Tensor:
    """Memory of so many slots, [num_slots, num_layers, page]; it is occupied when it is written.

    Raises:
        InvalidConfig: as `check_host_memory`, or the system refuses.
    """
    num_bytes = num_slots * layout.block_bytes
    check_host_memory(num_bytes, promised_bytes)
    try:
        shape = (num_slots, layout.num_tensors, layout.block_bytes // layout.num_tensors)
        return torch.empty(shape, dtype=torch.uint8).view(dtype)
    except RuntimeError:
        raise InvalidConfig(
            f"kv_offloading_size: the system refuses {num_bytes >> 20} MiB of host memory; lower --kv-offloading-size",
            param="kv_offloading_size",
        ) from None


def layer_pages(kv_caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor of the pool as [num_blocks, page]; with one group of layers every layer has its own."""
    return [cache.view(len(cache), -1) for cache in kv_caches]


class CpuPages:
    """Pages beside a pool in the same memory. Untouched ones occupy none.

    Raises:
        InvalidConfig: there is not so much memory.
    """

    def __init__(self, layout: KVLayout, num_slots: int, kv_caches: Sequence[torch.Tensor]) -> None:
        self._pool = layer_pages(kv_caches)
        pool_bytes = sum(cache.nbytes for cache in kv_caches)
        self._memory = allocate_slots(layout, num_slots, kv_caches[0].dtype, pool_bytes)

    def load(self, slots: Sequence[int], block_ids: Sequence[int], /) -> None:
        """As `HostPages.load`; done on return."""
        sources, targets = torch.tensor(slots), torch.tensor(block_ids)
        for i, layer in enumerate(self._pool):
            layer[targets] = self._memory[sources, i]

    def store(self, block_ids: Sequence[int], slots: Sequence[int], /) -> None:
        """As `HostPages.store`; done on return."""
        sources, targets = torch.tensor(block_ids), torch.tensor(slots)
        for i, layer in enumerate(self._pool):
            self._memory[targets, i] = layer[sources]

    def blank(self, block_ids: Sequence[int], /) -> None:
        """As `HostPages.blank`."""
        for layer in self._pool:
            layer[torch.tensor(block_ids)] = 0

    def close(self) -> None:
        """As `HostPages.close`."""
        self._pool, self._memory = [], torch.empty(0)
