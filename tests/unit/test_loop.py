"""How the step loop shares the event loop with other tasks."""

from __future__ import annotations

import asyncio

from aioengine.loop import MAX_HELD_STEPS, StepLoop


class Ready:
    """A scheduler with so many steps, and a device that has done each when it is launched."""

    def __init__(self, num_steps: int) -> None:
        self.num_left = num_steps
        self.step_seconds: list[float] = []

    def has_work(self) -> bool:
        return self.num_left > 0

    def schedule(self) -> object | None:
        if self.num_left == 0:
            return None
        self.num_left -= 1
        return object()

    def observe_step(self, plan: object, seconds: float) -> None:
        self.step_seconds.append(seconds)

    def launch(self, plan: object) -> asyncio.Future[object]:
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        done.set_result(plan)
        return done


async def test_a_device_that_is_always_ready_does_not_starve_the_others() -> None:
    ready = Ready(1000)
    settled: list[object] = []
    steps = StepLoop(ready, ready, lambda plan, result: settled.append(plan), clock=lambda: 0.0)  # type: ignore[arg-type]
    running = asyncio.create_task(steps.run())
    most, before = 0, 0
    while len(settled) < 1000:
        await asyncio.sleep(0)
        most, before = max(most, len(settled) - before), len(settled)
    assert 1 < most <= MAX_HELD_STEPS + 1
    steps.stop()
    await running


async def test_no_turn_is_put_off_for_long() -> None:
    ready = Ready(50)
    settled: list[object] = []
    now_s = iter(range(10_000))
    steps = StepLoop(ready, ready, lambda plan, result: settled.append(plan), clock=lambda: float(next(now_s)))  # type: ignore[arg-type]
    running = asyncio.create_task(steps.run())
    most, before = 0, 0
    while len(settled) < 50:
        await asyncio.sleep(0)
        most, before = max(most, len(settled) - before), len(settled)
    assert most == 1  # every step took a second
    steps.stop()
    await running


async def test_the_scheduler_learns_the_time_from_settlement_to_settlement() -> None:
    """With two steps in flight the second one is launched early: its own time begins when the first is over."""

    class Late(Ready):
        def launch(self, plan: object) -> asyncio.Future[object]:
            done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            launched.append(done)
            return done

    launched: list[asyncio.Future[object]] = []
    now_s = [100.0]
    device = Late(3)
    steps = StepLoop(device, device, lambda plan, result: None, max_in_flight=2, clock=lambda: now_s[0])  # type: ignore[arg-type]
    now_s[0] = 200.0  # what was idle before does not count
    running = asyncio.create_task(steps.run())
    steps.last_progress_s = 200.0
    for i, seconds in enumerate((5.0, 7.0, 11.0)):
        while len(launched) <= i:  # noqa: ASYNC110
            await asyncio.sleep(0)
        now_s[0] += seconds
        launched[i].set_result(None)
        while len(device.step_seconds) <= i:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert device.step_seconds == [5.0, 7.0, 11.0]
    steps.stop()
    await running
