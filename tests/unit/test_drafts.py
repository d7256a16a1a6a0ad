"""Drafts in the scheduler: who gets how many, what is rolled back, and what the n-gram drafter finds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

import numpy as np
import pytest

from aioengine.fastcore import step_buffer as layout
from aioengine.fastcore.drafts import LIMIT, Drafter, NgramDrafter
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan


def true_token(request: Request, position: int) -> int:
    """The token that the model of these tests puts at a position."""
    return 10 + (position * 7919 + len(request.request_id) * 31 + position // 3) % 50


class Guesses(Drafter):
    """Drafts the true tokens from where the text is expected to be, each right with a probability."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self.rng, self.share = rng, share
        self.asked: list[int] = []

    def propose(self, request: Request, most: int) -> Iterable[int]:
        self.asked.append(most)
        start = request.num_tokens + request.num_in_flight
        right = [true_token(request, start + i) for i in range(self.rng.randint(0, most + 1))]
        return [token_id if self.rng.random() < self.share else 1 for token_id in right]


class Device:
    """Runs packed steps in order; the same arithmetic as the kernels', by row."""

    def __init__(self, num_rows: int) -> None:
        self.rejected = [0] * num_rows
        self.last_token = [-1] * num_rows
        self.starts: dict[str, list[tuple[int, int]]] = {}
        """Positions [start, end) that each request has computed for good, in order."""

    def run(self, plan: StepPlan) -> np.ndarray:
        words = plan.buffer.tolist()
        tokens = words[words[layout.HEADER_OFF_TOKENS] :][: plan.num_tokens]
        out = np.full(plan.num_samples, -1, np.int32)
        num_drafts = 0
        for i, request in enumerate(plan.requests):
            at = layout.HEADER_WORDS + i * layout.ROW_WORDS
            row, first, num_new, computed, flags, sample, num_output, known_rejected = words[at : at + 8]
            count = flags >> layout.DRAFTS_SHIFT
            num_drafts += count
            shift = self.rejected[row] - known_rejected
            assert shift >= 0
            start, ids = computed - shift, tokens[first : first + num_new]
            if flags & layout.FLAG_JOINED:
                assert shift == 0
                self.starts[request.request_id] = [(0, start)]
            assert start == self.starts[request.request_id][-1][1], f"{request} goes on at {start}"
            if sample < 0:
                assert count == 0
                self.starts[request.request_id].append((start, start + num_new))
                continue
            ids = [self.last_token[row] if token_id == -1 else token_id for token_id in ids]
            needed = num_new - count
            wanted = [token_at(request, start + k) for k in range(needed)]
            assert ids[:needed] == wanted, "input is not the text"
            assert num_output - shift == start + needed - request.num_prompt_tokens
            accepted = 0
            while accepted < count and ids[needed + accepted] == true_token(request, start + needed + accepted):
                accepted += 1
            for k in range(accepted + 1):
                out[sample + k] = true_token(request, start + needed + k)
            self.last_token[row] = int(out[sample + accepted])
            self.rejected[row] += count - accepted
            self.starts[request.request_id].append((start, start + needed + accepted))
        assert words[layout.HEADER_NUM_DRAFTS] == num_drafts == plan.num_drafts
        return out


def token_at(request: Request, position: int) -> int:
    if position < request.num_prompt_tokens:
        return int(request.token_ids()[position])
    return true_token(request, position)


def make_scheduler(drafter: Drafter, count: int = 4, **options: object) -> Scheduler:
    defaults: dict[str, object] = {
        "num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128,
        "drafter": drafter, "num_speculative_tokens": count,
    }  # fmt: skip
    return Scheduler(**{**defaults, **options})  # type: ignore[arg-type]


def run(scheduler: Scheduler, requests: list[Request], depth: int = 1) -> Device:
    """Runs all requests to their end, with so many steps in flight."""
    device, in_flight = Device(scheduler.max_num_seqs), deque()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work():
        plan = scheduler.schedule() if len(in_flight) < depth else None
        scheduler.check_invariants()
        if plan is not None:
            in_flight.append((plan, device.run(plan)))
            if len(in_flight) < depth:
                continue
        assert in_flight, "nothing runs and nothing is in flight"
        changed = scheduler.update(*in_flight.popleft())
        scheduler.check_invariants()
        for request in changed:
            if not in_flight and request.status == "running":
                # What is computed is the text but its newest token: prompt and accepted tokens (INV-43).
                assert request.num_computed_tokens == request.num_tokens - 1 and request.num_in_flight == 0
    return device


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_random_acceptance_rolls_counts_back_before_they_are_used(depth: int, share: float) -> None:
    """INV-43, E14: every position is computed once, at its place, with the text as input, whatever is rejected."""
    rng = random.Random(depth * 10 + int(share * 4))
    drafter = Guesses(rng, share)
    scheduler = make_scheduler(drafter, num_blocks=24, max_in_flight=depth)
    requests = [
        Request("r" * (i + 1), [5] * rng.randint(1, 20), max_tokens=rng.randint(1, 40), ignore_eos=True)
        for i in range(12)
    ]
    device = run(scheduler, requests, depth)
    for request in requests:
        outputs = request.output_ids_from(0)
        assert outputs == [true_token(request, request.num_prompt_tokens + i) for i in range(len(outputs))]
        assert request.finish_reason == "length" and len(outputs) == request.max_tokens
    assert scheduler.num_draft_tokens_total > 0
    if share == 0:
        assert scheduler.num_accepted_tokens_total == 0 and any(device.rejected)
    else:
        assert scheduler.num_accepted_tokens_total > 0
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1


