"""Reads the JSON files of a Hugging Face folder: `ModelSpec` and chat templates.

Absent fields take the defaults of the architecture's own configuration class, and both spellings of rotary
scaling are understood: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`. What changes the
computation and is not supported raises here. `checkpoint.py` calls this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aioengine.errors import ModelLoadError
from aioengine.generation_defaults import GENERATION_FILE
from aioengine.model_spec import (
    MAX_LAYERS,
    SUPPORTED_ARCHITECTURES,
    ModelDtype,
    ModelSpec,
    RopeValue,
    check_spec,
)
from aioengine.typed_fields import Fields, read_json

CONFIG_FILE = "config.json"

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES: dict[str, ModelDtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """What the architecture's configuration class puts where config.json says nothing."""

    max_position_embeddings: int
    num_kv_heads: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


_DEFAULTS = {
    "LlamaForCausalLM": _Defaults(max_position_embeddings=2048, num_kv_heads=None, bos_token_id=1, eos_token_ids=(2,)),
    "MistralForCausalLM": _Defaults(max_position_embeddings=131072, num_kv_heads=8, bos_token_id=1, eos_token_ids=(2,)),
    "Qwen2ForCausalLM": _Defaults(max_position_embeddings=32768, num_kv_heads=32, bos_token_id=None, eos_token_ids=()),
    "Qwen3ForCausalLM": _Defaults(max_position_embeddings=32768, num_kv_heads=32, bos_token_id=None, eos_token_ids=()),
}

_SCALING_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
"""Supported types of rotary scaling with the fields each cannot do without."""


def read_spec(folder: Path, name: str, *, stored_dtype: ModelDtype) -> ModelSpec:
    """The model's shapes and switches from `config.json`, its end tokens also from `generation_config.json`.

    Args:
        stored_dtype: the type of the weights, for configurations that name none.

    Raises:
        ModelLoadError: a field is wrong or missing, or the architecture or a feature is not supported.
    """
    config = read_json(folder / CONFIG_FILE)
    architecture = _architecture(config)
    _refuse_unsupported(config)
    defaults = _DEFAULTS[architecture]
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    head_dim = config.optional_integer("head_dim", minimum=1)
    if head_dim is None and architecture == "Qwen3ForCausalLM":
        head_dim = 128
    if head_dim is None:
        if hidden_size % num_heads:
            raise config.wrong("head_dim", f"given: hidden_size {hidden_size} has no {num_heads} equal heads")
        head_dim = hidden_size // num_heads
    num_kv_heads = defaults.num_kv_heads
    if "num_key_value_heads" in config.values or num_kv_heads is None:
        num_kv_heads = config.integer("num_key_value_heads", num_heads)
    max_positions = config.integer("max_position_embeddings", defaults.max_position_embeddings)
    rope = _rope_fields(config)
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", 1.0))
    scaling = _rope_scaling(config, rope, max_positions, rotary_dim)
    context_length = _context_length(max_positions, scaling)
    bias = config.flag("attention_bias", False)
    spec = ModelSpec(
        name=name,
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        max_position_embeddings=max_positions,
        context_length=context_length,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=architecture == "Qwen2ForCausalLM" or (architecture != "MistralForCausalLM" and bias),
        attention_output_bias=architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        layer_windows=_layer_windows(config, architecture, num_layers, context_length),
        dtype=_dtype(config, stored_dtype),
        bos_token_id=_bos_token_id(config, defaults),
        eos_token_ids=_eos_token_ids(config, folder, defaults),
    )
    return check_spec(spec, config.source)


def read_chat_templates(folder: Path) -> dict[str, str]:
    """The Jinja chat templates by name: `chat_template.jinja` or those in `tokenizer_config.json`."""
    templates: dict[str, str] = {}
    tokenizer_config = folder / "tokenizer_config.json"
    if tokenizer_config.exists():
        fields = read_json(tokenizer_config)
        value = fields.values.get("chat_template")
        if isinstance(value, list):
            for entry in value:
                if not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
                    raise fields.wrong("chat_template", "a template or a list of named templates")
                templates[entry["name"]] = Fields(entry, f"{fields.source}: chat_template").text("template")
        elif value is not None:
            templates["default"] = fields.text("chat_template")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if (folder / "chat_template.jinja").exists():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None


