"""Brings a checkpoint's tensors into the form a device computes with.

A model states as data which tensors it wants and which are stacked into one matrix (`WeightSlot`); this file
collects them while the checkpoint streams by, has the device pack each slot as soon as it is complete, and
refuses a checkpoint in which anything is missing, left over or of the wrong shape. Quantized bytes go to the
device as stored; no float32 copy is made here. Called by `loader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from aioengine.errors import ModelLoadError
from aioengine.layers.ops import Ops, Weight
from aioengine.raw_tensor import RawTensor

_NAMES_SHOWN = 6


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One place in a model that wants weights."""

    path: str
    """The model's own name of the place."""
    sources: tuple[str, ...]
    """Hugging Face names of the tensors, stacked along their outputs in this order."""
    biases: tuple[str, ...] = ()
    """Their biases in the same order, or none."""
    is_vector: bool = False


@dataclass(slots=True)
class LoadedWeights:
    """All slots of a model, packed."""

    nbytes: int = 0
    """Bytes of memory they hold on the device."""
    _matrices: dict[str, Weight] = field(default_factory=dict)
    _vectors: dict[str, torch.Tensor] = field(default_factory=dict)

    def matrix(self, path: str) -> Weight:
        return self._matrices[path]

    def vector(self, path: str) -> torch.Tensor:
        return self._vectors[path]

    def add(self, slot: WeightSlot, tensors: Mapping[str, RawTensor], ops: Ops) -> None:
        """Packs a slot of which all tensors have come."""
        sources = [tensors[name] for name in slot.sources]
        if slot.is_vector:
            vector = ops.vector(sources[0])
            self._vectors[slot.path] = vector
            self.nbytes += vector.nbytes
        else:
            weight = ops.pack(sources, [tensors[name] for name in slot.biases])
            self._matrices[slot.path] = weight
            self.nbytes += weight.nbytes


def load_weights(
    tensors: Iterable[tuple[str, RawTensor]],
    slots: Sequence[WeightSlot],
    shapes: Mapping[str, tuple[int, ...]],
    ops: Ops,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> LoadedWeights:
    """Fills every slot from a checkpoint's tensors, in whatever order they come.

    Args:
        shapes: the shape each tensor must have, by name.
        on_bytes: told the bytes of each tensor that has been taken in, for a progress display.

    Raises:
        ModelLoadError: a tensor is missing, left over, given twice or of the wrong shape; it is named.
    """
    owner = {name: slot for slot in slots for name in (*slot.sources, *slot.biases)}
    loaded = LoadedWeights()
    waiting: dict[str, RawTensor] = {}
    seen: set[str] = set()
    left_over: list[str] = []
    for name, raw in tensors:
        slot = owner.get(name)
        if slot is None:
            left_over.append(name)
            continue
        if name in seen:
            raise ModelLoadError(f"the checkpoint has the tensor {name} twice")
        if tuple(raw.shape) != shapes[name]:
            raise ModelLoadError(
                f"the checkpoint's tensor {name} has shape {tuple(raw.shape)}, its configuration says {shapes[name]}"
            )
        seen.add(name)
        waiting[name] = raw
        on_bytes(raw.nbytes)
        if all(part in waiting for part in (*slot.sources, *slot.biases)):
            loaded.add(slot, waiting, ops)
            for part in (*slot.sources, *slot.biases):
                del waiting[part]
    missing = [name for name in owner if name not in seen]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {_listed(missing)}")
    if left_over:
        raise ModelLoadError(f"the checkpoint has tensors that its architecture has no use for: {_listed(left_over)}")
    return loaded


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
