"""Layer operations and paged attention of the native kernels against plain numpy in float64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from aioengine.fastcore import native

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@pytest.fixture(params=native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ptr(array: NDArray[np.generic] | None) -> int:
    return 0 if array is None else array.ctypes.data


# ---- norms and activations -------------------------------------------------------------------------------


def rms_reference(x: NDArray[np.floating], w: Floats, eps: float) -> NDArray[np.float64]:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


@pytest.mark.parametrize("dim", [1, 7, 64, 100, 576])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_rms_norm(isa: str, rows: int, dim: int) -> None:
    x, w = normal(rows, dim), normal(dim, seed=1)
    y = np.empty_like(x)
    native.rms_norm(ptr(x), ptr(w), 1e-5, ptr(y), rows, dim)
    np.testing.assert_allclose(y, rms_reference(x, w, 1e-5), rtol=2e-6, atol=1e-7)
    one = np.empty_like(x[:1])
    native.rms_norm(ptr(x[-1:]), ptr(w), 1e-5, ptr(one), 1, dim)
    np.testing.assert_array_equal(one[0], y[-1])


@pytest.mark.parametrize("dim", [9, 576])
def test_add_rms_norm_updates_the_residual_and_may_write_over_x(isa: str, dim: int) -> None:
    x, residual, w = normal(20, dim), normal(20, dim, seed=1), normal(dim, seed=2)
    expected_sum = x + residual
    native.add_rms_norm(ptr(x), ptr(residual), ptr(w), 1e-6, ptr(x), 20, dim)
    np.testing.assert_array_equal(residual, expected_sum)
    np.testing.assert_allclose(x, rms_reference(expected_sum, w, 1e-6), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dim", [1, 13, 1536])
def test_silu_mul(isa: str, dim: int) -> None:
    gate_up = normal(30, 2 * dim) * 8
    y = np.empty((30, dim), np.float32)
    native.silu_mul(ptr(gate_up), ptr(y), 30, dim)
    gate, up = gate_up[:, :dim].astype(np.float64), gate_up[:, dim:]
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)


def test_silu_mul_at_the_ends_of_the_range(isa: str) -> None:
    gates = np.array([0.0, -0.0, 200.0, -200.0, 88.0, -88.0, 3e38, -3e38, np.inf], np.float32)
    gate_up = np.concatenate([gates, np.ones_like(gates)])
    y = np.empty_like(gates)
    native.silu_mul(ptr(gate_up), ptr(y), 1, len(gates))
    expected = [0, 0, 200, 0, 88, -88 * np.exp(-88.0), 3e38, 0, np.inf]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-36)
    gate_up[0] = np.nan
    native.silu_mul(ptr(gate_up), ptr(y), 1, len(gates))
    assert np.isnan(y[0])


def test_gelu_tanh_mul(isa: str) -> None:
    gate_up = normal(9, 2 * 77) * 4
    y = np.empty((9, 77), np.float32)
    native.gelu_tanh_mul(ptr(gate_up), ptr(y), 9, 77)
    gate, up = gate_up[:, :77].astype(np.float64), gate_up[:, 77:]
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    np.testing.assert_allclose(y, 0.5 * gate * (1 + np.tanh(inner)) * up, rtol=1e-5, atol=2e-6)


def test_exponential_is_accurate_to_two_units_in_the_last_place(isa: str) -> None:
    """silu(x) * (1 / x) is the logistic function; for large -x it is exp(x) up to rounding."""
    x = -np.linspace(18, 80, 20_001).astype(np.float32)
    gate_up = np.concatenate([x, np.ones_like(x)])
    y = np.empty_like(x)
    native.silu_mul(ptr(gate_up), ptr(y), 1, len(x))
    x64 = x.astype(np.float64)
    relative = np.abs(y / (x64 / (1 + np.exp(-x64))) - 1)
    assert relative.max() < 4 * 2.0**-24


# ---- rotary embedding and cache write --------------------------------------------------------------------


def cos_sin_table(max_positions: int, rotary_dim: int) -> Floats:
    frequencies = 10_000.0 ** (-np.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angles = np.outer(np.arange(max_positions), frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotate_reference(x: NDArray[np.float64], cos_sin: Floats) -> NDArray[np.float64]:
    """x [T, heads, D], cos_sin [T, rotary_dim]."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def cache_values(cache: NDArray[np.generic]) -> NDArray[np.float64]:
    if cache.dtype == np.uint16:  # bfloat16
        return (cache.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return cache.astype(np.float64)


KV_TYPES = {
    "float32": (native.KV_FLOAT32, np.float32, 1e-6),
    "float16": (native.KV_FLOAT16, np.float16, 2.0**-11),
    "bfloat16": (native.KV_BFLOAT16, np.uint16, 2.0**-8),
}


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "norm"),
    [(9, 3, 64, 64, False), (4, 2, 40, 24, True), (2, 1, 128, 128, True), (3, 3, 6, 0, False)],
)
def test_rope_and_cache(isa: str, kv_dtype: str, heads: int, kv_heads: int, dim: int, rotary: int, norm: bool) -> None:
    code, numpy_type, tolerance = KV_TYPES[kv_dtype]
    tokens, block_size, blocks = 45, 8, 9
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    rng = np.random.default_rng(1)
    positions = rng.integers(0, 300, tokens).astype(np.int32)
    slots = rng.permutation(blocks * block_size)[:tokens].astype(np.int32)
    slots[[3, 11]] = -1
    table = cos_sin_table(300, rotary)
    if rotary == 0:
        table = np.zeros((300, 1), np.float32)
    q_norm, k_norm = (normal(dim, seed=2), normal(dim, seed=3)) if norm else (None, None)
    cache = np.zeros((blocks, kv_heads, block_size, 2 * dim), numpy_type)
    q = np.empty((tokens, heads, dim), np.float32)
    native.rope_and_cache(
        ptr(qkv), tokens, ptr(positions), ptr(table), ptr(slots), ptr(cache), code,
        ptr(q_norm), ptr(k_norm), 1e-6, ptr(q), heads, kv_heads, dim, rotary, block_size,
    )  # fmt: skip

    parts = qkv.reshape(tokens, heads + 2 * kv_heads, dim).astype(np.float64)
    q64, k64, v64 = np.split(parts, [heads, heads + kv_heads], axis=1)
    if q_norm is not None and k_norm is not None:
        q64, k64 = rms_reference(q64, q_norm, 1e-6), rms_reference(k64, k_norm, 1e-6)
    token_table = table[positions][:, :rotary]
    np.testing.assert_allclose(q, rotate_reference(q64, token_table), rtol=1e-5, atol=2e-6)
    expected = np.zeros((blocks * block_size, kv_heads, 2 * dim))
    kept = slots >= 0
    expected[slots[kept]] = np.concatenate([rotate_reference(k64, token_table), v64], axis=-1)[kept]
    got = cache_values(cache).transpose(0, 2, 1, 3).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_cache_values_are_rounded_to_nearest_even(isa: str, kv_dtype: str) -> None:
    code, numpy_type, _ = KV_TYPES[kv_dtype]
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    patterns[:64] = np.arange(64, dtype=np.uint32) * 0x1000 + 0x3F800000  # ties of both types
    patterns[64:128] = np.arange(64, dtype=np.uint32) * 0x8000 + 0x3F800000
    patterns[128:192] = np.arange(64, dtype=np.uint32) * 0x2000 + 0x33000000  # float16 subnormals
    v = patterns.view(np.float32)
    v = np.where(np.isfinite(v), v, np.float32(1e9)).astype(np.float32)
    dim, tokens = 64, 64
    qkv = np.concatenate([np.zeros((tokens, 2 * dim), np.float32), v.reshape(tokens, dim)], axis=1)
    zeros, slots = np.zeros(tokens, np.int32), np.arange(tokens, dtype=np.int32)
    table, q = cos_sin_table(1, dim), np.empty((tokens, dim), np.float32)
    cache = np.zeros((1, 1, tokens, 2 * dim), numpy_type)
    native.rope_and_cache(
        ptr(qkv), tokens, ptr(zeros), ptr(table), ptr(slots), ptr(cache), code,
        0, 0, 1e-6, ptr(q), 1, 1, dim, dim, tokens,
    )  # fmt: skip
    stored = cache[0, 0, :, dim:].reshape(-1)
    if kv_dtype == "float16":
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(stored, v.astype(np.float16))
    else:
        bits = v.view(np.uint32).astype(np.uint64)
        np.testing.assert_array_equal(stored, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


# ---- attention -------------------------------------------------------------------------------------------


@dataclass
class Pool:
    """Sequences of random keys and values in a paged cache; every slot that holds none of them is NaN."""

    cache: NDArray[np.generic]
    code: int
    table: Ints
    seq_lens: list[int]

    @property
    def shape(self) -> tuple[int, int, int]:
        _, kv_heads, block_size, width = self.cache.shape
        return kv_heads, block_size, width // 2

    def sequence(self, s: int, length: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        kv_heads, block_size, dim = self.shape
        rows = [self.cache[self.table[s, i // block_size], :, i % block_size] for i in range(length)]
        values = cache_values(np.stack(rows))
        return values[..., :dim], values[..., dim:]

    def hide(self, s: int, begin: int, end: int) -> None:
        """Poisons the slots of positions [begin, end)."""
        poison = 0x7FC0 if self.cache.dtype == np.uint16 else np.nan
        block_size = self.shape[1]
        for i in range(begin, end):
            self.cache[self.table[s, i // block_size], :, i % block_size] = poison


def make_pool(seq_lens: list[int], kv_heads: int, dim: int, block_size: int = 16, kv_dtype: str = "float32") -> Pool:
    code, numpy_type, _ = KV_TYPES[kv_dtype]
    rng = np.random.default_rng(sum(seq_lens) + dim)
    width = max(-(-length // block_size) for length in seq_lens)
    num_blocks = len(seq_lens) * width + 1
    table = (rng.permutation(num_blocks - 1)[: len(seq_lens) * width] + 1).reshape(len(seq_lens), width)
    values = rng.standard_normal((num_blocks, kv_heads, block_size, 2 * dim)).astype(np.float32)
    cache: NDArray[np.generic] = (
        (values.view(np.uint32) >> 16).astype(np.uint16) if numpy_type == np.uint16 else values.astype(numpy_type)
    )
    pool = Pool(cache, code, table.astype(np.int32), seq_lens)
    cache[0] = 0x7FC0 if cache.dtype == np.uint16 else np.nan
    for s, length in enumerate(seq_lens):
        pool.hide(s, length, width * block_size)
    return pool


def attend(
    pool: Pool, q: Floats, queries: list[int], lens: list[int] | None = None, rows: list[int] | None = None,
    window: int = 0, softcap: float = 0.0,
) -> Floats:  # fmt: skip
    """q [T, H, D] for `queries[s]` queries at the end of the first lens[s] keys of sequence rows[s]."""
    kv_heads, block_size, dim = pool.shape
    lens = pool.seq_lens if lens is None else lens
    table = np.ascontiguousarray(pool.table if rows is None else pool.table[rows])
    starts = np.cumsum([0, *queries]).astype(np.int32)
    seq_lens = np.array(lens, np.int32)
    q = np.ascontiguousarray(q)
    out = np.full_like(q, np.nan)
    native.paged_attention(
        ptr(q), ptr(pool.cache), pool.code, ptr(table), table.shape[1], ptr(starts), ptr(seq_lens),
        len(queries), q.shape[1], kv_heads, dim, block_size, dim**-0.5, window, softcap, ptr(out),
    )  # fmt: skip
    return out


def dense_reference(
    pool: Pool, s: int, q: Floats, length: int, window: int = 0, softcap: float = 0.0
) -> NDArray[np.float64]:
    k, v = pool.sequence(s, length)
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * q.shape[2] ** -0.5
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    position = np.arange(length - len(q), length)[:, None]
    key = np.arange(length)[None]
    seen = (key <= position) & ((key > position - window) if window else True)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 8, 16), (8, 1, 40, 5), (6, 2, 128, 32), (2, 1, 256, 16), (5, 1, 20, 16)],
)
def test_attention_of_a_mixed_batch(
    isa: str, kv_dtype: str, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    lens, queries = [1, 70, 300, 64, 129, 65], [1, 70, 1, 3, 100, 1]
    pool = make_pool(lens, kv_heads, dim, block_size, kv_dtype)
    q = normal(sum(queries), heads, dim, seed=5)
    out = attend(pool, q, queries)
    start = 0
    for s, (length, count) in enumerate(zip(lens, queries, strict=True)):
        rows = slice(start, start + count)
        np.testing.assert_allclose(out[rows], dense_reference(pool, s, q[rows], length), rtol=3e-5, atol=3e-6)
        start += count


@pytest.mark.parametrize(("window", "softcap"), [(0, 5.0), (1, 0.0), (50, 0.0), (64, 2.0), (290, 0.0), (5000, 0.0)])
def test_window_and_softcap(isa: str, window: int, softcap: float) -> None:
    length, count = 600, 150
    pool = make_pool([length], 2, 64)
    q = normal(count, 4, 64, seed=5) * 3
    expected = dense_reference(pool, 0, q, length, window, softcap)
    if window:  # keys that left the window of all queries may have been given away
        pool.hide(0, 0, max(0, length - count + 1 - window))
    out = attend(pool, q, [count], window=window, softcap=softcap)
    np.testing.assert_allclose(out, expected, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_a_query_is_bitwise_the_same_in_every_chunking_batch_and_thread_count(
    isa: str, kv_dtype: str, window: int
) -> None:
    length = 700
    pool = make_pool([length, 333, 90], 3, 64, kv_dtype=kv_dtype)
    q = normal(length, 9, 64, seed=5)
    native.set_num_threads(1)
    whole = attend(pool, q, [length], [length], [0], window=window)
    for threads in (1, 2, 4):
        native.set_num_threads(threads)
        cuts = [0, 1, 2, 50, 64, 65, 300, 511, 513, 699, 700]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            np.testing.assert_array_equal(
                attend(pool, q[begin:end], [end - begin], [end], [0], window=window), whole[begin:end]
            )
        others = normal(40, 9, 64, seed=6)
        for position in (0, 63, 64, 255, 256, 300, 699):
            mixed = np.concatenate([others[:39], q[position : position + 1], others[39:]])
            out = attend(pool, mixed, [39, 1, 1], [333, position + 1, 90], [1, 0, 2], window=window)
            np.testing.assert_array_equal(out[39], whole[position])


def test_sequences_without_queries_are_skipped() -> None:
    pool = make_pool([40, 30, 20], 1, 16)
    q = normal(3, 2, 16)
    out = attend(pool, q, [0, 3, 0])
    np.testing.assert_allclose(out, dense_reference(pool, 1, q, 30), rtol=3e-5, atol=3e-6)


def test_wrong_shapes_are_refused() -> None:
    pool = make_pool([40], 2, 16)
    q = normal(3, 4, 16)
    with pytest.raises(ValueError, match="has 3 queries but seq_len 2"):
        attend(pool, q, [3], [2])
    with pytest.raises(ValueError, match="does not fit a block table row of 3 blocks"):
        attend(pool, q, [3], [49])
    with pytest.raises(ValueError, match="num_heads must be a positive multiple of num_kv_heads"):
        attend(pool, normal(3, 3, 16), [3])
    pool.code = 7
    with pytest.raises(ValueError, match="kv_dtype=7 is unknown"):
        attend(pool, q, [3])
    with pytest.raises(ValueError, match="rotary_dim=7 must be even"):
        native.rope_and_cache(1, 1, 1, 1, 1, 1, 0, 0, 0, 1e-6, 1, 1, 1, 8, 7, 16)
    with pytest.raises(ValueError, match="w must not be a null address"):
        native.rms_norm(ptr(q), 0, 1e-6, ptr(q), 1, 16)
    with pytest.raises(ValueError, match="dim=0 is not a valid shape"):
        native.silu_mul(ptr(q), ptr(q), 1, 0)


# ---- threads ---------------------------------------------------------------------------------------------


def test_calls_from_several_threads_at_once_do_not_disturb_each_other() -> None:
    native.set_num_threads(3)
    pool = make_pool([500], 3, 64)
    q = normal(100, 9, 64, seed=5)
    expected = attend(pool, q, [100])
    results: list[Floats] = []

    def work() -> None:
        for _ in range(10):
            results.append(attend(pool, q, [100]))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for _ in range(20):
        native.set_num_threads(1)
        native.set_num_threads(3)
    for worker in workers:
        worker.join()
    assert len(results) == 40
    for result in results:
        np.testing.assert_array_equal(result, expected)