def test_what_is_published_is_the_text_and_no_rejected_draft() -> None:
    """INV-60: hashes name accepted tokens only, and a follower hits them all."""
    rng = random.Random(1)
    scheduler = make_scheduler(Guesses(rng, 0.5))
    first = Request("a", [5] * 6, max_tokens=40, ignore_eos=True)
    run(scheduler, [first])
    follower = Request("b", [*first.token_ids().tolist(), 7], max_tokens=1)
    scheduler.add(follower)
    scheduler.schedule()
    # Its last token needed no computing, so the block with it may be missing.
    assert follower.num_cached_tokens == (first.num_tokens - 1) // 4 * 4


def test_all_accepted_brings_several_tokens_a_step() -> None:
    drafter = Guesses(random.Random(2), 1.0)
    drafter.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    scheduler = make_scheduler(drafter, 4)
    request = Request("a", [5] * 3, max_tokens=21, ignore_eos=True)
    run(scheduler, [request])
    assert scheduler.last_step == 1 + 4  # the prompt, then five tokens a step
    assert (scheduler.num_drafts_total, scheduler.num_draft_tokens_total) == (4, 16)


def test_drafts_stop_at_the_last_token_that_may_come() -> None:
    drafter = Guesses(random.Random(3), 1.0)
    drafter.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    scheduler = make_scheduler(drafter, 8, max_model_len=16)
    short, long = (Request(name, [5] * 3, max_tokens=n, ignore_eos=True) for name, n in (("a", 5), ("bb", 99)))
    run(scheduler, [short, long])
    assert (short.num_tokens, long.num_tokens) == (8, 16)
    assert short.finish_reason == long.finish_reason == "length"


def test_a_stop_token_among_accepted_drafts_ends_the_text_there() -> None:
    request = Request("a", [5] * 3, max_tokens=30, stop_token_ids=[true_token(Request("x", [1], max_tokens=1), 6)])
    drafter = Guesses(random.Random(4), 1.0)
    drafter.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    scheduler = make_scheduler(drafter, 8)
    run(scheduler, [request])
    assert request.finish_reason == "stop" and request.num_tokens == 7
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1


def test_drafts_take_only_what_nobody_else_needs() -> None:
    """They come behind everybody's needs: the input budget's rest, and free blocks (J5)."""
    drafter = Guesses(random.Random(5), 1.0)
    drafter.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    scheduler = make_scheduler(drafter, 8, max_num_batched_tokens=10, max_num_scheduled_tokens=8)
    requests = [Request("a" * (i + 1), [5] * 4, max_tokens=20, ignore_eos=True) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    device = Device(8)
    plan = scheduler.schedule()
    assert plan is not None and plan.num_tokens == 8 and plan.num_drafts == 0
    scheduler.update(plan, device.run(plan))
    scheduler.add(Request("long", [5] * 30, max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None
    assert [plan.num_new(i) for i in range(3)] == [1 + 2, 1, 6], "drafts took a prompt's tokens"
    scheduler.update(plan, device.run(plan))


def test_without_free_blocks_a_row_drafts_into_its_own() -> None:
    drafter = Guesses(random.Random(6), 1.0)
    drafter.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    scheduler = make_scheduler(drafter, 8, num_blocks=3)
    request = Request("a", [5] * 5, max_tokens=3, ignore_eos=True)
    scheduler.add(request)
    device = Device(8)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, device.run(plan))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_drafts == 1  # max_tokens: one more comes with the step
    scheduler.update(plan, device.run(plan))
    request = Request("bb", [5] * 6, max_tokens=90, ignore_eos=True)
    scheduler = make_scheduler(drafter, 8, num_blocks=3)
    scheduler.add(request)
    while request.status != "finished":
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, device.run(plan))
        scheduler.check_invariants()
    assert request.num_tokens == 9  # what the pool holds, and one
    assert scheduler.num_preemptions_total == 0


@pytest.mark.parametrize(("num_free", "num_drafts"), [(2, 0), (5, 8), (6, 16)])
def test_drafts_leave_everybody_a_block_for_his_next_token(num_free: int, num_drafts: int) -> None:
    """What rejected drafts took stays taken, and others would be preempted for it."""
    drafter = Guesses(random.Random(13), 1.0)
    drafter.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    scheduler = make_scheduler(drafter, 8, num_blocks=1 + 2 + num_free)
    for i in range(2):
        scheduler.add(Request("a" * (i + 1), [5] * 3, max_tokens=20, ignore_eos=True))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, np.full(2, 9, np.int32))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_drafts == num_drafts


