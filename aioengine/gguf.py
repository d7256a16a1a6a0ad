"""One GGUF file as a model: spec, tokenizer, chat template, end tokens and weights, all from the file itself.

`gguf_format.py` reads the container; here its keys and tensor names get their meaning. Weights are handed
out under Hugging Face names. Converters store the query and key rows of `llama` files so that rotation
works on neighbouring dimensions; the rows are put back in Hugging Face's order (halves), so one rotary layout
serves both formats. `checkpoint.py` calls this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aioengine.errors import ModelLoadError
from aioengine.gguf_format import GgufFile, GgufTensor
from aioengine.model_spec import MAX_LAYERS, GgufTokenizer, ModelDtype, ModelSpec, RopeValue, check_spec
from aioengine.raw_tensor import RawTensor
from aioengine.typed_fields import Fields

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`general.architecture` -> Hugging Face class. Mistral files say llama."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_ROPE_SHORT, _ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"

_END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
    }
)
"""Control tokens that end a turn or a text in the models of these families, for files that name only one."""
_CONTROL_TYPES = (3, 4)


def gguf_spec(file: GgufFile, name: str, tokenizer: GgufTokenizer | None) -> ModelSpec:
    """The model's shapes and switches.

    Raises:
        ModelLoadError: a key is wrong or missing, or the architecture or a feature is not supported.
    """
    metadata = file.metadata
    arch = metadata.text("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: the architecture {arch} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    _refuse_unsupported(metadata, arch)
    hidden_size = metadata.integer(f"{arch}.embedding_length")
    num_heads = _one_integer(metadata, f"{arch}.attention.head_count")
    num_kv_heads = _one_integer(metadata, f"{arch}.attention.head_count_kv", num_heads)
    head_dim = metadata.integer(f"{arch}.attention.key_length", max(hidden_size // num_heads, 1))
    if metadata.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise metadata.wrong(f"{arch}.attention.value_length", f"equal to the key length, {head_dim}")
    rotary_dim = metadata.integer(f"{arch}.rope.dimension_count", head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} holds no token_embd.weight")
    context_length = metadata.integer(f"{arch}.context_length")
    num_layers = metadata.integer(f"{arch}.block_count", maximum=MAX_LAYERS)
    scaling = _rope_scaling(file, arch, context_length, rotary_dim)
    window = metadata.optional_integer(f"{arch}.attention.sliding_window")
    if not window or window >= context_length:
        window = None
    max_positions = context_length
    if scaling and scaling["rope_type"] == "yarn":
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        assert isinstance(original, int) and isinstance(factor, float)
        context_length = max(context_length, int(original * factor))
    spec = ModelSpec(
        name=name,
        architecture=_ARCHITECTURES[arch],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_one_integer(metadata, f"{arch}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        max_position_embeddings=max_positions,
        context_length=context_length,
        rms_norm_eps=metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.number(f"{arch}.rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        layer_windows=(window,) * num_layers,
        dtype=_dtype(file.tensors.values()),
        bos_token_id=metadata.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(metadata, tokenizer),
    )
    return check_spec(spec, str(file.path))


def gguf_tokenizer(file: GgufFile) -> GgufTokenizer | None:
    """The tokenizer as stored, or None if the file has none.

    Raises:
        ModelLoadError: its lists do not fit together.
    """
    metadata = file.metadata
    if not metadata.has("tokenizer.ggml.model"):
        return None
    tokens = metadata.texts("tokenizer.ggml.tokens")
    scores = metadata.numbers("tokenizer.ggml.scores")
    token_types = metadata.integers("tokenizer.ggml.token_type")
    for key, values in (("scores", scores), ("token_type", token_types)):
        if values and len(values) != len(tokens):
            raise ModelLoadError(
                f"{file.path}: tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens"
            )
    return GgufTokenizer(
        model=metadata.text("tokenizer.ggml.model"),
        pre=metadata.optional_text("tokenizer.ggml.pre"),
        tokens=tokens,
        scores=scores,
        token_types=token_types,
        merges=metadata.texts("tokenizer.ggml.merges"),
        bos_token_id=metadata.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.optional_integer("tokenizer.ggml.eos_token_id"),
        unk_token_id=metadata.optional_integer("tokenizer.ggml.unknown_token_id"),
        pad_token_id=metadata.optional_integer("tokenizer.ggml.padding_token_id"),
        eot_token_id=metadata.optional_integer("tokenizer.ggml.eot_token_id"),
        add_bos_token=metadata.optional_flag("tokenizer.ggml.add_bos_token"),
        add_eos_token=metadata.optional_flag("tokenizer.ggml.add_eos_token"),
        add_space_prefix=metadata.optional_flag("tokenizer.ggml.add_space_prefix"),
        chat_template=metadata.optional_text("tokenizer.chat_template"),
    )


def gguf_chat_templates(file: GgufFile) -> dict[str, str]:
    """The Jinja chat templates by name; the unnamed one is "default"."""
    templates: dict[str, str] = {}
    for name in file.metadata.texts("tokenizer.chat_templates"):
        templates[name] = file.metadata.text(f"tokenizer.chat_template.{name}")
    if file.metadata.has("tokenizer.chat_template"):
        templates["default"] = file.metadata.text("tokenizer.chat_template")
    return templates


def gguf_tensors(file: GgufFile, spec: ModelSpec) -> dict[str, RawTensor]:
    """All weights by their Hugging Face names; a name without a counterpart is kept as it is."""
    reordered: dict[str, int] = {}
    if file.metadata.text("general.architecture") == "llama":
        reordered = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    tensors: dict[str, RawTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name in (_ROPE_FREQS, _ROPE_SHORT, _ROPE_LONG):
            continue
        name = _hf_name(tensor.name)
        num_heads = reordered.get(tensor.name.split(".")[-2]) if name != tensor.name else None
        order = None
        if num_heads is not None and tensor.shape[0] == num_heads * spec.head_dim:
            order = _half_order(num_heads, spec.head_dim)
        tensors[name] = RawTensor(name, tensor.shape, tensor.kind, tensor.data, order)
    return tensors


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _half_order(num_heads: int, head_dim: int) -> NDArray[np.intp]:
    """Stored row of each row in Hugging Face's order: per head, even rows first, then odd ones."""
    rows = np.arange(num_heads * head_dim, dtype=np.intp).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _refuse_unsupported(metadata: Fields, arch: str) -> None:
    if metadata.optional_integer(f"{arch}.expert_count"):
        raise ModelLoadError(f"{metadata.source}: mixtures of experts are not supported")
    num_parts = metadata.optional_integer("split.count") or 1
    if num_parts > 1:
        raise ModelLoadError(
            f"{metadata.source} is one of {num_parts} parts of a split GGUF file, which is not supported; "
            "merge the parts first (llama-gguf-split --merge)"
        )


