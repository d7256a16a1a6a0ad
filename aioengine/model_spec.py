"""What a checkpoint says about its model: shapes and switches (`ModelSpec`) and where its tokenizer is.

Plain records without any reading of files: `hf_config.py` and `gguf.py` fill them in, `models/`,
`tokenizer.py` and the engine read them. Names and meanings follow Hugging Face's configuration, whatever
the file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aioengine.errors import ModelLoadError

RopeValue = str | bool | float | tuple[float, ...]
"""A value in `ModelSpec.rope_scaling`."""

ModelDtype = Literal["float32", "bfloat16", "float16"]

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Hugging Face architecture names that have a `ModelSpec`."""

MAX_LAYERS = 4096
"""No model has more; a larger number is damage and would fill the memory with names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes and switches of a decoder-only transformer. Set by the reader of the checkpoint."""

    name: str
    """The model as the user named it."""
    architecture: str
    """Hugging Face class, one of `SUPPORTED_ARCHITECTURES`, also for GGUF files."""
    vocab_size: int
    """Rows of the embedding and of the logits; may exceed the tokenizer's vocabulary (padding)."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Leading dimensions of a head that are rotated; usually `head_dim`."""
    max_position_embeddings: int
    """As in the configuration; what rope scalings refer to."""
    context_length: int
    """Longest sequence the model is made for, rope scaling included (the engine's `model_max_len`)."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, RopeValue] | None = field(default=None, hash=False)
    """None for plain rotary embeddings, else Hugging Face's fields with `rope_type` always present:
    linear, dynamic, llama3, yarn or longrope; or, from GGUF's `rope_freqs.weight`, `rope_type` "factors" with
    `factors` (rotary_dim / 2 numbers): frequency i is divided by factors[i]."""
    tie_word_embeddings: bool = False
    """The logits use the embedding matrix; there is no `lm_head.weight`."""
    attention_bias: bool = False
    """q_proj, k_proj and v_proj have biases."""
    attention_output_bias: bool = False
    """o_proj has a bias."""
    mlp_bias: bool = False
    """gate_proj, up_proj and down_proj have biases."""
    qk_norm: bool = False
    """Queries and keys are RMS-normalized per head before the rotation (`q_norm`, `k_norm`)."""
    layer_windows: tuple[int | None, ...]
    """Per layer: how many tokens a query sees, itself included; None sees all."""
    dtype: ModelDtype
    """The float type the checkpoint was made for; bfloat16 for quantized GGUF files."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Every token that ends an answer: end of sequence, end of turn. The first is the configuration's."""

    @property
    def context_cost(self) -> float:
        """What a token of context adds to the work of computing a token, that without any context being 1."""
        per_layer = self.hidden_size * (
            2 * (self.num_heads + self.num_kv_heads) * self.head_dim + 3 * self.intermediate_size
        )
        num_full = sum(window is None for window in self.layer_windows)
        # Two operations per weight; two per query element for a score and two for its share of the values.
        return 4 * num_full * self.num_heads * self.head_dim / (2 * per_layer * self.num_layers)

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one, or None."""
        return next((window for window in self.layer_windows if window is not None), None)


def check_spec(spec: ModelSpec, source: str) -> ModelSpec:
    """Returns the spec if its numbers fit together.

    Raises:
        ModelLoadError: they do not; `source` is the file to blame.
    """
    problem = None
    if spec.num_heads % spec.num_kv_heads:
        problem = f"{spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads evenly"
    elif spec.head_dim % 2 or spec.rotary_dim % 2 or not 0 < spec.rotary_dim <= spec.head_dim:
        problem = f"head size {spec.head_dim} with {spec.rotary_dim} rotated dimensions is not supported"
    elif len(spec.layer_windows) != spec.num_layers:
        problem = f"{len(spec.layer_windows)} layer types are given for {spec.num_layers} layers"
    if problem:
        raise ModelLoadError(f"{source}: {problem}")
    return spec


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight of the model by its Hugging Face name, with its shape (outputs, inputs)."""
    hidden, mlp, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv = spec.num_heads * head, spec.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    linears = (
        ("self_attn.q_proj", (q, hidden), spec.attention_bias),
        ("self_attn.k_proj", (kv, hidden), spec.attention_bias),
        ("self_attn.v_proj", (kv, hidden), spec.attention_bias),
        ("self_attn.o_proj", (hidden, q), spec.attention_output_bias),
        ("mlp.gate_proj", (mlp, hidden), spec.mlp_bias),
        ("mlp.up_proj", (mlp, hidden), spec.mlp_bias),
        ("mlp.down_proj", (hidden, mlp), spec.mlp_bias),
    )
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape, has_bias in linears:
            shapes[f"{prefix}{name}.weight"] = shape
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        if spec.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (head,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


@dataclass(frozen=True, slots=True)
class HfTokenizerFiles:
    """A folder with `tokenizer.json` and `tokenizer_config.json` (or what of them exists)."""

    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """The tokenizer inside a GGUF file, as stored (`tokenizer.ggml.*`); absent values are None or empty."""

    model: str
    """"gpt2" (byte-level BPE with merges) or "llama" (SentencePiece with scores), as the file says."""
    pre: str | None
    """Name of the pre-tokenizer, such as "smollm", "llama-bpe" or "qwen2"."""
    tokens: list[str]
    scores: list[float]
    token_types: list[int]
    """1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte."""
    merges: list[str]
    """Two tokens with a space between, best first."""
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    eot_token_id: int | None
    """End of turn."""
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_space_prefix: bool | None
    chat_template: str | None


TokenizerSource = HfTokenizerFiles | GgufTokenizer | None
"""Where the tokenizer comes from; None if the model has none (built-in shapes)."""
