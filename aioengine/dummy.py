"""Random weights in place of a checkpoint's (`--load-format dummy`), and the shapes built in for benchmarks.

The same seed gives the same weights. Nothing is made before it is asked for, and then at the speed of a copy:
every tensor is a window into the endless repetition of one block of random numbers. A device can also fill a
`DummyTensor` itself from its `mean`, `std` and `seed`, without any bytes from the host. `checkpoint.py` calls
this.
"""

from __future__ import annotations

import math

import numpy as np
import xxhash
from numpy.typing import NDArray

from aioengine.model_spec import ModelDtype, ModelSpec, tensor_shapes
from aioengine.raw_tensor import RawTensor, TensorKind

DTYPE_KINDS: dict[ModelDtype, TensorKind] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

SHAPE_PREFIX = "shape:"

_STD = 0.02
_PERIOD = 1_048_583
"""Prime, so that no row length divides it and the rows of a matrix differ."""


class _NormalBlock:
    """Standard normal numbers times `_STD`, made when first needed and shared by the tensors of a model."""

    def __init__(self, seed: int, kind: TensorKind) -> None:
        self._seed = seed
        self._kind = kind
        self._values: NDArray[np.uint16] | NDArray[np.float32] | NDArray[np.float16] | None = None

    def window(self, start: int, count: int) -> NDArray[np.uint8]:
        """The bytes of `count` numbers of the repeated block, beginning with the one at `start`."""
        if self._values is None:
            normal = np.random.default_rng(self._seed).standard_normal(_PERIOD, np.float32)
            self._values = _encode(normal * np.float32(_STD), self._kind)
        return np.resize(np.roll(self._values, -start), count).view(np.uint8)


class DummyTensor(RawTensor):
    """A weight whose values are normal numbers; `data` makes its bytes anew on each access."""

    __slots__ = ("_block", "mean", "seed", "std")

    def __init__(self, name: str, shape: tuple[int, ...], kind: TensorKind, seed: int, block: _NormalBlock) -> None:
        super().__init__(name, shape, kind, np.empty(0, np.uint8))
        is_norm = name.endswith("norm.weight")
        self.mean = 1.0 if is_norm else 0.0
        self.std = 0.0 if is_norm else _STD
        """Standard deviation; 0 fills the tensor with `mean`."""
        self.seed = xxhash.xxh3_64_intdigest(name.encode(), seed % 2**64) >> 1
        """Its own, below 2**63."""
        self._block = block

    @property
    def data(self) -> NDArray[np.uint8]:
        """The raw bytes in the tensor's kind; a new array."""
        count = math.prod(self.shape)
        if self.std == 0:
            return _encode(np.full(count, self.mean, np.float32), self.kind).view(np.uint8)
        return self._block.window(self.seed % _PERIOD, count)


def dummy_tensors(spec: ModelSpec, seed: int) -> dict[str, RawTensor]:
    """Random weights for every tensor of the model, in the model's own float type."""
    kind = DTYPE_KINDS[spec.dtype]
    block = _NormalBlock(seed, kind)
    return {name: DummyTensor(name, shape, kind, seed, block) for name, shape in tensor_shapes(spec).items()}


def _encode(
    values: NDArray[np.float32], kind: TensorKind
) -> NDArray[np.uint16] | NDArray[np.float32] | NDArray[np.float16]:
    if kind == "F16":
        return values.astype(np.float16)
    if kind == "BF16":
        return ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)
    assert kind == "F32"
    return values


def _shape(
    architecture: str,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    context_length: int,
    rope_theta: float,
    tie_word_embeddings: bool,
    qk_norm: bool = False,
    rms_norm_eps: float = 1e-5,
) -> ModelSpec:
    return ModelSpec(
        name="",
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        max_position_embeddings=context_length,
        context_length=context_length,
        rms_norm_eps=rms_norm_eps,
        rope_theta=rope_theta,
        tie_word_embeddings=tie_word_embeddings,
        qk_norm=qk_norm,
        layer_windows=(None,) * num_layers,
        dtype="bfloat16",
    )


BUILTIN_SHAPES: dict[str, ModelSpec] = {
    "qwen3-0.6b": _shape(
        "Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        context_length=40960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        qk_norm=True,
        rms_norm_eps=1e-6,
    ),
    "llama-3.1-8b": _shape(
        "LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        context_length=131072,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
    ),
    "smollm2-135m": _shape(
        "LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        context_length=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
}
"""Models without files: `shape:NAME` with `--load-format dummy`. They have no tokenizer, no end token."""
