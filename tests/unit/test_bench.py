"""The arithmetic of benchmark reports."""

from __future__ import annotations

import pytest

from aioengine.bench.naive_pool import NaivePool, chain_hashes
from aioengine.bench.workloads import Timeline, median_run, percentile, random_prompts, summarize


def test_percentile_takes_the_nearest_rank() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert percentile(values, 50) == 51
    assert percentile(values, 99) == 100
    assert percentile([7.0], 99) == 7
    assert percentile([], 50) is None


def test_a_timeline_tells_first_token_gaps_and_mean() -> None:
    line = Timeline(10.0, [10.5, 10.6, 10.6, 10.9])
    assert line.ttft_s == pytest.approx(0.5)
    assert line.gaps_s == pytest.approx([0.1, 0.0, 0.3])
    assert line.tpot_s == pytest.approx(0.4 / 3)
    assert Timeline(0.0, [1.0]).tpot_s is None


def test_a_summary_counts_tokens_and_rates() -> None:
    lines = [Timeline(0.0, [1.0, 2.0], 10, 4), Timeline(0.0, [1.5], 20, 0)]
    summary = summarize(lines, 2.0)
    assert (summary["requests"], summary["prompt_tokens"], summary["output_tokens"]) == (2, 30, 3)
    assert summary["output_tokens_per_s"] == 1.5
    assert summary["total_tokens_per_s"] == 16.5
    assert summary["cached_tokens"] == 4
    assert summary["ttft_p99_ms"] == 1500
    assert summary["itl_p50_ms"] == 1000


def test_prompts_differ_but_for_their_prefix_and_repeat_with_the_seed() -> None:
    prompts = random_prompts(3, 20, 1000, seed=5, prefix_len=8)
    assert all(len(p) == 20 and p[:8] == prompts[0][:8] for p in prompts)
    assert len({tuple(p[8:]) for p in prompts}) == 3
    assert prompts == random_prompts(3, 20, 1000, seed=5, prefix_len=8)
    assert prompts != random_prompts(3, 20, 1000, seed=6, prefix_len=8)
    assert all(0 <= i < 1000 for p in prompts for i in p)


def test_the_median_run_is_one_of_the_runs() -> None:
    runs: list[dict[str, float | int | None]] = [{"rate": 3.0}, {"rate": 1.0}, {"rate": 2.0}]
    assert median_run(runs, "rate") is runs[2]
    assert median_run(runs[:2], "rate") is runs[1]


def test_the_naive_pool_forgets_the_least_recently_used_and_keeps_what_is_touched() -> None:
    pool = NaivePool(5)
    hashes = chain_hashes(list(range(8)), 2)
    assert len(hashes) == 4 and chain_hashes([0, 1, 9, 3], 2)[0] == hashes[0]
    blocks = pool.allocate(4)
    pool.publish(blocks, hashes)
    pool.release_all(blocks)
    assert pool.lookup(hashes) == blocks
    pool.touch(blocks[:2])
    taken = pool.allocate(2)
    assert set(taken) == set(blocks[2:]) and pool.lookup(hashes) == blocks[:2]
    with pytest.raises(RuntimeError, match="1 blocks are wanted, 0 are free"):
        pool.allocate(1)
