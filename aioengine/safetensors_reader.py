"""The tensors of a Hugging Face folder: one or several memory-mapped safetensors files.

Reads the headers only; what the names mean and which must exist is `checkpoint.py`'s business. The format:
a little-endian uint64 N, N bytes of JSON (name -> dtype, shape, [begin, end)), then the bytes of the tensors.
The `safetensors` package is not used because it hands out bfloat16 only as a framework's tensor or as a copy.
"""

from __future__ import annotations

import json
import math
import mmap
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from aioengine.errors import ModelLoadError
from aioengine.raw_tensor import RawTensor, TensorKind, map_file, row_nbytes
from aioengine.typed_fields import Fields, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_KINDS: dict[str, TensorKind] = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_IGNORED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.masked_bias")
"""Buffers that old versions of transformers saved beside the weights."""

_MAX_HEADER_BYTES = 100_000_000


def read_safetensors(folder: Path) -> dict[str, RawTensor]:
    """All weights of the folder by name, mapped and not read.

    Raises:
        ModelLoadError: a file is missing, broken, or holds a type that cannot be loaded.
    """
    tensors: dict[str, RawTensor] = {}
    weight_map = _read_index(folder)
    for path in _weight_files(folder, weight_map):
        for name, tensor in _read_file(path).items():
            if name in tensors:
                raise ModelLoadError(f"{path} holds {name}, which another file of the folder holds too")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors and not _is_ignored(name):
            raise ModelLoadError(f"{folder / INDEX_FILE} places {name} in {file}, but it is not there")
    return tensors


def _read_index(folder: Path) -> dict[str, str]:
    """Which file holds each tensor, or nothing if the folder has no index."""
    if (folder / SINGLE_FILE).exists() or not (folder / INDEX_FILE).exists():
        return {}
    index = read_json(folder / INDEX_FILE)
    weight_map = index.group("weight_map")
    if weight_map is None or not weight_map.values:
        raise index.wrong("weight_map", "an object that maps tensors to files")
    files: dict[str, str] = {}
    for name in weight_map.values:
        files[name] = weight_map.text(name)
        if Path(files[name]).name != files[name]:
            raise weight_map.wrong(name, "the name of a file in the same folder")
    return files


def _weight_files(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    if weight_map:
        files = sorted({folder / file for file in weight_map.values()})
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ModelLoadError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:4])}; "
                "fetch the model again"
            )
        return files
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise ModelLoadError(
            f"{folder} holds {len(files)} safetensors files but neither {SINGLE_FILE} nor {INDEX_FILE}"
        )
    others = sorted(file.name for pattern in ("*.gguf", "*.bin", "*.pth") for file in folder.glob(pattern))
    hint = f" (it has {', '.join(others[:3])}: give the path of a GGUF file, or convert to safetensors)"
    raise ModelLoadError(f"{folder} holds no safetensors file{hint if others else ''}")


def _is_ignored(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _IGNORED)


def _read_file(path: Path) -> dict[str, RawTensor]:
    file = map_file(path)
    header_nbytes = int.from_bytes(file[:8], "little")
    if len(file) < 8 or header_nbytes > min(_MAX_HEADER_BYTES, len(file) - 8):
        raise ModelLoadError(f"{path} is cut off or not a safetensors file: its header does not fit")
    try:
        header = json.loads(file[8 : 8 + header_nbytes])
    except ValueError as error:
        raise ModelLoadError(f"{path} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path} is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    entries = Fields(header, str(path))
    return {name: _tensor(path, file, 8 + header_nbytes, name, entries) for name in header if not _is_ignored(name)}


def _tensor(path: Path, file: mmap.mmap, data_start: int, name: str, entries: Fields) -> RawTensor:
    entry = entries.group(name)
    if entry is None:
        raise entries.wrong(name, "an object")
    dtype = entry.text("dtype")
    if dtype not in _KINDS:
        raise ModelLoadError(f"{path}: {name} has the type {dtype}, not F32, F16 or BF16")
    kind = _KINDS[dtype]
    shape = tuple(entry.integers("shape"))
    offsets = entry.values.get("data_offsets")
    if not shape or min(shape) < 1:
        raise entry.wrong("shape", "a list of sizes above 0")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)):
        raise entry.wrong("data_offsets", "two integers")
    begin, end = offsets
    nbytes = math.prod(shape[:-1]) * row_nbytes(kind, shape[-1])
    if begin < 0 or end - begin != nbytes:
        raise entry.wrong("data_offsets", f"{nbytes} bytes apart")
    if data_start + end > len(file):
        raise ModelLoadError(
            f"{path} is cut off: {name} ends at byte {data_start + end}, the file at {len(file)}; fetch it again"
        )
    return RawTensor(name, shape, kind, np.frombuffer(file, np.uint8, nbytes, data_start + begin))
