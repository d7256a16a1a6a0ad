"""The CPU's operations: quantized weights as stored, recorded forward passes, rows that stand alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from aioengine.checkpoint import Checkpoint, load_checkpoint
from aioengine.device import CpuDevice
from aioengine.layers.ops_cpu import CpuForward, CpuOps
from aioengine.layers.ops_torch import TorchOps
from aioengine.loader import load_model
from aioengine.raw_tensor import RawTensor, TensorKind

from .tiny import PagedModel, load_paged, make_checkpoint, poison_given_back, random_prompt, resolve_for


def raw(kind: TensorKind, rows: int, columns: int, seed: int = 0) -> RawTensor:
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    data = quantize(values, GGMLQuantizationType[kind]).view(np.uint8).reshape(-1)
    return RawTensor(f"w{seed}", (rows, columns), kind, data)


def vector(length: int, seed: int) -> RawTensor:
    values = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
    return RawTensor(f"b{seed}", (length,), "F32", values.view(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    make_checkpoint("qwen2-tied", folder)
    return folder


def load_quantized(folder: Path, ops: TorchOps | CpuOps) -> PagedModel:
    """The checkpoint with its matrices quantized, the three of Q, K and V in two different ways."""
    config, resolved = resolve_for(str(folder), 256)
    original = load_checkpoint(config.model)

    def converted(name: str, tensor: RawTensor) -> RawTensor:
        if len(tensor.shape) == 1:
            return tensor
        kind: TensorKind = "Q8_0" if "v_proj" in name or "embed" in name else "Q4_1"
        data = quantize(tensor.dequantize(), GGMLQuantizationType[kind]).view(np.uint8).reshape(-1)
        return RawTensor(name, tensor.shape, kind, data)

    tensors = {name: converted(name, tensor) for name, tensor in original.tensors().items()}
    checkpoint: Checkpoint = replace(original, raw_tensors=tensors)
    return PagedModel(load_model(checkpoint, resolved, CpuDevice(resolved, ops)), ops, block_size=16)


@pytest.mark.parametrize("kinds", [("Q4_1",), ("F16", "F16"), ("Q4_1", "Q8_0", "Q4_1")])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_the_product_with_dequantized_weights(kinds: tuple[TensorKind, ...], has_bias: bool) -> None:
    parts = [raw(kind, 10 + 7 * i, 64, seed=i) for i, kind in enumerate(kinds)]
    biases = [vector(part.shape[0], seed=9 + i) for i, part in enumerate(parts)] if has_bias else []
    cpu, oracle = CpuOps(), TorchOps()
    ours, theirs = cpu.pack(parts, biases), oracle.pack(parts, biases)
    assert ours.num_outputs == theirs.num_outputs and ours.num_inputs == theirs.num_inputs == 64
    for num_rows in (1, 3, 40):
        x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(num_rows))
        torch.testing.assert_close(cpu.linear(x, ours), oracle.linear(x, theirs), atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(cpu.logits(x, ours), oracle.logits(x, theirs), atol=2e-5, rtol=1e-5)


def test_quantized_weights_take_about_the_bytes_of_their_file() -> None:
    part = raw("Q4_1", 256, 512)
    assert CpuOps().pack([part], []).nbytes <= part.nbytes * 1.25


def test_a_quantized_model_equals_the_oracle(folder: Path) -> None:
    prompt = random_prompt(37)
    logits = []
    for ops in (CpuOps(), TorchOps()):
        paged = load_quantized(folder, ops)
        logits.append(paged.run({paged.planner.request(prompt): len(prompt)}))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


def test_a_replay_gives_the_bits_of_the_calls_it_recorded(folder: Path) -> None:
    eager, recorded = load_quantized(folder, CpuOps()), load_quantized(folder, CpuOps())
    forward = CpuForward(recorded.loaded.model, recorded.kv_caches, recorded.layout.group_of_layer, max_num_tokens=40)
    pairs = [[paged.planner.request(random_prompt(n, seed=n)) for n in (40, 7)] for paged in (eager, recorded)]
    for chunks in ((20, None), (None, 7), (15, 0), (5, 0)):
        hidden = []
        for paged, requests in zip((eager, recorded), pairs, strict=True):
            plan = paged.planner.plan({r: n for r, n in zip(requests, chunks, strict=True) if n})
            step = paged.rows.unpack(plan.buffer)
            if paged is recorded:
                hidden.append(forward(step.input_ids, step.positions, step.attention))
            else:
                hidden.append(paged.forward(step))
        assert torch.equal(hidden[0], hidden[1])
    for ours, theirs in zip(recorded.kv_caches, eager.kv_caches, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_a_replay_keeps_the_block_tables_of_groups_apart(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3-five-to-two", tmp_path)
    paged = load_paged(tmp_path, CpuOps(), block_size=4)
    assert len(paged.layout.groups) == 4 and paged.layout.num_tensors == 2
    forward = CpuForward(paged.loaded.model, paged.kv_caches, paged.layout.group_of_layer, max_num_tokens=16)
    prompt, hidden = random_prompt(41), []
    request = paged.planner.request(prompt)
    for num_new in (16, 3, 16, 6):
        step = paged.rows.unpack(paged.planner.plan({request: num_new}).buffer)
        poison_given_back(paged.planner, paged.kv_caches)
        hidden.append(forward(step.input_ids, step.positions, step.attention).clone())
    with torch.no_grad():
        expected = model.model(torch.tensor([prompt])).last_hidden_state[0]
    torch.testing.assert_close(torch.cat(hidden), expected, atol=1e-4, rtol=0)


def test_a_step_longer_than_recorded_is_refused(folder: Path) -> None:
    paged = load_quantized(folder, CpuOps())
    forward = CpuForward(paged.loaded.model, paged.kv_caches, paged.layout.group_of_layer, max_num_tokens=4)
    step = paged.rows.unpack(paged.planner.plan({paged.planner.request(random_prompt(5)): 5}).buffer)
    with pytest.raises(ValueError, match="5 tokens, recorded for 4"):
        forward(step.input_ids, step.positions, step.attention)


def test_a_row_has_the_same_bits_alone_in_a_crowd_and_in_chunks(folder: Path) -> None:
    prompt, others = random_prompt(29), [random_prompt(n, seed=n) for n in (3, 12, 24)]
    alone = load_quantized(folder, CpuOps())
    expected = alone.run({alone.planner.request(prompt): 29})
    crowd = load_quantized(folder, CpuOps())
    request = crowd.planner.request(prompt)
    neighbours = [crowd.planner.request(other) for other in others]
    logits = []
    for num_new, theirs in ((1, (1, 0, 20)), (16, (1, 12, 0)), (12, (1, 0, 4))):
        chunks = {r: n for r, n in zip(neighbours, theirs, strict=True) if n}
        logits.append(crowd.run({**chunks, request: num_new})[-num_new:])
    assert torch.equal(torch.cat(logits), expected)


def test_the_tied_head_is_the_embedding(folder: Path) -> None:
    loaded = load_paged(folder, CpuOps(), block_size=16).loaded
    model = loaded.model
    assert model.lm_head is model.model.embed_tokens  # type: ignore[attr-defined]
