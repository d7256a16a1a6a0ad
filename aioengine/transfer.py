"""Small arrays on their way to a device, without anybody waiting.

A copy from memory that is not pinned may wait for all that the stream has to do first, which is a whole step. So
what a step needs goes through pinned memory, which torch lends and takes back once the copy is done; and as one
array where possible, because a copy costs the host as much as a kernel launch. Used by the sampler and its parts.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray


def to_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, in stream order; `values` may be changed afterwards."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def stack_to_device(device: torch.device, *rows: ArrayLike) -> torch.Tensor:
    """Equally long rows of int32, or of float32 as their bits, as one int32 matrix on the device."""
    first = np.asarray(rows[0])
    host = np.empty((len(rows), len(first)), np.int32)
    for line, row in zip(host, rows, strict=True):
        array = np.asarray(row)
        line[:] = array.view(np.int32) if array.dtype == np.float32 else array
    return to_device(host, device)
