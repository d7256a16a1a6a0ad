"""The same work done by `transformers`, in the same process: float32, its own `generate`, greedy.

The baseline of `aioengine bench transformers`. It dequantizes the GGUF file to float32 at load.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

from aioengine.bench.workloads import PEER_WORK, random_prompts
from aioengine.cli.flags import engine_config
from aioengine.config import usable_cores
from aioengine.errors import InvalidConfig
from aioengine.model_source import resolve_model


class TransformersPeer:
    """A loaded model.

    Raises:
        InvalidConfig: the engine's model is no GGUF file.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        config = engine_config(args)
        path = resolve_model(config.model).path
        if path is None or path.suffix != ".gguf":
            raise InvalidConfig("`bench transformers` needs a GGUF model", param="model")
        torch.set_num_threads(config.runtime.num_threads or usable_cores())
        self._model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self._model.train(False)
        self._vocab_size = int(self._model.config.vocab_size)

    def measure(self, repeats: int) -> list[dict[str, float]]:
        """Tokens per second by workload: a warm-up, then one run per repeat."""
        return [
            {
                name: work.num_tokens / self._generate_s(work.batch_size, work.input_len, work.output_len, repeat)
                for name, work in PEER_WORK.items()
            }
            for repeat in range(repeats + 1)
        ]

    def _generate_s(self, batch_size: int, input_len: int, output_len: int, seed: int) -> float:
        prompts = torch.tensor(random_prompts(batch_size, input_len, self._vocab_size, 100 * batch_size + seed))
        begun = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
            )
        return time.perf_counter() - begun
