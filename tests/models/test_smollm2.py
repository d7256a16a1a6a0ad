"""The default model on its quantized weights against transformers on the same weights, dequantized.

Every prompt runs at once through the scheduler and the CPU runner, in steps of at most 48 tokens. The
reference reads a prompt with our continuation once: the continuation is greedy if each of its tokens is the
most likely one there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from aioengine.checkpoint import load_checkpoint
from aioengine.config import EngineConfig, resolve
from aioengine.device import CpuDevice
from aioengine.fastcore.request import Request
from aioengine.fastcore.scheduler import Scheduler
from aioengine.kv_layout import layout_of
from aioengine.loader import load_model, make_runner
from aioengine.sampler import RowLogprobs, compile_sampling
from aioengine.tokenizer import load_tokenizer
from aioengine.types import SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 48
TEXTS = {
    "story": "Once upon a time, in a village by the sea, there lived",
    "chat": "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n",
    "unicode": "Die Straße nach 東京 führt über naïve Cafés — und weiter: ",
    "numbers": "1, 1, 2, 3, 5, 8, 13,",
    "long": "The quick brown fox jumps over the lazy dog near the old stone bridge. " * 45,
}


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Iterator[PreTrainedModel]:
    model = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)
    yield model.eval()


Answer = tuple[list[int], list[int], list[RowLogprobs], list[RowLogprobs]]


@pytest.fixture(scope="module")
def answers(smollm2_path: Path) -> dict[str, Answer]:
    """Per text: prompt, greedy output, log-probabilities of the output and of the prompt."""
    config = EngineConfig(
        model=str(smollm2_path), device="cpu", max_num_batched_tokens=48, num_gpu_blocks_override=200, block_size=8
    )
    checkpoint = load_checkpoint(config.model)
    resolved = resolve(config, model_max_len=1024, model_dtype="float32", cuda_available=False, num_cores=2)
    tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    device = CpuDevice(resolved)
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0)
    requests, found = {}, {}
    for name, text in TEXTS.items():
        prompt = tokenizer.encode(text, add_special_tokens=False)
        requests[name] = Request(
            name,
            prompt,
            max_tokens=NUM_TOKENS,
            wants_prompt_logits=True,
            sampling=compile_sampling(params, None, checkpoint.config.vocab_size, (), 0, 0),
        )
        found[name] = (prompt, [], [])

    async def run() -> dict[str, Answer]:
        loaded = load_model(checkpoint, resolved, device)
        runner = make_runner(loaded, layout_of(loaded.spec, resolved), resolved, config.cache, device)
        scheduler = Scheduler(
            num_blocks=runner.memory.num_blocks,
            block_size=resolved.block_size,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
        )
        for request in requests.values():
            scheduler.add(request)
        while (plan := scheduler.schedule()) is not None:
            result = await runner.launch(plan)
            assert result.failures is None
            for i, request in enumerate(plan.sample_requests):
                assert result.logprobs is not None
                found[request.request_id][1].append(result.logprobs[i])
            for i, entries in (result.prompt_logprobs or {}).items():
                found[plan.requests[i].request_id][2].extend(entries)
            scheduler.update(plan, result.token_ids)
        await runner.close()
        return {
            name: (prompt, requests[name].output_ids_from(0), outputs, prompts)
            for name, (prompt, outputs, prompts) in found.items()
        }

    return asyncio.run(run())


@pytest.mark.parametrize("name", TEXTS)
def test_greedy_tokens_and_logprobs_equal_the_reference(
    reference: PreTrainedModel, answers: dict[str, Answer], name: str
) -> None:
    prompt, output, output_logprobs, prompt_logprobs = answers[name]
    assert len(output) == NUM_TOKENS
    with torch.no_grad():
        expected = reference(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
    continued = expected[len(prompt) - 1 : -1]
    assert output == continued.argmax(-1).tolist()
    for i, entry in enumerate(output_logprobs):
        best = continued[i].topk(2)
        assert entry.top_ids.tolist() == best.indices.tolist()
        np.testing.assert_allclose(entry.top_logprobs, best.values.numpy(), atol=1e-3)
    given = expected[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [entry.token_id for entry in prompt_logprobs] == prompt[1:]
    np.testing.assert_allclose([entry.logprob for entry in prompt_logprobs], given.numpy(), atol=1e-3)


def test_a_long_prompt_is_among_them(answers: dict[str, Answer]) -> None:
    assert max(len(prompt) for prompt, *_ in answers.values()) > 600
