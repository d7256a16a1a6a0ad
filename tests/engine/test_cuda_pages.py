"""Pinned pages beside a pool on a GPU: contents, order of copies, memory; and the whole engine over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from aioengine import AsyncEngine, SamplingParams, cuda_pages
from aioengine.cuda_pages import CudaPages, _runs
from aioengine.kernels.block_pack import pack_blocks_ref, unpack_blocks_ref
from aioengine.kv_host_tier import KVHostTier
from aioengine.kv_layout import make_layout
from aioengine.kv_spec import FullAttentionSpec
from tests.engine.test_cuda_runner import Family, family, gpu_config
from tests.models.tiny import random_prompt
from tests.oracle.streams import Streams

__all__ = ["family"]


def test_neighbours_travel_together() -> None:
    assert list(_runs([])) == []
    assert list(_runs([4, 5, 6, 2, 1, 9, 10])) == [(0, 4, 3), (3, 2, 1), (4, 1, 1), (5, 9, 2)]


class Model:
    """What pool and slots must hold after each call, whenever the device gets to it."""

    def __init__(self, pages: CudaPages, pool: list[torch.Tensor], num_slots: int) -> None:
        self.pages, self.pool = pages, pool
        self.blocks = [layer.cpu().clone() for layer in pool]
        self.slots: list[list[torch.Tensor] | None] = [None] * num_slots

    def step(self, draw: random.Random, write: Callable[[int, float], None], value: float) -> None:
        """A step that writes to a block, then a store or a load of some blocks."""
        written = draw.randrange(1, len(self.blocks[0]))
        write(written, value)
        for layer in self.blocks:
            layer[written] = value
        count = draw.randint(1, 5)
        if draw.random() < 0.5:
            blocks = draw.sample(range(1, len(self.blocks[0])), count)
            slots = draw.sample(range(len(self.slots)), count)
            self.pages.store(blocks, slots)
            for block, slot in zip(blocks, slots, strict=True):
                self.slots[slot] = [layer[block].clone() for layer in self.blocks]
            return
        full = [i for i, slot in enumerate(self.slots) if slot is not None]
        slots = draw.sample(full, min(count, len(full)))
        if slots:
            blocks = draw.sample(range(1, len(self.blocks[0])), len(slots))
            self.pages.load(slots, blocks)
            for block, slot in zip(blocks, slots, strict=True):
                for layer, held in zip(self.blocks, self.slots[slot] or [], strict=True):
                    layer[block] = held

    def check(self) -> None:
        for got, want in zip(self.pool, self.blocks, strict=True):
            assert torch.equal(got.cpu(), want)


SPEC = FullAttentionSpec(block_size=2, num_kv_heads=1, head_dim=4, itemsize=4)
LAYOUT = make_layout([SPEC] * 3, max_model_len=64, max_step_tokens=64)
NUM_SLOTS, NUM_BLOCKS = 9, 12


def pool_on(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn((NUM_BLOCKS, *LAYOUT.page_shape(layer))).to(device) for layer in range(3)]


@pytest.mark.parametrize("staged", [2, 256])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_order_the_streams_allow_contents_are_those_asked_for(
    monkeypatch: pytest.MonkeyPatch, seed: int, staged: int
) -> None:
    """Slots, blocks and buffers are used again at once, while the device is far behind."""
    streams, draw = Streams(monkeypatch, seed), random.Random(seed)

    class Packer:
        """The reference, put on the current stream."""

        def __init__(self, caches: list[torch.Tensor]) -> None:
            self.caches = caches

        def pack(self, block_ids: Sequence[int], staging: torch.Tensor) -> None:
            streams.enqueue(lambda: pack_blocks_ref(torch.tensor(block_ids), self.caches, staging))

        def unpack(self, staging: torch.Tensor, block_ids: Sequence[int]) -> None:
            streams.enqueue(lambda: unpack_blocks_ref(staging, torch.tensor(block_ids), self.caches))

        def close(self) -> None:
            self.caches = []

    monkeypatch.setattr(cuda_pages, "BlockPacker", Packer)
    monkeypatch.setattr(cuda_pages, "MAX_STAGED", staged)
    pinned: list[int] = []
    monkeypatch.setattr(cuda_pages, "_pin", lambda memory: pinned.append(memory.data_ptr()))
    monkeypatch.setattr(cuda_pages, "_unpin", lambda memory: pinned.remove(memory.data_ptr()))
    pool, compute = pool_on(torch.device("cpu")), streams.stream()
    pages = CudaPages(LAYOUT, NUM_SLOTS, pool, compute)
    pages.warm_up()
    model = Model(pages, pool, NUM_SLOTS)

    def write(block: int, value: float) -> None:
        with torch.cuda.stream(compute):
            streams.enqueue(lambda: [layer[block].fill_(value) for layer in pool])

    for step in range(80):
        model.step(draw, write, float(step))
        streams.run_some(draw.randint(0, 12))
    streams.run_all()
    model.check()
    assert len(pinned) == 1
    pages.close()
    pages.close()
    assert pinned == []


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [2, 256])
def test_copies_on_the_gpu_are_done_in_the_order_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, staged: int
) -> None:
    monkeypatch.setattr(cuda_pages, "MAX_STAGED", staged)
    device, draw = torch.device("cuda"), random.Random(staged)
    pool, compute = pool_on(device), torch.cuda.Stream(device)
    ballast = torch.randn((2048, 2048), device=device)
    torch.cuda.synchronize()
    pages = CudaPages(LAYOUT, NUM_SLOTS, pool, compute)
    pages.warm_up()
    model = Model(pages, pool, NUM_SLOTS)

    def write(block: int, value: float) -> None:
        nonlocal ballast
        with torch.cuda.stream(compute):
            ballast = ballast @ ballast / 2048  # the host runs ahead
            for layer in pool:
                layer[block].fill_(value)

    for step in range(80):
        model.step(draw, write, float(step))
    pages.blank([3, 5])
    for layer in model.blocks:
        layer[3] = layer[5] = 0
    torch.cuda.synchronize()
    model.check()
    pages.close()
    pages.close()


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("ahead", [False, True])
async def test_a_prefix_on_the_gpu_is_loaded_and_answers_are_those_of_the_model(
    family: Family, level: int, ahead: bool
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [random_prompt(100, seed=seed) for seed in range(6)]
    config = gpu_config(
        str(family.folder),
        optimization_level=level,
        async_scheduling=ahead,
        num_gpu_blocks_override=20,  # two of the prompts
        kv_offloading_size=0.05,
    )

    async def answer(engine: AsyncEngine, prompt: list[int]) -> tuple[list[int], int]:
        outputs = [output async for output in await engine.submit(prompt, params)]
        assert outputs[-1].usage is not None
        return outputs[-1].token_ids, outputs[-1].usage.cached_tokens

    async with AsyncEngine(config) as engine:
        tier = engine._loaded.runner.connector
        assert isinstance(tier, KVHostTier) and isinstance(tier._pages, CudaPages)
        for turn in range(3):
            for prompt in prompts:
                ids, num_cached = await answer(engine, prompt)
                assert num_cached == (96 if turn else 0)
                with torch.no_grad():
                    logits = family.reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
                chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
                assert bool((logits.max(-1).values - chosen < 0.03).all())  # float16 may swap near-ties
        stats = engine.stats().connector
        assert stats is not None and stats.num_loaded_blocks >= 2 * 6 * 4
    assert not tier._pages._unpin.alive and tier._pages._memory.numel() == 0, "host memory is still pinned"
