"""The names of cached blocks that two engines give: which agree, which must not, and how that is chosen."""

from __future__ import annotations

import logging

import pytest

from aioengine.errors import InvalidConfig
from tests.engine.conftest import MakeEngine


async def block_hash(make_engine: MakeEngine, **options: object) -> bytes:
    """The name that a new engine gives a block."""
    async with make_engine(**options) as engine:
        hasher = engine._scheduler.kv.hasher
        assert hasher is not None
        return hasher.chain([1, 2], 2)[0]


@pytest.mark.parametrize(
    ("algo", "seed", "agree"),
    [
        ("xxh3_128", None, False),
        ("xxh3_128", "random", False),
        ("xxh3_128", "7", True),
        ("sha256", None, True),
        ("sha256", "7", True),
    ],
)
async def test_engines_agree_where_they_may_share_a_cache(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    algo: str,
    seed: str | None,
    agree: bool,
) -> None:
    """B5, INV-03: always with sha256, else only if PYTHONHASHSEED is set; that they do not is said at start."""
    caplog.set_level(logging.INFO, "aioengine.engine")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    one, other = [await block_hash(make_engine, prefix_caching_hash_algo=algo) for _ in range(2)]
    assert (one == other) == agree and len(one) == (32 if algo == "sha256" else 16)
    told = [r.levelno for r in caplog.records if "other processes cannot share this prefix cache" in r.message]
    assert told == ([] if agree else [logging.INFO] * 2)
    if seed == "7":
        monkeypatch.setenv("PYTHONHASHSEED", "8")
        assert await block_hash(make_engine, prefix_caching_hash_algo=algo) != one


@pytest.mark.parametrize(("options", "is_warned"), [({}, True), ({"prefix_caching_hash_algo": "sha256"}, False)])
async def test_whoever_tells_others_of_a_random_root_is_warned(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, object],
    is_warned: bool,
) -> None:
    """INV-03: hashes leave the process in KV events, where a router would compare those of several processes."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    await block_hash(make_engine, kv_events_config='{"enable_kv_cache_events": true}', **options)
    warned = [
        r for r in caplog.records if r.levelno == logging.WARNING and "block hashes have a random root" in r.message
    ]
    assert len(warned) == is_warned


async def test_a_hash_that_nobody_has_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidConfig, match="prefix_caching_hash_algo='md5'"):
        await block_hash(make_engine, prefix_caching_hash_algo="md5")
