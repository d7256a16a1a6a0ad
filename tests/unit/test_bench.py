"""The arithmetic of benchmark reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aioengine.bench.conditions import Conditions, comparison_class, counted
from aioengine.bench.gpu_steps import _TimedScheduler
from aioengine.bench.naive_pool import NaivePool, chain_hashes
from aioengine.bench.replay import replay
from aioengine.bench.traces import SYNTHETIC, Arrival, read_trace
from aioengine.bench.workloads import Timeline, median_run, percentile, random_prompts, summarize
from aioengine.errors import InvalidConfig
from aioengine.fastcore.kv_manager import KVManager


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


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({}, "tuned"),
        ({"num_compiled": 1}, "cold"),
        ({"num_captured": 2}, "cold"),
        ({"is_warm": False}, "cold"),
        ({"has_cache": False}, "cold"),
        ({"num_compiled": None}, "diagnostic"),
        ({"is_warm": None, "has_cache": None}, "diagnostic"),
        ({"is_warm": None, "num_compiled": 1}, "cold"),
    ],
)
def test_a_run_is_tuned_cold_or_diagnostic(seen: dict[str, int | None], expected: str) -> None:
    """P4: what was not seen is not what was seen to be absent."""
    warm = {"num_compiled": 0, "num_captured": 0, "is_warm": True, "has_cache": True}
    assert Conditions(**{**warm, **seen}).run_class() == expected


def test_one_run_that_is_not_tuned_spoils_a_comparison() -> None:
    assert comparison_class(["tuned", "tuned"]) == "tuned"
    assert comparison_class(["tuned", "diagnostic"]) == "diagnostic"
    assert comparison_class(["diagnostic", "cold", "tuned"]) == "cold"
    assert comparison_class([]) == "diagnostic"


def test_compilations_are_counted_by_the_hook_and_the_old_one_is_called_and_put_back() -> None:
    knobs = pytest.importorskip("triton.knobs")
    heard: list[str] = []
    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, lambda **kw: heard.append("old")
    try:
        old = knobs.runtime.jit_post_compile_hook
        with counted() as compiled:
            assert compiled.number == 0
            knobs.runtime.jit_post_compile_hook(key="k", repr="r")
        assert compiled.number == 1 and heard == ["old"] and knobs.runtime.jit_post_compile_hook is old
    finally:
        knobs.runtime.jit_post_compile_hook = before


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
    assert not pool.reset() and pool.lookup(hashes) == blocks[:2]
    pool.release_all(blocks)
    assert pool.reset() and pool.lookup(hashes) == []


@pytest.mark.parametrize("name", sorted(SYNTHETIC))
def test_a_synthetic_trace_repeats_with_its_seed_and_shares_prefixes(name: str) -> None:
    first, again, other = (list(SYNTHETIC[name](200, seed)) for seed in (3, 3, 4))
    assert len(first) == 200 and all(0 < a.num_prompt < len(a.token_ids) for a in first)
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, other, strict=True))
    everything = replay(first, KVManager(100_000, 16), concurrency=4)
    assert 0.1 < everything.hit_rate < 1 and everything.num_refused == 0


def test_replay_counts_whole_blocks_of_the_prompt_that_are_cached() -> None:
    """Q2: the hit rate is that of a run worked out by hand."""
    text = np.arange(100, dtype=np.int32)
    # The second finds 5 blocks of 16 of its prompt of 90; the third's last prompt token is computed in any case.
    trace = [Arrival(text, 90), Arrival(text, 90), Arrival(text[:65], 64)]
    outcome = replay(trace, KVManager(50, 16), concurrency=1)
    assert (outcome.num_prompt_tokens, outcome.num_hit_tokens) == (244, 80 + 48)


def test_replay_waits_for_room_and_refuses_what_no_pool_holds() -> None:
    texts = [np.full(48, i, np.int32) for i in range(4)]
    large = Arrival(np.arange(500, dtype=np.int32), 400)
    outcome = replay([*(Arrival(text, 40) for text in texts), large], KVManager(8, 16), concurrency=10)
    assert outcome.num_refused == 1 and outcome.num_prompt_tokens == 560


def test_a_trace_file_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 20, "input_length": 5, "output_length": 2, "hash_ids": [7, 9]}',
        "",
        '{"arrival": 10, "token_ids": [1, 2, 3], "num_output": 1}',
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    first, second = read_trace(tmp_path / "t.jsonl", hash_block_size=4)
    assert (first.token_ids.tolist(), first.num_prompt) == ([1, 2, 3], 2)
    assert (second.token_ids.tolist(), second.num_prompt) == ([7, 7, 7, 7, 9], 5)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1 is no request"),
        ("[]", "line 1 is no request"),
        ('{"prompt": 1}', "neither token_ids nor hash_ids"),
        ('{"token_ids": []}', "not a list of ids"),
        ('{"token_ids": [[1, 2], [3, 4]]}', "from 0 to 2147483647"),
        ('{"token_ids": [1], "arrival": "nan"}', "it arrives at nan"),
        ('{"token_ids": [-1]}', "from 0 to 2147483647"),
        ('{"token_ids": [1], "num_output": 1}', "num_output=1 of 1"),
        ('{"hash_ids": [1], "input_length": 9}', "input_length=9 does not fit 1 blocks of 4"),
        ("", "has no requests"),
    ],
)
def test_a_bad_trace_is_told_with_its_line(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(InvalidConfig, match=why):
        read_trace(tmp_path / "t.jsonl", hash_block_size=4)


def test_a_timed_scheduler_is_told_all_that_the_step_loop_tells() -> None:
    """It stands where the scheduler stood: settling names lost blocks too."""
    told: list[tuple[object, ...]] = []
    scheduler = SimpleNamespace(update=lambda *args: told.append(args) or ["changed"])
    probe = SimpleNamespace(steps={7: SimpleNamespace(update_s=0.0)})
    plan = SimpleNamespace(step_id=7)
    assert _TimedScheduler(scheduler, probe).update(plan, [1], (5,)) == ["changed"]  # type: ignore[arg-type]
    assert told == [(plan, [1], (5,))] and probe.steps[7].update_s > 0
