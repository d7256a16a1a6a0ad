"""What `--speculative-config` may say, who gets drafts, and how what came of them is told; without any model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from aioengine.config import EngineConfig, ResolvedConfig, resolve
from aioengine.errors import InvalidConfig
from aioengine.fastcore.drafts import LIMIT, NgramDrafter
from aioengine.metrics import DraftStats
from aioengine.sampling_plan import compile_sampling
from aioengine.speculation import MOST_DRAFTS, MOST_LOOKUP, Speculation, parse
from aioengine.types import SamplingParams


def asked(**fields: object) -> str:
    return json.dumps({"method": "ngram", "num_speculative_tokens": 4, **fields})


def resolved(text: str | None, **options: object) -> ResolvedConfig:
    config = EngineConfig(speculative_config=text, **options)
    return resolve(config, model_max_len=4096, model_dtype="bfloat16", cuda_available=False, num_cores=2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Speculation(4, 5, 3, 32)),
        ({"num_speculative_tokens": 16}, Speculation(16, 5, 3, 32)),
        ({"prompt_lookup_max": 2}, Speculation(4, 2, 2, 32)),
        ({"prompt_lookup_min": 7}, Speculation(4, 7, 7, 32)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 1}, Speculation(4, 4, 1, 32)),
        ({"prompt_lookup_max": None, "disable_by_batch_size": None}, Speculation(4, 5, 3, 32)),
        ({"disable_by_batch_size": 0}, Speculation(4, 5, 3, 0)),
        ({"disable_by_batch_size": 8}, Speculation(4, 5, 3, 8)),
    ],
)
def test_fields_that_are_not_given_have_vllms_or_own_defaults(fields: dict[str, object], expected: Speculation) -> None:
    assert parse(asked(**fields)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "it is no JSON: "),
        ("", "it is no JSON: "),
        ("[" * 100_000, "it is no JSON: "),
        ("[]", 'it is not a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}'),
        ("{}", 'method is missing; give "method": "ngram"'),
        ('{"num_speculative_tokens": 4}', 'method is missing; give "method": "ngram"'),
        ('{"method": "ngram"}', "num_speculative_tokens is missing; give the most drafts of a request in a step"),
        (asked(num_speculative_tokens=None), "num_speculative_tokens is missing"),
        (asked(num_speculative_tokens=0), "num_speculative_tokens=0 must be an integer from 1 to 16"),
        (asked(num_speculative_tokens=17), "num_speculative_tokens=17 must be an integer from 1 to 16"),
        (asked(num_speculative_tokens=True), "num_speculative_tokens=true must be an integer"),
        (asked(num_speculative_tokens="4"), 'num_speculative_tokens="4" must be an integer'),
        (asked(num_speculative_tokens=2.0), "num_speculative_tokens=2.0 must be an integer"),
        (asked(prompt_lookup_max=0), "prompt_lookup_max=0 must be an integer from 1 to 16"),
        (asked(prompt_lookup_max=17), "prompt_lookup_max=17 must be an integer from 1 to 16"),
        (asked(prompt_lookup_min=0), "prompt_lookup_min=0 must be an integer from 1 to 16"),
        (asked(prompt_lookup_min=3, prompt_lookup_max=2), "prompt_lookup_min=3 is above prompt_lookup_max=2"),
        (asked(disable_by_batch_size=-1), "disable_by_batch_size=-1 must be an integer from 0"),
        (asked(prompt_lookup=3), "prompt_lookup is unknown; did you mean prompt_lookup_m"),
        (asked(num_speculative_token=3), "num_speculative_token is unknown; did you mean num_speculative_tokens?"),
        (asked(quantisation="x"), "quantisation is unknown; there are method, num_speculative_tokens, prompt_lookup_"),
        *(
            (asked(method=method, model="m"), f'the method {method!r} is not supported yet; there is "ngram"')
            for method in ("eagle", "eagle3", "medusa", "mtp", "draft_model", "Ngram", None, ["ngram"])
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        resolved(text)
    assert f"speculative_config cannot be used: {message}" in str(caught.value)
    assert caught.value.param == "speculative_config"


def test_an_engine_without_the_option_speculates_nothing() -> None:
    assert parse(None) is None
    assert resolved(None).num_speculative_tokens == 0
    assert resolved(asked(num_speculative_tokens=7)).num_speculative_tokens == 7


def test_the_core_takes_what_may_be_asked_for_and_no_more() -> None:
    assert MOST_DRAFTS == LIMIT
    NgramDrafter(most_tokens=MOST_LOOKUP, least_tokens=1)
    with pytest.raises(ValueError, match="must lie between"):
        NgramDrafter(most_tokens=MOST_LOOKUP + 1, least_tokens=1)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "ngram, up to 4 drafts a step by the last 3 to 5 tokens; none with more than 32 requests running"),
        ({"prompt_lookup_max": 2, "disable_by_batch_size": 0}, "ngram, up to 4 drafts a step by the last 2 tokens"),
        ({"prompt_lookup_max": 1, "disable_by_batch_size": 0}, "ngram, up to 4 drafts a step by the last 1 token"),
    ],
)
def test_it_is_told_in_words(fields: dict[str, object], told: str) -> None:
    assert str(parse(asked(**fields))) == told


@pytest.mark.parametrize(
    ("params", "takes"),
    [
        ({}, True),
        ({"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1, "stop": ["x"], "ignore_eos": True}, True),
        ({"temperature": 1.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 3, "n": 2}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": -0.5}, False),
        ({"presence_penalty": 0.5}, False),
        ({"logit_bias": {5: 1.0}}, False),
        ({"allowed_token_ids": [3, 4]}, False),
        ({"bad_words": ["no"]}, False),
        ({"min_tokens": 1}, False),
    ],
)
def test_what_needs_the_text_before_each_token_takes_no_drafts(params: dict[str, object], takes: bool) -> None:
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [7])
    plan = compile_sampling(SamplingParams(**params), tokenizer, 100, (1,), 0, 0)
    assert plan.takes_drafts is takes


def test_acceptance_is_that_of_the_drafts_since() -> None:
    first, now = DraftStats(2, 8, 2), DraftStats(5, 20, 11)
    assert now.since(first) == DraftStats(3, 12, 9) and now.since(None) == now
    assert now.since(first).acceptance == 0.75
    assert now.since(first).told() == ", drafts accepted 75 % of 12 tokens"
    assert now.since(now).acceptance is None and now.since(now).told() == ""


def test_a_report_counts_one_draft_as_one() -> None:
    one = parse('{"method": "ngram", "num_speculative_tokens": 1}')
    assert str(one).startswith("ngram, one draft a step by the last 3 to 5 tokens")
