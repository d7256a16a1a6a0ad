"""An engine with the public face of `AsyncEngine` and no model: it says what its script says, when it may.

Tokens are bytes (ids 0 to 255), `BOS`, `EOS` and a few longer ones. By default a request is answered with
the words of `script`; a test can hold all tokens back (`hold()`, `release(n)`), break the engine after k
tokens, and count what was aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from aioengine.chat import normalize_messages
from aioengine.config import EngineConfig, resolve
from aioengine.determinism import DECLARED, check_demand
from aioengine.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    EngineError,
    InvalidRequest,
    QueueFull,
)
from aioengine.types import (
    FinishReason,
    PositionLogprobs,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    Usage,
)

BOS, EOS = 256, 257
LONG_TOKENS = {258: b" one", 259: b" two", 260: b" three", 261: "🙂".encode()}
VOCAB_SIZE = 262


class FakeTokenizer:
    """Bytes as tokens; BOS in front of a text if special tokens are wanted."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [i for i in token_ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or LONG_TOKENS[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in (BOS, EOS)


@dataclass(frozen=True)
class FakeModelInfo:
    name: str = "fake"
    max_model_len: int = 4096
    architecture: str = "FakeForCausalLM"


@dataclass(frozen=True)
class FakeMemory:
    weights_bytes: int = 3 << 20
    kv_cache_bytes: int = 64 << 20
    num_kv_tokens: int = 12345
    kv_groups: str | None = None
    num_host_blocks: int = 0
    num_host_tokens: int = 0
    host_bytes: int = 0


Script = Callable[[Sequence[int], int], Sequence[int]]
"""Prompt ids and choice index to the token ids of the answer; EOS may be the last."""


def three_words(prompt_ids: Sequence[int], index: int) -> Sequence[int]:
    """ " one two three" and the end token; other choices have a digit behind it."""
    return [258, 259, 260, *(str(index).encode() if index else b""), EOS]


def logprob_of(token_id: int) -> float:
    """A fixed log-probability for every token."""
    return -(token_id % 10) / 8


