"""GGUF files: what the metadata means, that weights arrive unchanged, and that broken files say so."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from aioengine.checkpoint import TENSOR_KINDS, Checkpoint, GgufTokenizer, load_checkpoint, tensor_shapes
from aioengine.config import ModelConfig
from aioengine.errors import EngineError, ModelLoadError
from tests.oracle import tiny_gguf
from tests.oracle.tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, VOCAB, llama_values, llama_weights, write_gguf


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def load(path: Path, **options: object) -> Checkpoint:
    return load_checkpoint(ModelConfig(model=str(path), **options))


def opened(
    tmp_path: Path,
    weights: Mapping[str, NDArray[np.float32]],
    changes: Mapping[str, object],
    *,
    arch: str = "llama",
    **options: object,
) -> Checkpoint:
    path = tmp_path / "model.gguf"
    write_gguf(path, weights, {**llama_values(arch), **changes}, arch=arch)
    return load(path, **options)


def permuted(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Per head, interleaves the two halves of the rows, as converters do for llama files."""
    out = np.empty_like(rows)
    half = HEAD_DIM // 2
    for head in range(num_heads):
        for index in range(half):
            out[head * HEAD_DIM + 2 * index] = rows[head * HEAD_DIM + index]
            out[head * HEAD_DIM + 2 * index + 1] = rows[head * HEAD_DIM + half + index]
    return out


