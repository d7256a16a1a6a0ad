"""Packed matrices and their product: exact weights, float32 sums, bitwise independence of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from aioengine.fastcore import native

QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
KINDS = ["F32", "F16", "BF16", *QUANTIZED]
# Byte offsets of the float16 fields of a block; any other byte may have any value.
HALF_FIELDS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip

Floats = NDArray[np.float32]


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


def random_bytes(kind: str, n: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16"):
        return rng.standard_normal((n, k)).astype(np.float32 if kind == "F32" else np.float16).view(np.uint8)
    if kind == "BF16":
        floats = rng.standard_normal((n, k)).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (n, k // block_weights, block_bytes), dtype=np.uint8)
    for offset in HALF_FIELDS[kind]:
        halves = (rng.standard_normal(blocks.shape[:2]) / 16).astype(np.float16)
        blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def reference_weights(kind: str, data: NDArray[np.uint8]) -> Floats:
    return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]), dtype=np.float32)


def pack(kind: str, n: int, k: int, seed: int = 0) -> native.PackedMatrix:
    return native.PackedMatrix.pack(kind, random_bytes(kind, n, k, seed), n, k)


def product(x: Floats, weights: native.PackedMatrix, bias: Floats | None = None) -> Floats:
    y = np.full((len(x), weights.n), np.nan, np.float32)
    bias_ptr = 0 if bias is None else bias.ctypes.data
    native.matmul(x.ctypes.data, len(x), x.shape[1], weights, bias_ptr, y.ctypes.data, weights.n)
    return y


def random_rows(m: int, k: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_equal_the_reference_dequantization_bit_for_bit(kind: str) -> None:
    data = random_bytes(kind, 37, 512)
    weights = native.PackedMatrix.pack(kind, data, 37, 512).dequantize()
    np.testing.assert_array_equal(weights, reference_weights(kind, data))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (37, 512), (50, 1280)])
def test_product_is_that_of_the_dequantized_weights(isa: str, kind: str, n: int, k: int) -> None:
    weights = pack(kind, n, k)
    dense = weights.dequantize().astype(np.float64)
    bias = random_rows(1, n, 2)[0]
    for m in (1, 2, 3, 4, 7, 11, 16, 31):
        x = random_rows(m, k)
        y = product(x, weights, bias)
        # Sums of k rounded products: an error of a few roundings of the sum of magnitudes.
        bound = 2e-6 * (np.abs(x).astype(np.float64) @ np.abs(dense).T + np.abs(bias))
        assert np.all(np.abs(y - (x @ dense.T + bias)) <= bound)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_one_in_x_reads_one_exact_weight(isa: str, kind: str) -> None:
    weights = pack(kind, 50, 256)
    for m in (1, 5, 40):
        x = np.zeros((m, 256), np.float32)
        columns = np.arange(m) * 7 % 256
        x[np.arange(m), columns] = 1.0
        np.testing.assert_array_equal(product(x, weights), weights.dequantize()[:, columns].T)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("k", [1, 3, 15, 17, 61])
def test_float_weights_take_any_k(isa: str, kind: str, k: int) -> None:
    weights = pack(kind, 19, k)
    for m in (1, 3, 13, 30):
        x = random_rows(m, k)
        np.testing.assert_allclose(product(x, weights), x @ weights.dequantize().T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_bitwise_the_same_in_every_batch_and_thread_count(isa: str, kind: str) -> None:
    n, k = 200, 1280  # 13 panels, the last one partial; more inputs than one dequantized block holds
    weights = pack(kind, n, k)
    bias = random_rows(1, n, 2)[0]
    x = random_rows(70, k)
    native.set_num_threads(1)
    alone = np.concatenate([product(x[i : i + 1], weights, bias) for i in range(len(x))])
    rng = np.random.default_rng(3)
    for threads in (1, 2, 3, 4):
        native.set_num_threads(threads)
        for m in [*range(2, 20), 29, 33, 64, 70]:
            rows = rng.choice(len(x), m, replace=False)
            np.testing.assert_array_equal(product(np.ascontiguousarray(x[rows]), weights, bias), alone[rows])


def test_levels_with_fused_multiply_add_agree_bit_for_bit() -> None:
    fused = [name for name in native.available_isas() if name != "generic"]
    weights, x = pack("Q4_K", 77, 512), random_rows(9, 512)
    before = native.isa()
    results = []
    for name in fused:
        native.set_isa(name)
        results.append(product(x, weights))
    native.set_isa(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_concat_stacks_outputs_of_any_kind(isa: str) -> None:
    shapes = [("Q4_1", 40), ("Q8_0", 5), ("Q6_K", 64), ("F16", 17)]
    parts = [pack(kind, n, 256, seed) for seed, (kind, n) in enumerate(shapes)]
    fused = native.PackedMatrix.concat(parts)
    assert (fused.n, fused.k, fused.kind) == (126, 256, "Q4_1+Q8_0+Q6_K+F16")
    assert fused.nbytes == sum(part.nbytes for part in parts)
    bias = random_rows(1, 126, 2)[0]
    starts = np.cumsum([0, 40, 5, 64, 17])
    for m in (1, 6, 50):
        x = random_rows(m, 256)
        expected = [
            product(x, part, np.ascontiguousarray(bias[a:b]))
            for part, a, b in zip(parts, starts, starts[1:], strict=False)
        ]
        np.testing.assert_array_equal(product(x, fused, bias), np.concatenate(expected, axis=1))
    np.testing.assert_array_equal(fused.dequantize(), np.concatenate([part.dequantize() for part in parts]))


def test_strides_leave_the_gaps_alone(isa: str) -> None:
    weights = pack("Q4_0", 33, 64)
    for m in (1, 4, 40):
        x = random_rows(m, 64 + 9)
        y = np.full((m, 33 + 5), 7.0, np.float32)
        native.matmul(x.ctypes.data, m, 73, weights, 0, y.ctypes.data, 38)
        np.testing.assert_array_equal(y[:, :33], product(np.ascontiguousarray(x[:, :64]), weights))
        assert np.all(y[:, 33:] == 7.0)


def test_rows_gives_whole_outputs_by_index() -> None:
    table = native.PackedMatrix.concat([pack("Q8_0", 20, 96, 1), pack("Q4_1", 30, 96, 2)])
    ids = np.array([49, 0, 19, 20, 20, 7] * 5, np.int32)
    out = np.empty((len(ids), 96), np.float32)
    table.rows(ids.ctypes.data, len(ids), out.ctypes.data)
    np.testing.assert_array_equal(out, table.dequantize()[ids])
    ids[3] = 50
    with pytest.raises(IndexError, match=r"row 50 is outside \[0, 50\)"):
        table.rows(ids.ctypes.data, len(ids), out.ctypes.data)


def test_no_rows_is_no_work() -> None:
    weights = pack("Q4_0", 16, 32)
    native.matmul(0, 0, 32, weights, 0, 0, 16)
    weights.rows(0, 0, 0)


def test_packed_size_stays_near_the_stored_size() -> None:
    data = random_bytes("Q4_1", 576, 576)
    assert native.PackedMatrix.pack("Q4_1", data, 576, 576).nbytes == data.nbytes


def test_read_only_weights_can_be_packed() -> None:
    data = random_bytes("Q4_1", 16, 64)
    data.flags.writeable = False
    assert native.PackedMatrix.pack("Q4_1", data, 16, 64).kind == "Q4_1"


def test_wrong_weights_are_refused_by_name_and_size() -> None:
    data = random_bytes("Q4_1", 4, 64)
    with pytest.raises(ValueError, match="kind='Q3_K' cannot be packed; known kinds are F32"):
        native.PackedMatrix.pack("Q3_K", data, 4, 64)
    with pytest.raises(ValueError, match="take 200 bytes, but 160 were given"):
        native.PackedMatrix.pack("Q4_1", data, 5, 64)
    with pytest.raises(ValueError, match="k must be a multiple of 32"):
        native.PackedMatrix.pack("Q4_1", data, 4, 63)
    with pytest.raises(ValueError, match="not a valid matrix shape"):
        native.PackedMatrix.pack("Q4_1", data, 0, 64)
    with pytest.raises(TypeError):
        native.PackedMatrix.pack("F32", np.zeros((4, 64), np.float32), 4, 64)
    with pytest.raises(ValueError, match="same k"):
        native.PackedMatrix.concat([pack("Q4_0", 4, 64), pack("Q4_0", 4, 32)])
    with pytest.raises(ValueError, match="at least one"):
        native.PackedMatrix.concat([])


def test_wrong_sizes_and_null_addresses_are_refused() -> None:
    weights, x, y = pack("Q4_0", 16, 32), random_rows(1, 32), np.zeros((1, 16), np.float32)
    with pytest.raises(ValueError, match="ldx=31 is below k=32"):
        native.matmul(x.ctypes.data, 1, 31, weights, 0, y.ctypes.data, 16)
    with pytest.raises(ValueError, match="ldy=15 is below n=16"):
        native.matmul(x.ctypes.data, 1, 32, weights, 0, y.ctypes.data, 15)
    with pytest.raises(ValueError, match="m=-1"):
        native.matmul(x.ctypes.data, -1, 32, weights, 0, y.ctypes.data, 16)
    with pytest.raises(ValueError, match="x must not be a null address"):
        native.matmul(0, 1, 32, weights, 0, y.ctypes.data, 16)
    with pytest.raises(ValueError, match="num_threads=0"):
        native.set_num_threads(0)
    with pytest.raises(ValueError, match="isa 'avx9' is not available here"):
        native.set_isa("avx9")
