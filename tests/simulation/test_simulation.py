"""A slice of the simulation, and that it sees, replays and shrinks what it should."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest

from aioengine.loop import StepLoop
from tests.simulation import device, mutations
from tests.simulation.__main__ import main
from tests.simulation.batch import run_batch
from tests.simulation.faults import FAULTS
from tests.simulation.mutations import HUNG, MISSED, ROOT, SEEN, verdict
from tests.simulation.script import (
    OPTIONS,
    Abort,
    Add,
    Cancel,
    Close,
    DeviceFails,
    Event,
    Govern,
    Reset,
    Script,
    draw_script,
)
from tests.simulation.shrink import shrink
from tests.simulation.world import Violation, run

PLAIN = {name: option.values[0] for name, option in OPTIONS.items()}


def counts_of(*events: Event, **options: object) -> dict[str, int]:
    return dict(run(Script({**PLAIN, **options}, events)).counts)


@pytest.fixture
def sometimes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that gives another token for a few contexts."""
    right: Callable[[int, int], int] = device.sampled
    monkeypatch.setattr(device, "sampled", lambda value, seed: right(value, seed) ^ (value % 29 == 0))


@pytest.mark.slow
def test_no_seed_breaks_a_rule() -> None:
    batch = run_batch(range(300), 60)
    assert batch.failures == []
    assert batch.num_steps > 10_000
    ends = ("stop", "length", "abort", "failed", "left", "refused")
    hits = ("hit tokens", "hit tokens of several groups", "copies")
    loads = ("loaded tokens", "lost blocks", "preempted for lost blocks")
    drafts = ("accepted drafts", "rejected drafts")
    for kind in (*ends, "preempted", "made way", *hits, *loads, *drafts, "spoiled", "with media"):
        assert batch.counts[kind] > 20, f"the load no longer reaches {kind}"


@pytest.mark.parametrize("line", ["--seeds 0", "--seeds -3", "--steps 0", "--jobs 0", "--first-seed -1"])
def test_a_run_of_nothing_does_not_pass(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2


def test_a_seed_replays_exactly() -> None:
    first, second = (run(draw_script(12, 60)) for _ in range(2))
    assert first == second and first.num_steps > 10
    assert run(draw_script(13, 60)).digest != first.digest


def test_every_kind_of_end_is_told_apart() -> None:
    assert counts_of(Add(0.0, "a", 5, 6, ignore_eos=True))["length"] == 1
    assert counts_of(Add(0.0, "a", 5, 40, stop_ids=tuple(range(1, 64))))["stop"] == 1
    assert counts_of(Add(0.0, "a", 5, 40, ignore_eos=True), Abort(3.5, "a"))["abort"] == 1
    assert counts_of(Add(0.0, "a", 5, 40, ignore_eos=True, leaves_after=2))["left"] == 1
    assert counts_of(Add(0.0, "a", 5, 40, ignore_eos=True, fails_at=3))["failed"] == 1
    assert counts_of(Add(0.0, "a", 5, 40, ignore_eos=True), Close(3.5))["failed"] == 1
    assert counts_of(Add(0.0, "a", 5, 40, ignore_eos=True), DeviceFails(3.5))["failed"] == 1
    assert counts_of(Add(0.0, "a", 48, 1))["refused"] == 1
    assert "length" not in counts_of(Add(0.0, "a", 5, 40, ignore_eos=True), Cancel(0.0, "a"))


def test_an_urgent_request_gets_the_only_token_of_a_paced_step() -> None:
    """Its victim had it; without it the step would be empty and nobody would wake the loop again."""
    limits = {"max_num_seqs": 1, "max_num_scheduled_tokens": 1, "target_itl_s": 3.0, "policy": "priority"}
    counts = counts_of(
        Add(0.0, "a", 1, 4, ignore_eos=True), Add(2.9, "b", 1, 1, priority=-1, ignore_eos=True), **limits
    )
    assert counts["length"] == 2 and counts["made way"] == 1


def test_a_prefix_is_hit_until_it_is_reset() -> None:
    events = (Add(0.0, "a", 20, 1), Add(9.0, "b", 20, 1, shared=20, follows="a"))
    assert counts_of(*events)["hit tokens"] == 16
    assert counts_of(events[0], Reset(5.0), events[1])["hit tokens"] == 0
    assert counts_of(events[0], Add(9.0, "b", 20, 1, shared=20, follows="a", salt="other"))["hit tokens"] == 0
    assert counts_of(events[0], Govern(5.0, "a", "evict", 0.5), events[1])["hit tokens"] == 8
    assert counts_of(events[0], Govern(5.0, "a", "evict", 0.0), events[1])["hit tokens"] == 0
    other = Add(1.0, "o", 20, 1, salt="other")
    kept = counts_of(events[0], other, Govern(5.0, "o", "quarantine", 0.0), replace(other, at=8.0, name="p"), events[1])
    assert kept["hit tokens"] == 16 and kept["quarantine salt"] == 1


def test_pictures_part_prompts_of_equal_tokens_from_their_block_on() -> None:
    """In blocks of 4. With another picture, or the same one elsewhere, answers differ too, or `run` would say so."""
    cat = ((6, 3, "cat"),)
    first, again = Add(0.0, "a", 20, 9, stem=1, shared=20, media=cat), Add(9.0, "b", 20, 9, stem=1, shared=20)
    for media, hits in ((cat, 16), ((), 4), (((6, 3, "dog"),), 4), (((5, 3, "cat"),), 4), ((*cat, (13, 1, "x")), 12)):
        assert counts_of(first, replace(again, media=media))["hit tokens"] == hits
    evicted = Govern(8.0, "a", "evict", 0.4)
    assert counts_of(first, replace(again, name="o", at=4.0), evicted, again)["hit tokens"] == 4 + 16


def test_a_sibling_copies_no_block_that_another_request_computes_in_the_same_step() -> None:
    """A10: its source came back in that step and hit the block; copies are made before the step's tokens."""
    options = {"block_size": 2, "num_blocks": 9, "max_num_seqs": 4, "max_model_len": 48, "max_num_batched_tokens": 256}
    events = (
        Add(0.0, "r105", 3, 3),
        Add(0.0, "r106", 5, 3),
        Add(0.0, "r109", 4, 3, stem=1, shared=4),
        Add(0.0, "r110", 4, 2, stem=1, shared=4, n=2),
    )
    counts = run(Script({**PLAIN, **options, "max_in_flight": 1}, events, step_seconds=(1.0,), seed=6003547)).counts
    assert counts["preempted"] == 2


def test_what_the_pool_has_forgotten_is_loaded_and_what_is_lost_is_computed() -> None:
    events = (Add(0.0, "a", 20, 1), Reset(5.0), Add(9.0, "b", 20, 3, shared=20, follows="a", ignore_eos=True))
    counts = counts_of(*events, kv_connector=(1.0, 0.0))
    assert (counts["loaded tokens"], counts["lost blocks"], counts["hit tokens"]) == (16, 0, 0)
    counts = counts_of(*events, kv_connector=(1.0, 1.0))
    assert (counts["lost blocks"], counts["preempted for lost blocks"], counts["length"]) == (4, 1, 2)
    assert counts_of(*events, kv_connector=(0.0, 0.0))["loaded tokens"] == 0


def test_a_forced_reset_preempts_what_runs() -> None:
    counts = counts_of(Add(0.0, "a", 5, 40, ignore_eos=True), Reset(3.5), Reset(5.5, force=True))
    assert (counts["forced resets"], counts["preempted"], counts["length"]) == (1, 1, 1)


def test_a_wrong_token_is_seen_and_shrunk_to_one_request(sometimes_wrong: None) -> None:
    seed = next(seed for seed in range(50) if fails(draw_script(seed, 60)))
    script, violation = shrink(draw_script(seed, 60))
    assert len(script.events) == 1 and "got" in str(violation)
    with pytest.raises(Violation) as again:
        exec(script.code(), {})
    assert str(again.value) == str(violation)


def test_a_lost_wake_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLoop, "wake", lambda self: None)
    with pytest.raises(Violation, match="Stalled"):
        counts_of(Add(5.0, "a", 5, 6))


