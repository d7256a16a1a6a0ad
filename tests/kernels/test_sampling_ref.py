"""The sampling references against published vectors, brute force and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aioengine.kernels import sampling as ops
from tests.oracle import sampling_chain as oracle

PHILOX_VECTORS = [  # counter, key, output: the known answers published with Random123
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

# Few distinct values, so that ties are the rule.
tied_logits = st.lists(st.integers(-12, 12), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.float32) / 4
)


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = ops.philox_4x32_ref(*(torch.tensor([w]) for w in counter + key))
    assert [int(w) for w in words] == expected
    assert oracle.philox(counter, key) == expected


def test_noise_of_a_token_depends_on_seed_position_and_id_only() -> None:
    seeds, positions = torch.tensor([5, -(2**63), 2**63 - 1]), torch.tensor([0, 7, 2**31 - 1])
    wide = ops.gumbel_ref(ops.random_words_ref(seeds, positions, 103))
    assert torch.equal(ops.gumbel_ref(ops.random_words_ref(seeds[1:2], positions[1:2], 42))[0], wide[1, :42])
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        expected = [oracle.noise(seed, position, token_id) for token_id in range(103)]
        np.testing.assert_allclose(wide[row].numpy(), expected, rtol=3e-7, atol=3e-7)


def test_extreme_words_give_finite_noise() -> None:
    words = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    noise = ops.gumbel_ref(words)
    assert torch.isfinite(noise).all()
    assert noise[0] == noise[4] == noise.max()
    assert noise[2] == noise[3] == noise.min()


def test_noise_follows_the_gumbel_distribution() -> None:
    words = ops.random_words_ref(torch.arange(8), torch.zeros(8, dtype=torch.int64), 50_000).flatten()
    uniform = torch.exp(-torch.exp(-ops.gumbel_ref(words).double()))
    observed = torch.histc(uniform, bins=100, min=0, max=1)
    expected = len(words) / 100
    assert float(((observed - expected) ** 2 / expected).sum()) < 148  # 99 degrees of freedom, p = 0.001


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_uncorrelated() -> None:
    seeds, positions = torch.tensor([1, 2, 1]), torch.tensor([0, 0, 1])
    noise = ops.gumbel_ref(ops.random_words_ref(seeds, positions, 40_001)).double()
    rows = torch.stack((noise[0, :-1], noise[1, :-1], noise[2, :-1], noise[0, 1:]))
    off_diagonal = torch.corrcoef(rows) - torch.eye(4)
    assert float(off_diagonal.abs().max()) < 0.02


@pytest.mark.parametrize("logits", [[0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 0.0, 1.5], [0.0, -7.0], [50.0, 50.0, 49.0, -1e30]])
def test_draws_follow_the_softmax(logits: list[float]) -> None:
    count = 40_000
    z = torch.tensor(logits).expand(count, -1)
    no_threshold = torch.full((count,), -torch.inf)
    drawn = ops.draw_ref(z, no_threshold, torch.full((count,), 99), torch.arange(count))
    observed = torch.bincount(drawn, minlength=len(logits)).double()
    expected = torch.tensor(logits).double().softmax(-1) * count
    used = expected > 0
    assert observed[~used].sum() == 0
    chi_square = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001


@settings(max_examples=200, deadline=None)
@given(
    tied_logits,
    st.integers(0, 45),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    st.floats(0, 1, width=32),
)
def test_filters_keep_what_brute_force_keeps(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    row = oracle.Row(top_k=top_k, top_p=top_p, min_p=min_p)
    assume(oracle.is_top_p_clear(row, x))
    expected, _ = oracle.survivors(row, x)
    z = torch.from_numpy(x)[None]
    threshold = ops.filter_threshold_ref(
        z,
        torch.tensor([top_k if 0 < top_k < len(x) else len(x)]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )
    assert torch.equal(z[0] >= threshold, torch.from_numpy(expected > -np.inf))


def test_tokens_tied_with_the_last_kept_one_stay() -> None:
    z = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    full, one, none = torch.tensor([6]), torch.tensor([1.0]), torch.tensor([0.0])
    assert ops.filter_threshold_ref(z, torch.tensor([2]), one, none) == 2.0
    assert ops.filter_threshold_ref(z, full, torch.tensor([0.6]), none) == 2.0
    assert ops.filter_threshold_ref(z, full, one, torch.tensor([1.0])) == 3.0


def test_bad_word_is_forbidden_only_after_its_beginning() -> None:
    x = torch.zeros(2, 6)
    recent = torch.tensor([[-1, 4], [-1, 4], [3, 4], [3, 4]], dtype=torch.int32)
    prefix = torch.tensor([[3, 4], [-2, 4], [3, 4], [-2, 3]], dtype=torch.int32)
    ops.mask_bad_words_ref(x, recent, torch.tensor([0, 0, 1, 1]), prefix, torch.tensor([1, 2, 1, 1]))
    assert torch.isinf(x).nonzero().tolist() == [[0, 2], [1, 1]]


@settings(max_examples=100, deadline=None)
@given(tied_logits, st.data())
def test_top_logprobs_are_ordered_by_value_then_id(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(x)))
    values = torch.from_numpy(x)[None].log_softmax(-1)
    ids, best = ops.top_logprobs_ref(values, k)
    expected = sorted(range(len(x)), key=lambda i: (-float(values[0, i]), i))[:k]
    assert ids[0].tolist() == expected
    assert torch.equal(best[0], values[0, expected])


def test_rank_counts_strictly_greater_ones() -> None:
    values = torch.tensor([[-1.0, -2.0, -1.0, -3.0]]).expand(4, -1)
    chosen, ranks = ops.rank_ref(values, torch.arange(4))
    assert chosen.tolist() == [-1.0, -2.0, -1.0, -3.0]
    assert ranks.tolist() == [1, 3, 1, 4]
