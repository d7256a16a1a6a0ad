"""One weight as it lies in its file: raw bytes, their encoding and shape, nothing converted.

Made by the readers (`gguf.py`, `safetensors_reader.py`, `dummy.py`), consumed by the models' loading: a CPU
device packs the bytes as they are, a GPU copies or dequantizes them. No torch here.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from aioengine.errors import ModelLoadError

TensorKind = Literal["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

TENSOR_KINDS: tuple[TensorKind, ...] = get_args(TensorKind)

_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Python 3.11 has no name for it."""


def block_columns(kind: TensorKind) -> int:
    """Columns of a row that are encoded together: 1, 32 or 256. A row is a whole number of blocks."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


def row_nbytes(kind: TensorKind, num_columns: int) -> int:
    """Bytes of one row."""
    block, block_nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert num_columns % block == 0, (kind, num_columns)
    return num_columns // block * block_nbytes


def map_file(path: Path) -> mmap.mmap:
    """Maps a file of weights: private, read lazily, closed with the last array over it.

    Raises:
        ModelLoadError: it cannot be opened or is empty.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelLoadError(f"{path} is empty (0 bytes); fetch it again")
            # Without MAP_NORESERVE a writable private map counts in full against the machine's memory.
            return mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from None


class RawTensor:
    """A matrix (or vector) in its stored encoding.

    `data` is a flat uint8 array over a private memory map: reading it pages the file in, nothing is copied.
    Treat it as read-only; it is writable only so that torch can share it without a warning.
    """

    __slots__ = ("_data", "_row_order", "kind", "name", "shape")

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: TensorKind,
        data: NDArray[np.uint8],
        row_order: NDArray[np.intp] | None = None,
    ) -> None:
        self.name = name
        """Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`."""
        self.shape = shape
        """(outputs, inputs) of a matrix, (n,) of a vector."""
        self.kind: TensorKind = kind
        self._data = data
        self._row_order = row_order

    @property
    def num_rows(self) -> int:
        """Outputs of a matrix; 1 for a vector."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def nbytes(self) -> int:
        return self.num_rows * row_nbytes(self.kind, self.shape[-1])

    @property
    def data(self) -> NDArray[np.uint8]:
        """The raw bytes, row after row. Rows stored in another order are copied into order on each access."""
        if self._row_order is None:
            return self._data
        return self._data.reshape(self.shape[0], -1)[self._row_order].reshape(-1)

    def ends(self, count: int) -> bytes:
        """The first and the last bytes as they are stored, `count` of each."""
        return self._data[:count].tobytes() + self._data[-count:].tobytes()

    def dequantize(self) -> NDArray[np.float32]:
        """The values as float32 in the tensor's shape; shares the file's memory if the kind is F32."""
        data = self.data
        if self.kind == "F32":
            return data.view(np.float32).reshape(self.shape)
        if self.kind == "F16":
            return data.view(np.float16).astype(np.float32).reshape(self.shape)
        if self.kind == "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        rows = dequantize(data.reshape(self.num_rows, -1), GGMLQuantizationType[self.kind])
        return rows.reshape(self.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.shape}, {self.kind})"
