"""What the server needs of an engine, as protocols: `AsyncEngine` has it, and so has the tests' scripted one.

The meaning of each member is documented at `AsyncEngine`; here stands only what the routes call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from aioengine.errors import EngineError
from aioengine.types import CacheReply, CacheStats, Determinism, Prompt, RequestOutput, SamplingParams


class Tokenizer(Protocol):
    """The model's tokenizer, as far as echo, logprobs and /tokenize need it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    @property
    def vocab_size(self) -> int: ...


class Stream(Protocol):
    """One queued request: an iterator of outputs; `abort` may be called at any time, also after the end."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def abort(self) -> None: ...


class ModelInfo(Protocol):
    """The served model."""

    @property
    def name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...


class Cache(Protocol):
    """Operations on the prefix cache; `naming` is the salt and the options of the chat template."""

    async def evict(
        self, prompt: Prompt | None = None, *, start: int | None = None, require_exact: bool = False, **naming: Any
    ) -> CacheReply: ...

    async def quarantine(
        self, prompt: Prompt | None = None, *, start: int | None = None, require_exact: bool = False, **naming: Any
    ) -> CacheReply: ...

    async def lift(self, prompt: Prompt | None = None, *, start: int | None = None, **naming: Any) -> CacheReply: ...

    async def pin(self, prompt: Prompt, *, require_exact: bool = False, **naming: Any) -> CacheReply: ...

    async def lease(
        self, prompt: Prompt, ttl_s: float, *, require_exact: bool = False, **naming: Any
    ) -> CacheReply: ...

    async def unpin(self, pin_id: str) -> CacheReply: ...

    async def prewarm(self, prompt: Prompt, **naming: Any) -> CacheReply: ...

    async def reset(self, *, force: bool = False) -> CacheReply: ...

    def audit(self, limit: int) -> list[CacheReply]: ...

    def stats(self) -> CacheStats: ...


class KVEvents(Protocol):
    """What is cached and forgotten, as JSON."""

    def subscribe_json(self, start: int | None = None) -> AsyncIterator[bytes]: ...


class Engine(Protocol):
    """The public face of `AsyncEngine` that the routes use."""

    @property
    def cache(self) -> Cache: ...

    @property
    def kv_events(self) -> KVEvents | None: ...

    @property
    def determinism(self) -> Determinism: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def default_sampling(self) -> Mapping[str, object]: ...

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def sampling_params(self, **overrides: object) -> SamplingParams: ...

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        determinism: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Stream: ...

    async def submit_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> Sequence[Stream | EngineError]: ...

    async def render(
        self,
        prompt: Prompt,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]: ...

    def metrics_text(self) -> bytes: ...

    def health(self) -> str: ...

    async def drain(self, timeout_s: float) -> object: ...
