"""The sampling defaults that a checkpoint recommends, by their `SamplingParams` names.

Only values that are really given count: a file that sets the temperature alone leaves top-p neutral, and
`do_sample` decides nothing. `checkpoint.py` calls this.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aioengine.errors import InvalidRequest, ModelLoadError
from aioengine.typed_fields import Fields, read_json
from aioengine.types import SamplingParams

GENERATION_FILE = "generation_config.json"

_HF_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_INTEGERS = ("top_k", "max_tokens")


def hf_defaults(folder: Path) -> dict[str, float]:
    """Those of a folder's `generation_config.json`, if it has one.

    Raises:
        ModelLoadError: a value has the wrong type or is out of range.
    """
    path = folder / GENERATION_FILE
    return _pick(read_json(path), _HF_NAMES) if path.exists() else {}


def gguf_defaults(metadata: Fields) -> dict[str, float]:
    """Those of a GGUF file's `general.sampling.*`; few files have any.

    Raises:
        ModelLoadError: a value has the wrong type or is out of range.
    """
    return _pick(metadata, _GGUF_NAMES)


def _pick(fields: Fields, names: Mapping[str, str]) -> dict[str, float]:
    chosen: dict[str, float] = {}
    for key, name in names.items():
        value: float | None
        if name in _INTEGERS:
            value = fields.optional_integer(key, minimum=-1)
        else:
            value = fields.optional_number(key)
        if value is not None:
            chosen[name] = value
    try:
        SamplingParams(**chosen)  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ModelLoadError(
            f"{fields.source}: {error.message}; correct it or use --generation-config neutral"
        ) from None
    return chosen
