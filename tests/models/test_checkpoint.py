"""Hugging Face folders and dummy weights, compared with what `transformers` reads and writes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aioengine.checkpoint import (
    Checkpoint,
    DummyTensor,
    HfTokenizerFiles,
    load_checkpoint,
    tensor_shapes,
)
from aioengine.config import ModelConfig
from aioengine.errors import ModelLoadError, ModelNotFound
from aioengine.model_spec import ModelSpec
from tests.oracle.tiny_models import CONFIGS, make_model, save_model

FAMILIES = list(CONFIGS)


def load(folder: Path | str, **options: object) -> Checkpoint:
    return load_checkpoint(ModelConfig(model=str(folder), **options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama model that a test may damage."""
    return save_model(make_model("llama"), tmp_path / "model")


def change_json(path: Path, **changes: object) -> None:
    """Sets fields of a JSON file; None removes one."""
    fields = json.loads(path.read_text()) if path.exists() else {}
    fields |= changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def check_same_weights(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    expected = {name: value.float().numpy() for name, value in model.state_dict().items()}
    if checkpoint.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(checkpoint.tensors()) == set(expected)
    for name, tensor in checkpoint.weights():
        np.testing.assert_array_equal(tensor.dequantize(), expected[name], err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_folder_gives_the_weights_and_spec_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    model = make_model(family, tie_word_embeddings=tied, rms_norm_eps=1e-5)
    checkpoint = load(save_model(model, tmp_path))
    check_same_weights(checkpoint, model)
    spec = checkpoint.config
    config = AutoConfig.from_pretrained(tmp_path)
    assert spec.architecture == config.architectures[0]
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (96, 64, 112)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (3, 4, 2)
    assert spec.head_dim == spec.rotary_dim == (32 if family == "qwen3" else 16)
    assert spec.max_position_embeddings == spec.context_length == 128
    assert spec.rms_norm_eps == 1e-5
    assert spec.rope_theta == config.rope_parameters["rope_theta"] and spec.rope_scaling is None
    assert spec.tie_word_embeddings is tied
    assert spec.attention_bias is (family == "qwen2") and not spec.attention_output_bias
    assert spec.qk_norm is (family == "qwen3")
    assert spec.dtype == "float32"
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert checkpoint.tokenizer_source is None and checkpoint.chat_template is None


def test_biases_of_llama(tmp_path: Path) -> None:
    model = make_model("llama", attention_bias=True, mlp_bias=True)
    checkpoint = load(save_model(model, tmp_path))
    check_same_weights(checkpoint, model)
    spec = checkpoint.config
    assert spec.attention_bias and spec.attention_output_bias and spec.mlp_bias


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_sharded_16_bit_folder(kind: str, tmp_path: Path) -> None:
    model = make_model("qwen3")
    save_model(model, tmp_path, dtype=getattr(torch, kind), max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    checkpoint = load(tmp_path)
    check_same_weights(checkpoint, model)
    assert checkpoint.config.dtype == kind
    assert {tensor.kind for tensor in checkpoint.tensors().values()} == {{"bfloat16": "BF16", "float16": "F16"}[kind]}
    change_json(tmp_path / "config.json", dtype=None, torch_dtype=None)
    assert load(tmp_path).config.dtype == kind


def test_raw_bytes_are_shared_with_torch_without_a_copy(folder: Path) -> None:
    tensor = load(folder).tensors()["model.layers.0.mlp.up_proj.weight"]
    shared = torch.from_numpy(tensor.data)  # warns, and thereby fails, if numpy calls the array read-only
    assert shared.data_ptr() == tensor.data.ctypes.data
    before = (folder / "model.safetensors").read_bytes()
    shared.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_old_and_new_spelling_of_rope_give_the_same(folder: Path) -> None:
    change_json(
        folder / "config.json",
        rope_parameters=None,
        rope_theta=12345.0,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    old = load(folder).config
    change_json(
        folder / "config.json",
        rope_theta=None,
        rope_scaling=None,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0},
    )
    assert load(folder).config == old
    assert old.rope_theta == 12345.0
    assert old.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert old.context_length == 256


@pytest.mark.parametrize(
    ("scaling", "context_length"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            128,
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
            256,
        ),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}, 128),
    ],
)
def test_rope_scalings_are_passed_on_as_transformers_sees_them(
    scaling: dict[str, object], context_length: int, folder: Path
) -> None:
    parameters = {**scaling, "rope_theta": 10000.0}
    change_json(folder / "config.json", rope_parameters=parameters)
    spec = load(folder).config
    seen = AutoConfig.from_pretrained(folder).rope_parameters
    expected = {key: tuple(value) if isinstance(value, list) else value for key, value in seen.items()}
    del expected["rope_theta"]
    if scaling["rope_type"] == "dynamic":
        expected.pop("original_max_position_embeddings", None)
    assert spec.rope_scaling == expected
    assert spec.context_length == context_length


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 32}, (32, 32, 32)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {"sliding_window": 128}, (None, None, None)),
        ("qwen2", {"sliding_window": 32}, (None, None, None)),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (None, 32, 32)),
        (
            "qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (16, None, 16),
        ),
        ("llama", {}, (None, None, None)),
    ],
)
def test_sliding_windows_by_layer(
    family: str, changes: dict[str, object], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    spec = load(save_model(make_model(family, **changes), tmp_path)).config
    assert spec.layer_windows == windows
    assert spec.sliding_window == next((window for window in windows if window), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_take_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    architecture = type(make_model(family)).__name__
    fields = {"architectures": [architecture], "model_type": family, "vocab_size": 96}
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(fields | sizes))
    config = AutoConfig.from_pretrained(tmp_path)
    spec = load(tmp_path, load_format="dummy").config
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 8)
    assert spec.max_position_embeddings == config.max_position_embeddings
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.rope_theta == config.rope_parameters["rope_theta"]
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    assert spec.bos_token_id == config.bos_token_id
    assert spec.eos_token_ids == (() if config.eos_token_id is None else (config.eos_token_id,))
    assert spec.sliding_window == (4096 if family == "mistral" else None)
    del fields["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(fields | sizes))
    assert load(tmp_path, load_format="dummy").config == spec


def test_generation_config_gives_defaults_and_end_tokens(folder: Path) -> None:
    generation = folder / "generation_config.json"
    change_json(
        generation,
        eos_token_id=[7, 2, 9],
        temperature=0.7,
        top_k=20,
        repetition_penalty=1.05,
        max_new_tokens=50,
        do_sample=False,
        num_beams=3,
    )
    checkpoint = load(folder)
    assert checkpoint.generation_defaults == {
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 50,
    }
    assert checkpoint.config.eos_token_ids == (2, 7, 9)
    neutral = load(folder, generation_config="neutral")
    assert neutral.generation_defaults == {} and neutral.config.eos_token_ids == (2, 7, 9)
    generation.unlink()
    assert load(folder).generation_defaults == {} and load(folder).config.eos_token_ids == (2,)


def test_chat_templates_and_tokenizer_files(folder: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    checkpoint = load(folder)
    assert checkpoint.tokenizer_source == HfTokenizerFiles(folder)
    assert checkpoint.chat_templates == {"default": "A", "tool_use": "B"} and checkpoint.chat_template == "A"
    change_json(folder / "tokenizer_config.json", chat_template="C")
    assert load(folder).chat_template == "C"
    (folder / "chat_template.jinja").write_text("Ď")
    assert load(folder).chat_template == "Ď"
    other = tmp_path / "other"
    other.mkdir()
    change_json(other / "tokenizer_config.json", chat_template="E")
    checkpoint = load(folder, tokenizer=str(other))
    assert checkpoint.tokenizer_source == HfTokenizerFiles(other) and checkpoint.chat_template == "E"
    change_json(other / "tokenizer_config.json", chat_template=None)
    assert load(folder, tokenizer=str(other)).chat_template == "Ď"


def test_leftovers_and_gaps_can_be_asked_for(folder: Path) -> None:
    checkpoint = load(folder)
    names = list(checkpoint.tensors())
    assert list(checkpoint.require(names[:2])) == names[:2]
    assert checkpoint.leftover(names[2:]) == names[:2]
    with pytest.raises(ModelLoadError, match="lacks no.such.weight"):
        checkpoint.require([names[0], "no.such.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are LlamaForC"),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"architectures": "Llama"}, "architectures is 'Llama', but must be a list"),
        ({"hidden_size": None}, "hidden_size is missing, but must be an integer from 1 to"),
        ({"hidden_size": "64"}, "hidden_size is '64', but must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000, but must be an integer from 1 to 4096",
        ),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 4}, r"lacks model.layers.3.input_layernorm.weight, .* and 4 more"),
        ({"num_hidden_layers": 2}, r"holds model.layers.2.* no use for"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"num_key_value_heads": 4}, r"k_proj.weight has the shape \(32, 64\), not \(64, 64\)"),
        ({"head_dim": 15}, "head size 15"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, but must be a number above 0"),
        ({"attention_bias": 1}, "attention_bias is 1, but must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8 are not supported"),
        (
            {"rope_parameters": {"rope_type": "mrope"}},
            "rope_type 'mrope' is not supported; supported are def",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing, but must be given for rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            "short_factor is .*, but must be a list of 8 numbers",
        ),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "differ by layer"),
        ({"rope_parameters": [1]}, "rope_parameters is .*, but must be an object"),
    ],
)
def test_wrong_configuration_is_told(changes: dict[str, object], message: str, folder: Path) -> None:
    change_json(folder / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_sampling_default_is_told(folder: Path) -> None:
    change_json(folder / "generation_config.json", top_p=1.5)
    with pytest.raises(ModelLoadError, match=r"generation_config.json: top_p=1.5 .*--generation-config neutral"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "config.json is not valid JSON"),
        ("config.json", b"\xff\xfe", "config.json is not valid JSON"),
        ("config.json", b"[]", "config.json must hold a JSON object"),
        ("model.safetensors", b"", r"model.safetensors is empty \(0 bytes\)"),
        ("model.safetensors", b"abc", "model.safetensors is cut off or not a safetensors file"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "not a safetensors file"),
        ("model.safetensors", struct.pack("<Q", 4) + b"nope", "header is not JSON"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "header is not an object"),
        ("model.safetensors", struct.pack("<Q", 2) + b"{}", "lacks model.embed_tokens.weight"),
    ],
)
def test_broken_file_is_told(file: str, content: bytes, message: str, folder: Path) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_cut_off_safetensors_is_told_wherever_it_ends(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (4, 100, 3000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match="cut off"):
            load(folder)


def rewrite_header(path: Path, name: str, **changes: object) -> None:
    """Changes one tensor's entry in the header of a safetensors file."""
    whole = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + nbytes])
    header[name] |= changes
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + whole[8 + nbytes :])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "F8_E4M3"}, "model.norm.weight has the type F8_E4M3, not F32, F16 or BF16"),
        ({"dtype": None}, "dtype is missing"),
        ({"shape": [0]}, "shape is .0., but must be a list of sizes"),
        ({"shape": [64, -1]}, "shape is"),
        ({"shape": [32]}, "data_offsets is .* but must be 128 bytes apart"),
        ({"data_offsets": [0]}, "data_offsets is .0., but must be two integers"),
        ({"data_offsets": [-8, 248]}, "data_offsets is"),
    ],
)
def test_wrong_tensor_entry_is_told(changes: dict[str, object], message: str, folder: Path) -> None:
    rewrite_header(folder / "model.safetensors", "model.norm.weight", **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_model(make_model("llama"), tmp_path / "sharded", max_shard_size="60KB")


def test_missing_shard_is_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ModelLoadError, match=f"lacks 1 of {len(shards)} weight files: {shards[1].name}"):
        load(sharded)


