"""Sampling parameters against a vocabulary: what is refused, and what the sampler is given."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aioengine.errors import InvalidRequest
from aioengine.sampling_plan import SamplingPlan, compile_sampling, derive_seed, splitmix64
from aioengine.types import SamplingParams

VOCAB = 100


class WordEncoder:
    """Knows some texts; any other is spelled in characters."""

    TEXTS = {"bad": (7,), " bad": (8,), "good day": (1, 2), " good day": (3, 1, 2), "": ()}

    def encode(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        assert not add_special_tokens
        return self.TEXTS.get(text) or tuple(ord(c) % 50 + 50 for c in text)


def compile_(choice_index: int = 0, fallback_seed: int = 11, **params: object) -> SamplingPlan:
    return compile_sampling(SamplingParams(**params), WordEncoder(), VOCAB, [98, 99], choice_index, fallback_seed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [3, VOCAB]),
        ("stop_token_ids", [2**40]),
        ("logit_bias", {VOCAB: 1.0}),
        ("allowed_token_ids", [0, VOCAB]),
    ],
)
def test_token_id_outside_the_vocabulary_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} .*{VOCAB} tokens") as caught:
        compile_(**{name: value})
    assert caught.value.param == name


def test_last_token_of_the_vocabulary_is_accepted() -> None:
    plan = compile_(stop_token_ids=[VOCAB - 1], logit_bias={VOCAB - 1: 1.0}, allowed_token_ids=[VOCAB - 1, 0])
    assert plan.allowed_ids == (0, VOCAB - 1)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens_are_refused(name: str) -> None:
    assert getattr(compile_(**{name: VOCAB}).params, name) == VOCAB
    with pytest.raises(InvalidRequest, match=f"{name}=101") as caught:
        compile_(**{name: VOCAB + 1})
    assert caught.value.param == name


def test_stop_ids_are_end_tokens_and_stop_token_ids() -> None:
    assert compile_(stop_token_ids=[5, 98]).stop_ids == (5, 98, 99)
    assert compile_(stop_token_ids=[5], ignore_eos=True).stop_ids == (5,)


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    assert compile_(bad_words=["bad"]).bad_words == ((7,), (8,))
    assert compile_(bad_words=[" bad"]).bad_words == ((7,), (8,))


def test_form_that_ends_with_another_form_is_left_out() -> None:
    assert compile_(bad_words=["good day"]).bad_words == ((1, 2),)


def test_bad_word_of_foreign_tokens_is_refused() -> None:
    class Foreign:
        def encode(self, text: str, add_special_tokens: bool) -> Sequence[int]:
            return [VOCAB]

    with pytest.raises(InvalidRequest, match="bad_words") as caught:
        compile_sampling(SamplingParams(bad_words=["x"]), Foreign(), VOCAB, [], 0, 0)
    assert caught.value.param == "bad_words"


def test_bad_words_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        compile_sampling(SamplingParams(bad_words=["x"]), None, VOCAB, [], 0, 0)


def test_constraints_that_leave_no_token_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids") as caught:
        compile_(bad_words=["bad"], allowed_token_ids=[7, 8])
    assert caught.value.param == "bad_words"
    with pytest.raises(InvalidRequest, match="min_tokens=3") as caught:
        compile_(min_tokens=3, allowed_token_ids=[99])
    assert caught.value.param == "min_tokens"
    compile_(bad_words=["bad"], allowed_token_ids=[7, 9])
    compile_(min_tokens=3, allowed_token_ids=[99], ignore_eos=True)


def test_seeds_of_choices_differ_and_are_reproducible() -> None:
    seeds = {(seed, index): derive_seed(seed, index) for seed in range(-50, 50) for index in range(50)}
    assert len(set(seeds.values())) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds.values())
    assert compile_(seed=4, choice_index=2, fallback_seed=1).seed == seeds[4, 2]
    assert compile_(seed=4, choice_index=2, fallback_seed=2).seed == seeds[4, 2]


def test_fallback_seed_is_used_only_without_a_seed() -> None:
    assert compile_(fallback_seed=3).seed == derive_seed(3, 0) != compile_(fallback_seed=4).seed
    assert compile_(seed=0, fallback_seed=3).seed == derive_seed(0, 0)


def test_splitmix64_gives_the_published_sequence() -> None:
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
