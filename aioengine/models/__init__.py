"""The registry of model families: which class runs a checkpoint's architecture.

Checkpoint readers give Hugging Face class names for every file format (`ModelSpec.architecture`); the names
that GGUF files use are accepted too. Called by `loader.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from aioengine.errors import ModelLoadError
from aioengine.layers.context import StepContext
from aioengine.model_spec import ModelSpec
from aioengine.models.llama import LlamaForCausalLM
from aioengine.weights import LoadedWeights, WeightSlot


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Normalized hidden states [T, H] of the step's tokens; writes their keys and values to the cache.

        Only those of `ctx.final`, [S, H], if it is given.
        """

    def logits(self, hidden: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Float32 scores [R, V] for a few rows of what `forward` returned."""


class ModelClass(Protocol):
    """A family: its table of weights, and how a model is made from them."""

    def weight_slots(self, spec: ModelSpec) -> list[WeightSlot]: ...

    def __call__(self, spec: ModelSpec, weights: LoadedWeights, cos_sin: torch.Tensor) -> Model: ...


MODELS: dict[str, ModelClass] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen2": LlamaForCausalLM,
    "qwen3": LlamaForCausalLM,
}


def model_class(architecture: str) -> ModelClass:
    """The class for an architecture.

    Raises:
        ModelLoadError: there is none; the message lists those that exist.
    """
    try:
        return MODELS[architecture]
    except KeyError:
        known = ", ".join(name for name in MODELS if name.endswith("LM"))
        raise ModelLoadError(f"architecture {architecture} is not supported; supported: {known}") from None
