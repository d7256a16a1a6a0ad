"""What intake makes of a prompt, and what it refuses, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aioengine.errors import ContextLengthExceeded, InvalidRequest
from aioengine.intake import ChatOptions, Intake
from aioengine.types import SamplingParams
from tests.api.fake_engine import BOS, EOS, VOCAB_SIZE, FakeTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class NamingTokenizer(FakeTokenizer):
    named_tokens = {"bos_token": "<s>"}


@contextmanager
def made(**options: Any) -> Iterator[Intake]:
    intake = Intake(
        NamingTokenizer(),  # type: ignore[arg-type]
        {"default": TEMPLATE},
        **{
            "max_model_len": 100,
            "context_limit": ("the model's context window", None),
            "max_logprobs": 20,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": (EOS,),
            "next_seed": lambda: 7,
            **options,
        },
    )
    try:
        yield intake
    finally:
        intake.close()


@pytest.fixture
def intake() -> Iterator[Intake]:
    with made() as intake:
        yield intake


@pytest.mark.parametrize(("given", "in_text", "in_chat"), [(None, 1, 0), (True, 1, 1), (False, 0, 0)])
async def test_the_tokenizer_s_own_tokens_by_default_are_added_to_texts_only(
    intake: Intake, given: bool | None, in_text: int, in_chat: int
) -> None:
    options = ChatOptions(add_special_tokens=given, add_generation_prompt=False)
    text, long_text = await intake.render("hi", options), await intake.render("h" * 90, options)
    assert (text, long_text) == ([BOS] * in_text + list(b"hi"), [BOS] * in_text + list(b"h" * 90))
    assert await intake.render(MESSAGES, options) == [BOS] * in_chat + list(b"hi")
    assert await intake.render([5, 6], options) == [5, 6]


@pytest.mark.parametrize(
    ("limit", "words", "remedy"),
    [
        (("the model's context window", None), "(the model's context window)", None),
        (("as configured", "max_model_len"), "(as configured)", " or raise --max-model-len"),
        (("all that the KV pool holds", "num_gpu_blocks_override"), "KV pool", " or raise --num-gpu-blocks-override"),
    ],
)
@pytest.mark.parametrize(("length", "max_tokens"), [(100, None), (60, 41), (101, None)])
async def test_what_is_too_long_is_told_what_set_the_limit(
    limit: tuple[str, str | None], words: str, remedy: str | None, length: int, max_tokens: int | None
) -> None:
    with made(context_limit=limit) as intake, pytest.raises(ContextLengthExceeded) as caught:
        await intake.prepare([5] * length, SamplingParams(max_tokens=max_tokens), ChatOptions())
    advice = f"{'shorten the prompt' if max_tokens is None else 'lower max_tokens'}{remedy or ''}"
    assert words in caught.value.message and caught.value.message.endswith(f"; {advice}")


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("most", "allowed", "refused"), [(20, (None, 0, 20), (21, -1)), (0, (0,), (1, -1)), (-1, (0, VOCAB_SIZE, -1), ())]
)
async def test_log_probabilities_are_limited(
    name: str, most: int, allowed: tuple[int | None, ...], refused: tuple[int, ...]
) -> None:
    with made(max_logprobs=most) as intake:
        for count in allowed:
            await intake.prepare([5], SamplingParams(**{name: count}), ChatOptions())
        for count in refused:
            with pytest.raises(InvalidRequest, match=rf"{name}=.* above max_logprobs={most}; .* --max-log") as caught:
                await intake.prepare([5], SamplingParams(**{name: count}), ChatOptions())
            assert caught.value.param == name
        with pytest.raises(InvalidRequest, match="use -1" if most == -1 else "max_logprobs"):
            await intake.prepare([5], SamplingParams(**{name: VOCAB_SIZE + 1}), ChatOptions())
