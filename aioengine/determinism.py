"""Determinism as the operator declares it: what is promised, what a request may demand, what identifies an engine.

Owns the words and the checks. Nothing is inferred: neither temperature 0 nor a seed makes a promise, and an engine
started without `--determinism` answers `unavailable`. Who keeps the promise: `config.resolve()` refuses what would
break it, `engine.py` queues the requests of a call together and lets one call run after the other (offline), and the
CPU's kernels sum every row in one fixed order, whatever else is in the batch (batch-invariant).
"""

from __future__ import annotations

import dataclasses
import hashlib
from importlib.metadata import version
from typing import TYPE_CHECKING

from aioengine.errors import InvalidRequest
from aioengine.types import Determinism, SamplingParams

if TYPE_CHECKING:
    from aioengine.checkpoint import Checkpoint
    from aioengine.config import ResolvedConfig

DECLARED = {
    "none": Determinism("unavailable", "the operator has declared nothing"),
    "offline": Determinism("offline", "the same calls in the same order give the same steps and the same answers"),
    "batch-invariant": Determinism(
        "batch-invariant", "greedy and seeded answers do not depend on what else runs, on chunks, cache or preemption"
    ),
}
"""By the value of `--determinism`."""

SATISFIED_BY = {"offline": ("offline", "batch-invariant"), "batch-invariant": ("batch-invariant",)}
"""What a request may demand, and the levels that are enough for it."""

NUM_SAMPLED_BYTES = 4096
"""Of each weight's beginning and end so much enters the fingerprint: reading all would take as long as loading."""


def check_demand(demand: object, declared: Determinism, params: SamplingParams) -> None:
    """Whether an engine keeps what a request demands; None demands nothing.

    Raises:
        InvalidRequest: the level is not a known one or was not declared, or the request is drawn without a seed
            where its seed depends on the order in which requests arrive.
    """
    if demand is None:
        return
    if not isinstance(demand, str) or demand not in SATISFIED_BY:
        allowed = " or ".join(SATISFIED_BY)
        raise InvalidRequest(f"determinism={demand!r} must be {allowed}", param="determinism")
    if declared.level not in SATISFIED_BY[demand]:
        has = "" if declared.level == "unavailable" else f"only {declared.level} is declared; "
        raise InvalidRequest(
            f"determinism={demand} is unavailable: {has or declared.reason + '; '}"
            f"an operator turns it on by starting with --determinism {demand}",
            param="determinism",
        )
    if declared.level == "batch-invariant" and not params.is_greedy and params.seed is None:
        raise InvalidRequest(
            f"determinism={demand} needs a seed or temperature 0: without a seed, what is drawn depends on the order "
            "in which requests arrive",
            param="seed",
        )


def fingerprint(checkpoint: Checkpoint, resolved: ResolvedConfig, device_name: str, dummy_seed: int | None) -> str:
    """Twelve hex digits that change when something changes on which results depend.

    That is this package's version, the model (its configuration, and of each weight name, shape, kind, first and last
    bytes), types, device and the declared determinism. Of a weight above twice `NUM_SAMPLED_BYTES` (4 KiB) the
    middle is not read, so an edit that leaves shapes and both ends as they were goes unnoticed: this tells engines
    apart, it does not prove that a file is whole.

    Args:
        device_name: what tells kinds of devices with different arithmetic apart.
        dummy_seed: of weights that are random numbers; None for stored ones.
    """
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode("utf-8", "surrogatepass"))

    add(version("aioengine"), resolved.dtype, resolved.kv_cache_dtype, resolved.device, device_name)
    add(resolved.determinism, dataclasses.replace(checkpoint.config, name=""), dummy_seed)
    for name, tensor in checkpoint.tensors().items():
        add(name, tensor.shape, tensor.kind)
        if dummy_seed is None:
            digest.update(tensor.ends(NUM_SAMPLED_BYTES))
    return digest.hexdigest()[:12]