class FakeStream:
    """The outputs of one request: one per token and choice, in turns."""

    def __init__(self, engine: FakeEngine, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.num_aborts = 0
        self.is_finished = False
        self._engine = engine
        self._closed = asyncio.Event()
        self._outputs = self._generate()

    async def abort(self) -> None:
        self.num_aborts += 1
        self._closed.set()
        self._engine.live.discard(self)
        self._engine.notify()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        return await anext(self._outputs)

    async def _generate(self) -> AsyncIterator[RequestOutput]:
        engine, params = self._engine, self.params
        limit = params.max_tokens if params.max_tokens is not None else engine.model.max_model_len
        answers = [list(engine.script(self.prompt_ids, i)) for i in range(params.n)]
        states = [_Choice(self, i) for i in range(params.n)]
        num_open = len(states)
        step = 0
        while num_open:
            for state, answer in zip(states, answers, strict=True):
                if state.finish_reason is not None:
                    continue
                await engine.next_token(self)
                if self._closed.is_set():
                    return
                state.push(answer[step : step + 1] if step < limit else [])
                if step < len(answer) and answer[step] == EOS and step < limit and not params.ignore_eos:
                    state.finish_reason = "stop"
                elif step + 1 >= min(limit, len(answer)):
                    state.finish_reason = "length"
                if state.finish_reason is not None and engine.finish_reason is not None:
                    state.finish_reason = engine.finish_reason
                num_open -= state.finish_reason is not None
                yield state.output(is_last=num_open == 0, all_states=states)
            step += 1
        self.is_finished = True
        engine.live.discard(self)
        engine.notify()


class _Choice:
    def __init__(self, stream: FakeStream, index: int) -> None:
        self.stream, self.index = stream, index
        self.token_ids: list[int] = []
        self.sent_chars = 0
        self.finish_reason: FinishReason | None = None
        self._new: list[int] = []
        self._is_first = True

    def push(self, token_ids: list[int]) -> None:
        self._new = token_ids
        self.token_ids += token_ids

    def output(self, *, is_last: bool, all_states: Sequence[_Choice]) -> RequestOutput:
        tokenizer, params, engine = self.stream._engine.tokenizer, self.stream.params, self.stream._engine
        raw = b"".join(
            tokenizer.token_bytes(i)
            for i in self.token_ids
            if not (params.skip_special_tokens and tokenizer.is_special(i))
        )
        done = self.finish_reason is not None
        text = raw.decode(errors="replace" if done else "ignore")
        delta, self.sent_chars = text[self.sent_chars :], len(text)
        output = RequestOutput(
            request_id=self.stream.request_id,
            index=self.index,
            delta=delta,
            text=text,
            delta_token_ids=list(self._new),
            token_ids=list(self.token_ids),
            prompt_token_ids=self.stream.prompt_ids,
            finish_reason=self.finish_reason,
        )
        if params.logprobs is not None:
            output.delta_logprobs = [engine.position(i, params.logprobs) for i in self._new]
        if self._is_first and params.prompt_logprobs is not None:
            rest = [engine.position(i, params.prompt_logprobs) for i in self.stream.prompt_ids[1:]]
            output.prompt_logprobs = [None, *rest]
        self._is_first = False
        if is_last:
            generated = sum(len(s.token_ids) for s in all_states)
            output.usage = Usage(len(self.stream.prompt_ids), generated, engine.num_cached_tokens)
        return output


class FakeEngine:
    """See the head of the file."""

    def __init__(self, script: Script = three_words, **defaults: object) -> None:
        self.script = script
        self.model = FakeModelInfo()
        self.tokenizer: FakeTokenizer = FakeTokenizer()
        self.default_sampling: Mapping[str, object] = defaults
        self.determinism = DECLARED["none"]
        self.fingerprint = "0123456789ab"
        self.state = "ready"
        self.num_cached_tokens = 0
        self.max_waiting: int | None = None
        self.submitted: list[FakeStream] = []
        self.num_together: list[int] = []
        """How many prompts each `submit_all` brought."""
        self.options: list[dict[str, object]] = []
        self.live: set[FakeStream] = set()
        self.fail_after: int | None = None
        self.failure: Exception = EngineDead("the engine has failed: broken on purpose")
        self.submit_error: Exception | None = None
        self.finish_reason: FinishReason | None = None
        self.lowest_logprob: float | None = None
        self.num_tokens = 0
        self.num_entered = 0
        self.config = EngineConfig()
        self.resolved = resolve(
            self.config, model_max_len=4096, model_dtype="float32", cuda_available=False, num_cores=2
        )
        self.memory_report = FakeMemory()
        self.startup_timings = {"locate": 0.25, "weights": 0.5}
        self.load_forever = False
        self.drain_timeouts: list[float] = []
        self._gate: asyncio.Semaphore | None = None
        self._waiting = asyncio.Event()
        self._changed = asyncio.Event()

    # ---- steering by tests ------------------------------------------------------------------------------

    def hold(self) -> None:
        """From now on every token needs a `release`."""
        self._gate = asyncio.Semaphore(0)

    def release(self, num_tokens: int) -> None:
        """Lets this many tokens through."""
        assert self._gate is not None
        for _ in range(num_tokens):
            self._gate.release()

    async def wait_blocked(self) -> None:
        """Until some request waits for a token that is held back."""
        await self._waiting.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; looked at whenever a token is made or a request ends."""
        while not condition():
            await self._changed.wait()

    def notify(self) -> None:
        """Something changed; those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def next_token(self, stream: FakeStream) -> None:
        if self.fail_after is not None and self.num_tokens >= self.fail_after:
            raise self.failure
        if self._gate is not None:
            self._waiting.set()
            self.notify()
            waiting = asyncio.ensure_future(self._gate.acquire())
            closed = asyncio.ensure_future(stream._closed.wait())
            try:
                await asyncio.wait((waiting, closed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                closed.cancel()
        else:
            await asyncio.sleep(0)
        self.num_tokens += 1
        self.notify()

    def position(self, token_id: int, num_top: int) -> PositionLogprobs:
        """The fixed log-probabilities; the alternatives are ids 65, 66, …"""

        def token(i: int, rank: int) -> TokenLogprob:
            token_bytes = self.tokenizer.token_bytes(i)
            logprob = logprob_of(i) if self.lowest_logprob is None else self.lowest_logprob
            return TokenLogprob(i, logprob, rank, token_bytes.decode(errors="replace"), token_bytes)

        top = tuple(token(65 + r, r + 1) for r in range(max(num_top, 0)))
        return PositionLogprobs(token(token_id, 7), top)

    # ---- the public face --------------------------------------------------------------------------------

    async def __aenter__(self) -> FakeEngine:
        self.num_entered += 1
        if self.load_forever:
            await asyncio.Event().wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.state = "closed"

    def sampling_params(self, **overrides: object) -> SamplingParams:
        given = {name: value for name, value in overrides.items() if value is not None}
        return SamplingParams(**{**self.default_sampling, **given})  # type: ignore[arg-type]

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
    ) -> FakeStream:
        if self.state == "dead":
            raise EngineDead("the engine has failed")
        if self.state != "ready":
            raise EngineClosed(f"the engine takes no requests: it is {self.state}")
        if self.submit_error is not None:
            raise self.submit_error
        if self.max_waiting is not None and len(self.live) >= self.max_waiting:
            raise QueueFull("too many requests are waiting")
        chat = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "add_special_tokens": add_special_tokens,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        ids = await self.render(prompt, **chat)  # type: ignore[arg-type]
        params = params or self.sampling_params()
        check_demand(determinism, self.determinism, params)
        if len(ids) + (params.max_tokens or 1) > self.model.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens, max_model_len is {self.model.max_model_len}",
                param="prompt",
            )
        if priority:
            raise InvalidRequest("priority needs --scheduling-policy priority", param="priority")
        stream = FakeStream(self, request_id or "fake", ids, params)
        self.submitted.append(stream)
        self.options.append({**chat, "cache_salt": cache_salt, "prompt": prompt})
        self.live.add(stream)
        self.notify()
        return stream

    async def submit_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[FakeStream | EngineError]:
        found: list[FakeStream | EngineError] = []
        for prompt, its_params in zip(prompts, params, strict=True):
            try:
                found.append(await self.submit(prompt, its_params))
            except EngineError as error:
                found.append(error)
        self.num_together.append(len(found))
        return found

    async def render(
        self,
        prompt: Prompt,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens is not False) if prompt else []
        elif prompt and isinstance(prompt[0], Mapping):
            messages = normalize_messages(prompt)  # type: ignore[arg-type]
            if any(message["role"] == "nobody" for message in messages):
                raise InvalidRequest("the chat template refuses: no such role", param="messages")
            text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
            text += "assistant: " if add_generation_prompt else ""
            ids = [BOS, *text.encode()]
        else:
            ids = list(prompt)  # type: ignore[arg-type]
            if any(not 0 <= i < VOCAB_SIZE for i in ids):
                raise InvalidRequest("prompt has a token id outside the vocabulary", param="prompt")
        if not ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", param="prompt")
        return ids

    def metrics_text(self) -> bytes:
        return b"# HELP aioengine_up Whether it runs.\n# TYPE aioengine_up gauge\naioengine_up 1.0\n"

    def health(self) -> str:
        return self.state

    async def drain(self, timeout_s: float) -> bool:
        self.state = "draining"
        self.notify()
        self.drain_timeouts.append(timeout_s)
        await self.wait_until(lambda: not self.live)
        return True


def assert_all_settled(engine: FakeEngine) -> None:
    """Every request was closed exactly once, and none is live."""
    assert not engine.live
    assert [s.num_aborts for s in engine.submitted] == [1] * len(engine.submitted)
