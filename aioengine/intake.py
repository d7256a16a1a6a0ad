"""Intake: from what a caller passes to prompt token ids and checked sampling, before anything is allocated.

A bad request raises `InvalidRequest` here and leaves no trace. Short texts are tokenized in place; long ones,
and everything that could keep the loop busy for more than about a millisecond, go to a small thread pool.
Called by `engine.py` only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from aioengine.chat import render_chat
from aioengine.config import flag_name
from aioengine.errors import ContextLengthExceeded, InvalidRequest
from aioengine.fastcore.token_ids import pack_token_ids
from aioengine.sampler import SamplingPlan, compile_sampling
from aioengine.types import ChatMessages, Prompt, SamplingParams

if TYPE_CHECKING:
    from aioengine.tokenizer import Tokenizer

INLINE_CHARS = 600
"""Texts up to this length are tokenized on the loop: a thread switch would cost more than the work."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How chat messages are rendered; of other prompts only texts look at one of them, `add_special_tokens`."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """Lets the tokenizer add its own, such as a BOS; None does so for texts only: chat templates write them."""
    tools: Sequence[Mapping[str, object]] | None = None
    chat_template_kwargs: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that will be accepted: its token ids, its limits, and one sampling plan per choice."""

    prompt_token_ids: list[int]
    packed_token_ids: NDArray[np.int32]
    """The same, as the scheduler takes them."""
    params: SamplingParams
    max_tokens: int
    plans: tuple[SamplingPlan, ...]


class Intake:
    """Validates, renders and tokenizes.

    Args:
        max_model_len: most tokens of prompt and output together.
        context_limit: what set that, in words, and the option that raises it.
        max_logprobs: most that are given per token; -1 for as many as there are.
        chat_templates: Jinja templates by name; empty if the model takes no messages.
        vocab_size: token ids must be below this (rows of the embedding).
        next_seed: gives the seed of a request that has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_templates: Mapping[str, str],
        *,
        max_model_len: int,
        context_limit: tuple[str, str | None],
        max_logprobs: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        next_seed: Callable[[], int],
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_templates = dict(chat_templates)
        self._max_model_len = max_model_len
        self._context_limit, option = context_limit
        self._or_raise = "" if option is None else f" or raise {flag_name(option)}"
        self._max_logprobs = max_logprobs
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._next_seed = next_seed
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="aioengine-intake")

    def close(self) -> None:
        """Ends the threads; running jobs finish first."""
        self._threads.shutdown(wait=True)

    async def prepare(self, prompt: Prompt, params: SamplingParams, chat: ChatOptions) -> PreparedRequest:
        """Everything that must be known before a request is queued.

        Raises:
            InvalidRequest: a field is wrong; the message says which, what was given and what is allowed.
            ContextLengthExceeded: the prompt, or prompt plus max_tokens, does not fit the context window.
        """
        self._check_logprobs(params)
        seed = self._next_seed()  # before anything is awaited: by the order of arrival, not by that of tokenization
        token_ids, packed = await self._render(prompt, chat)
        max_tokens = self._fit(len(token_ids), params)
        plans = await self._compile(params, seed)
        return PreparedRequest(
            prompt_token_ids=token_ids, packed_token_ids=packed, params=params, max_tokens=max_tokens, plans=plans
        )

    async def render(self, prompt: Prompt, chat: ChatOptions) -> list[int]:
        """Token ids of a text, a list of ids, or chat messages.

        Raises:
            InvalidRequest: the prompt is empty, of no known form, or has ids outside the vocabulary.
        """
        return (await self._render(prompt, chat))[0]

    async def _render(self, prompt: Prompt, chat: ChatOptions) -> tuple[list[int], NDArray[np.int32]]:
        if isinstance(prompt, str):
            token_ids = await self._encode_text(prompt, chat.add_special_tokens is not False)
        elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InvalidRequest(
                f"prompt must be text, token ids or chat messages, got {type(prompt).__name__}", param="prompt"
            )
        elif prompt and isinstance(prompt[0], Mapping):
            token_ids = await self._encode_chat(prompt, chat)  # type: ignore[arg-type]
        else:
            if len(prompt) > self._max_model_len:  # before anybody looks at every id
                raise self._too_long(len(prompt))
            token_ids = list(prompt)  # type: ignore[arg-type]
        if not token_ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", param="prompt")
        try:
            return token_ids, pack_token_ids(token_ids, self._vocab_size)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(str(error), param="prompt") from None

    async def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._need_tokenizer()
        return await self._off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def _encode_chat(self, messages: ChatMessages, chat: ChatOptions) -> list[int]:
        tokenizer = self._need_tokenizer()

        def run() -> list[int]:
            text = render_chat(
                messages,
                self._chat_templates,
                named_tokens=tokenizer.named_tokens,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tools=chat.tools,
                chat_template_kwargs=chat.chat_template_kwargs,
            )
            return tokenizer.encode(text, add_special_tokens=bool(chat.add_special_tokens))

        return await self._off_loop(_rough_size(messages) + (4000 if chat.tools else 0), run)

    def _fit(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Most tokens to generate, or an error if prompt and output do not fit."""
        room = self._max_model_len - num_prompt_tokens
        wanted = params.max_tokens
        if room < 0 or (room == 0 and wanted != 0):
            raise self._too_long(num_prompt_tokens)
        if wanted is None:
            return room
        if wanted > room:
            raise ContextLengthExceeded(
                f"max_tokens={wanted} does not fit: prompt {num_prompt_tokens} + {wanted} > "
                f"max_model_len {self._max_model_len} ({self._context_limit}); lower max_tokens{self._or_raise}",
                param="max_tokens",
            )
        return wanted

    def _too_long(self, num_prompt_tokens: int) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and leaves no room for output: "
            f"prompt and output together may have max_model_len={self._max_model_len} ({self._context_limit}); "
            f"shorten the prompt{self._or_raise}",
            param="prompt",
        )

    def _check_logprobs(self, params: SamplingParams) -> None:
        if self._max_logprobs == -1:
            return
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(params, name)
            count = self._vocab_size if given == -1 else given
            if count is not None and count > self._max_logprobs:
                asked = f"{name}=-1 asks for all {count} tokens and" if given == -1 else f"{name}={given}"
                raise InvalidRequest(
                    f"{asked} is above max_logprobs={self._max_logprobs}; ask for fewer or raise --max-logprobs",
                    param=name,
                )

    async def _compile(self, params: SamplingParams, fallback_seed: int) -> tuple[SamplingPlan, ...]:
        def run() -> tuple[SamplingPlan, ...]:
            return tuple(
                compile_sampling(params, self._tokenizer, self._vocab_size, self._eos_token_ids, index, fallback_seed)
                for index in range(params.n)
            )

        work = 1000 * len(params.bad_words) + len(params.allowed_token_ids or ()) + len(params.logit_bias or ())
        return await self._off_loop(work, run)

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer: give the prompt as token ids", param="prompt")
        return self._tokenizer


def _rough_size(messages: ChatMessages) -> int:
    """About how many characters the messages hold, without looking deep."""
    size = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        size += len(content) if isinstance(content, str) else INLINE_CHARS
    return size
