"""Gated activations of the MLP: SwiGLU and GeGLU (tanh form).

    y = act(gate) * up,   gate_up = [gate | up] on the last axis

gate_up: [T, 2I] in any float type, y: [T, I]. Computed in float32, rounded once at the store of y. Called by
`aioengine/layers/ops.py` between the gate-up and the down projection.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., 2I] -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * up: [..., 2I] -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