def test_the_command_says_how_to_replay(sometimes_wrong: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "8", "--steps", "60", "--jobs", "1", "--no-shrink"]) == 1
    assert "--seeds 1 --steps 60" in capsys.readouterr().out


def test_the_command_is_content_with_sound_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--steps", "20", "--jobs", "1"]) == 0
    assert "violations" in capsys.readouterr().out


def fails(script: Script) -> bool:
    try:
        run(script)
    except Violation:
        return True
    return False


def test_every_fault_that_is_put_in_on_purpose_still_finds_its_line() -> None:
    """The run that compiles them takes too long for every day; a line that has changed is seen here."""
    lost = [fault.what for fault in FAULTS if (ROOT / fault.path).read_text(encoding="utf-8").count(fault.right) != 1]
    assert not lost


class FakeProcess:
    """Prints at its end, after so many waits in vain."""

    def __init__(self, num_waits: int, printed: str, returncode: int = 0) -> None:
        self.num_waits, self.printed, self.returncode = num_waits, printed, returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.num_waits -= 1
        if self.num_waits >= 0:
            raise subprocess.TimeoutExpired("seeds", timeout)
        return self.printed, "Error: what"


@pytest.mark.parametrize(
    ("process", "steps", "kind"),
    [
        (FakeProcess(0, "seed 3: a rule"), [], SEEN),
        (FakeProcess(3, "seed 3: a rule"), [5, 6, 7], SEEN),
        (FakeProcess(0, "", -11), [], SEEN),
        (FakeProcess(9, "seed 3: a rule"), [5, 6, 6], HUNG),
        (FakeProcess(9, "seed 3: a rule"), [0, 0], HUNG),
        (FakeProcess(0, "None"), [], MISSED),
        (FakeProcess(0, "", 1), [], MISSED),
    ],
)
def test_a_fault_is_seen_by_a_broken_rule_and_hangs_where_no_step_ends(
    process: FakeProcess, steps: list[int], kind: str
) -> None:
    assert verdict(process, iter(steps).__next__)[0] == kind  # type: ignore[arg-type]


def test_a_fault_that_keeps_making_steps_until_its_time_is_over_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "LIMIT_S", -1.0)
    process = FakeProcess(9, "seed 3: a rule")
    assert verdict(process, itertools.count().__next__)[0] == MISSED  # type: ignore[arg-type]


def test_a_paced_step_of_fewer_tokens_than_decodes_takes_none_away() -> None:
    """What is left for prompts was less than nothing then, and a request that needed no token got that much."""
    limits = {"max_in_flight": 4, "max_num_scheduled_tokens": 1, "target_itl_s": 0.5, "drafter": (16, 0.7, 0)}
    events = (
        Add(336.591, "r60", 1, 18),
        Add(336.591, "r61", 2, 8),
        Reset(353.702, force=True),
        Add(357.968, "r65bh1", 1, 4),
        Add(358.968, "r65bh2", 1, 3),
    )
    assert run(Script({**PLAIN, **limits}, events, seed=20000384)).counts["length"] == 4
