"""Loading fills every place of a model and refuses checkpoints that do not fit it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioengine.errors import ModelLoadError
from aioengine.layers.ops_torch import TorchOps, TorchWeight
from aioengine.raw_tensor import RawTensor
from aioengine.weights import LoadedWeights, WeightSlot, load_weights

SLOTS = [
    WeightSlot("norm", ("n",), is_vector=True),
    WeightSlot("qkv", ("q", "k"), ("q.b", "k.b")),
    WeightSlot("out", ("o",)),
]
SHAPES: dict[str, tuple[int, ...]] = {
    "n": (3,),
    "q": (2, 3),
    "k": (1, 3),
    "q.b": (2,),
    "k.b": (1,),
    "o": (3, 2),
}


def tensors() -> dict[str, RawTensor]:
    made, start = {}, 0
    for name, shape in SHAPES.items():
        count = int(np.prod(shape))
        values = np.arange(start, start + count, dtype=np.float32)
        made[name] = RawTensor(name, shape, "F32", values.view(np.uint8))
        start += count
    return made


def load(given: dict[str, RawTensor]) -> LoadedWeights:
    return load_weights(given.items(), SLOTS, SHAPES, TorchOps())


@pytest.mark.parametrize("order", [1, -1])
def test_parts_are_stacked_in_the_order_of_the_slot(order: int) -> None:
    given = dict(list(tensors().items())[::order])
    seen: list[int] = []
    weights = load_weights(given.items(), SLOTS, SHAPES, TorchOps(), seen.append)
    qkv = weights.matrix("qkv")
    assert isinstance(qkv, TorchWeight) and qkv.bias is not None
    assert qkv.matrix.tolist() == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert qkv.bias.tolist() == [12, 13, 14]
    assert weights.vector("norm").tolist() == [0, 1, 2]
    assert weights.nbytes == sum(seen) == 4 * 21


def test_a_missing_tensor_is_named() -> None:
    given = tensors()
    del given["k.b"]
    with pytest.raises(ModelLoadError, match=r"lacks k\.b"):
        load(given)


def test_a_tensor_left_over_is_named() -> None:
    given = tensors() | {"extra.weight": tensors()["n"]}
    with pytest.raises(ModelLoadError, match=r"has no use for: extra\.weight"):
        load(given)


def test_a_wrong_shape_is_refused() -> None:
    given = tensors() | {"o": tensors()["q"]}
    with pytest.raises(ModelLoadError, match=r"o has shape \(2, 3\), its configuration says \(3, 2\)"):
        load(given)


def test_a_tensor_given_twice_is_refused() -> None:
    given = [*tensors().items(), ("n", tensors()["n"])]
    with pytest.raises(ModelLoadError, match="n twice"):
        load_weights(given, SLOTS, SHAPES, TorchOps())


def test_weights_are_not_shared_with_the_file() -> None:
    given = tensors()
    weights = load(given)
    given["n"].data[:] = 0
    assert torch.equal(weights.vector("norm"), torch.tensor([0.0, 1.0, 2.0]))
