"""A model's files, opened: its spec, its tokenizer and chat template, its weights as raw tensors.

This is the face of everything that reads checkpoints; the engine and `models/` import from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aioengine.model_spec import (
    SUPPORTED_ARCHITECTURES,
    GgufTokenizer,
    HfTokenizerFiles,
    ModelSpec,
    TokenizerSource,
    tensor_shapes,
)
from aioengine.raw_tensor import TENSOR_KINDS, RawTensor, TensorKind

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "TENSOR_KINDS",
    "Checkpoint",
    "GgufTokenizer",
    "HfTokenizerFiles",
    "ModelSpec",
    "RawTensor",
    "TensorKind",
    "TokenizerSource",
    "tensor_shapes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened model. Its memory maps live as long as any of its tensors."""

    config: ModelSpec
    generation_defaults: Mapping[str, float]
    """Sampling defaults of the model by their `SamplingParams` names."""
    chat_templates: Mapping[str, str]
    """Jinja templates by name; most models have one, "default"."""
    tokenizer_source: TokenizerSource
    _tensors: Mapping[str, RawTensor]

    @property
    def chat_template(self) -> str | None:
        """The model's main chat template."""
        return self.chat_templates.get("default")

    def tensors(self) -> Mapping[str, RawTensor]:
        """All weights by Hugging Face name: exactly the names of `tensor_shapes(config)`."""
        return self._tensors

    def weights(self) -> Iterator[tuple[str, RawTensor]]:
        """All weights, in the order of the layers."""
        return iter(self._tensors.items())
