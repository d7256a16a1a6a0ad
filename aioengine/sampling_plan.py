"""What a request's sampling parameters mean for one model: checked once, at intake, off the hot path.

Owns the checks that need a vocabulary or a tokenizer, the token forms of bad words, and the seeds of the
n choices. The sampler trusts a `SamplingPlan` blindly: no token id in it lies outside the vocabulary and
at least one token can follow at the first position. Imports no torch. Called by `intake.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aioengine.errors import InvalidRequest
from aioengine.types import SamplingParams

_U64 = 2**64 - 1
_SHOWN_IDS = 8


class TextEncoder(Protocol):
    """The one method of the tokenizer that is needed here."""

    def encode(self, text: str, add_special_tokens: bool) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """One choice's sampling, ready for the sampler. Made by `compile_sampling`, never changed."""

    params: SamplingParams
    vocab_size: int
    seed: int
    """Key of this choice's draws, as a signed 64-bit integer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is forbidden once the output ends with the others."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the output (end tokens and stop token ids): forbidden before `min_tokens`."""
    allowed_ids: tuple[int, ...] | None = None
    """Sorted; None allows every token."""

    @property
    def takes_drafts(self) -> bool:
        """Whether drafts may be verified for it: all their positions at once, by the model's own scores.

        Not with penalties or bad words, which need the text before each token, and not with other constraints:
        the sampler treats a constrained or penalized row once in a step.
        """
        p = self.params
        is_penalized = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        is_constrained = bool(self.bad_words or p.logit_bias) or self.allowed_ids is not None or p.min_tokens > 0
        return not (is_penalized or is_constrained)


def splitmix64(state: int) -> int:
    """One output of SplitMix64 from a 64-bit state (public domain algorithm of Steele, Lea and Flood)."""
    z = (state + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def derive_seed(seed: int, choice_index: int) -> int:
    """The signed 64-bit key of choice `choice_index`: a fixed function, distinct for distinct choices."""
    mixed = splitmix64(splitmix64(seed & _U64) ^ choice_index)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def compile_sampling(
    params: SamplingParams,
    tokenizer: TextEncoder | None,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    choice_index: int,
    fallback_seed: int,
) -> SamplingPlan:
    """Checks `params` against a vocabulary and resolves what the sampler needs.

    Args:
        tokenizer: needed for `bad_words` only; encoding many long words is the only slow part.
        vocab_size: number of logits of the model; every token id must be below it.
        eos_token_ids: the model's own end tokens; they count as stop ids unless `ignore_eos`.
        choice_index: which of the `n` choices; each gets its own seed.
        fallback_seed: used when the request names no seed; the caller makes it differ between requests.

    Raises:
        InvalidRequest: a token id lies outside the vocabulary, a bad word has no tokens, more
            log-probabilities are asked for than there are tokens, or no token could ever be chosen.
    """
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise InvalidRequest(
                f"{name}={count} is above the vocabulary of {vocab_size} tokens; use -1 for all of them",
                param=name,
            )
    eos_ids = [] if params.ignore_eos else [i for i in eos_token_ids if 0 <= i < vocab_size]
    plan = SamplingPlan(
        params=params,
        vocab_size=vocab_size,
        seed=derive_seed(fallback_seed if params.seed is None else params.seed, choice_index),
        bad_words=_bad_word_forms(params.bad_words, tokenizer, vocab_size),
        stop_ids=tuple(sorted({*eos_ids, *params.stop_token_ids})),
        allowed_ids=None if params.allowed_token_ids is None else tuple(sorted(set(params.allowed_token_ids))),
    )
    _check_satisfiable(plan)
    return plan


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        shown = ", ".join(map(str, outside[:_SHOWN_IDS])) + (" ..." if len(outside) > _SHOWN_IDS else "")
        raise InvalidRequest(
            f"{name} holds the token id {shown}, but the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})",
            param=name,
        )


def _bad_word_forms(
    words: Sequence[str], tokenizer: TextEncoder | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words at the start of a text and after a space, without redundant ones."""
    forms: set[tuple[int, ...]] = set()
    for word in words:
        if tokenizer is None:
            raise InvalidRequest("bad_words needs a tokenizer, and this engine has none", param="bad_words")
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise InvalidRequest(f"bad_words holds {word!r}, which has no tokens", param="bad_words")
            if not all(0 <= i < vocab_size for i in ids):
                raise InvalidRequest(
                    f"bad_words holds {word!r}, which needs tokens that the model does not have",
                    param="bad_words",
                )
            forms.add(ids)
    # A form that ends with another form is never the first to fire.
    return tuple(sorted(f for f in forms if not any(f[i:] in forms for i in range(1, len(f)))))


def _check_satisfiable(plan: SamplingPlan) -> None:
    """Refuses constraints that leave no token at the first position (the mask is their intersection)."""
    allowed: set[int] | range = range(plan.vocab_size) if plan.allowed_ids is None else set(plan.allowed_ids)
    banned = {form[0] for form in plan.bad_words if len(form) == 1}
    if banned.issuperset(allowed):
        raise InvalidRequest("bad_words forbids every token that allowed_token_ids allows", param="bad_words")
    if plan.params.min_tokens > 0 and banned.union(plan.stop_ids).issuperset(allowed):
        raise InvalidRequest(
            f"min_tokens={plan.params.min_tokens} cannot be reached: every allowed token ends the output",
            param="min_tokens",
        )
