"""The learned time of steps, and what --target-itl-ms makes of it: decodes go, prompts get the rest."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_cost import DecayedFit, StepCost
from tests.oracle.costed_device import CostedWorld, Costs
from tests.unit.test_scheduler import make_request, make_scheduler, scheduled, settle

# ---- the fit ----


def best_by_trying(rows: list[list[float]], values: list[float], keep: float) -> list[float]:
    """Weighted least squares over every choice of the coefficients that are not zero."""
    ages = np.arange(len(rows))[::-1]
    scale = np.sqrt(keep**ages) / np.array(values)
    a, b = np.array(rows) * scale[:, None], np.array(values) * scale
    best, least = np.zeros(a.shape[1]), float(b @ b)
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(range(a.shape[1]), n) for n in range(1, a.shape[1] + 1)
    ):
        solution = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
        if (solution >= 0).all():
            full = np.zeros(a.shape[1])
            full[list(chosen)] = solution
            if (loss := float(((a @ full - b) ** 2).sum())) < least:
                best, least = full, loss
    return best.tolist()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_features", [1, 2, 3])
def test_fit_is_the_best_without_negative_coefficients(seed: int, num_features: int) -> None:
    rng = random.Random(seed)
    fit = DecayedFit(num_features, 0.97)
    truth = [rng.uniform(-0.5, 2.0) for _ in range(num_features)]
    rows, values = [], []
    for _ in range(300):
        rows.append([rng.uniform(0.1, 1.0) * 10 ** (3 * i) for i in range(num_features)])
        clean = sum(t * x / 10 ** (3 * i) for i, (t, x) in enumerate(zip(truth, rows[-1], strict=True)))
        values.append(max(0.2, clean + rng.gauss(0, 0.05)))
        fit.observe(rows[-1], values[-1])
    expected = best_by_trying(rows, values, 0.97)
    assert min(fit.coefficients()) >= 0
    assert fit.coefficients() == pytest.approx(expected, rel=0.02, abs=1e-3 * max(expected))


def test_fit_forgets() -> None:
    fit = DecayedFit(1, 0.9)
    for value in [1.0] * 100 + [3.0] * 80:
        fit.observe([1.0], value)
    assert fit.coefficients() == pytest.approx([3.0], rel=0.05)


def test_fits_that_cannot_work_are_refused() -> None:
    for num_features, keep in ((0, 0.9), (4, 0.9), (2, 0.0), (2, 1.1)):
        with pytest.raises(ValueError, match="num_features"):
            DecayedFit(num_features, keep)
    for target_s, least in ((0.0, 1), (-1.0, 1), (float("nan"), 1), (1.0, 0)):
        with pytest.raises(ValueError, match="target_s"):
            StepCost(target_s, least)
    with pytest.raises(ValueError, match="target_itl_s=1.0 must lie between 0 and 1e6, and be 0 without chunked"):
        make_scheduler(target_itl_s=1.0, max_num_batched_tokens=128, enable_chunked_prefill=False)


# ---- the rules, with steps that take exactly 1 s + 0.1 s a prompt token ----


def paced(**options: object) -> Scheduler:
    return make_scheduler(**{"target_itl_s": 2.0, "max_num_batched_tokens": 64, "num_blocks": 500, **options})


def run_step(scheduler: Scheduler) -> dict[str, int]:
    plan = scheduler.schedule()
    assert plan is not None
    sizes = scheduled(plan)
    scheduler.observe_step(plan, 1.0 + 0.1 * sum(n for n in sizes.values() if n > 1))
    settle(scheduler, plan)
    return sizes


def learned(**options: object) -> Scheduler:
    """A scheduler that has seen enough steps to know the cost, and runs one decode."""
    scheduler = paced(max_model_len=2000, **options)
    scheduler.add(make_request("decode", 4, max_tokens=1900))
    for i in range(8):
        for _ in range(20):
            run_step(scheduler)
        scheduler.add(make_request(f"taught{i}", 100, start=2000 + 200 * i, max_tokens=1))
        while scheduler.num_running + scheduler.num_waiting > 1:
            run_step(scheduler)
    return scheduler


def test_prompts_get_the_time_that_decodes_leave() -> None:
    scheduler = learned()
    scheduler.add(make_request("long", 100, start=500))
    sizes = run_step(scheduler)
    assert sizes["decode"] == 1 and 8 <= sizes["long"] <= 10  # (2 s - 1 s) / 0.1 s, less a margin
    stats = scheduler.step_cost_stats()
    assert stats is not None and stats["per_prompt_token_s"] == pytest.approx(0.1, rel=0.1)
    assert stats["base_s"] + stats["per_decode_s"] == pytest.approx(1.0, rel=0.1)
    assert stats["num_observed"] > 40 and stats["target_s"] == 2.0


def test_several_prompts_share_the_time_in_order() -> None:
    scheduler = learned()
    for i, length in enumerate((4, 3, 50, 50)):
        scheduler.add(make_request(str(i), length, start=500 + 100 * i))
    sizes = run_step(scheduler)
    assert (sizes["0"], sizes["1"]) == (4, 3) and 1 <= sizes["2"] <= 3 and "3" not in sizes


def test_a_prompt_without_decodes_takes_the_whole_step() -> None:
    scheduler = paced(target_itl_s=0.001)
    scheduler.add(make_request("a", 100))
    assert [run_step(scheduler)["a"] for _ in range(3)] == [64, 36, 1]
    scheduler = paced(target_itl_s=0.001)
    for i in range(3):
        scheduler.add(make_request(str(i), 50, start=100 * i))
    assert run_step(scheduler) == {"0": 50, "1": 14}


def test_decodes_always_go_and_prompts_move_on_though_the_target_is_out_of_reach() -> None:
    scheduler = paced(target_itl_s=0.001, max_num_batched_tokens=256, max_num_seqs=8)
    for i in range(4):
        scheduler.add(make_request(f"decode{i}", 4, start=100 * i, max_tokens=100))
    run_step(scheduler)
    scheduler.add(make_request("long", 40, start=900))
    for _ in range(5):
        sizes = run_step(scheduler)
        assert {n for name, n in sizes.items() if name.startswith("decode")} == {1} and len(sizes) == 5
        assert sizes["long"] == 4  # a sixty-fourth of the step


def test_decodes_keep_their_tokens_from_prompts_ahead_of_them() -> None:
    scheduler = paced(target_itl_s=1e5, max_num_batched_tokens=8, max_num_seqs=8, long_prefill_token_threshold=7)
    scheduler.add(make_request("long", 100))
    scheduler.add(make_request("one", 1, start=500, max_tokens=30))
    for _ in range(9):
        sizes = run_step(scheduler)
        assert sizes["one"] == 1 and sizes["long"] in (6, 7)


def test_a_model_that_knows_little_promises_little() -> None:
    scheduler = paced(target_itl_s=1e5, max_num_batched_tokens=1024, max_model_len=4000, num_blocks=2000)
    scheduler.add(make_request("decode", 4, max_tokens=100))
    run_step(scheduler)
    scheduler.add(make_request("long", 3000, start=5000))
    sizes = [run_step(scheduler)["long"] for _ in range(6)]
    assert sizes == [16, 32, 64, 128, 256, 512]  # the floor, then twice the most it has seen


def test_a_step_that_is_unknown_or_took_no_time_teaches_nothing() -> None:
    scheduler = paced()
    scheduler.add(make_request("a", 4))
    plan = scheduler.schedule()
    assert plan is not None
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        scheduler.observe_step(plan, seconds)
    assert scheduler.step_cost_stats()["num_observed"] == 0  # type: ignore[index]
    scheduler.observe_step(plan, 1.0)
    scheduler.observe_step(plan, 1.0)
    assert scheduler.step_cost_stats()["num_observed"] == 1  # type: ignore[index]
    settle(scheduler, plan)
    off = make_scheduler()
    off.add(make_request("a", 4))
    plan = off.schedule()
    assert plan is not None
    off.observe_step(plan, 1.0)
    assert off.step_cost_stats() is None


# ---- the promise, on a device with the costs of an H200, under a virtual clock ----


def chat_with_long_prompts(
    target_itl_s: float, *, seed: int = 0, depth: int = 2, num_chats: int = 32, per_second: float = 1.0,
    costs: Costs | None = None,
) -> CostedWorld:  # fmt: skip
    """About `num_chats` answers at any time, and long prompts that arrive among them."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        num_blocks=60_000, block_size=16, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=40_000,
        max_in_flight=depth, target_itl_s=target_itl_s, enable_prefix_caching=False, full_sequence_must_fit=True,
    )  # fmt: skip
    world = CostedWorld(scheduler, costs or Costs(), seed)
    arrivals = []
    end_s = 0.0
    for i in range(12):
        end_s += rng.expovariate(per_second)
        arrivals.append((end_s, f"long{i}", rng.randint(4000, 32_000), 64))
    now_s = 0.0
    while now_s < end_s:
        now_s += rng.expovariate(num_chats / 6.0)
        arrivals.append((now_s, f"chat{len(arrivals)}", rng.randint(50, 1500), rng.randint(200, 900)))
    for at_s, name, length, max_tokens in sorted(arrivals):
        request = Request(name, np.arange(length), max_tokens=max_tokens, ignore_eos=True)
        world.arrivals.append((at_s, request))
    return world


