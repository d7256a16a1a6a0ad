"""Requests that cannot be served: each is refused by name, costs nothing, and the engine goes on serving."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from aioengine.engine import AsyncEngine
from aioengine.errors import ContextLengthExceeded, InvalidRequest
from aioengine.types import SamplingParams
from tests.engine.conftest import MAX_LEN, VOCAB_SIZE, MakeEngine, assert_nothing_held
from tests.engine.reading import ask


@pytest_asyncio.fixture
async def engine(make_engine: MakeEngine) -> AsyncIterator[AsyncEngine]:
    async with make_engine() as engine:
        yield engine


def params(**fields: object) -> Callable[[], SamplingParams]:
    """Made inside the test: the constructor checks as well."""
    return lambda: SamplingParams(**{"max_tokens": 4, **fields})


GOOD = params()
LAST_ID = VOCAB_SIZE - 1

CASES: dict[str, tuple[object, Callable[[], object], dict[str, object], str, str]] = {
    # name: prompt, parameters, options, the field to blame, words of the message
    "empty text": ("", GOOD, {}, "prompt", "no tokens"),
    "no token ids": ([], GOOD, {}, "prompt", "no tokens"),
    "no messages": ((), GOOD, {}, "prompt", "no tokens"),
    "bytes": (b"abc", GOOD, {}, "prompt", "bytes"),
    "no prompt": (None, GOOD, {}, "prompt", "NoneType"),
    "a number": (7, GOOD, {}, "prompt", "int"),
    "id above the vocabulary": ([5, VOCAB_SIZE], GOOD, {}, "prompt", rf"prompt\[1\]={VOCAB_SIZE}"),
    "negative id": ([-1], GOOD, {}, "prompt", r"prompt\[0\]=-1"),
    "huge id": ([2**70], GOOD, {}, "prompt", "outside the vocabulary"),
    "float id": ([1.0], GOOD, {}, "prompt", "not a token id"),
    "truth value": ([True], GOOD, {}, "prompt", "not a token id"),
    "text among ids": ([3, "four"], GOOD, {}, "prompt", r"prompt\[1\]"),
    "lone surrogate": ("a\ud800", GOOD, {}, None, "surrogate"),
    "message without role": ([{"content": "x"}], GOOD, {}, None, "role"),
    "id among messages": ([{"role": "user", "content": "x"}, 5], GOOD, {}, None, "message"),
    "params of another type": ("x", lambda: {"max_tokens": 1}, {}, "params", "SamplingParams"),
    "label of another type": ("x", GOOD, {"request_id": 7}, "request_id", "text"),
    "salt of another type": ("x", GOOD, {"cache_salt": b"x"}, "cache_salt", "text"),
    "priority without the policy": ("x", GOOD, {"priority": 1}, "priority", "--scheduling-policy"),
    "priority of another type": ("x", GOOD, {"priority": "high"}, "priority", "high"),
    "priority out of range": ("x", GOOD, {"priority": 2**40}, "priority", "32 bits"),
    "stop id": ("x", params(stop_token_ids=(VOCAB_SIZE,)), {}, "stop_token_ids", f"{LAST_ID}"),
    "bias id": ("x", params(logit_bias={VOCAB_SIZE: 1.0}), {}, "logit_bias", f"{LAST_ID}"),
    "allowed id": ("x", params(allowed_token_ids=(VOCAB_SIZE,)), {}, "allowed_token_ids", f"{LAST_ID}"),
    "too many logprobs": ("x", params(logprobs=21), {}, "logprobs", "raise --max-logprobs"),
    "all logprobs": ("x", params(logprobs=-1), {}, "logprobs", f"all {VOCAB_SIZE} tokens .* max_logprobs=20"),
    "too many prompt logprobs": ("x", params(prompt_logprobs=21), {}, "prompt_logprobs", "raise --max-logprobs"),
    "nothing left": ("x", params(allowed_token_ids=(1,), min_tokens=1), {}, "min_tokens", "cannot be reached"),
    "negative temperature": ("x", params(temperature=-1.0), {}, "temperature", "at least 0"),
    "not a number": ("x", params(top_p=float("nan")), {}, "top_p", "finite"),
    "no choices": ("x", params(n=0), {}, "n", "between 1"),
    "contradiction": ("x", params(min_tokens=5), {}, "min_tokens", "above max_tokens"),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_bad_request_is_refused_and_costs_nothing(engine: AsyncEngine, case: str) -> None:
    prompt, make_params, options, param, words = CASES[case]
    with pytest.raises(InvalidRequest, match=words) as caught:
        await engine.submit(prompt, make_params(), **options)
    assert not isinstance(caught.value, ContextLengthExceeded)
    if param is not None:
        assert caught.value.param == param
    assert_nothing_held(engine)
    assert engine.stats().prompt_tokens == 0
    assert (await ask(engine, "x", GOOD())).last.is_finished


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param"),
    [
        (MAX_LEN + 1, 0, "prompt"),
        (MAX_LEN + 1, 1, "prompt"),
        (MAX_LEN + 500, None, "prompt"),
        (MAX_LEN, None, "prompt"),
        (MAX_LEN, 1, "prompt"),
        (MAX_LEN - 3, 4, "max_tokens"),
        (1, MAX_LEN, "max_tokens"),
    ],
)
async def test_what_does_not_fit_the_context_is_refused(
    engine: AsyncEngine, num_prompt_tokens: int, max_tokens: int | None, param: str
) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"{MAX_LEN}") as caught:
        await engine.submit([5] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens))
    assert caught.value.param == param
    assert_nothing_held(engine)


async def test_what_just_fits_is_served(engine: AsyncEngine) -> None:
    for num_prompt_tokens, num_output_tokens in ((MAX_LEN, 0), (MAX_LEN - 4, 4), (1, MAX_LEN - 1)):
        fitting = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        answer = await ask(engine, [5] * num_prompt_tokens, fitting)
        assert len(answer.token_ids) == num_output_tokens


async def test_render_refuses_as_submit_does(engine: AsyncEngine) -> None:
    for prompt in ("", [VOCAB_SIZE], None):
        with pytest.raises(InvalidRequest):
            await engine.render(prompt)
    assert await engine.render([1, 2]) == [1, 2]


async def test_a_pool_too_small_for_the_context_shortens_it(make_engine: MakeEngine) -> None:
    async with make_engine(num_gpu_blocks_override=4) as engine:
        assert engine.model.max_model_len == 48
        with pytest.raises(
            ContextLengthExceeded, match="48 .all that the KV pool holds.* or raise --num-gpu-blocks-override"
        ):
            await engine.submit([5] * 49, GOOD())
        assert len((await ask(engine, [5] * 44, SamplingParams(max_tokens=4, ignore_eos=True))).token_ids) == 4
