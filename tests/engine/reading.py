"""How the engine's tests read answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aioengine.engine import AsyncEngine
from aioengine.outputs import RequestStream
from aioengine.types import PositionLogprobs, Prompt, RequestOutput, SamplingParams, Usage

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

PRINTABLE = tuple(2 + byte - 33 for byte in range(ord("a"), ord("z") + 1))
"""Token ids of the letters a to z: the tokenizer's alphabet begins with '!'."""

LETTERS = SamplingParams(temperature=1.0, seed=3, max_tokens=40, allowed_token_ids=PRINTABLE)
"""Random lowercase letters, one token each."""


@dataclass
class Answer:
    """One choice, read to its end."""

    outputs: list[RequestOutput]

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def token_ids(self) -> list[int]:
        return self.last.token_ids

    @property
    def text(self) -> str:
        return self.last.text

    @property
    def prompt_logprobs(self) -> list[PositionLogprobs | None]:
        (found,) = [o.prompt_logprobs for o in self.outputs if o.prompt_logprobs is not None]
        return found

    @property
    def usage(self) -> Usage:
        assert self.last.usage is not None
        return self.last.usage


async def read(stream: RequestStream) -> list[Answer]:
    """All choices; deltas must add up, and only the last output of a choice has a finish reason."""
    choices: dict[int, list[RequestOutput]] = {}
    async for output in stream:
        choices.setdefault(output.index, []).append(output)
    assert sorted(choices) == list(range(len(choices)))
    for outputs in choices.values():
        last = outputs[-1]
        assert last.text == "".join(o.delta for o in outputs)
        assert last.token_ids == [i for o in outputs for i in o.delta_token_ids]
        assert [o.is_finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return [Answer(choices[index]) for index in sorted(choices)]


async def ask(engine: AsyncEngine, prompt: Prompt, params: SamplingParams = GREEDY, **options: object) -> Answer:
    """One request with one choice."""
    (answer,) = await read(await engine.submit(prompt, params, **options))
    return answer


async def ask_all(engine: AsyncEngine, prompts: list[Prompt], params: SamplingParams = GREEDY) -> list[Answer]:
    """Many requests at once, in order."""
    return list(await asyncio.gather(*(ask(engine, prompt, params) for prompt in prompts)))
