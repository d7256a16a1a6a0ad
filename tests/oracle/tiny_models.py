"""Tiny random checkpoints of every supported family, made and saved by `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}

SHAPE: dict[str, object] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(family: str, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A model with random weights; `changes` are fields of the family's configuration."""
    shape = SHAPE | ({"head_dim": 32} if family == "qwen3" else {}) | changes
    config = CONFIGS[family](**shape)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):  # transformers makes them zero, which would hide a missing one
                weight.normal_(std=0.1)
            elif weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def save_model(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float32, **options: object) -> Path:
    """Writes the model's folder (config.json, generation_config.json, safetensors)."""
    model.to(dtype).save_pretrained(folder, **options)
    return folder
