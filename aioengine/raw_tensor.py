"""One weight as it lies in its file: raw bytes, their encoding and shape, nothing converted.

Made by the readers (`gguf.py`, `safetensors_reader.py`, `dummy.py`), consumed by the models' loading: a CPU
device packs the bytes as they are, a GPU copies or dequantizes them. No torch here.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

TensorKind = Literal["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

TENSOR_KINDS: tuple[TensorKind, ...] = get_args(TensorKind)


def row_nbytes(kind: TensorKind, num_columns: int) -> int:
    """Bytes of one row. Quantized kinds need a multiple of their block length (32 or 256) of columns."""
    block, block_nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert num_columns % block == 0, (kind, num_columns)
    return num_columns // block * block_nbytes


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
        """Outputs of a matrix, elements of a vector when its rows are reordered, else 1."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def nbytes(self) -> int:
        return self.num_rows * row_nbytes(self.kind, self.shape[-1])

    @property
    def data(self) -> NDArray[np.uint8]:
        """The raw bytes, row after row. Rows stored in another order are put in order on each access (a copy)."""
        if self._row_order is None:
            return self._data
        return self._data.reshape(self.shape[0], -1)[self._row_order].reshape(-1)

    def dequantize(self) -> NDArray[np.float32]:
        """The values as float32, in the tensor's shape; a new array unless the kind is F32."""
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
