"""What is right: the text that every request must get, and the KV that every slot of its context must hold.

The "model" is a chain: the KV of a position is a number that depends on every token and picture up to it and on the
salt, and
the next token depends on that number and on the choice's seed. So the whole output of a request follows from
its prompt, however it was scheduled, and KV that belongs to any other text is told from its own.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from aioengine.fastcore import native
from aioengine.types import SamplingParams

VOCAB_SIZE = 64
EOS = 0
_MASK = (1 << 60) - 1
_FIRST_CHAR = 48
_VOCABULARY = native.Vocabulary([bytes([_FIRST_CHAR + i]) for i in range(VOCAB_SIZE)], bytes(VOCAB_SIZE))


def root_of(salt: str) -> int:
    """The chain's value before the first token."""
    return zlib.crc32(salt.encode()) + 1


def chained(value: int, token_id: int) -> int:
    """KV of a position, from that of the position before it."""
    return ((value ^ token_id) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK


def seen_at(name: str, i: int) -> int:
    """What a position has of a picture beside its token; every place in it shows something else."""
    return zlib.crc32(f"{name} {i}".encode()) << 8


def sampled(value: int, seed: int) -> int:
    """The token that follows a position."""
    return ((value + seed * 0x2545F4914F6CDD1D & _MASK) >> 23) % VOCAB_SIZE


def stem_tokens(stem: int, count: int) -> list[int]:
    """Prompt tokens that many requests share; never an end token."""
    state, tokens = stem, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        tokens.append(1 + (state >> 16) % (VOCAB_SIZE - 1))
    return tokens


class OneCharTokens:
    """A tokenizer whose tokens are one character each, for the real detokenizer."""

    def text_stream(self, params: SamplingParams) -> native.TextStream:
        """As `Tokenizer.text_stream`."""
        stops = native.StopSet(list(params.stop)) if params.stop else None
        return native.TextStream(_VOCABULARY, stops, min_tokens=params.min_tokens)


@dataclass(eq=False)
class Truth:
    """One choice of one request. Travels through the engine as the request's `sampling`."""

    name: str
    prompt: list[int]
    salt: str
    seed: int
    params: SamplingParams
    max_tokens: int
    max_total: int
    fails_at: int = 0
    arrival: int = 0
    media: tuple[tuple[int, int, str], ...] = ()
    """Pictures in the prompt: first position, number of positions, name."""
    tokens: list[int] = field(init=False)
    """Prompt and output, continued past the end where the device ran ahead."""
    chain: list[int] = field(init=False)
    """chain[i] is the KV of position i."""
    output: list[int] = field(init=False)
    reason: str = field(init=False)
    text: str = field(init=False)
    # What the device has seen of it.
    reached: int = 0
    """Positions computed or in flight since it got its row."""
    num_scored: int = 1
    """Prompt positions whose logits were asked for, the first one included: nothing predicts it."""
    was_spoiled: bool = False
    """It has computed on what another, whose row failed, had computed."""

    @property
    def takes_drafts(self) -> bool:
        """As of a `SamplingPlan`; not for every fifth or so."""
        return zlib.crc32(self.name.encode()) % 5 > 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.chain = []
        value = root_of(self.salt)
        seen = {start + i: seen_at(name, i) for start, length, name in self.media for i in range(length)}
        for position, token_id in enumerate(self.prompt):
            value = chained(value ^ seen.get(position, 0), token_id)
            self.chain.append(value)
        self._find_output()

    def grow(self, num_tokens: int) -> None:
        """Makes `tokens` and `chain` at least so long."""
        tokens, chain = self.tokens, self.chain
        while len(tokens) < num_tokens:
            tokens.append(sampled(chain[-1], self.seed))
            chain.append(chained(chain[-1], tokens[-1]))

    def _find_output(self) -> None:
        params, start = self.params, len(self.prompt)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        stop_chars = {ord(text) - _FIRST_CHAR for text in params.stop}
        count, hidden = 0, 0
        self.reason = "length"
        while count < self.max_tokens and start + count < self.max_total:
            count += 1
            self.grow(start + count)
            newest = self.tokens[-1]
            if newest in stop_ids and count >= params.min_tokens:
                self.reason, hidden = "stop", 1
                break
            if newest in stop_chars and count > params.min_tokens:
                self.reason, hidden = "stop", 1
                break
        self.output = self.tokens[start:]
        shown = self.output[: len(self.output) - hidden]
        self.text = "".join(chr(_FIRST_CHAR + token_id) for token_id in shown)
