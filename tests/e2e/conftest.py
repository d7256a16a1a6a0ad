"""What the end-to-end tests compare with: `transformers` on the same file, and our library on its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from aioengine.config import EngineConfig
from aioengine.engine import AsyncEngine
from tests.e2e.answers import Answer, Reference, answer_together, generate_references
from tests.e2e.prompts import PROMPTS


@dataclass(frozen=True)
class Library:
    """What the library makes of all prompts with its default options."""

    prompt_ids: dict[str, list[int]]
    answers: dict[str, Answer]


@pytest.fixture(scope="session")
def library(smollm2_path: Path) -> Library:
    async def run() -> Library:
        async with AsyncEngine(EngineConfig(model=str(smollm2_path))) as engine:
            prompt_ids = {name: await engine.render(prompt) for name, prompt in PROMPTS.items()}
            return Library(prompt_ids, await answer_together(engine, PROMPTS))

    return asyncio.run(run())


@pytest.fixture(scope="session")
def references(smollm2_path: Path, library: Library) -> dict[str, Reference]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would be faster alone, but spin for minutes when the cores are shared
    try:
        return generate_references(smollm2_path, library.prompt_ids)
    finally:
        torch.set_num_threads(num_threads)
