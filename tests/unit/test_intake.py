"""What intake makes of a prompt, and what it refuses, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioengine.intake import ChatOptions, Intake
from tests.api.fake_engine import BOS, EOS, VOCAB_SIZE, FakeTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class NamingTokenizer(FakeTokenizer):
    named_tokens = {"bos_token": "<s>"}


@pytest.fixture
def intake() -> Iterator[Intake]:
    made = Intake(
        NamingTokenizer(),  # type: ignore[arg-type]
        {"default": TEMPLATE},
        max_model_len=100,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        next_seed=lambda: 7,
    )
    yield made
    made.close()


@pytest.mark.parametrize(("given", "in_text", "in_chat"), [(None, 1, 0), (True, 1, 1), (False, 0, 0)])
async def test_the_tokenizer_s_own_tokens_by_default_are_added_to_texts_only(
    intake: Intake, given: bool | None, in_text: int, in_chat: int
) -> None:
    options = ChatOptions(add_special_tokens=given, add_generation_prompt=False)
    text, long_text = await intake.render("hi", options), await intake.render("h" * 90, options)
    assert (text, long_text) == ([BOS] * in_text + list(b"hi"), [BOS] * in_text + list(b"h" * 90))
    assert await intake.render(MESSAGES, options) == [BOS] * in_chat + list(b"hi")
    assert await intake.render([5, 6], options) == [5, 6]
