"""Typed access to the values of a configuration or metadata block read from a model's file.

Every wrong or missing value becomes a `ModelLoadError` that names file and field. A null counts as absent,
as in Hugging Face's JSON files. Used by the readers of checkpoints only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from aioengine.errors import ModelLoadError

MAX_INTEGER = 2**31 - 1
"""No size, count or token id of a model is larger."""


class Fields:
    """A mapping with the name of the file it was read from. A getter without a default demands the field."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source

    def wrong(self, key: str, wanted: str) -> ModelLoadError:
        value = self.values.get(key)
        given = "is missing" if value is None else f"is {_short(value)}"
        return ModelLoadError(f"{self.source}: {key} {given}, but must be {wanted}", param=key)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def optional_integer(self, key: str, *, minimum: int = 0, maximum: int = MAX_INTEGER) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        value = self.optional_integer(key, minimum=minimum, maximum=maximum)
        if value is not None:
            return value
        if default is None:
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return default

    def optional_number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self.optional_number(key)
        if value is None:
            value = default
        if value is None or value <= above:
            raise self.wrong(key, f"a number above {above:g}")
        return value

    def optional_flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.optional_flag(key)
        return default if value is None else value

    def optional_text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def text(self, key: str) -> str:
        value = self.optional_text(key)
        if value is None:
            raise self.wrong(key, "text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not set(map(type, value)) <= {str}:
            raise self.wrong(key, "a list of texts")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; a single one counts as a list of one."""
        value = self.values.get(key)
        if value is None:
            return []
        items = list(value) if isinstance(value, list) else [value]
        if not _all_integers(items) or (items and not -1 <= min(items) <= max(items) <= MAX_INTEGER):
            raise self.wrong(key, "an integer or a list of integers")
        return items

    def numbers(self, key: str) -> list[float]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
            raise self.wrong(key, "a list of numbers")
        return value

    def group(self, key: str) -> Fields | None:
        """A nested mapping."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.source}: {key}")


def read_json(path: Path) -> Fields:
    """A JSON object from a file.

    Raises:
        ModelLoadError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return Fields(value, str(path))


def _all_integers(items: list[object]) -> TypeGuard[list[int]]:
    return set(map(type, items)) <= {int}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