@pytest.mark.slow
@pytest.mark.parametrize(("target_s", "seed", "depth"), [(0.015, 0, 2), (0.025, 1, 2), (0.025, 2, 1), (0.05, 3, 2)])
def test_gaps_between_tokens_hold_the_target_while_long_prompts_arrive(target_s: float, seed: int, depth: int) -> None:
    without = chat_with_long_prompts(0.0, seed=seed, depth=depth)
    without.run()
    world = chat_with_long_prompts(target_s, seed=seed, depth=depth)
    world.run()
    assert len(world.gaps_s) == len(without.gaps_s) > 5000
    assert world.gap_s(0.99) <= 1.1 * target_s
    assert without.gap_s(0.99) > 3 * target_s
    assert world.now_s <= 1.03 * without.now_s  # the price in throughput


@pytest.mark.slow
def test_a_target_near_the_time_of_the_decodes_costs_throughput_and_still_holds() -> None:
    busy = {"num_chats": 32, "per_second": 100.0}
    without, world = chat_with_long_prompts(0.0, **busy), chat_with_long_prompts(0.01, **busy)  # type: ignore[arg-type]
    for each in (without, world):
        each.run()
    assert world.gap_s(0.99) <= 0.011 and without.gap_s(0.99) > 0.2
    assert world.now_s <= 1.25 * without.now_s


@pytest.mark.slow
def test_a_device_that_becomes_slower_is_followed() -> None:
    world = chat_with_long_prompts(0.025)
    world.run(4.0)
    costs = world.costs
    world.costs = Costs(
        2 * costs.weights, 2 * costs.per_token, 2 * costs.per_context_token, 2 * costs.per_pair, costs.launch
    )
    num_before = len(world.gaps_s)
    world.run()
    del world.gaps_s[:num_before]
    assert len(world.gaps_s) > 2000 and world.gap_s(0.99) <= 0.0275
