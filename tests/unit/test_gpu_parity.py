"""The GPU parity check itself: what counts as a difference, and the smaller checkpoint it carries."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioengine.bench.gpu_parity import compare_scores, compare_tokens, first_layers, split

CASE = {"prompt": [9, 9], "tokens": [1, 2, 3], "logprobs": [-0.5, -0.6, -0.7], "gaps": [2.0, 0.01, 1.0]}


@pytest.mark.parametrize(
    ("tokens", "bad"), [([1, 2, 3], 0), ([1, 7, 8], 0), ([4, 2, 3], 1), ([1, 2, 4], 1), ([1, 7, 3], 0)]
)
def test_answers_may_part_where_the_call_was_close(tokens: list[int], bad: int) -> None:
    assert compare_tokens("x", [CASE, CASE], [[1, 2, 3], tokens], tolerance=0.1) == bad


def scored(*ids: int) -> list[Any]:
    entries = [
        SimpleNamespace(chosen=SimpleNamespace(logprob=-0.5), top=[SimpleNamespace(token_id=token_id)])
        for token_id in ids
    ]
    return [None, None, *entries]


@pytest.mark.parametrize(("ids", "bad"), [((1, 2, 3), 0), ((1, 5, 3), 0), ((5, 2, 5), 2)])
def test_likeliest_tokens_may_differ_where_the_call_was_close(ids: tuple[int, ...], bad: int) -> None:
    assert compare_scores("x", [CASE], [scored(*ids)], tolerance=0.1) == bad


def test_parts_joined_are_the_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(1000)
    (tmp_path / "file").write_bytes(data)
    assert split(tmp_path / "file", tmp_path, 300) == 4
    assert b"".join((tmp_path / f"model.part{i}").read_bytes() for i in range(4)) == data


@pytest.mark.slow
def test_first_layers_keep_weights_as_they_are_stored(smollm2_path: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    first_layers(smollm2_path, tmp_path / "small.gguf", 2)
    whole, small = GGUFReader(smollm2_path), GGUFReader(tmp_path / "small.gguf")
    expected = {t.name: t for t in whole.tensors if not t.name.startswith("blk.") or t.name.split(".")[1] in "01"}
    assert {t.name for t in small.tensors} == set(expected)
    for tensor in small.tensors:
        assert tensor.tensor_type == expected[tensor.name].tensor_type
        assert np.array_equal(tensor.data, expected[tensor.name].data)
    for key, field in whole.fields.items():
        if not key.startswith("GGUF."):
            value = 2 if key == "llama.block_count" else field.contents()
            assert small.fields[key].contents() == value, key
