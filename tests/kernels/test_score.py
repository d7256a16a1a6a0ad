"""Log-probabilities of a batch: values, ranks and the most likely tokens, against float64 and by hand."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels import score as kernels
from aioengine.kernels.score import CHUNK, GROUP, MOST_TOP
from tests.kernels.triton_here import need_triton

FLOOR = -9999.0
INF = float("inf")


@pytest.fixture
def score(run):
    return getattr(kernels, "score_ref" if run == "reference" else "score")


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def read(words):
    """Token ids, log-probabilities, ranks, ids and log-probabilities of the top."""
    width = (words.shape[1] - 3) // 2
    assert words.dtype == torch.int32
    logprobs = words[:, 1].contiguous().view(torch.float32)
    top = words[:, 3 + width :].contiguous().view(torch.float32)
    return words[:, 0], logprobs, words[:, 2], words[:, 3 : 3 + width], top


@pytest.mark.slow
@pytest.mark.parametrize("width", [0, 1, 4])
@pytest.mark.parametrize("vocab", [4, GROUP, 1000, CHUNK + 3])
def test_scores_are_those_of_the_softmax(score, vocab, width, dtype, device):
    generator = torch.Generator(device).manual_seed(vocab)
    x = (torch.randn(5, vocab, generator=generator, device=device) * 3).to(dtype)
    x[1, :2] = x.max()  # a tie at the top
    x[2] = x[2].float().round().to(dtype)  # many
    token_ids = ints(device, 0, 1, 2, vocab - 1, vocab // 2)
    ids, logprobs, ranks, top_ids, top = read(score(x, None, token_ids, width, FLOOR))
    values = x.double().log_softmax(-1)
    chosen = values.gather(1, token_ids[:, None].long())
    assert torch.equal(ids, token_ids)
    torch.testing.assert_close(logprobs.double(), chosen[:, 0], rtol=0, atol=2e-5)
    assert ranks.tolist() == ((x > x.gather(1, token_ids[:, None].long())).sum(1) + 1).tolist()
    for row in range(5):
        expected = sorted(range(vocab), key=lambda i, row=row: (-float(x[row, i]), i))[:width]
        assert top_ids[row].tolist() == expected
        torch.testing.assert_close(top[row].double(), values[row, expected], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_the_whole_order_comes_out_where_it_is_asked_for(score, device):
    """Every group is taken to its last token; a float32 tie of log-probabilities goes to the lower id."""
    vocab = MOST_TOP
    x = torch.randn(2, vocab, generator=torch.Generator(device).manual_seed(0), device=device).mul(4).round()
    x[0, 7] = -INF
    x[0, 200] = -3e38  # both at the floor
    _, _, _, top_ids, top = read(score(x, None, ints(device, 1, 2), vocab, FLOOR))
    for row in range(2):
        values = x[row].log_softmax(-1).clamp(min=FLOOR)
        assert top_ids[row].tolist() == sorted(range(vocab), key=lambda i, v=values: (-float(v[i]), i))
        assert torch.isfinite(top[row]).all() and bool((top[row].diff() <= 0).all())
    assert top_ids[0, -2:].tolist() == [7, 200]


def test_the_best_of_many_groups_are_found_in_order(score, device):
    x = torch.randn(1, 3 * CHUNK // 2, generator=torch.Generator(device).manual_seed(1), device=device)
    best = [5, GROUP + 1, 6, CHUNK, CHUNK + 1, CHUNK - 1, 3 * CHUNK // 2 - 1, 7, 8]
    x[0, best] = torch.linspace(30, 20, len(best), device=device)
    *_, top_ids, top = read(score(x, None, ints(device, 7), len(best), FLOOR))
    assert top_ids[0].tolist() == best
    torch.testing.assert_close(top[0], x[0].log_softmax(-1)[best], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_rows_are_picked_and_do_not_depend_on_the_batch(score, dtype, device):
    x = (torch.randn(6, 700, generator=torch.Generator(device).manual_seed(2), device=device) * 2).to(dtype)
    token_ids = ints(device, 1, 699, 3, 300, 5, 6)
    all_rows = score(x, None, token_ids, 3, FLOOR)
    assert torch.equal(score(x, ints(device, 4, 0, 5), token_ids, 3, FLOOR), all_rows[[4, 0, 5]])
    alone = score(x[3:4], None, token_ids[3:4], 3, FLOOR)
    assert torch.equal(alone, all_rows[3:4])
    assert score(x[:0], None, token_ids[:0], 2, FLOOR).shape == (0, 7)


@pytest.mark.parametrize("poison", [float("nan"), INF])
def test_logits_that_are_no_numbers_have_rank_zero(score, poison, device):
    x = torch.zeros(4, 600, device=device)
    x[1, 599] = poison
    x[2] = -INF
    x[3, 1:] = -INF
    _, logprobs, ranks, _, _ = read(score(x, None, ints(device, 0, 0, 0, 0), 1, FLOOR))
    assert ranks.tolist() == [1, 0, 0, 1]
    assert logprobs[3] == 0.0


def test_more_than_the_kernel_finds_is_refused(device):
    need_triton(device)
    x = torch.zeros(1, 10, device=device)
    with pytest.raises(ValueError, match="at most 10"):
        kernels.score(x, None, ints(device, 0), 11, FLOOR)
