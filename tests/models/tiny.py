"""Tiny random checkpoints of each family, made with transformers, and how our models run them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from aioengine.batch import HostRows, HostStep
from aioengine.checkpoint import load_checkpoint
from aioengine.config import EngineConfig, ResolvedConfig, resolve
from aioengine.device import CpuDevice, layer_caches
from aioengine.kv_layout import KVLayout, layout_of
from aioengine.layers.context import StepContext
from aioengine.layers.ops import Ops
from aioengine.loader import LoadedModel, load_model
from aioengine.model_spec import ModelSpec

from .plans import FakeRequest, Planner

VOCAB = 97

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama3-scaling": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window-in-upper-layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-alternating": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3-three-to-one": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 13,
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "qwen3-five-to-two": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 6,
            "num_hidden_layers": 7,
            "layer_types": ["full_attention", *["sliding_attention"] * 5, "full_attention"],
        },
    ),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def make_checkpoint(family: str, folder: Path) -> PreTrainedModel:
    """A random model of the family, saved to `folder`; weights are large enough to tell mistakes apart."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
        bos_token_id=2,
        **{"tie_word_embeddings": False, "num_hidden_layers": 3, **options},
    )
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which are made as ones and zeros
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    model.eval()
    model.save_pretrained(folder)
    return model


def resolve_for(model: str, num_positions: int, **options: object) -> tuple[EngineConfig, ResolvedConfig]:
    """A configuration of a CPU engine."""
    config = EngineConfig(model=model, device="cpu", **options)
    resolved = resolve(config, model_max_len=num_positions, model_dtype="float32", cuda_available=False, num_cores=2)
    return config, resolved


def tiny_layout(spec: ModelSpec, block_size: int, *, hybrid: bool = True) -> KVLayout:
    """The layout that an engine with these options would have."""
    _, resolved = resolve_for("m", 256, block_size=block_size)
    return layout_of(spec, replace(resolved, hybrid_kv_cache=hybrid))


def poisoned_caches(layout: KVLayout, num_blocks: int) -> list[torch.Tensor]:
    """A pool of NaN by layer: old bytes must not matter (INV-26)."""
    tensors = torch.full((layout.num_tensors, num_blocks, math.prod(layout.page_shape(0))), float("nan"))
    return layer_caches(tensors.unbind(0), layout)


def poison_given_back(planner: Planner, kv_caches: list[torch.Tensor]) -> None:
    """What fell out of a window holds anything from now on."""
    for cache in kv_caches:
        cache[planner.given_back] = float("nan")
    planner.given_back.clear()


@dataclass
class PagedModel:
    """Our model over a paged cache, driven chunk by chunk without a runner."""

    loaded: LoadedModel
    ops: Ops
    block_size: int
    num_blocks: int = 200
    hybrid: bool = True

    def __post_init__(self) -> None:
        spec = self.loaded.spec
        self.layout = tiny_layout(spec, self.block_size, hybrid=self.hybrid)
        self.kv_caches = poisoned_caches(self.layout, self.num_blocks)
        self.rows = HostRows(8, self.num_blocks, self.layout.block_sizes)
        self.planner = Planner(
            vocab_size=spec.vocab_size,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_groups=self.layout.scheduler_groups,
        )

    def run(self, chunks: dict[FakeRequest, int]) -> torch.Tensor:
        """Logits of all tokens of a step."""
        step = self.rows.unpack(self.planner.plan(chunks).buffer)
        poison_given_back(self.planner, self.kv_caches)
        with torch.no_grad():
            ctx = StepContext(self.ops, step.attention, self.kv_caches, self.layout.group_of_layer)
            return self.loaded.model.logits(self.forward(step), ctx).clone()

    def forward(self, step: HostStep) -> torch.Tensor:
        """Hidden states of all tokens of a step."""
        ctx = StepContext(self.ops, step.attention, self.kv_caches, self.layout.group_of_layer)
        return self.loaded.model.forward(step.input_ids, step.positions, ctx)

    def greedy(self, request: FakeRequest, num_tokens: int) -> list[int]:
        """Greedy continuation of a request whose known tokens are all computed but the last."""
        for _ in range(num_tokens):
            logits = self.run({request: len(request.prompt) + len(request.outputs) - request.num_computed})
            request.num_in_flight = 0
            request.outputs.append(int(logits[-1].argmax()))
        return request.outputs


def load_paged(folder: Path, ops: Ops, block_size: int) -> PagedModel:
    config, resolved = resolve_for(str(folder), 256)
    loaded = load_model(load_checkpoint(config.model), resolved, CpuDevice(resolved, ops))
    return PagedModel(loaded, ops, block_size)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, length)]
