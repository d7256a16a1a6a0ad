"""Several tokens of one step on their way to the reader: text, ends, log-probabilities and what is counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from aioengine.errors import EngineClosed
from aioengine.fastcore.drafts import Drafter
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.intake import PreparedRequest
from aioengine.live import LiveRequests
from aioengine.logprobs import RowLogprobs
from aioengine.metrics import EngineMetrics, EngineStats
from aioengine.outputs import RequestStream
from aioengine.runner import StepResult
from aioengine.sampling_plan import compile_sampling
from aioengine.types import RequestOutput, SamplingParams
from tests.simulation.truth import VOCAB_SIZE, OneCharTokens

EOS = 0
MOST = 4


class Known(Drafter):
    """Drafts what the text is going to be."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[int]] = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        start = request.num_tokens + request.num_in_flight - request.num_prompt_tokens
        return self.outputs[request.request_id.split("/")[0]][start : start + most]


class Letters(OneCharTokens):
    """With the bytes of single tokens, for log-probabilities."""

    def token_bytes(self, token_id: int) -> bytes:
        return text_of([token_id]).encode()


def no_stats() -> EngineStats:
    raise AssertionError("nobody scrapes here")


class Steps:
    """The live requests of a scheduler, and a device that says what it is told to; a step takes a second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.drafter = Known()
        self.scheduler = Scheduler(
            num_blocks=64,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=64,
            drafter=self.drafter,
            num_speculative_tokens=MOST,
        )
        self.metrics = EngineMetrics(no_stats, "model")
        self.live = LiveRequests(
            self.scheduler,
            self.metrics,
            Letters(),  # type: ignore[arg-type]
            (EOS,),
            take_back=lambda _: None,
            clock=lambda: self.now_s,
        )

    def add(self, label: str, output: list[int], params: SamplingParams, max_tokens: int = 30) -> RequestStream:
        prompt = [5, 6, 7]
        plan = compile_sampling(params, None, VOCAB_SIZE, (EOS,), 0, 0)
        prepared = PreparedRequest(
            prompt_token_ids=prompt,
            packed_token_ids=np.array(prompt, np.int32),
            params=params,
            max_tokens=max_tokens,
            plans=(plan,),
        )
        self.drafter.outputs[label] = output
        return self.live.add(prepared, label, priority=0, cache_salt=None, arrived_s=self.now_s)

    def run(self, failures: dict[int, str] | None = None, **accepted: int) -> list[int]:
        """A step in which as many drafts as told are accepted, or all; returns how many tokens each row brought."""
        plan = self.scheduler.schedule()
        assert plan is not None
        token_ids, logprobs, counts = np.full(plan.num_samples, -1, np.int32), {}, []
        for request in dict.fromkeys(plan.sample_requests):
            label = request.request_id.split("/")[0]
            first = plan.sample_requests.index(request)
            num_drafts = plan.sample_requests.count(request) - 1
            counts.append(1 + min(num_drafts, accepted.get(label, num_drafts)))
            num_known = request.num_tokens - request.num_prompt_tokens
            for i in range(counts[-1]):
                token_ids[first + i] = token_id = self.drafter.outputs[label][num_known + i]
                if request.sampling.params.logprobs is not None:  # type: ignore[attr-defined]
                    empty = np.empty(0, np.int32)
                    logprobs[first + i] = RowLogprobs(token_id, -float(token_id), 1, empty, empty.view(np.float32))
        self.now_s += 1.0
        self.live.settle(plan, StepResult(token_ids, logprobs or None, failures=failures))
        self.scheduler.check_invariants()
        return counts


@pytest.fixture
async def steps() -> Steps:
    return Steps()


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(48 + token_id) for token_id in token_ids)


async def drain(stream: RequestStream) -> list[RequestOutput]:
    return [out async for out in stream]


def scored(out: RequestOutput) -> list[int]:
    assert out.delta_logprobs is not None
    assert all(p.chosen.logprob == -p.chosen.token_id for p in out.delta_logprobs)
    return [p.chosen.token_id for p in out.delta_logprobs]


async def test_tokens_of_a_step_come_as_one_delta(steps: Steps) -> None:
    output = list(range(10, 40))
    stream = steps.add("a", output, SamplingParams(logprobs=0), max_tokens=8)
    assert [steps.run(), steps.run(a=2), steps.run()] == [[1], [3], [3]]
    first = await anext(stream)
    assert first.delta_token_ids == output[:7] == scored(first) and first.text == text_of(output[:7])
    assert steps.run() == [1], "as many as there may be"
    (last,) = await drain(stream)
    assert (last.delta_token_ids, scored(last), last.finish_reason) == ([17], [17], "length")
    assert last.usage is not None and last.usage.completion_tokens == 8
    assert not len(steps.live)


async def test_rows_of_several_requests_stay_apart(steps: Steps) -> None:
    params = [SamplingParams(logprobs=0), SamplingParams(), SamplingParams(logprobs=0)]
    outputs = [list(range(10 * i, 10 * i + 10)) for i in (1, 2, 3)]
    streams = [steps.add(label, outputs[i], params[i]) for i, label in enumerate("abc")]
    steps.run()
    for stream in streams:
        await anext(stream)
    assert steps.run(a=2, b=0, c=1) == [3, 1, 2]
    a, b, c = [await anext(stream) for stream in streams]
    assert a.delta_token_ids == [11, 12, 13] == scored(a)
    assert b.delta_token_ids == [21] and b.delta_logprobs is None
    assert c.delta_token_ids == [31, 32] == scored(c)
    steps.live.fail_all(EngineClosed("over"))


@pytest.mark.parametrize(
    ("params", "kept", "text", "stop_reason"),
    [
        (SamplingParams(logprobs=0, stop_token_ids=[12]), [10, 11, 12], [10, 11], 12),
        (
            SamplingParams(logprobs=0, stop_token_ids=[12], include_stop_str_in_output=True),
            [10, 11, 12],
            [10, 11, 12],
            12,
        ),
        (SamplingParams(logprobs=0, stop=text_of([12, 13])), [10, 11, 12, 13], [10, 11], text_of([12, 13])),
        (SamplingParams(logprobs=0, stop=text_of([10, 11])), [10, 11], [], text_of([10, 11])),  # over two steps
        (
            SamplingParams(logprobs=0, stop=text_of([11, 12]), stop_token_ids=[13]),
            [10, 11, 12],
            [10],
            text_of([11, 12]),
        ),
        (SamplingParams(logprobs=0), [10, 11, 12, 13, EOS], [10, 11, 12, 13], None),
    ],
    ids=["token", "token with text", "text", "text over two steps", "text before a token", "end token"],
)
async def test_an_end_among_the_tokens_of_a_step_drops_those_behind_it(
    steps: Steps, params: SamplingParams, kept: list[int], text: list[int], stop_reason: int | str | None
) -> None:
    """As if they had come one by one."""
    output = [10, 11, 12, 13, EOS, 15, 16]
    stream = steps.add("a", output, params)
    assert [steps.run(), steps.run()] == [[1], [1 + MOST]]
    (last,) = await drain(stream)
    assert last.token_ids == kept == scored(last)
    assert (last.text, last.finish_reason, last.stop_reason) == (text_of(text), "stop", stop_reason)
    assert last.usage is not None and last.usage.completion_tokens == len(kept)
    assert steps.metrics.generation_tokens == len(kept)
    assert steps.metrics.inter_token_latency.count == len(kept) - 1
    assert steps.scheduler.num_running == 0 and not len(steps.live)
    assert steps.scheduler.num_free_blocks == steps.scheduler.num_blocks - 1


async def test_gaps_between_tokens_add_up_to_the_time_they_took(steps: Steps) -> None:
    """Each token but a choice's first has its gap: those that come with another one have none."""
    for label in "abc":
        steps.add(label, list(range(10, 40)), SamplingParams(), max_tokens=12)
        steps.run()
    while len(steps.live):
        steps.run(b=0, c=1)
    latency = steps.metrics.inter_token_latency
    assert latency.count == 3 * 11 == steps.metrics.generation_tokens - 3
    assert latency.counts[0] > 10 and sum(latency.counts[1:]) + latency.counts[0] == latency.count
    per_output = steps.metrics.time_per_output_token
    assert latency.total == pytest.approx(per_output.total * 11) and per_output.count == 3


async def test_a_row_that_fails_tells_none_of_its_tokens(steps: Steps) -> None:
    broken = steps.add("a", list(range(10, 40)), SamplingParams(logprobs=0))
    other = steps.add("b", list(range(10, 40)), SamplingParams(logprobs=0))
    steps.run()
    steps.run({0: "it is broken"})
    assert (await anext(broken)).delta_token_ids == [10]
    with pytest.raises(Exception, match="it is broken"):
        await anext(broken)
    out = await anext(other)
    assert out.delta_token_ids == list(range(10, 16)) == scored(out)
    steps.live.fail_all(EngineClosed("over"))
