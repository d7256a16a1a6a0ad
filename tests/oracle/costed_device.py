"""A device that takes as long as a real one would, under a virtual clock; it computes nothing.

The cost of a step is that of one H200 and the shape of Llama-3.1-8B in 16 bit: the longer of reading the
weights and multiplying (a bend no linear model has), plus reading the KV of decodes, plus attention of prompt
chunks, plus launching, times noise.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.fastcore.step_buffer import StepPlan


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    weights: float = 4.1e-3
    per_token: float = 20.3e-6
    per_context_token: float = 32e-9
    per_pair: float = 0.89e-9
    launch: float = 0.3e-3
    noise: float = 0.02
    """Standard deviation of the logarithm."""

    def of(self, plan: StepPlan, rng: random.Random) -> float:
        """How long a step takes."""
        context = pairs = 0.0
        for i in range(plan.num_rows):
            computed, new = plan.num_computed(i), plan.num_new(i)
            if new == 1:
                context += computed + 1
            else:
                pairs += new * (computed + (new + 1) / 2)
        products = max(self.weights, plan.num_tokens * self.per_token)
        attention = context * self.per_context_token + pairs * self.per_pair
        return (self.launch + products + attention) * rng.lognormvariate(0.0, self.noise)


@dataclass
class CostedWorld:
    """A scheduler and a device that runs its steps in order, one step ahead or not."""

    scheduler: Scheduler
    costs: Costs = field(default_factory=Costs)
    seed: int = 0
    now_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of one request, all requests."""
    first_s: dict[Request, float] = field(default_factory=dict)
    """When a request got its first token."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.arrivals: deque[tuple[float, Request]] = deque()
        self.in_flight: deque[tuple[StepPlan, float]] = deque()
        self.last_token_s: dict[Request, float] = {}
        self.settled_s = 0.0
        self.free_s = 0.0
        """When the device has done all that was launched."""

    def run(self, until_s: float = float("inf")) -> None:
        """Until all is done, or no step ends before `until_s`."""
        while self.now_s < until_s:
            self.arrive()
            plan = None
            if len(self.in_flight) < self.scheduler.max_in_flight:
                plan = self.scheduler.schedule()
            if plan is not None:
                self.free_s = max(self.free_s, self.now_s) + self.costs.of(plan, self.rng)
                self.in_flight.append((plan, self.free_s))
            elif self.in_flight:
                self.settle()
            elif self.arrivals:
                self.now_s = self.settled_s = max(self.now_s, self.arrivals[0][0])  # idle
            else:
                return

    def arrive(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now_s:
            self.scheduler.add(self.arrivals.popleft()[1])

    def settle(self) -> None:
        plan, done_s = self.in_flight.popleft()
        self.now_s = done_s
        self.scheduler.observe_step(plan, done_s - self.settled_s)
        self.settled_s = done_s
        for request in self.scheduler.update(plan, np.full(plan.num_samples, 7, dtype=np.int32)):
            if request in self.last_token_s:
                self.gaps_s.append(done_s - self.last_token_s[request])
            else:
                self.first_s[request] = done_s
            self.last_token_s[request] = done_s
            if request.finish_reason is not None:
                del self.last_token_s[request]

    def gap_s(self, share: float) -> float:
        """A percentile of the gaps."""
        ordered = sorted(self.gaps_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
