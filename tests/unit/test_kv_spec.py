"""Cache specs: sizes, frozenness, rules found by class, groups, and which blocks a layer still reads."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from fractions import Fraction

import pytest

from aioengine.kv_spec import (
    BUILTIN_SPECS,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KeepAll,
    KVSpec,
    MLASpec,
    SlidingWindowSpec,
    SSMSpec,
    group_layers,
    layer_specs,
)
from tests.engine.test_device import SPEC

SHAPE = {"block_size": 16, "num_kv_heads": 4, "head_dim": 64, "itemsize": 2}
STATES = {"block_size": 16, "state_shapes": ((8, 16), (4,)), "itemsizes": (4, 2)}


@pytest.mark.parametrize(
    ("spec", "page_bytes"),
    [
        (FullAttentionSpec(**SHAPE), 16 * 2 * 4 * 64 * 2),
        (SlidingWindowSpec(**SHAPE, window=100), 16 * 2 * 4 * 64 * 2),
        (ChunkedLocalSpec(**SHAPE, chunk=64), 16 * 2 * 4 * 64 * 2),
        (CrossAttentionSpec(**SHAPE, max_encoder_len=1500), 16 * 2 * 4 * 64 * 2),
        (FullAttentionSpec(**SHAPE, tokens_per_state=Fraction(4)), 4 * 2 * 4 * 64 * 2),
        (FullAttentionSpec(**SHAPE, tokens_per_state=Fraction(1, 2)), 32 * 2 * 4 * 64 * 2),
        (MLASpec(block_size=16, num_kv_heads=1, head_dim=576, itemsize=2), 16 * 576 * 2),
        (MLASpec(block_size=16, num_kv_heads=1, head_dim=576, itemsize=1, alignment=128), 16 * 640),
        (SSMSpec(**STATES), 8 * 16 * 4 + 4 * 2),
    ],
)
def test_page_sizes(spec: KVSpec, page_bytes: int) -> None:
    """A19: of every kind."""
    assert spec.page_bytes == page_bytes


def test_a_spec_cannot_be_changed() -> None:
    """A19: nor made with a field that it has not."""
    spec = FullAttentionSpec(**SHAPE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_kv_heads = 8  # type: ignore[misc]
    with pytest.raises(TypeError, match="tokens_of_wisdom"):
        FullAttentionSpec(**SHAPE, tokens_of_wisdom=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FullAttentionSpec(**{**SHAPE, "block_size": 0}), "block_size=0 must be at least 1"),
        (lambda: FullAttentionSpec(**{**SHAPE, "head_dim": 0}), "head_dim=0"),
        (lambda: SlidingWindowSpec(**SHAPE, window=0), "window=0"),
        (lambda: ChunkedLocalSpec(**SHAPE, chunk=-1), "chunk=-1"),
        (lambda: MLASpec(**SHAPE, alignment=0), "alignment=0"),
        (lambda: FullAttentionSpec(**SHAPE, tokens_per_state=Fraction(3)), "whole number of states"),
        (lambda: SSMSpec(**{**STATES, "itemsizes": (4,)}), "2 state shapes, 1 item sizes"),
        (lambda: SSMSpec(**STATES, cache_mode="some"), "cache_mode='some'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


class NearlyFull(FullAttentionSpec):
    """A kind that somebody adds."""


class Unheard(KVSpec):
    """A kind without rules."""


def test_a_subclass_has_its_parent_s_rules_until_it_gets_its_own() -> None:
    """A22: the nearest class in the order of inheritance decides."""
    spec = NearlyFull(**SHAPE)
    assert BUILTIN_SPECS.rules_of(spec) is BUILTIN_SPECS.rules_of(FullAttentionSpec(**SHAPE))
    mine = KeepAll()
    assert BUILTIN_SPECS.extended({NearlyFull: mine}).rules_of(spec) is mine
    assert BUILTIN_SPECS.rules_of(spec) is not mine


def test_an_unknown_kind_is_refused_with_its_layer() -> None:
    """A22: at start, before anything is sized by it."""
    specs = (FullAttentionSpec(**SHAPE), Unheard(block_size=16))
    with pytest.raises(ValueError, match="layer 1: Unheard is no kind of KV cache that is known; known are Chunked"):
        group_layers(specs)


def test_checks_hold_without_asserts_too() -> None:
    """A22: under -O as well."""
    code = (
        "from aioengine.kv_spec import *\n"
        "class Unheard(KVSpec): pass\n"
        "for make in (lambda: group_layers((Unheard(block_size=1),)), lambda: Unheard(block_size=0)):\n"
        "    try: make()\n"
        "    except ValueError: continue\n"
        "    raise SystemExit('accepted')\n"
    )
    subprocess.run([sys.executable, "-P", "-O", "-c", code], check=True)


@pytest.mark.parametrize("block_size", [1, 4, 5])
@pytest.mark.parametrize("size", [1, 3, 4, 7, 20])
def test_what_is_out_is_what_no_later_query_reads(block_size: int, size: int) -> None:
    shape = {**SHAPE, "block_size": block_size}
    kinds = {
        SlidingWindowSpec(**shape, window=size): lambda query: query - size + 1,
        ChunkedLocalSpec(**shape, chunk=size): lambda query: query // size * size,
        FullAttentionSpec(**shape, window=size): lambda query: 0,
    }
    for spec, first_read in kinds.items():
        rules = BUILTIN_SPECS.rules_of(spec)
        for num_computed in range(60):
            read = min(max(0, first_read(query)) for query in range(num_computed, num_computed + 60))
            assert rules.num_out(spec, num_computed) == read // block_size, (spec, num_computed)
        assert [rules.num_blocks(spec, n) for n in (0, 1, block_size, block_size + 1)] == [0, 1, 1, 2]


def test_states_and_encoders_take_a_constant_number_of_blocks() -> None:
    counts = {
        mode: [BUILTIN_SPECS.rules_of(spec).num_blocks(spec, n) for n in (1, 16, 17, 160)]
        for mode in ("none", "align", "all")
        for spec in [SSMSpec(**STATES, cache_mode=mode, num_speculative=3 if mode != "all" else 0)]
    }
    assert counts == {"none": [4, 4, 4, 4], "align": [5, 5, 5, 5], "all": [1, 1, 2, 10]}
    spec = CrossAttentionSpec(**SHAPE, max_encoder_len=1500)
    assert [BUILTIN_SPECS.rules_of(spec).num_blocks(spec, n) for n in (1, 5000)] == [94, 94]


def test_layers_with_equal_specs_are_grouped_in_order() -> None:
    windows = (8, None, 8, 8, None)
    model = dataclasses.replace(SPEC, num_layers=5, layer_windows=windows)
    groups = group_layers(layer_specs(model, 2, 16, hybrid=True))
    assert [group.layers for group in groups] == [(0, 2, 3), (1, 4)]
    assert [type(group.spec) for group in groups] == [SlidingWindowSpec, FullAttentionSpec]
    assert groups[0].page_bytes == 3 * groups[0].spec.page_bytes
    # Without the hybrid allocator a window narrows what is read, not what is kept (A20).
    plain = group_layers(layer_specs(model, 2, 16))
    assert {type(group.spec) for group in plain} == {FullAttentionSpec}
    assert sum(group.page_bytes for group in plain) == sum(group.page_bytes for group in groups)