def _one_integer(metadata: Fields, key: str, default: int | None = None) -> int:
    """A count that may be stored once or per layer; layers that differ are not supported."""
    values = set(metadata.integers(key))
    if len(values) > 1:
        raise ModelLoadError(f"{metadata.source}: {key} differs between layers, which is not supported")
    value = values.pop() if values else default
    if value is None or value < 1:
        raise metadata.wrong(key, "an integer from 1")
    return value


def _rope_scaling(file: GgufFile, arch: str, context_length: int, rotary_dim: int) -> dict[str, RopeValue] | None:
    metadata = file.metadata
    if _ROPE_FREQS in file.tensors:
        return {"rope_type": "factors", "factors": _factors(file, _ROPE_FREQS, rotary_dim)}
    prefix = f"{arch}.rope.scaling."
    original = metadata.integer(prefix + "original_context_length", context_length)
    attention_factor = metadata.optional_number(prefix + "attn_factor")
    if _ROPE_LONG in file.tensors:
        scaling: dict[str, RopeValue] = {
            "rope_type": "longrope",
            "short_factor": _factors(file, _ROPE_SHORT, rotary_dim),
            "long_factor": _factors(file, _ROPE_LONG, rotary_dim),
            "original_max_position_embeddings": original,
        }
        if attention_factor is not None:
            scaling["attention_factor"] = attention_factor
        return scaling
    scaling_type = metadata.optional_text(prefix + "type")
    old_linear = metadata.optional_number(f"{arch}.rope.scale_linear")
    if scaling_type is None and old_linear not in (None, 0.0, 1.0):
        return {"rope_type": "linear", "factor": metadata.number(f"{arch}.rope.scale_linear")}
    if scaling_type in (None, "none"):
        return None
    factor = metadata.number(prefix + "factor")
    if scaling_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    if scaling_type != "yarn":
        raise metadata.wrong(prefix + "type", "none, linear, yarn or longrope")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if metadata.has(f"{prefix}yarn_{key}"):
            scaling[key] = metadata.number(f"{prefix}yarn_{key}")
    if attention_factor is not None:
        scaling["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling


def _factors(file: GgufFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind != "F32" or tensor.shape != (rotary_dim // 2,):
        raise ModelLoadError(f"{file.path}: {name} must hold {rotary_dim // 2} numbers of type F32")
    factors = tuple(tensor.data.view(np.float32).tolist())
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelLoadError(f"{file.path}: {name} must hold numbers above 0")
    return factors


def _dtype(tensors: Iterable[GgufTensor]) -> ModelDtype:
    """The type of the matrices if they are of one float type; quantized weights run best in bfloat16."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else "bfloat16"


def _eos_token_ids(metadata: Fields, tokenizer: GgufTokenizer | None) -> tuple[int, ...]:
    """The declared end tokens, then control tokens whose text says that they end a turn or a text.

    A token that is also the unknown token stands for ordinary text in some vocabularies and is left out.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    declared = [metadata.optional_integer(f"tokenizer.ggml.{key}") for key in keys]
    ids = [token_id for token_id in declared if token_id is not None]
    if tokenizer is not None:
        for token_id, token_type in enumerate(tokenizer.token_types):
            if token_type not in _CONTROL_TYPES or token_id == tokenizer.unk_token_id:
                continue
            if tokenizer.tokens[token_id] in _END_TEXTS:
                ids.append(token_id)
    return tuple(dict.fromkeys(ids))
