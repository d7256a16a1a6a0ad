"""Rotary tables against transformers' own for each scaling, and errors that name what is wrong."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from aioengine.errors import ModelLoadError
from aioengine.layers.rotary import cos_sin_table

HEAD_DIM = 16
FACTORS = [1.0 + 0.25 * i for i in range(HEAD_DIM // 2)]

SCALINGS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn, given magnitude": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.7,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
        "original_max_position_embeddings": 64,
    },
}


def reference(scaling: dict[str, object], num_positions: int, theta: float) -> torch.Tensor:
    """The table that transformers uses for one sequence of this length."""
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    half = HEAD_DIM // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


def ours(scaling: dict[str, object] | None, num_positions: int, theta: float = 10000.0) -> torch.Tensor:
    return cos_sin_table(
        rotary_dim=HEAD_DIM,
        theta=theta,
        scaling=scaling,
        max_position_embeddings=128,
        num_positions=num_positions,
    )


@pytest.mark.parametrize("num_positions", [50, 200])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str, num_positions: int) -> None:
    for theta in (10000.0, 500000.0):
        expected = reference(SCALINGS[name], num_positions, theta)
        table = ours(SCALINGS[name], num_positions, theta)
        torch.testing.assert_close(table, expected, atol=3e-5, rtol=0)


def test_stored_factors_divide_the_frequencies() -> None:
    table = ours({"rope_type": "factors", "factors": tuple(FACTORS)}, 100)
    expected = reference({**SCALINGS["longrope"], "attention_factor": 1.0}, 50, 10000.0)
    torch.testing.assert_close(table[:50], expected, atol=1e-5, rtol=0)
    assert not torch.allclose(table, ours(None, 100))


def test_no_scaling_is_the_default() -> None:
    assert torch.equal(ours(None, 10), ours({"rope_type": "default"}, 10))


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "linear", "factor": "two"}, "factor='two'"),
        ({**SCALINGS["longrope"], "long_factor": [1.0]}, "long_factor"),
        ({"rope_type": "factors", "factors": (1.0,)}, "factors"),
    ],
)
def test_a_bad_scaling_is_refused_by_name(scaling: dict[str, object], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        ours(scaling, 100)
