"""How the step loop shares the event loop with other tasks."""

from __future__ import annotations

import asyncio

from aioengine.loop import MAX_HELD_STEPS, StepLoop


class Ready:
    """A scheduler with so many steps, and a device that has done each when it is launched."""

    def __init__(self, num_steps: int) -> None:
        self.num_left = num_steps

    def has_work(self) -> bool:
        return self.num_left > 0

    def schedule(self) -> object | None:
        if self.num_left == 0:
            return None
        self.num_left -= 1
        return object()

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
