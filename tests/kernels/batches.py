"""Random paged batches with a dense float64 answer, and step buffers packed the slow way.

Used by the kernel tests and by `bench/gpu_kernels.py`. A batch holds every sequence's keys and values twice:
contiguous, for the dense answer, and scattered over shuffled blocks of a cache that is NaN elsewhere, so that
a kernel that reads a slot nobody owns is caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expectation; NaN or infinity gives infinity."""
    expected = expected.double().to(out.device)
    error = (out.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    return error.item() if bool(torch.isfinite(error)) else float("inf")


def random_like_activations(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(dtype)


@dataclass
class PagedBatch:
    q: torch.Tensor  # [T_padded, H * D]
    kv_cache: torch.Tensor  # [blocks, KH, block_size, 2D]
    block_table: torch.Tensor  # [S_padded, max_blocks]
    query_start_loc: torch.Tensor  # [S_padded + 1]
    seq_lens: torch.Tensor  # [S_padded]
    keys: list[torch.Tensor]  # per row [seq_len, KH, D]
    values: list[torch.Tensor]
    query_lens: list[int]
    num_heads: int

    def dense(
        self,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The answer in float64, one row and one head after another; padding rows are zero."""
        num_kv_heads, head_dim = self.kv_cache.shape[1], self.kv_cache.shape[3] // 2
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        token = 0
        for keys, values, query_len in zip(self.keys, self.values, self.query_lens, strict=True):
            seq_len = keys.shape[0]
            behind = torch.arange(seq_len - query_len, seq_len, device=out.device)[:, None]
            behind = behind - torch.arange(seq_len, device=out.device)[None, :]  # query minus key position
            hidden = (behind < 0) | (behind >= window) if window else behind < 0
            for head in range(self.num_heads):
                kv_head = head // (self.num_heads // num_kv_heads)
                part = slice(head * head_dim, (head + 1) * head_dim)
                scores = self.q[token : token + query_len, part].double() @ keys[:, kv_head].double().T * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp().masked_fill(hidden, 0.0)
                total = weights.sum(dim=1)
                if sinks is not None:
                    total = total + sinks[head].double().exp()
                out[token : token + query_len, part] = weights @ values[:, kv_head].double() / total[:, None]
            token += query_len
        return out

    def poison_before(self, window: int) -> None:
        """NaN before the window of each row's first query; entries of blocks that are out name a block of NaN."""
        block_size = self.kv_cache.shape[2]
        poisoned = self.kv_cache.shape[0]
        self.kv_cache = torch.cat((self.kv_cache, torch.full_like(self.kv_cache[:1], float("nan"))))
        for row, (keys, query_len) in enumerate(zip(self.keys, self.query_lens, strict=True)):
            first = max(0, keys.shape[0] - query_len - window + 1)
            full, part = divmod(first, block_size)
            self.kv_cache[self.block_table[row, full].long(), :, :part] = float("nan")
            self.block_table[row, :full] = poisoned


def paged_batch(
    lens: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    padding_tokens: int = 0,
    padding_rows: int = 0,
    spare_blocks: int = 3,
) -> PagedBatch:
    """A batch of (context length, query length) rows; the null block holds large finite values."""
    generator = torch.Generator(device).manual_seed(seed)
    seq_lens = [context + query for context, query in lens]
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    max_blocks = max(counts, default=0) + 2
    num_blocks = 1 + sum(counts) + spare_blocks
    order = (1 + torch.randperm(num_blocks - 1, generator=generator, device=device)).tolist()
    cache = torch.full((num_blocks, num_kv_heads, block_size, 2 * head_dim), float("nan"), dtype=dtype, device=device)
    cache[0] = 3e4
    rows = len(lens) + padding_rows
    table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
    keys, values = [], []
    for row, seq_len in enumerate(seq_lens):
        shape = (seq_len, num_kv_heads, head_dim)
        keys.append(random_like_activations(*shape, dtype=dtype, generator=generator))
        values.append(random_like_activations(*shape, dtype=dtype, generator=generator))
        blocks = [order.pop() for _ in range(counts[row])]
        table[row, : counts[row]] = torch.tensor(blocks, dtype=torch.int32, device=device)
        for logical, block in enumerate(blocks):
            part = slice(logical * block_size, min((logical + 1) * block_size, seq_len))
            size = part.stop - part.start
            cache[block, :, :size, :head_dim] = keys[row][part].transpose(0, 1)
            cache[block, :, :size, head_dim:] = values[row][part].transpose(0, 1)
    query_lens = [query for _, query in lens]
    num_tokens = sum(query_lens)
    starts = [0]
    for query_len in query_lens + [0] * padding_rows:
        starts.append(starts[-1] + query_len)
    width = num_heads * head_dim
    return PagedBatch(
        q=random_like_activations(num_tokens + padding_tokens, width, dtype=dtype, generator=generator),
        kv_cache=cache,
        block_table=table,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens + [0] * padding_rows, dtype=torch.int32, device=device),
        keys=keys,
        values=values,
        query_lens=query_lens,
        num_heads=num_heads,
    )
