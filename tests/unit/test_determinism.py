"""What a declared determinism means for options, demands and the fingerprint (Q12); nothing runs here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aioengine.checkpoint import Checkpoint, open_checkpoint
from aioengine.config import EngineConfig, ResolvedConfig, resolve
from aioengine.determinism import DECLARED, check_demand, fingerprint
from aioengine.errors import InvalidConfig, InvalidRequest
from aioengine.model_source import resolve_model
from aioengine.types import SamplingParams
from tests.oracle.tiny_models import make_model, save_model

GREEDY, SEEDED, DRAWN = SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(temperature=1.0)


def resolved(*, cuda: bool = False, **options: object) -> ResolvedConfig:
    return resolve(
        EngineConfig(**options), model_max_len=4096, model_dtype="bfloat16", cuda_available=cuda, num_cores=2
    )


def test_nothing_is_declared_by_default() -> None:
    assert resolved().determinism == "none" and DECLARED["none"].level == "unavailable"
    assert resolved(determinism="batch-invariant").determinism == "batch-invariant"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"determinism": "yes"}, "determinism", "must be one of none, offline, batch-invariant"),
        ({"cuda": True, "determinism": "batch-invariant"}, "determinism", "not available on a GPU: matrix products"),
        ({"cuda": True, "determinism": "offline"}, "determinism", "not available on a GPU: which graphs and kernels"),
        ({"determinism": "offline", "target_itl_ms": 20.0}, "target_itl_ms", "makes steps depend on the clock"),
        (
            {"determinism": "offline", "scheduling_policy": "priority", "priority_ageing_s": 1.0},
            "priority_ageing_s",
            "makes steps depend on the clock",
        ),
    ],
)
def test_what_would_break_the_promise_is_refused(options: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        resolved(**options)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_the_clock_may_decide_where_nothing_says_otherwise() -> None:
    for mode in ("none", "batch-invariant"):
        assert resolved(determinism=mode, target_itl_ms=20.0).determinism == mode


@pytest.mark.parametrize("params", [GREEDY, SEEDED, DRAWN])
def test_a_demand_is_refused_unless_it_was_declared(params: SamplingParams) -> None:
    for demand in ("offline", "batch-invariant"):
        message = f"determinism={demand} is unavailable: the operator has declared nothing; .* --determinism {demand}"
        with pytest.raises(InvalidRequest, match=message) as caught:
            check_demand(demand, DECLARED["none"], params)  # also with temperature 0 and with a seed
        assert caught.value.param == "determinism"
    with pytest.raises(InvalidRequest, match="only offline is declared; .* --determinism batch-invariant"):
        check_demand("batch-invariant", DECLARED["offline"], params)
    for declared in DECLARED.values():
        check_demand(None, declared, params)
    check_demand("offline", DECLARED["offline"], params)


def test_batch_invariance_is_enough_for_both_but_not_without_a_seed() -> None:
    for demand in ("offline", "batch-invariant"):
        for params in (GREEDY, SEEDED):
            check_demand(demand, DECLARED["batch-invariant"], params)
        with pytest.raises(InvalidRequest, match="needs a seed or temperature 0") as caught:
            check_demand(demand, DECLARED["batch-invariant"], DRAWN)
        assert caught.value.param == "seed"


@pytest.mark.parametrize("demand", ["none", "", "Offline", 1, True, ["offline"]])
def test_an_unknown_demand_is_refused(demand: object) -> None:
    with pytest.raises(InvalidRequest, match="must be offline or batch-invariant"):
        check_demand(demand, DECLARED["batch-invariant"], GREEDY)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint, Checkpoint]:
    """A model, a copy of it elsewhere, and one with a single other number at the end of its last weight."""
    model = make_model("llama", num_hidden_layers=1)
    folders: list[Path] = []
    for name in ("one", "copy", "other"):
        if name == "other":
            list(model.parameters())[-1].data.view(-1)[-1] += 1.0
        folders.append(save_model(model, tmp_path_factory.mktemp("models") / name))
    opened = []
    for folder in folders:
        config = EngineConfig(str(folder)).model
        opened.append(open_checkpoint(resolve_model(config), config))
    return opened[0], opened[1], opened[2]


def test_the_fingerprint_changes_with_what_results_depend_on(
    checkpoints: tuple[Checkpoint, Checkpoint, Checkpoint],
) -> None:
    one, copy, other = checkpoints
    own = fingerprint(one, resolved(), "avx2", None)
    assert own == fingerprint(copy, resolved(num_threads=1, max_num_seqs=3), "avx2", None) and len(own) == 12
    others = {
        fingerprint(other, resolved(), "avx2", None),
        fingerprint(one, resolved(determinism="batch-invariant"), "avx2", None),
        fingerprint(one, resolved(), "generic", None),
        fingerprint(one, dataclasses.replace(resolved(), dtype="float16"), "avx2", None),
        fingerprint(one, dataclasses.replace(resolved(), kv_cache_dtype="float16"), "avx2", None),
        fingerprint(one, resolved(), "avx2", 0),
        fingerprint(one, resolved(), "avx2", 1),
    }
    assert len(others) == 7 and own not in others