def _architecture(config: Fields) -> str:
    named = config.values.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise config.wrong("architectures", "a list of names")
    model_type = config.optional_text("model_type")
    if not named and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    for name in named:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    given = ", ".join(named) or f"model_type {model_type!r}"
    raise ModelLoadError(
        f"{config.source}: the architecture {given} is not supported; "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unsupported(config: Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        quantization = config.group(key)
        if quantization is not None:
            method = quantization.optional_text("quant_method") or "unknown"
            raise ModelLoadError(
                f"{config.source}: Hugging Face checkpoints quantized by {method} are not supported; "
                "use the unquantized model or a GGUF file"
            )
    activation = config.optional_text("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise ModelLoadError(f"{config.source}: hidden_act {activation!r} is not supported (only silu)")


def _dtype(config: Fields, stored_dtype: ModelDtype) -> ModelDtype:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.optional_text(key)
    if name is None or name == "auto":
        return stored_dtype
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise config.wrong(key, "float32, bfloat16 or float16")
    return dtype


def _bos_token_id(config: Fields, defaults: _Defaults) -> int | None:
    if "bos_token_id" in config.values:
        return config.optional_integer("bos_token_id")
    return defaults.bos_token_id


def _eos_token_ids(config: Fields, folder: Path, defaults: _Defaults) -> tuple[int, ...]:
    ids = config.integers("eos_token_id") if "eos_token_id" in config.values else list(defaults.eos_token_ids)
    if (folder / GENERATION_FILE).exists():
        ids += read_json(folder / GENERATION_FILE).integers("eos_token_id")
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id >= 0))


def _rope_fields(config: Fields) -> Fields:
    """All rotary fields as one flat group, from either spelling. `rope_type` is set."""
    values: dict[str, object] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        values[key] = config.values.get(key)
    nested = config.group("rope_scaling") if config.has("rope_scaling") else config.group("rope_parameters")
    source = config.source
    if nested is not None:
        source = nested.source
        inner = nested.values
        kinds = [value for value in inner.values() if isinstance(value, dict)]
        if kinds:
            if any(kind != kinds[0] for kind in kinds):
                raise ModelLoadError(f"{source}: rotary embeddings that differ by layer are not supported")
            inner = kinds[0]
        values |= {key: value for key, value in inner.items() if value is not None}
    values["rope_type"] = values.get("rope_type") or values.pop("type", None) or "default"
    values.pop("type", None)
    return Fields(values, source)


def _rope_scaling(config: Fields, rope: Fields, max_positions: int, rotary_dim: int) -> dict[str, RopeValue] | None:
    rope_type = rope.text("rope_type")
    if rope_type == "su":
        rope_type = "longrope"
    if rope_type == "default":
        return None
    if rope_type not in _SCALING_FIELDS:
        raise ModelLoadError(
            f"{rope.source}: rope_type {rope_type!r} is not supported; "
            f"supported are default, {', '.join(_SCALING_FIELDS)}"
        )
    scaling: dict[str, RopeValue] = {"rope_type": rope_type}
    for key, value in rope.values.items():
        if key in ("rope_type", "rope_theta", "partial_rotary_factor") or value is None:
            continue
        if isinstance(value, list):
            scaling[key] = tuple(map(float, rope.numbers(key)))
        elif isinstance(value, bool | str):
            scaling[key] = value
        else:
            scaling[key] = rope.number(key, above=float("-inf"))
    for key in _SCALING_FIELDS[rope_type]:
        if key not in scaling:
            raise rope.wrong(key, f"given for rope_type {rope_type}")
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            if not isinstance(scaling[key], tuple) or len(scaling[key]) != rotary_dim // 2:  # type: ignore[arg-type]
                raise rope.wrong(key, f"a list of {rotary_dim // 2} numbers")
    elif rope.has("factor"):
        rope.number("factor")
    if rope_type in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        owner = config if config.has(key) else rope
        scaling[key] = owner.integer(key, max_positions)
    return scaling


def _context_length(max_positions: int, scaling: dict[str, RopeValue] | None) -> int:
    """The longest sequence: yarn, linear and dynamic scaling stretch what `max_position_embeddings` says."""
    factor = scaling.get("factor") if scaling else None
    if not scaling or not isinstance(factor, float):
        return max_positions
    if scaling["rope_type"] == "yarn":
        original = scaling["original_max_position_embeddings"]
        assert isinstance(original, int)
        return max(max_positions, int(original * factor))
    if scaling["rope_type"] in ("linear", "dynamic"):
        return int(max_positions * factor)
    return max_positions


def _layer_windows(config: Fields, architecture: str, num_layers: int, context_length: int) -> tuple[int | None, ...]:
    full = (None,) * num_layers
    if architecture == "LlamaForCausalLM":
        return full
    window = config.optional_integer("sliding_window", minimum=1)
    if window is None and "sliding_window" not in config.values:
        window = 4096
    if architecture == "MistralForCausalLM":
        slides = [True] * num_layers
    elif not config.flag("use_sliding_window", False):
        return full
    elif config.has("layer_types"):
        slides = []
        for layer_type in config.texts("layer_types"):
            if layer_type not in ("full_attention", "sliding_attention"):
                raise config.wrong("layer_types", "a list of full_attention and sliding_attention")
            slides.append(layer_type == "sliding_attention")
    else:
        first = config.integer("max_window_layers", 28, minimum=0)
        slides = [layer >= first for layer in range(num_layers)]
    if window is None or window >= context_length:
        return full
    return tuple(window if is_sliding else None for is_sliding in slides)
