"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3.

Pre-norm decoder layers with rotary embeddings, grouped-query attention and SwiGLU. What differs between the
members is data: biases and QK-norm exist if the checkpoint has them, a layer's window comes from
`ModelSpec.layer_windows`, the rotary table is made by the loader. Everything is written in `ctx.ops`, so the
same file runs on every device. Q, K and V are one product, gate and up are another.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

import torch

from aioengine.layers.context import FinalRows, StepContext
from aioengine.model_spec import ModelSpec
from aioengine.weights import LoadedWeights, WeightSlot


class Attention:
    """Projections around paged attention; heads are head_dim wide, whatever H is."""

    def __init__(self, spec: ModelSpec, layer: int, weights: LoadedWeights, cos_sin: torch.Tensor) -> None:
        prefix = f"layers.{layer}.self_attn."
        self.layer = layer
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.window = spec.layer_windows[layer] or 0
        self.eps = spec.rms_norm_eps
        self.cos_sin = cos_sin
        self.qkv_proj = weights.matrix(prefix + "qkv_proj")
        self.o_proj = weights.matrix(prefix + "o_proj")
        self.q_norm = weights.vector(prefix + "q_norm") if spec.qk_norm else None
        self.k_norm = weights.vector(prefix + "k_norm") if spec.qk_norm else None

    def forward(
        self, qkv: torch.Tensor, positions: torch.Tensor, ctx: StepContext, final: FinalRows | None
    ) -> torch.Tensor:
        """What the queries gather, or those of `final`, before the output projection."""
        ops, meta = ctx.ops, ctx.attention_of(self.layer)
        kv_cache = ctx.kv_caches[self.layer]
        q = ops.rope_and_cache(
            qkv,
            positions,
            self.cos_sin,
            meta.slot_mapping,
            kv_cache,
            self.q_norm,
            self.k_norm,
            self.eps,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
        )
        if final is not None:
            q, meta = ops.take(q, final.tokens), final.attention[ctx.group_of_layer[self.layer]]
        return ops.attention(q, kv_cache, meta, self.scale, self.window, 0.0)


class DecoderLayer:
    """Attention and SwiGLU with a norm before each; see `layers/ops.py` for the sum of `x` and `residual`."""

    def __init__(self, spec: ModelSpec, layer: int, weights: LoadedWeights, cos_sin: torch.Tensor) -> None:
        prefix = f"layers.{layer}."
        self.eps = spec.rms_norm_eps
        self.input_layernorm = weights.vector(prefix + "input_layernorm")
        self.self_attn = Attention(spec, layer, weights, cos_sin)
        self.post_attention_layernorm = weights.vector(prefix + "post_attention_layernorm")
        self.gate_up_proj = weights.matrix(prefix + "mlp.gate_up_proj")
        self.down_proj = weights.matrix(prefix + "mlp.down_proj")

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        ctx: StepContext,
        final: FinalRows | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`final` is given to the last layer, which returns those rows alone."""
        ops, attn = ctx.ops, self.self_attn
        qkv, residual = ops.add_norm_linear(x, residual, self.input_layernorm, self.eps, attn.qkv_proj)
        attended = attn.forward(qkv, positions, ctx, final)
        if final is not None:
            residual = ops.take(residual, final.tokens)
        x, residual = ops.linear_add(attended, attn.o_proj, residual)
        gated, residual = ops.add_norm_gated_linear(
            x, residual, self.post_attention_layernorm, self.eps, self.gate_up_proj
        )
        return ops.linear_add(gated, self.down_proj, residual)


class LlamaModel:
    """Embedding, layers, final norm."""

    def __init__(self, spec: ModelSpec, weights: LoadedWeights, cos_sin: torch.Tensor) -> None:
        self.eps = spec.rms_norm_eps
        self.embed_tokens = weights.matrix("embed_tokens")
        self.layers = [DecoderLayer(spec, i, weights, cos_sin) for i in range(spec.num_layers)]
        self.norm = weights.vector("norm")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        x, residual = None, ctx.ops.embed(input_ids, self.embed_tokens)
        *inner, last = self.layers
        for layer in inner:
            x, residual = layer.forward(x, residual, positions, ctx)
        x, residual = last.forward(x, residual, positions, ctx, ctx.final)
        return ctx.ops.add_norm(x, residual, self.norm, self.eps)[0]


class LlamaForCausalLM:
    """The model with its head; a tied head is the embedding's own matrix, stored once."""

    def __init__(self, spec: ModelSpec, weights: LoadedWeights, cos_sin: torch.Tensor) -> None:
        self.model = LlamaModel(spec, weights, cos_sin)
        tied = spec.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else weights.matrix("lm_head")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Normalized hidden states [T, H], or those of `ctx.final`; keys and values go to the cache."""
        return self.model.forward(input_ids, positions, ctx)

    def logits(self, hidden: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Float32 [R, V] of a few rows of hidden states."""
        return ctx.ops.logits(hidden, self.lm_head)

    @staticmethod
    def weight_slots(spec: ModelSpec) -> list[WeightSlot]:
        """Which tensors of a checkpoint go where, and which are stacked into one matrix."""
        slots = [WeightSlot("embed_tokens", ("model.embed_tokens.weight",))]
        for layer in range(spec.num_layers):
            slots += _layer_slots(spec, f"layers.{layer}.")
        slots.append(WeightSlot("norm", ("model.norm.weight",), is_vector=True))
        if not spec.tie_word_embeddings:
            slots.append(WeightSlot("lm_head", ("lm_head.weight",)))
        return slots


def _layer_slots(spec: ModelSpec, path: str) -> list[WeightSlot]:
    def matrix(name: str, sources: tuple[str, ...], has_bias: bool) -> WeightSlot:
        full = [f"model.{path}{source}" for source in sources]
        biases = tuple(f"{source}.bias" for source in full) if has_bias else ()
        return WeightSlot(path + name, tuple(f"{source}.weight" for source in full), biases)

    def vector(name: str) -> WeightSlot:
        return WeightSlot(path + name, (f"model.{path}{name}.weight",), is_vector=True)

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    slots = [
        vector("input_layernorm"),
        matrix("self_attn.qkv_proj", qkv, spec.attention_bias),
        matrix("self_attn.o_proj", ("self_attn.o_proj",), spec.attention_output_bias),
        vector("post_attention_layernorm"),
        matrix("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), spec.mlp_bias),
        matrix("mlp.down_proj", ("mlp.down_proj",), spec.mlp_bias),
    ]
    if spec.qk_norm:
        slots += [vector("self_attn.q_norm"), vector("self_attn.k_norm")]
    return slots