def test_nobody_drafts_in_a_large_batch_or_against_its_will() -> None:
    drafter = Guesses(random.Random(7), 1.0)
    scheduler = make_scheduler(drafter, 4, draft_batch_limit=2)
    run(scheduler, [Request("a" * (i + 1), [5] * 4, max_tokens=5, ignore_eos=True) for i in range(3)])
    assert not drafter.asked
    scheduler = make_scheduler(drafter, 4)
    run(scheduler, [Request("a", [5] * 4, max_tokens=5, ignore_eos=True, takes_drafts=False)])
    assert not drafter.asked


def test_a_request_whose_drafts_are_in_vain_gets_fewer_then_none_for_a_while() -> None:
    drafter = Guesses(random.Random(8), 0.0)
    drafter.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    scheduler = make_scheduler(drafter, 8)
    run(scheduler, [Request("a", [5] * 4, max_tokens=100, ignore_eos=True)])
    assert drafter.asked[:6] == [8, 4, 2, 1, 1, 1]
    assert scheduler.num_drafts_total < 12  # pauses of 8, 16, 32, ... tokens


def test_a_result_that_cannot_be_is_refused() -> None:
    drafter = Guesses(random.Random(9), 1.0)
    drafter.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    scheduler = make_scheduler(drafter, 2)
    scheduler.add(Request("a", [5] * 4, max_tokens=50, ignore_eos=True))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, np.array([9], np.int32))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_samples == 3 and len(plan.sample_requests) == 3
    for wrong in ([-1, -1, -1], [9, -1, 9], [9, -2, -1]):
        with pytest.raises(ValueError, match="got the token id"):
            scheduler.update(plan, np.array(wrong, np.int32))
    scheduler.update(plan, np.array([9, 9, -1], np.int32))


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": LIMIT + 1},
        {"drafter": None},
        {"draft_batch_limit": -1},
    ],
)
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens|draft_batch_limit"):
        make_scheduler(**{"drafter": Guesses(random.Random(0), 1.0), **options})  # type: ignore[arg-type]


# ---- n-grams ----