def test_index_that_names_an_absent_tensor_is_told(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    change_json(index, weight_map=weight_map | {"model.extra.weight": next(iter(weight_map.values()))})
    with pytest.raises(ModelLoadError, match=r"index.json places model.extra.weight in .*, but it is not there"):
        load(sharded)
    change_json(index, weight_map={"model.norm.weight": "../elsewhere.safetensors"})
    with pytest.raises(ModelLoadError, match="must be the name of a file in the same folder"):
        load(sharded)


def test_tensor_in_two_shards_is_told(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ModelLoadError, match="which another file of the folder holds too"):
        load(sharded)


def test_folder_without_weights_is_told(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="holds no safetensors file .it has pytorch_model.bin"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match="has no config.json"):
        load(folder)


def test_old_buffers_and_a_tied_head_are_ignored_but_nothing_else(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = make_model("llama", tie_word_embeddings=True)
    save_model(model, tmp_path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(8)
    assert "lm_head.weight" in weights
    save_file(weights, tmp_path / "model.safetensors")
    check_same_weights(load(tmp_path), model)
    save_file(weights | {"model.layers.0.adapter": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"holds model.layers.0.adapter, which LlamaForCausalLM has no use"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dummy_weights_follow_the_seed(dtype: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    change_json(folder / "config.json", dtype=dtype)
    first, again, other = (load(folder, load_format="dummy", seed=seed) for seed in (3, 3, 4))
    name = "model.layers.1.mlp.down_proj.weight"
    assert {n: t.shape for n, t in first.weights()} == tensor_shapes(first.config)
    tensor = first.tensors()[name]
    assert isinstance(tensor, DummyTensor) and tensor.data.size == tensor.nbytes
    values = tensor.dequantize()
    assert values.shape == tensor.shape == (64, 112)
    np.testing.assert_array_equal(values, again.tensors()[name].dequantize())
    assert not np.array_equal(values, other.tensors()[name].dequantize())
    assert not np.array_equal(values, first.tensors()["model.layers.2.mlp.down_proj.weight"].dequantize())
    assert abs(values.std() - tensor.std) < 0.1 * tensor.std and abs(values.mean()) < 0.1 * tensor.std
    norm = first.tensors()["model.norm.weight"]
    np.testing.assert_array_equal(norm.dequantize(), np.ones(64, np.float32))


def test_dummy_rows_differ_beyond_the_length_of_the_random_block() -> None:
    checkpoint = load("shape:qwen3-0.6b", load_format="dummy")
    rows = checkpoint.tensors()["model.layers.0.mlp.up_proj.weight"].dequantize()
    assert rows.shape == (3072, 1024)
    assert len(np.unique(rows[:, 0])) > 1000
    assert np.linalg.matrix_rank(rows[:64]) == 64


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("qwen3-0.6b", 596_049_920), ("llama-3.1-8b", 8_030_261_248), ("smollm2-135m", 134_515_008)],
)
def test_builtin_shapes_have_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    checkpoint = load(f"shape:{name}", load_format="dummy")
    assert checkpoint.config.name == f"shape:{name}"
    assert checkpoint.tokenizer_source is None
    assert sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors().values()) == num_parameters


@pytest.mark.slow
def test_default_model_equals_what_transformers_reads_from_it(smollm2_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)
    checkpoint = load("smollm2")
    check_same_weights(checkpoint, model)
    spec, config = checkpoint.config, model.config
    assert spec.tie_word_embeddings
    assert spec.num_kv_heads == config.num_key_value_heads and spec.head_dim == config.head_dim
    assert spec.rope_theta == config.rope_parameters["rope_theta"]
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.context_length == config.max_position_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert checkpoint.chat_template is not None and "<|im_start|>" in checkpoint.chat_template


def test_context_adds_attention_to_the_work_of_a_token() -> None:
    spec = ModelSpec(
        name="m",
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rotary_dim=16,
        max_position_embeddings=64,
        context_length=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        layer_windows=(None, 32),
        dtype="float32",
    )
    weights = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    assert spec.context_cost == (4 * 4 * 16) / (2 * weights)  # of the one layer that sees all