@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_every_kind_keeps_its_bytes_and_dequantizes(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = llama_weights(rng)
    written = write_gguf(tmp_path / "m.gguf", weights, llama_values(), kind=kind, rng=rng)
    tensors = load(tmp_path / "m.gguf").tensors()
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    raw = written["blk.1.ffn_down.weight"]
    assert (down.kind, down.shape, down.nbytes) == (kind, (256, 512), raw.size)
    assert down.data.dtype == np.uint8 and down.data.ndim == 1
    np.testing.assert_array_equal(down.data, raw.reshape(-1))
    values = down.dequantize()
    assert values.dtype == np.float32 and values.shape == (256, 512)
    rows = raw.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    np.testing.assert_array_equal(values, dequantize(rows, GGMLQuantizationType[kind]))
    if not kind.endswith("_K"):
        tolerance = {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 3e-2}.get(kind, 0.5)
        np.testing.assert_allclose(values, weights["blk.1.ffn_down.weight"], atol=tolerance)
    assert tensors["model.norm.weight"].kind == "F32"
    np.testing.assert_array_equal(tensors["model.norm.weight"].dequantize(), weights["output_norm.weight"])


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q6_K"])
def test_llama_query_and_key_rows_come_in_hugging_face_order(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = llama_weights(rng, biases=True)
    source = {name: weights[name] for name in weights if "attn_q." in name or "attn_k." in name}
    for name, rows in source.items():
        weights[name] = permuted(rows, HEADS if "attn_q" in name else KV_HEADS)
    written = write_gguf(tmp_path / "m.gguf", weights, llama_values(), kind=kind, rng=rng)
    checkpoint = load(tmp_path / "m.gguf")
    tensors = checkpoint.tensors()
    assert checkpoint.config.attention_bias and not checkpoint.config.attention_output_bias
    q, k = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qk")
    row_nbytes = q.nbytes // q.shape[0]
    stored = written["blk.1.attn_q.weight"].reshape(-1, row_nbytes)
    ours = q.data.reshape(-1, row_nbytes)
    np.testing.assert_array_equal(ours[0], stored[0])
    np.testing.assert_array_equal(ours[1], stored[2])
    np.testing.assert_array_equal(ours[HEAD_DIM // 2], stored[1])
    np.testing.assert_array_equal(ours[HEAD_DIM + 1], stored[HEAD_DIM + 2])
    if kind == "F32":
        np.testing.assert_array_equal(q.dequantize(), source["blk.1.attn_q.weight"])
        np.testing.assert_array_equal(k.dequantize(), source["blk.1.attn_k.weight"])
    bias = tensors["model.layers.0.self_attn.k_proj.bias"]
    np.testing.assert_array_equal(bias.dequantize(), source["blk.0.attn_k.bias"])


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_stay_as_stored(arch: str, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = llama_weights(rng, biases=arch == "qwen2", qk_norm=arch == "qwen3", tied=True)
    checkpoint = opened(tmp_path, weights, {}, arch=arch)
    spec = checkpoint.config
    assert spec.architecture == {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]
    assert (spec.attention_bias, spec.qk_norm) == (arch == "qwen2", arch == "qwen3")
    assert spec.tie_word_embeddings and "lm_head.weight" not in checkpoint.tensors()
    for ours, stored in (("q_proj.weight", "attn_q.weight"), ("k_proj.weight", "attn_k.weight")):
        tensor = checkpoint.tensors()[f"model.layers.0.self_attn.{ours}"]
        np.testing.assert_array_equal(tensor.dequantize(), weights[f"blk.0.{stored}"])


def test_spec_comes_from_the_metadata(tmp_path: Path, rng: np.random.Generator) -> None:
    checkpoint = opened(tmp_path, llama_weights(rng), {})
    spec = checkpoint.config
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (VOCAB, 256, 512)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 64)
    assert (spec.max_position_embeddings, spec.context_length, spec.rope_theta) == (128, 128, 5000.0)
    assert spec.rms_norm_eps == np.float32(1e-5)
    assert spec.rope_scaling is None and spec.sliding_window is None
    assert spec.layer_windows == (None, None)
    assert not spec.tie_word_embeddings and spec.dtype == "float32"
    assert list(checkpoint.tensors()) == list(tensor_shapes(spec))
    assert checkpoint.generation_defaults == {}


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")])
def test_dtype_follows_the_matrices(kind: str, dtype: str, tmp_path: Path, rng: np.random.Generator) -> None:
    write_gguf(tmp_path / "m.gguf", llama_weights(rng), llama_values(), kind=kind)
    assert load(tmp_path / "m.gguf").config.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "scaling", "context_length"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, None, 128),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
            128,
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}, 128),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
            },
            256,
        ),
    ],
)
def test_rope_scaling_keys(
    changes: dict[str, object],
    scaling: dict[str, object] | None,
    context_length: int,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    spec = opened(tmp_path, llama_weights(rng), changes).config
    assert spec.rope_scaling == scaling
    assert spec.context_length == context_length


def test_rope_factor_tensors(tmp_path: Path, rng: np.random.Generator) -> None:
    factors = rng.uniform(1, 8, HEAD_DIM // 2).astype(np.float32)
    weights = llama_weights(rng)
    spec = opened(tmp_path, weights | {"rope_freqs.weight": factors}, {}).config
    assert spec.rope_scaling == {"rope_type": "factors", "factors": tuple(factors.tolist())}
    long = {"rope_factors_long.weight": factors, "rope_factors_short.weight": factors[::-1].copy()}
    changes = {"llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.attn_factor": 1.25}
    spec = opened(tmp_path, weights | long, changes).config
    assert spec.rope_scaling == {
        "rope_type": "longrope",
        "long_factor": tuple(factors.tolist()),
        "short_factor": tuple(factors[::-1].tolist()),
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    }
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight must hold 32 numbers"):
        opened(tmp_path, weights | {"rope_freqs.weight": factors[:3]}, {})


def test_tokenizer_record_holds_what_is_stored(tmp_path: Path, rng: np.random.Generator) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    changes = {
        "tokenizer.ggml.tokens": ["<unk>", "ä", "日本", "\u0120a"] + tiny_gguf.TOKENS[4:],
        "tokenizer.ggml.scores": [float(-index) for index in range(VOCAB)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": template,
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    checkpoint = opened(tmp_path, llama_weights(rng), changes)
    source = checkpoint.tokenizer_source
    assert isinstance(source, GgufTokenizer)
    assert (source.model, source.pre) == ("gpt2", "smollm")
    assert source.tokens[:4] == ["<unk>", "ä", "日本", "\u0120a"] and len(source.tokens) == VOCAB
    assert source.scores[3] == -3.0 and source.token_types == [1] * VOCAB
    assert source.merges == ["t 0", "t 1"]
    assert (source.bos_token_id, source.eos_token_id, source.unk_token_id) == (1, 2, 0)
    assert (source.pad_token_id, source.eot_token_id) == (None, 5)
    assert (source.add_bos_token, source.add_eos_token, source.add_space_prefix) == (False, None, False)
    assert source.chat_template == template == checkpoint.chat_template
    assert checkpoint.chat_templates == {"default": template, "tool_use": "tools"}
    assert checkpoint.config.bos_token_id == 1
    assert checkpoint.config.eos_token_ids == (2, 5)


def test_end_tokens_are_found_by_their_text(tmp_path: Path, rng: np.random.Generator) -> None:
    tokens, types = list(tiny_gguf.TOKENS), [1] * VOCAB
    tokens[7], types[7] = "<|im_end|>", 3
    tokens[8], types[8] = "<|endoftext|>", 3
    tokens[9], types[9] = "<|eot_id|>", 1  # ordinary text that looks like one
    changes: dict[str, object] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert opened(tmp_path, llama_weights(rng), changes).config.eos_token_ids == (2, 7, 8)
    changes["tokenizer.ggml.unknown_token_id"] = 8
    assert opened(tmp_path, llama_weights(rng), changes).config.eos_token_ids == (2, 7)


def test_sampling_keys_become_defaults(tmp_path: Path, rng: np.random.Generator) -> None:
    changes = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.mirostat": 2}
    checkpoint = opened(tmp_path, llama_weights(rng), changes)
    assert checkpoint.generation_defaults == {"temperature": 0.5, "top_k": 20}
    neutral = load(tmp_path / "model.gguf", generation_config="neutral")
    assert neutral.generation_defaults == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.embedding_length": "big"}, "llama.embedding_length is 'big', but must be an integer"),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count is 2147483647, but must be .* to 4096"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3 KV heads"),
        ({"llama.attention.value_length": 32}, "value_length is 32, but must be equal"),
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.feed_forward_length": [512, 256]}, "differs between layers"),
        ({"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 2.0}, "scaling.type is 'ntk'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for 40 tokens"),
        ({"general.sampling.temp": -1.0}, "temperature=-1.0"),
        ({"llama.block_count": 3}, r"lacks model.layers.2.input_layernorm.weight, .* and 4 more"),
        ({"llama.block_count": 1}, "holds model.layers.1.* which LlamaForCausalLM has no use for"),
        ({"llama.feed_forward_length": 256}, r"gate_proj.weight has the shape \(512, 256\)"),
    ],
)
def test_contradicting_metadata_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        opened(tmp_path, llama_weights(rng), changes)
    assert "model.gguf" in str(caught.value)


def test_unknown_architecture_is_named_with_the_supported_ones(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(ModelLoadError, match=r"architecture gpt2 is not supported; supported are llama, qwen2"):
        opened(tmp_path, llama_weights(rng), {}, arch="gpt2")


def test_unknown_tensors_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = llama_weights(rng)
    weights["blk.0.attn_qkv.weight"] = weights.pop("blk.0.attn_q.weight")
    with pytest.raises(
        ModelLoadError, match=r"lacks model.layers.0.self_attn.q_proj.weight; it holds blk.0.attn_qkv.weight"
    ):
        opened(tmp_path, weights, {})


def test_unsupported_tensor_type_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    data = bytearray(tiny_file(tmp_path, rng).read_bytes())
    header = struct.pack("<Q", len("output_norm.weight")) + b"output_norm.weight"
    at = data.index(header) + len(header) + 4 + 8
    for type_id, name in ((10, "Q2_K"), (16, "IQ2_XXS"), (999, "number 999")):
        data[at : at + 4] = struct.pack("<I", type_id)
        (tmp_path / "model.gguf").write_bytes(data)
        with pytest.raises(ModelLoadError, match=f"output_norm.weight has the type {name}, which cannot be"):
            load(tmp_path / "model.gguf")


def tiny_file(tmp_path: Path, rng: np.random.Generator) -> Path:
    write_gguf(tmp_path / "model.gguf", llama_weights(rng), llama_values(), kind="Q4_0")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"GG", "begins with b'GG'"),
        (b"GGUF", "cut off"),
        (b"PK\x03\x04" * 8, "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(64), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture is missing"),
    ],
)
def test_broken_head_is_told(head: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(head)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(path)
    assert "broken.gguf" in str(caught.value)


def test_cut_off_file_is_told_wherever_it_ends(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = tiny_file(tmp_path, rng).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(4, 3000, 151), *range(3000, len(whole), 49999), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match="cut off"):
            load(path)


def test_damaged_metadata_never_escapes_as_another_error(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = tiny_file(tmp_path, rng).read_bytes()
    path = tmp_path / "damaged.gguf"
    refused = 0
    for position in range(4, 2600, 29):
        damaged = bytearray(whole)
        damaged[position] ^= 0x81
        path.write_bytes(damaged)
        try:
            load(path)
        except EngineError:
            refused += 1
    assert refused > 25


def test_names_may_not_repeat(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tiny_file(tmp_path, rng)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(ModelLoadError, match=r"it holds blk.0.ffn_up.weight twice"):
        load(path)


def test_dummy_weights_need_only_the_metadata(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tiny_file(tmp_path, rng)
    checkpoint = load(path, load_format="dummy")
    stored = load(path)
    assert {n: t.shape for n, t in checkpoint.weights()} == {n: t.shape for n, t in stored.weights()}
    assert {tensor.kind for tensor in checkpoint.tensors().values()} == {"BF16"}
