"""Hand-made step plans: what the scheduler would pack, with the chunks, blocks and rows that a test wants."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aioengine.fastcore.step_buffer import VERSION
from aioengine.kernels import step as layout
from aioengine.sampling_plan import compile_sampling
from aioengine.types import SamplingParams

SAMPLE, PROMPT_LOGITS, JOINED = 1, 2, 4


@dataclass(eq=False)
class FakeRequest:
    """The attributes of a request that a runner reads."""

    prompt: list[int]
    sampling: object
    outputs: list[int] = field(default_factory=list)
    row: int = -1
    tables: list[list[int]] = field(default_factory=list)
    """Blocks by group; 0 where a block was given back."""
    num_sent_blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    """Samples in flight, those that follow a draft included, as if all drafts were accepted."""
    scores_prompt: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    def token_ids(self) -> NDArray[np.int32]:
        return np.array(self.prompt + self.outputs, np.int32)


@dataclass
class FakePlan:
    buffer: NDArray[np.int32]
    requests: list[FakeRequest]
    sample_requests: list[FakeRequest]
    joined: list[FakeRequest]
    left_rows: list[int]

    @property
    def num_samples(self) -> int:
        return len(self.sample_requests)


class Planner:
    """Packs plans; blocks are handed out in a shuffled order, rows lowest first.

    What a window of `kv_groups` has left goes back when a step is planned, and into `given_back`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int = 8,
        seed: int = 0,
        kv_groups: Sequence[tuple[str, int, int]] = (("full", 0, 1),),
    ) -> None:
        self.kv_groups = kv_groups
        self.max_num_seqs = max_num_seqs
        self.given_back: list[int] = []
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.free_blocks = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.left_rows: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.num_rejected = [0] * max_num_seqs
        """By row: drafts whose rejection `update` was told of."""
        self.step_id = 0

    def request(self, prompt: Sequence[int], params: SamplingParams | None = None) -> FakeRequest:
        params = params or SamplingParams(temperature=0.0)
        plan = compile_sampling(params, None, self.vocab_size, (), 0, 0)
        request = FakeRequest(list(prompt), plan, scores_prompt=params.prompt_logprobs is not None)
        request.tables = [[] for _ in self.kv_groups]
        return request

    def sibling(self, request: FakeRequest, num_shared: int) -> FakeRequest:
        """One that continues after the first tokens of another: full blocks shared, the next one copied."""
        known = request.prompt + request.outputs
        assert num_shared <= request.num_computed and num_shared % self.block_size and len(self.kv_groups) == 1
        sibling = FakeRequest(known[: num_shared + 1], request.sampling, num_computed=num_shared)
        full = num_shared // self.block_size
        sibling.tables = [[*request.tables[0][:full], self.free_blocks.pop()]]
        self.copies.append((request.tables[0][full], sibling.tables[0][full]))
        return sibling

    def _place(self, request: FakeRequest, start: int, end: int) -> list[tuple[int, int, int]]:
        """Blocks for the tokens start .. end in all groups; the updates that tell the device."""
        updates = []
        for g, ((kind, reach, scale), table) in enumerate(zip(self.kv_groups, request.tables, strict=True)):
            size = self.block_size * scale
            first_read = {"full": 0, "sliding": start - reach + 1, "chunked": start // max(reach, 1) * reach}[kind]
            for i in range(min(max(0, first_read) // size, len(table))):
                if table[i]:
                    self.given_back.append(table[i])
                    self.free_blocks.insert(0, table[i])
                    table[i] = 0
            while len(table) * size < end:
                table.append(self.free_blocks.pop())
            new = range(request.num_sent_blocks[g], len(table))
            updates += [(g * self.max_num_seqs + request.row, i, table[i]) for i in new]
            request.num_sent_blocks[g] = len(table)
        return updates

    def plan(
        self, chunks: Mapping[FakeRequest, int], drafts: Mapping[FakeRequest, Sequence[int]] | None = None
    ) -> FakePlan:
        """A step in which each request computes this many of its tokens, in this order, and its drafts behind them."""
        rows, tokens, updates, joined, samples, num_drafts = [], [], [], [], [], 0
        for request, num_new in chunks.items():
            flags = 0
            if request.row < 0:
                request.row = self.free_rows.pop()
                request.num_sent_blocks = [0] * len(self.kv_groups)
                joined.append(request)
                flags |= JOINED
            known = request.prompt + request.outputs + [-1] * request.num_in_flight
            drafted = list((drafts or {}).get(request, ()))
            start, end = request.num_computed, request.num_computed + num_new + len(drafted)
            assert end <= len(known) + len(drafted)
            updates += self._place(request, start, end)
            num_outputs = len(request.outputs) + request.num_in_flight
            sample_index = -1
            if end == len(known) + len(drafted):
                flags |= SAMPLE | len(drafted) << layout.DRAFTS_SHIFT
                sample_index = len(samples)
                samples += [request] * (1 + len(drafted))
                request.num_in_flight += 1 + len(drafted)
                num_drafts += len(drafted)
            if request.scores_prompt and start < len(request.prompt):
                flags |= PROMPT_LOGITS
            rejected = self.num_rejected[request.row]
            rows.append((request.row, len(tokens), end - start, start, flags, sample_index, num_outputs, rejected))
            tokens += (known + drafted)[start:end]
            request.num_computed = end
        header = [0] * layout.HEADER_WORDS
        header[layout.VERSION], header[layout.STEP_ID] = VERSION, self.step_id
        header[layout.NUM_ROWS], header[layout.NUM_TOKENS] = len(rows), len(tokens)
        header[layout.NUM_SAMPLES], header[layout.NUM_BLOCK_UPDATES] = len(samples), len(updates)
        header[layout.NUM_DRAFTS] = num_drafts
        words = [header, *rows]
        header[layout.OFF_ROWS] = layout.HEADER_WORDS
        header[layout.OFF_TOKENS] = layout.HEADER_WORDS + layout.ROW_WORDS * len(rows)
        header[layout.OFF_BLOCKS] = header[layout.OFF_TOKENS] + len(tokens)
        words += [tokens, *updates]
        header[layout.OFF_COPIES] = sum(map(len, words))
        header[layout.NUM_COPIES] = len(self.copies)
        words += self.copies
        self.copies = []
        header[layout.TOTAL_WORDS] = sum(map(len, words))
        buffer = np.array([word for part in words for word in part], np.int32)
        left_rows, self.left_rows = self.left_rows, []
        self.step_id += 1
        return FakePlan(buffer, list(chunks), samples, joined, left_rows)

    def update(self, plan: FakePlan, token_ids: Sequence[int]) -> None:
        for request, token_id in zip(plan.sample_requests, token_ids, strict=True):
            request.num_in_flight -= 1
            if token_id >= 0:
                request.outputs.append(int(token_id))
            else:  # it followed a rejected draft
                request.num_computed -= 1
                self.num_rejected[request.row] += 1

    def leave(self, request: FakeRequest) -> None:
        """Takes row and blocks back; a request that joins again computes everything anew."""
        self.left_rows.append(request.row)
        self.free_rows.append(request.row)
        self.free_blocks += [block for table in request.tables for block in table if block]
        request.row, request.tables, request.num_computed = -1, [[] for _ in self.kv_groups], 0
