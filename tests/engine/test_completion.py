"""When the end of a step is asked for instead of awaited, on a clock and a device of our own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from aioengine import completion
from aioengine.completion import CompletionWatch
from aioengine.fastcore import native

MS = 1e-3


class Device:
    """Steps that end when told to; every question takes `turn_s` of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, poll_us: int, turn_s: float = 0.01 * MS) -> None:
        class Silent(native.Completion):
            def enqueue(self, stream: int) -> None:
                pass

        monkeypatch.setattr(completion, "native", SimpleNamespace(Completion=Silent))
        self.now_s, self.turn_s = 100.0, turn_s
        self.num_done = self.num_told = self.num_launched = self.num_asked = 0
        self.done_at_s: list[float] = []
        self.watch = CompletionWatch(self.tell, poll_us, clock=lambda: self.now_s)
        self.watch.attach(asyncio.get_running_loop())

    def tell(self) -> None:
        self.num_told += 1

    def launch(self, took_s: float, kind: int = 1) -> None:
        """A step that ends `took_s` after the one before it, or after now."""
        before = self.done_at_s[-1] if self.done_at_s else 0.0
        end_s = max(before, self.now_s) + took_s
        self.done_at_s.append(end_s)

        def is_done() -> bool:
            self.num_asked += 1
            self.now_s += self.turn_s
            return self.now_s >= end_s

        self.watch.launched(0, kind, is_done)

    async def turns(self, count: int = 3) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def signal(self, count: int = 1) -> None:
        for _ in range(count):
            self.watch._completion.signal()
        await asyncio.sleep(0.005)

    async def learn(self, took_s: float, kind: int = 1) -> None:
        """One step by its signal, so that the time of its kind is known."""
        self.launch(took_s, kind)
        await self.turns()
        self.now_s = self.done_at_s[-1]
        await self.signal()
        assert self.num_asked == 0


async def test_a_step_that_is_due_soon_is_found_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, poll_us=300)
    await device.learn(0.2 * MS)
    device.launch(0.2 * MS)
    await device.turns(40)
    assert device.num_told == 2 and 15 <= device.num_asked <= 25
    assert device.watch.polled_s == pytest.approx(0.2 * MS, rel=0.2)
    await device.signal()  # of the step that was found
    assert device.num_told == 2
    device.watch.close()


@pytest.mark.parametrize(("poll_us", "took_ms"), [(0, 0.2), (300, 5.0), (300, 0.5)])
async def test_without_polling_or_with_time_to_sleep_only_the_signal_tells(
    monkeypatch: pytest.MonkeyPatch, poll_us: int, took_ms: float
) -> None:
    device = Device(monkeypatch, poll_us)
    await device.learn(took_ms * MS)
    device.launch(took_ms * MS)
    await device.turns(40)
    assert device.num_asked == 0 and device.num_told == 1 and device.watch.polled_s == 0
    await device.signal()
    assert device.num_told == 2
    device.watch.close()


async def test_the_next_step_is_asked_for_when_the_one_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, poll_us=250)
    await device.learn(0.2 * MS)
    for _ in range(3):
        device.launch(0.2 * MS)
    await device.turns(100)
    assert device.num_told == 4
    await device.signal(3)
    assert device.num_told == 4
    device.launch(9 * MS)
    await device.turns(100)
    await device.signal()
    assert device.num_told == 5  # no signal was counted twice or lost
    device.watch.close()


async def test_an_overdue_step_is_left_to_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, poll_us=100)
    await device.learn(0.05 * MS)
    device.launch(50 * MS)
    await device.turns(100)
    assert device.num_told == 1 and device.num_asked <= 17
    assert device.watch.polled_s <= 0.17 * MS
    await device.signal()
    assert device.num_told == 2
    device.watch.close()


async def test_a_signal_ends_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, poll_us=300, turn_s=0.0)
    await device.learn(0.2 * MS)
    device.launch(0.2 * MS)
    await device.signal()
    asked = device.num_asked
    await device.turns(10)
    assert device.num_told == 2 and device.num_asked == asked > 0
    device.watch.close()


async def test_kinds_are_estimated_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, poll_us=300)
    await device.learn(0.2 * MS, kind=1)
    device.launch(0.2 * MS, kind=2)  # nothing is known of it
    await device.turns(10)
    assert device.num_asked == 0
    device.watch.close()


async def test_a_failed_device_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, poll_us=300)
    await device.learn(0.2 * MS)
    device.launch(0.2 * MS)

    def fail() -> bool:
        device.num_asked += 1
        raise RuntimeError("an illegal memory access")

    device.watch.forget()
    device.watch.launched(0, 1, fail)
    await device.turns(10)
    assert device.num_asked == 1 and device.num_told == 1
    device.watch.close()
    device.watch.close()
