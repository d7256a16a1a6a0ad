"""The records a user of the library sees: what goes into `generate()` and what comes out.

Range checks that need no model live here (`SamplingParams.__post_init__`); checks against a vocabulary or
a context window live in `intake.py`. Nothing here imports anything of ours but the errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aioengine.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a choice ended: a stop token or text, a length limit, the caller, or a failure."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy; the same constant guards the division (checklist G4)."""

_MAX_SEED = 2**63 - 1
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop. All fields are checked when it is made.

    Raises:
        InvalidRequest: a field has the wrong type or lies outside its range; `param` names it.
    """

    n: int = 1
    """Number of choices for one prompt (1 or more)."""
    max_tokens: int | None = None
    """Most tokens to generate per choice; None means until the context window is full. 0 only scores the prompt."""
    min_tokens: int = 0
    """Stop tokens and stop strings are not considered before this many tokens."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (0 < top_p <= 1)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one (0 to 1)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated so far (-2 to 2)."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logit of every token generated so far (-2 to 2)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output (above 0)."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids (-100 to 100 each)."""
    allowed_token_ids: Sequence[int] | None = None
    """If given, no other token can be generated."""
    bad_words: Sequence[str] = ()
    """Texts that must not be generated; the token that would complete one is forbidden."""
    stop: Sequence[str] = ()
    """Texts that end the output. A single string may be given."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output besides the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop text (or the text of a stop token) at the end of the output."""
    ignore_eos: bool = False
    """Do not stop at the model's own end tokens."""
    seed: int | None = None
    """Makes the draw reproducible whatever else is in the batch; choice i uses a seed derived from it."""
    logprobs: int | None = None
    """Log-probabilities of the sampled token and of this many most likely ones; -1 means the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first; the prompt is then computed without reading the prefix cache."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Kept for compatibility: special tokens are separated as the tokenizer's own decoder does it."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.stop, str):
            set_(self, "stop", (self.stop,))
        if isinstance(self.bad_words, str):
            raise InvalidRequest("bad_words must be a list of strings, not one string", param="bad_words")
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            try:
                set_(self, name, () if value is None else tuple(value))
            except TypeError:
                raise InvalidRequest(f"{name} must be a list, got {value!r}", param=name) from None
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _check_int(self, "n", 1, 1024)
        if self.max_tokens is not None:
            _check_int(self, "max_tokens", 0, 2**31 - 1)
        _check_int(self, "min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}", param="min_tokens"
            )
        _check_float(self, "temperature", 0.0, 100.0)
        _check_float(self, "top_p", 0.0, 1.0, above=True)
        _check_int(self, "top_k", -1, 2**31 - 1)
        _check_float(self, "min_p", 0.0, 1.0)
        _check_float(self, "presence_penalty", -2.0, 2.0)
        _check_float(self, "frequency_penalty", -2.0, 2.0)
        _check_float(self, "repetition_penalty", 0.0, 1e6, above=True)
        if self.seed is not None:
            _check_int(self, "seed", -(2**63), _MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(self, name, -1, 2**31 - 1)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop must hold non-empty strings, got {text!r}", param="stop")
        for text in self.bad_words:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"bad_words must hold non-empty strings, got {text!r}", param="bad_words")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                if not _is_int(token_id) or token_id < 0:
                    raise InvalidRequest(f"{name} must hold token ids, got {token_id!r}", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        if self.logit_bias is not None:
            self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias")
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            try:
                token_id = int(key)
            except (TypeError, ValueError):
                raise InvalidRequest(f"logit_bias has the key {key!r}, not a token id", param="logit_bias") from None
            if token_id < 0 or isinstance(key, float):
                raise InvalidRequest(f"logit_bias has the key {key!r}, not a token id", param="logit_bias")
            if not _is_number(value) or not -100 <= value <= 100:
                raise InvalidRequest(
                    f"logit_bias[{token_id}]={value!r} must be a number from -100 to 100", param="logit_bias"
                )
            bias[token_id] = float(value)
        object.__setattr__(self, "logit_bias", bias or None)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_int(params: object, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if not _is_int(value):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name}={value} must lie between {low} and {high}", param=name)


def _check_float(params: object, name: str, low: float, high: float, *, above: bool = False) -> None:
    value = getattr(params, name)
    if not _is_number(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r}", param=name)
    if not (low < value if above else low <= value) or value > high:
        edge = "above" if above else "at least"
        raise InvalidRequest(f"{name}={value} must be {edge} {low:g} and at most {high:g}", param=name)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability (natural logarithm, raw logits) and rank (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int
    token: str
    """Its text alone; broken UTF-8 shows as U+FFFD, `token_bytes` is exact."""
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What was sampled (or given, in a prompt) at one position and its most likely alternatives."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The most likely tokens, best first; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Points of one choice's life, in seconds of `time.monotonic()`; None where it never came to that."""

    arrived_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float | None


