"""A tiny random Llama with a byte-level tokenizer, engines over it, and the check that nothing stays alive."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from aioengine.config import EngineConfig
from aioengine.engine import AsyncEngine
from tests.oracle.tiny_models import make_model, save_model

BOS, EOS = 0, 1
NUM_SPECIAL = 2
VOCAB_SIZE = NUM_SPECIAL + 256
MAX_LEN = 192

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"

MakeEngine = Callable[..., AbstractAsyncContextManager[AsyncEngine]]


@pytest.fixture(scope="session")
def tiny_model() -> PreTrainedModel:
    return make_model(
        "llama",
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS,
        eos_token_id=EOS,
        max_position_embeddings=MAX_LEN,
        num_hidden_layers=2,
    )


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every byte is a token, so that texts and token ids are easy to tell from each other."""
    folder = save_model(tiny_model, tmp_path_factory.mktemp("engine") / "tiny")
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def make_engine(tiny_folder: Path) -> MakeEngine:
    """Makes engines that are checked before they are closed: no requests, all blocks free, records sound."""

    @asynccontextmanager
    async def make(**options: object) -> AsyncIterator[AsyncEngine]:
        async with AsyncEngine(engine_config(tiny_folder, **options)) as engine:
            yield engine
            if engine.health() in ("ready", "draining"):
                await wait_idle(engine)
                assert_nothing_held(engine)

    return make


@pytest.fixture(autouse=True)
def nothing_stays_alive() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and "asyncio" not in thread.name]
    assert not left


def engine_config(folder: Path, **options: object) -> EngineConfig:
    defaults = {"num_gpu_blocks_override": 65, "max_num_seqs": 16, "num_threads": 1, "log_stats_interval_s": 0.0}
    return EngineConfig(model=str(folder), **{**defaults, **options})


async def wait_idle(engine: AsyncEngine) -> None:
    """Until no step is in flight and no request is left: what was aborted may still be in a running step."""
    async with asyncio.timeout(60):
        while not engine._steps.is_idle:  # noqa: ASYNC110  an idle engine tells nobody
            await asyncio.sleep(0)


def assert_nothing_held(engine: AsyncEngine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks - 1)
    assert len(engine._live) == 0
    engine._scheduler.check_invariants()


def teacher_forced(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of `transformers` at every position of a sequence, [T, V].

    On one thread: so small a model gains nothing from more, and on shared cores they wait for each other.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)
    finally:
        torch.set_num_threads(num_threads)


def prompt_logprobs(model: PreTrainedModel, ids: list[int]) -> list[float]:
    """What `transformers` gives each prompt token but the first."""
    return teacher_forced(model, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
