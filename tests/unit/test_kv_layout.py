"""Which layers share tables and memory: groups, tensors, sizes, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.config import EngineConfig, resolve
from aioengine.device import CpuDevice, layer_caches
from aioengine.fastcore.drafts import NgramDrafter
from aioengine.fastcore.groups import KVGroups
from aioengine.fastcore.scheduler import Scheduler
from aioengine.kv_layout import MAX_GROUPS, KVLayout, layout_of, make_layout
from aioengine.kv_spec import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVSpec,
    SlidingWindowSpec,
    SSMSpec,
)
from tests.engine.test_device import SPEC

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_dim": 64, "itemsize": 4}
PAGE = 16 * 2 * 2 * 64 * 4
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, window=64)


def layout_for(pattern: str, window: int = 64, max_model_len: int = 4096, hybrid: bool = True) -> KVLayout:
    """The layout of a model whose layers are written as F (full) and W (window)."""
    windows = tuple(None if kind == "F" else window for kind in pattern)
    model = dataclasses.replace(SPEC, num_layers=len(pattern), layer_windows=windows)
    config = EngineConfig(device="cpu", max_model_len=max_model_len)
    resolved = resolve(config, model_max_len=1 << 20, model_dtype="bfloat16", cuda_available=False, num_cores=2)
    return layout_of(model, dataclasses.replace(resolved, hybrid_kv_cache=hybrid))


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("FFFF", {}),
        ("WFWF", {"hybrid": False}),  # A20: all blocks, the window only narrows what is read
        ("WWWW", {}),  # the prefix cache is governed through a group that keeps everything
        ("WFWF", {"window": 4096}),  # no request is longer than the window
        ("WFWF", {"window": 4000}),  # nor does it save anything worth a second table
    ],
)
def test_one_group_has_a_tensor_per_layer(pattern: str, options: dict[str, object]) -> None:
    layout = layout_for(pattern, **options)  # type: ignore[arg-type]
    assert layout.scheduler_groups == (("full", 0, 1),) and layout.num_tensors == 4
    assert layout.group_of_layer == (0,) * 4 and layout.tensor_of_layer == (0, 1, 2, 3)
    assert layout.block_bytes == 4 * PAGE and layout.blocks_of(1000) == 63 and str(layout) == "1 group: 4 layers full"
    assert [layout.longest_request(n) for n in (0, 1, 10)] == [0, 16, 160]
    assert layout.num_kv_tokens(10, 1000) == 160


def test_alternating_layers_share_tensors_in_pairs() -> None:
    layout = layout_for("WFWF")
    assert layout.scheduler_groups == (("full", 0, 1), ("sliding", 64, 1))
    assert layout.group_of_layer == (1, 0, 1, 0) and layout.tensor_of_layer == (0, 0, 1, 1)
    assert layout.block_bytes == 2 * PAGE and layout.bytes_per_token == 4 * PAGE // 16
    assert str(layout) == "2 groups: 2 layers full, 2 layers window 64"
    # A step of 512 tokens after a window of 64 spans at most ceil(575 / 16) + 1 blocks.
    assert layout.blocks_of(4096) == 256 + 37 and layout.blocks_of(160) == 20
    assert layout.longest_request(292) == 4080 and layout.longest_request(293) == 4096
    assert layout.num_kv_tokens(2930, 4096) == 40960


@pytest.mark.parametrize(
    ("pattern", "num_groups", "num_tensors"),
    [
        ("WWWWWF" * 4, 6, 4),  # 20 and 4 layers: five groups of windows
        ("FWWWWWF", 4, 2),  # the third group of windows is padded by one layer
        ("WWWF", 4, 1),
        ("W" * 11 + "F" * 10, 2, 11),  # one padded layer, and not two groups of windows that are half empty
        ("W" * 22 + "F" * 4, 7, 4),
        ("W" * 36 + "F" * 3, 7, 6),  # 13 groups of 3 are too many
    ],
)
def test_groups_waste_little_and_are_few(pattern: str, num_groups: int, num_tensors: int) -> None:
    layout = layout_for(pattern, max_model_len=32768)
    assert (len(layout.groups), layout.num_tensors) == (num_groups, num_tensors)
    check(layout, len(pattern))


def check(layout: KVLayout, num_layers: int) -> None:
    """Every layer has one place; no two of a group share a tensor; only equal layers are in a group."""
    assert 1 <= len(layout.groups) <= MAX_GROUPS and layout.groups[0].spec.__class__ is FullAttentionSpec
    places = set(zip(layout.group_of_layer, layout.tensor_of_layer, strict=True))
    assert len(places) == num_layers == len(layout.group_of_layer)
    assert max(layout.tensor_of_layer) < layout.num_tensors
    assert {group.spec.page_bytes for group in layout.groups} == {layout.block_bytes // layout.num_tensors}


@given(st.lists(st.sampled_from("FWVC"), min_size=1, max_size=40), st.integers(1, 40), st.integers(17, 100_000))
def test_any_mix_of_layers_has_a_place_for_each(kinds: list[str], window: int, max_model_len: int) -> None:
    made: dict[str, KVSpec] = {
        "F": FULL,
        "W": WINDOW,
        "V": SlidingWindowSpec(**SHAPE, window=window),
        "C": ChunkedLocalSpec(**SHAPE, chunk=128),
    }
    specs = [FULL, *(made[kind] for kind in kinds)]
    layout = make_layout(specs, max_model_len=max_model_len, max_step_tokens=512)
    check(layout, len(specs))
    for layer, spec in enumerate(specs):
        kept = layout.groups[layout.group_of_layer[layer]].spec
        assert kept in (spec, FULL)  # never less than the layer needs
    lengths = [layout.longest_request(n) for n in range(60)]
    assert lengths == sorted(lengths) and all(
        layout.blocks_of(lengths[n]) <= n < layout.blocks_of(lengths[n] + 1) for n in range(60)
    )


def test_layers_with_smaller_pages_get_more_tokens_in_a_block() -> None:
    narrow = SlidingWindowSpec(**{**SHAPE, "num_kv_heads": 1, "head_dim": 32}, window=256)
    layout = make_layout([FULL, narrow, FULL, narrow], max_model_len=4096, max_step_tokens=64)
    assert layout.scheduler_groups == (("full", 0, 1), ("sliding", 256, 4)) and layout.block_sizes == (16, 64)
    assert layout.page_shape(0) == (2, 16, 128) and layout.page_shape(1) == (1, 64, 64)
    assert math.prod(layout.page_shape(1)) == math.prod(layout.page_shape(0))
    _, resolved = (
        (config := EngineConfig(device="cpu")),
        resolve(config, model_max_len=4096, model_dtype="float32", cuda_available=False, num_cores=2),
    )
    caches = CpuDevice(resolved).allocate_kv_cache(layout, 10)
    assert [cache.shape for cache in caches] == [torch.Size((10, *layout.page_shape(layer))) for layer in range(4)]
    assert len({cache.data_ptr() for cache in caches}) == 2 and caches[0].data_ptr() == caches[1].data_ptr()


def test_a_layer_s_view_names_the_bytes_that_the_layout_gives_it() -> None:
    """A21: tensor, block, KV head, token, value: each outside of all behind it, in pages without a gap.

    Kernels read blocks of the pool's size, so there is no smaller one whose pages would have to be dense.
    """
    narrow = SlidingWindowSpec(**{**SHAPE, "num_kv_heads": 1, "head_dim": 32}, window=256)
    layout = make_layout([FULL, narrow, FULL, narrow, narrow], max_model_len=4096, max_step_tokens=64)
    page, num_blocks = PAGE // 4, 5
    pool = torch.arange(layout.num_tensors * num_blocks * page, dtype=torch.float64).view(layout.num_tensors, -1)
    views = layer_caches([tensor.view(num_blocks, page) for tensor in pool], layout)
    for layer, view in enumerate(views):
        num_heads, block_size, width = layout.page_shape(layer)
        for at in itertools.product((0, 3, 4), (0, num_heads - 1), (0, 7, block_size - 1), (0, width - 1)):
            block, head, token, value = at
            offset = block * page + (head * block_size + token) * width + value
            assert view[at] == layout.tensor_of_layer[layer] * num_blocks * page + offset, (layer, at)
        assert view.is_contiguous() and view.data_ptr() == pool[layout.tensor_of_layer[layer]].data_ptr()


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ([FULL, FullAttentionSpec(**{**SHAPE, "head_dim": 48})], "layer 1: a page of .* does not fit"),
        ([FullAttentionSpec(**{**SHAPE, "num_kv_heads": 1}), WINDOW], "in blocks no larger than those of the others"),
        ([WINDOW, WINDOW], "some layer must keep everything"),
        ([FULL, CrossAttentionSpec(**SHAPE, max_encoder_len=10)], "CrossAttentionSpec layers cannot be run yet"),
        ([FULL, SSMSpec(block_size=16, state_shapes=((PAGE // 4,),), itemsizes=(4,))], "SSMSpec layers cannot be run"),
        (
            [FullAttentionSpec(**SHAPE)]
            + [SlidingWindowSpec(**{**SHAPE, "head_dim": 64 // 2 ** (i % 3)}, window=8 + i) for i in range(9)],
            "10 kinds of layers need more than 8 groups",
        ),
    ],
)
def test_layers_that_cannot_share_a_pool_are_refused(specs: list[KVSpec], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_layout(specs, max_model_len=4096, max_step_tokens=512)


@pytest.mark.parametrize("pattern", ["FFFF", "WFWF", "FWWWWWF", "WWWWWF" * 4])
@pytest.mark.parametrize("step_tokens", [1, 100, 512, 4096])
def test_the_scheduler_counts_as_the_layout_does(pattern: str, step_tokens: int) -> None:
    """Else a context that fits the pool by the one would be refused by the other."""
    specs = [FULL if kind == "F" else WINDOW for kind in pattern]
    layout = make_layout(specs, max_model_len=4096, max_step_tokens=step_tokens)
    groups = KVGroups(layout.scheduler_groups, layout.block_size, step_tokens)
    assert [groups.capacity(n) for n in range(300)] == [layout.longest_request(n) for n in range(300)]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_in_flight_count_as_they_do_in_the_scheduler(async_scheduling: bool) -> None:
    """Or a context would be promised whose end the scheduler does not let a request reach."""
    config = EngineConfig(
        device="cpu",
        max_model_len=4096,
        max_num_seqs=1,
        max_num_batched_tokens=2,
        async_scheduling=async_scheduling,
        speculative_config='{"method": "ngram", "num_speculative_tokens": 16}',
    )
    resolved = resolve(config, model_max_len=1 << 20, model_dtype="bfloat16", cuda_available=False, num_cores=2)
    model = dataclasses.replace(SPEC, num_layers=4, layer_windows=(64, None) * 2)
    layout = layout_of(model, resolved)
    for num_blocks in range(2, 300):
        scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=layout.block_size,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_model_len=4096,
            max_in_flight=1 + async_scheduling,
            kv_groups=layout.scheduler_groups,
            drafter=NgramDrafter(most_tokens=3),
            num_speculative_tokens=resolved.num_speculative_tokens,
        )
        assert scheduler.max_total == min(4096, layout.longest_request(num_blocks - 1) + 1)
