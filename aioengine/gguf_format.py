"""The GGUF container: typed key-values and a table of tensors, read in milliseconds.

Layout (little-endian)::

    "GGUF"  u32 version  u64 num_tensors  u64 num_values
    num_values  x  string key, u32 type, value         string = u64 length + bytes
    num_tensors x  string name, u32 num_dims, u64 dims[num_dims] (innermost first), u32 type, u64 offset
    padding to a multiple of general.alignment, then the tensors' bytes

The `gguf` package's own reader makes several arrays per token and takes seconds on a vocabulary, so it is not
used here. What keys and names mean is `gguf.py`'s business.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from aioengine.errors import ModelLoadError
from aioengine.raw_tensor import TENSOR_KINDS, TensorKind, block_columns, map_file, row_nbytes
from aioengine.typed_fields import Fields

MAGIC = b"GGUF"

_SUPPORTED_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Type number of a value -> how it is packed."""
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table with its bytes, by its name in the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in Hugging Face: (outputs, inputs)."""
    kind: TensorKind
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Fields
    tensors: dict[str, GgufTensor]


class _Cursor:
    """A position in the file. Reading past the end raises `struct.error`, far past it `OverflowError`."""

    def __init__(self, file: mmap.mmap) -> None:
        self.file = file
        self.position = 0

    def u32(self) -> int:
        (value,) = _U32.unpack_from(self.file, self.position)
        self.position += 4
        return int(value)

    def u64(self) -> int:
        (value,) = _U64.unpack_from(self.file, self.position)
        self.position += 8
        return int(value)

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self.file):
            raise struct.error("past the end")
        taken = self.file[self.position : end]
        self.position = end
        return taken

    def string(self) -> str:
        return self.take(self.u64()).decode()

    def strings(self, count: int) -> list[str]:
        """`count` strings in a row; the loop over a whole vocabulary, so it is kept tight."""
        file, unpack, end = self.file, _U64.unpack_from, self.position
        raw: list[bytes] = []
        for _ in range(count):
            start = end + 8
            end = start + unpack(file, end)[0]
            raw.append(file[start:end])
        if end > len(file):
            raise struct.error("past the end")
        self.position = end
        return [text.decode() for text in raw]

    def value(self, value_type: int) -> object:
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            return self.array()
        packed = _NUMBERS[value_type]
        return struct.unpack(packed, self.take(struct.calcsize(packed)))[0]

    def array(self) -> list[object]:
        value_type, count = self.u32(), self.u64()
        if value_type == _STRING:
            return list(self.strings(count))
        dtype = np.dtype(_NUMBERS[value_type])
        numbers: list[object] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return numbers


def read_gguf_file(path: Path) -> GgufFile:
    """Reads metadata and tensor table and maps the tensors.

    Raises:
        ModelLoadError: the file is broken, cut off, or holds a type of tensor that cannot be loaded.
    """
    file = map_file(path)
    if file[:4] != MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file: it begins with {file[:4]!r} instead of {MAGIC!r}")
    cursor = _Cursor(file)
    cursor.position = len(MAGIC)
    try:
        _check_version(path, cursor.u32())
        num_tensors, num_values = cursor.u64(), cursor.u64()
        values: dict[str, object] = {}
        for _ in range(num_values):
            key = cursor.string()
            values[key] = cursor.value(cursor.u32())
        metadata = Fields(values, str(path))
        headers = [_tensor_header(cursor) for _ in range(num_tensors)]
    except (struct.error, OverflowError):
        raise ModelLoadError(
            f"{path} is cut off or broken: its metadata runs past its end at byte {len(file)}; fetch it again"
        ) from None
    except UnicodeDecodeError:
        raise ModelLoadError(f"{path} is broken: a text near byte {cursor.position} is not UTF-8") from None
    except KeyError as error:
        raise ModelLoadError(f"{path} is broken: unknown type {error} of a value near byte {cursor.position}") from None
    alignment = metadata.integer("general.alignment", 32)
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        if header.name in tensors:
            raise ModelLoadError(f"{path} is broken: it holds {header.name} twice")
        tensors[header.name] = _tensor(path, file, header, data_start)
    return GgufFile(path, metadata, tensors)


def _check_version(path: Path, version: int) -> None:
    if version in _SUPPORTED_VERSIONS:
        return
    if version >= 1 << 16:
        raise ModelLoadError(f"{path} is a big-endian GGUF file, which is not supported")
    raise ModelLoadError(f"{path} is a GGUF file of version {version}; supported are versions 2 and 3")


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


def _tensor_header(cursor: _Cursor) -> _TensorHeader:
    name, num_dims = cursor.string(), cursor.u32()
    if num_dims > _MAX_DIMS:
        raise struct.error("more dimensions than GGUF has")
    dims = tuple(cursor.u64() for _ in range(num_dims))
    return _TensorHeader(name, dims, cursor.u32(), cursor.u64())


def _tensor(path: Path, file: mmap.mmap, header: _TensorHeader, data_start: int) -> GgufTensor:
    shape = header.dims[::-1] or (1,)
    try:
        type_name = GGMLQuantizationType(header.type_id).name
    except ValueError:
        type_name = f"number {header.type_id}"
    if type_name not in TENSOR_KINDS:
        raise ModelLoadError(
            f"{path}: {header.name} has the type {type_name}, which cannot be loaded; "
            f"supported are {', '.join(TENSOR_KINDS)}"
        )
    kind: TensorKind = type_name
    if min(shape) < 1 or shape[-1] % block_columns(kind):
        raise ModelLoadError(f"{path}: {header.name} of shape {shape} cannot have the type {kind}")
    nbytes = math.prod(shape[:-1]) * row_nbytes(kind, shape[-1])
    start = data_start + header.offset
    if start + nbytes > len(file):
        raise ModelLoadError(
            f"{path} is cut off: {header.name} ends at byte {start + nbytes}, the file at {len(file)}; fetch it again"
        )
    return GgufTensor(header.name, shape, kind, np.frombuffer(file, np.uint8, nbytes, start))