def brute_force(text: list[int], longest: int, shortest: int, most: int) -> list[int]:
    """What followed the last earlier occurrence of the longest n-gram at the end, going round."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:] and length <= len(text):
                following = text[start + length :]
                return [following[i % len(following)] for i in range(most)]
    return []


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (3, 2), (5, 3), (16, 1)])
def test_ngrams_are_found_as_by_brute_force(sizes: tuple[int, int]) -> None:
    rng = random.Random(sizes[0])
    num_found = 0
    for case in range(40):
        num_ids = rng.choice([2, 3, 8, 40])
        text = [rng.randrange(num_ids) for _ in range(rng.randint(1, 120))]
        drafts = _drafts(NgramDrafter(most_tokens=sizes[0], least_tokens=sizes[1]), text, 4, case)
        wanted = brute_force(text, *sizes, 4)
        assert drafts == wanted, (text, drafts, wanted)
        num_found += bool(wanted)
    assert num_found > 5


def _drafts(drafter: NgramDrafter, text: list[int], most: int, prompt_len: int) -> list[int]:
    """What is drafted behind a text of which the last part was generated."""
    prompt = text[: max(1, min(prompt_len, len(text) - 1))]
    scheduler = make_scheduler(drafter, most, max_num_batched_tokens=512, max_model_len=512, num_blocks=200)
    request = Request("a", prompt, max_tokens=300, ignore_eos=True)
    scheduler.add(request)
    while request.num_tokens < len(text):
        plan = scheduler.schedule()
        assert plan is not None
        ids = np.full(plan.num_samples, -1, np.int32)
        ids[0] = text[request.num_tokens]
        scheduler.update(plan, ids)
    if len(text) == len(prompt):
        return brute_force(text, drafter.longest, drafter.shortest, most)  # nothing was generated: no decode yet
    scheduler = make_scheduler(drafter, most, max_num_batched_tokens=512, max_model_len=512, num_blocks=200)
    again = Request("b", text[:-1], max_tokens=300, ignore_eos=True)
    scheduler.add(again)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, np.array([text[-1]], np.int32))
    plan = scheduler.schedule()
    assert plan is not None
    words = plan.buffer.tolist()
    return words[words[layout.HEADER_OFF_TOKENS] :][1 : plan.num_tokens]


def test_with_a_step_in_flight_drafts_continue_what_it_is_expected_to_bring() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    scheduler = make_scheduler(NgramDrafter(most_tokens=3), 3, max_in_flight=2)
    request = Request("a", text[:-1], max_tokens=50, ignore_eos=True)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, np.array([2], np.int32))
    first = scheduler.schedule()
    assert first is not None and request.drafts_in_flight() == [[3, 4, 5]]
    second = scheduler.schedule()
    assert second is not None and request.drafts_in_flight() == [[3, 4, 5], [7, 8, 9]]
    words = second.buffer.tolist()
    assert words[words[layout.HEADER_OFF_TOKENS] :][:4] == [-1, 7, 8, 9]
    scheduler.update(first, np.array([3, -1, -1, -1], np.int32))
    assert request.drafts_in_flight() == [[7, 8, 9]] and request.num_in_flight == 4
    assert request.num_computed_tokens == 12 + 4 - 1 + 0 and request.num_tokens == 12
    scheduler.update(second, np.array([4, -1, -1, -1], np.int32))
    assert request.num_tokens == 13 and request.num_computed_tokens == 12


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    rng = random.Random(11)
    prompt = [rng.randrange(20_000) for _ in range(9000)]
    scheduler = make_scheduler(
        NgramDrafter(most_tokens=3, least_tokens=2),
        2,
        max_num_batched_tokens=16384,
        max_model_len=16384,
        num_blocks=4000,
    )
    request = Request("a", [*prompt, prompt[0]], max_tokens=50, ignore_eos=True)
    scheduler.add(request)
    counts = []
    for token_id in (prompt[1], *prompt[2:8]):
        plan = scheduler.schedule()
        assert plan is not None
        counts.append(plan.num_drafts)
        ids = np.full(plan.num_samples, -1, np.int32)
        ids[0] = token_id
        scheduler.update(plan, ids)
    assert counts[:4] == [0, 0, 0, 2]


def test_long_prompts_are_indexed_one_after_the_other() -> None:
    """Else a step with many of them would keep the loop for as many milliseconds."""
    prompt = list(range(10_000, 14_000))
    scheduler = make_scheduler(
        NgramDrafter(most_tokens=3, least_tokens=2),
        1,
        max_num_batched_tokens=16384,
        max_model_len=8192,
        num_blocks=4096,
        enable_prefix_caching=False,
    )
    requests = [Request("r" * (i + 1), [*prompt, prompt[0]], max_tokens=50, ignore_eos=True) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    counts, served = [], set()
    for token_id in prompt[1:8]:
        plan = scheduler.schedule()
        assert plan is not None
        served |= {request for request in requests if request.drafts_in_flight()[0]}
        counts.append(len(served))
        ids = np.full(plan.num_samples, -1, np.int32)
        ids[[plan.sample_requests.index(request) for request in requests]] = token_id
        scheduler.update(plan, ids)
    # 8000 n-grams each, and 8192 in a step.
    assert counts[:6] == [0, 1, 2, 3, 4, 4]


def test_a_table_that_becomes_too_small_is_filled_anew() -> None:
    """An answer much longer than its prompt: what is drafted stays what is there."""
    rng = random.Random(12)
    scheduler = make_scheduler(
        NgramDrafter(most_tokens=4), 3, max_num_batched_tokens=16, max_model_len=4096, num_blocks=1100
    )
    request = Request("a", [1, 2, 3], max_tokens=3000, ignore_eos=True)
    scheduler.add(request)
    num_drafted = 0
    while request.status != "finished":
        text = request.token_ids().tolist()
        plan = scheduler.schedule()
        assert plan is not None
        if plan.num_drafts:
            words = plan.buffer.tolist()
            drafts = words[words[layout.HEADER_OFF_TOKENS] :][1 : plan.num_tokens]
            assert drafts == brute_force(text, 4, 1, len(drafts))
            num_drafted += 1
        ids = np.full(plan.num_samples, -1, np.int32)
        ids[0] = rng.randrange(60)
        scheduler.update(plan, ids)
    assert num_drafted > 20


@pytest.mark.parametrize("sizes", [(0, 0), (17, 1), (2, 3)])
def test_lengths_of_ngrams_that_cannot_be(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="most_tokens"):
        NgramDrafter(most_tokens=sizes[0], least_tokens=sizes[1])
