"""Writes tiny GGUF files with the `gguf` package: the independent side of the tests of our reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 256, 512, 4, 2, 64, 40, 2

TOKENS = [f"t{index}" for index in range(VOCAB)]


def llama_values(arch: str = "llama") -> dict[str, object]:
    """The metadata of a tiny model; tests change, add or remove (None) entries."""
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": MLP,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 5000.0,
        f"{arch}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.merges": ["t 0", "t 1"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def llama_weights(
    rng: np.random.Generator,
    *,
    arch: str = "llama",
    tied: bool = False,
    biases: bool = False,
    qk_norm: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Random weights by their GGUF names, with rows in the order of the file."""
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, MLP),
        }
        if biases:
            shapes |= {
                f"blk.{layer}.attn_q.bias": (HIDDEN,),
                f"blk.{layer}.attn_k.bias": (kv,),
                f"blk.{layer}.attn_v.bias": (kv,),
            }
        if qk_norm:
            shapes |= {
                f"blk.{layer}.attn_q_norm.weight": (HEAD_DIM,),
                f"blk.{layer}.attn_k_norm.weight": (HEAD_DIM,),
            }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def encode(values: NDArray[np.float32], kind: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The values' bytes, row by row; for kinds the package cannot quantize, random bytes of valid blocks."""
    qtype = GGMLQuantizationType[kind]
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "F16":
        return values.astype(np.float16).view(np.uint8)
    if not kind.endswith("_K"):
        return quantize(values, qtype).view(np.uint8)
    block, block_nbytes = GGML_QUANT_SIZES[qtype]
    num_blocks = values.size // block
    blocks = rng.integers(0, 256, (num_blocks, block_nbytes), np.uint8)
    scales = rng.uniform(0.001, 0.1, (num_blocks, 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path: Path,
    weights: Mapping[str, NDArray[np.float32]],
    values: Mapping[str, object],
    *,
    arch: str = "llama",
    kind: str = "F32",
    rng: np.random.Generator | None = None,
) -> dict[str, NDArray[np.uint8]]:
    """Writes the file, matrices in `kind` and vectors in F32. Returns the bytes of each tensor."""
    rng = rng or np.random.default_rng(0)
    writer = GGUFWriter(path, arch)
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, list)
            writer.add_array(key, value)
    written: dict[str, NDArray[np.uint8]] = {}
    for name, array in weights.items():
        chosen = kind if array.ndim > 1 else "F32"
        written[name] = encode(array, chosen, rng)
        writer.add_tensor(name, written[name], raw_dtype=GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written