@dataclass(slots=True)
class RequestOutput:
    """What is new for one choice since the last one, and everything so far.

    A slow reader gets fewer, longer ones: unread deltas are joined. The last one of a choice has a
    `finish_reason`; the last one of the request has `usage`.
    """

    request_id: str
    index: int
    """Which of the n choices."""
    delta: str
    text: str
    delta_token_ids: list[int]
    token_ids: list[int]
    delta_logprobs: list[PositionLogprobs] | None = None
    """One per token in `delta_token_ids`, if asked for."""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One per prompt token (the first is None), on the first output of each choice, if asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop text that ended it; None for the model's own end token."""
    usage: Usage | None = None
    timing: RequestTiming | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Determinism:
    """What the operator of an engine promises about its answers (`--determinism`)."""

    level: Literal["unavailable", "offline", "batch-invariant"]
    reason: str


CacheStatus = Literal["exact", "degraded", "refused"]
"""exact: done as asked; degraded: done, but more or less than was named, see the reason; refused: nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReply:
    """What an operation on the prefix cache did. It is also its entry in the audit log."""

    audit_id: int
    """Counts from 1."""
    at_s: float
    """Unix time."""
    action: str
    status: CacheStatus
    reason: str | None = None
    """Why it is degraded or refused."""
    note: str | None = None
    """What the caller may not expect although it was done as asked."""
    cache_salt: str | None = None
    """The tenant."""
    num_tokens: int = 0
    """Length of the name; 0 if everything under the salt was meant."""
    start: int | None = None
    """First token of the span, where there is one."""
    num_cached_tokens: int = 0
    """Tokens of the name that requests still hit afterwards, or have loaded from the memory behind the pool, counted
    in whole blocks; partial-block reuse may find some of the next block in another prefix."""
    num_held_tokens: int = 0
    """Tokens of the name that a pin or lease holds."""
    num_blocks: int = 0
    """Blocks evicted, pinned, let go or computed."""
    num_offloaded_blocks: int = 0
    """Blocks dropped from the memory behind the pool, where there is one."""
    num_blocks_in_use: int = 0
    """Of the evicted ones those that running requests still read; nobody else can hit them."""
    num_requests: int = 0
    """Requests that go on with evicted blocks, or that were preempted."""
    num_pins_broken: int = 0
    pin_id: str | None = None
    expires_in_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The prefix cache at this moment."""

    enabled: bool
    block_size: int
    num_blocks: int
    """Usable ones."""
    num_free_blocks: int
    """Without an owner; they may hold cached prefixes."""
    num_cached_blocks: int
    num_evicted_blocks: int
    """Cached blocks that had to make room so far."""
    num_offloaded_blocks: int
    """Blocks in the memory behind the pool."""
    num_pinned_blocks: int
    max_pinned_blocks: int
    num_quarantined: int
    pins: dict[str, int]
    """Blocks per pin."""
    leases: dict[str, float]
    """Seconds that are left to each pin that expires."""


ChatMessages = Sequence[Mapping[str, object]]
"""Chat messages as in the OpenAI API: mappings with `role` and `content` at least."""

Prompt = str | Sequence[int] | ChatMessages
"""Text, token ids, or chat messages."""
