"""Sampling on the GPU without a sort, with the results of the references in `sampling.py`.

    argmax            greedy choice of rows [S, V]: lowest id on ties, NaN counts as greatest
    gumbel            the noise of the seeded draw, for `choose.py`
    filter_threshold  min-p, top-k and top-p as one threshold per row, by search over values

Rows are cut over the device where one pass suffices, and owned by one program each where a search needs many
passes (a row of 152k float32 logits stays in L2). Results never depend on the batch: sums inside a row have a
fixed order, and no atomics are used. Used by `choose.py` and `score.py`.
"""

from __future__ import annotations

import torch

from .jit import jit, launch_options, let_next_start, require_kernels, tl, triton, wait_for_inputs


@jit
def sortable(x):
    """int32 that order like the float32 x, NaN above everything."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: one zero instead of two
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def _log2(x, APPROXIMATE: tl.constexpr):
    """The hardware's logarithm, absolute error about 1e-7 near 1; the interpreter has none."""
    if APPROXIMATE:
        return tl.extra.cuda.libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@jit
def gumbel(seed, position, first, GROUPS: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Noise of the tokens first .. first + 4 GROUPS (first a multiple of 4); see `sampling.py`.

    -log(1 - u) loses its digits to the subtraction where u is small: its series serves there.
    """
    counter = (first // 4 + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = tl.zeros([GROUPS], tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, counter, zero + position.to(tl.uint32), zero, zero)
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3)).reshape([4 * GROUPS])  # token order
    signed = words.to(tl.int32, bitcast=True)
    folded = tl.where(signed < 0, ~signed, signed)
    u = tl.maximum(folded.to(tl.float32) * 4.6566127342e-10, 2.3283064365386963e-10)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
    e = tl.where(u < 0.03125, series, -0.6931471805599453 * _log2(1.0 - u, APPROXIMATE))
    return -0.6931471805599453 * _log2(e, APPROXIMATE)


@jit(varying=["blocks_per_program"])
def _best_of_chunk_kernel(
    x_ptr, keys_ptr, vocab_size, blocks_per_program, stride_x_row, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (row, chunk): the greatest key among the tokens of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    start = tl.program_id(1) * blocks_per_program * BLOCK
    # per lane the first index of the greatest key; then over lanes by (key, lower index)
    best = tl.full([BLOCK], -0x80000000, tl.int32)
    best_index = start + tl.arange(0, BLOCK)
    for first in range(start, tl.minimum(start + blocks_per_program * BLOCK, vocab_size), BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < vocab_size
        x = tl.load(x_ptr + row * stride_x_row + index, mask=mask, other=float("-inf")).to(tl.float32)  # [BLOCK]
        key = tl.where(mask, sortable(x), -0x80000000)
        is_better = key > best
        best = tl.where(is_better, key, best)
        best_index = tl.where(is_better, index, best_index)
    keys = (best.to(tl.int64) << 32) | (0x7FFFFFFF - best_index).to(tl.int64)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(keys, axis=0))


@jit(varying=["num_chunks"])
def _best_of_row_kernel(keys_ptr, ids_ptr, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    chunk = tl.arange(0, BLOCK)
    lowest = -0x7FFFFFFFFFFFFFFF
    keys = tl.load(keys_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=lowest)  # [BLOCK]
    tl.store(ids_ptr + row, 0x7FFFFFFF - (tl.max(keys, axis=0) & 0xFFFFFFFF))


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Index of the greatest value per row of x [S, V], int64 [S]."""
    require_kernels(x.device)
    num_rows, vocab_size = x.shape
    if x.stride(1) != 1:
        raise ValueError("logits must be contiguous along the vocabulary")
    ids = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    if num_rows == 0:
        return ids
    block = 2048
    blocks = triton.cdiv(vocab_size, block)
    chunks = min(blocks, max(1, 1056 // num_rows), 1024)
    blocks_per_program = triton.cdiv(blocks, chunks)
    chunks = triton.cdiv(blocks, blocks_per_program)
    keys = torch.empty((num_rows, chunks), dtype=torch.int64, device=x.device)
    options = launch_options(x.device)
    _best_of_chunk_kernel[(num_rows, chunks)](
        x, keys, vocab_size, blocks_per_program, x.stride(0), BLOCK=block, num_warps=8, **options
    )
    _best_of_row_kernel[(num_rows,)](keys, ids, chunks, BLOCK=triton.next_power_of_2(blocks), num_warps=1, **options)
    return ids


@jit
def _mass_above(
    z_ptr,
    slots,
    vocab_size,
    low,
    step,
    floor,
    z_max,
    BY_MASS: tl.constexpr,
    IN_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What lies at or above low + step, low + 2 step, low + 3 step: mass and number of the values >= floor.

    Of the row in memory, or of the values collected in `slots` [SLOTS, WIDTH], the rest being -inf.
    """
    mass1 = tl.zeros([WIDTH], tl.float32)
    mass2 = mass1
    mass3 = mass1
    count1 = tl.zeros([WIDTH], tl.int32)
    count2 = count1
    count3 = count1
    for first in range(0, 1 if IN_SLOTS else vocab_size, 4 * WIDTH):
        if IN_SLOTS:
            z = slots
        else:
            index = first + tl.arange(0, 4)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            z = tl.load(z_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)  # [4, WIDTH]
        above1, above2, above3 = z >= low + step, z >= low + 2 * step, z >= low + 3 * step
        if BY_MASS:
            weight = tl.where(z >= floor, tl.exp(z - z_max), 0.0)
            mass1 += tl.sum(tl.where(above1, weight, 0.0), axis=0)
            mass2 += tl.sum(tl.where(above2, weight, 0.0), axis=0)
            mass3 += tl.sum(tl.where(above3, weight, 0.0), axis=0)
        count1 += tl.sum(above1.to(tl.int32), axis=0)
        count2 += tl.sum(above2.to(tl.int32), axis=0)
        count3 += tl.sum(above3.to(tl.int32), axis=0)
    num1, num2, num3 = tl.sum(count1, axis=0), tl.sum(count2, axis=0), tl.sum(count3, axis=0)
    if BY_MASS:
        return tl.sum(mass1, axis=0), tl.sum(mass2, axis=0), tl.sum(mass3, axis=0), num1, num2, num3
    else:
        return num1.to(tl.float32), num2.to(tl.float32), num3.to(tl.float32), num1, num2, num3


@jit
def _separating(
    z_ptr,
    slots,
    vocab_size,
    low,
    high,
    num_low,
    floor,
    z_max,
    target,
    BY_MASS: tl.constexpr,
    IN_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A value at or above which lie exactly the tokens that reach `target` when taken from the top, ties together.

    At least `target` lies at or above `low`, less at or above `high`; `num_low` values are >= low. Quarters the
    interval until one value is left in it, or no float32 lies between its ends. Returns it and the number above.
    """
    num_high = 0
    step = (high - low) * 0.25
    while (num_low - num_high > 1) & (low + 2 * step > low) & (low + 2 * step < high):
        mass1, mass2, mass3, num1, num2, num3 = _mass_above(
            z_ptr, slots, vocab_size, low, step, floor, z_max, BY_MASS, IN_SLOTS, WIDTH
        )
        pivot1, pivot2, pivot3 = low + step, low + 2 * step, low + 3 * step
        if mass3 >= target:
            low, num_low = pivot3, num3
        elif mass2 >= target:
            low, num_low, high, num_high = pivot2, num2, pivot3, num3
        elif mass1 >= target:
            low, num_low, high, num_high = pivot1, num1, pivot2, num2
        else:
            high, num_high = pivot1, num1
        step = (high - low) * 0.25
    return low, num_low


@jit
def _nucleus(z_ptr, slots, vocab_size, low, beyond, z_max, top_p, IN_SLOTS: tl.constexpr, WIDTH: tl.constexpr):
    """The top-p threshold among the values >= low."""
    total, _, _, num_low, _, _ = _mass_above(z_ptr, slots, vocab_size, low, 0.0, low, z_max, True, IN_SLOTS, WIDTH)
    nucleus, _ = _separating(
        z_ptr, slots, vocab_size, low, beyond, num_low, low, z_max, total * top_p, True, IN_SLOTS, WIDTH
    )
    return nucleus


@jit
def _collect(z_ptr, vocab_size, low, WIDTH: tl.constexpr):
    """The values >= low of each lane's column, [4, WIDTH] filled with -inf, and the most that one lane met."""
    nothing = tl.full([WIDTH], float("-inf"), tl.float32)
    slot0, slot1, slot2, slot3 = nothing, nothing, nothing, nothing
    met = tl.zeros([WIDTH], tl.int32)
    for first in range(0, vocab_size, 4 * WIDTH):
        for part in tl.static_range(4):
            index = first + part * WIDTH + tl.arange(0, WIDTH)
            z = tl.load(z_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)  # [WIDTH]
            is_met = z >= low
            slot3 = tl.where(is_met, slot2, slot3)
            slot2 = tl.where(is_met, slot1, slot2)
            slot1 = tl.where(is_met, slot0, slot1)
            slot0 = tl.where(is_met, z, slot0)
            met += is_met.to(tl.int32)
    pairs = tl.join(tl.join(slot0, slot1), tl.join(slot2, slot3)).reshape([WIDTH, 4])
    return tl.trans(pairs), tl.max(met, axis=0)


@jit
def _filter_threshold_kernel(
    z_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    threshold_ptr,
    vocab_size,
    stride_z_row,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    z_ptr += row * stride_z_row
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    greatest = tl.full([WIDTH], float("-inf"), tl.float32)
    least = tl.full([WIDTH], float("inf"), tl.float32)
    num_finite = tl.zeros([WIDTH], tl.int32)
    for first in range(0, vocab_size, 4 * WIDTH):
        index = first + tl.arange(0, 4)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        z = tl.load(z_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)  # [4, WIDTH]
        is_finite = z > float("-inf")
        greatest = tl.maximum(greatest, tl.max(z, axis=0))
        least = tl.minimum(least, tl.min(tl.where(is_finite, z, float("inf")), axis=0))
        num_finite += tl.sum(is_finite.to(tl.int32), axis=0)
    z_max = tl.max(greatest, axis=0)
    z_min = tl.min(least, axis=0)
    count = tl.sum(num_finite, axis=0)
    beyond = z_max + 1.0 + tl.abs(z_max) * 1e-6  # above every value
    threshold = z_max + tl.log(min_p)
    none = tl.zeros([4, WIDTH], tl.float32)
    num_left = count
    if (top_k < count) & (z_min < z_max):  # with fewer finite values, the k-th is -inf and filters nothing
        wanted = top_k.to(tl.float32)
        kth, num_left = _separating(
            z_ptr, none, vocab_size, z_min, beyond, count, z_min, z_max, wanted, False, False, WIDTH
        )
        threshold = tl.maximum(threshold, kth)
    if (top_p < 1.0) & (z_min < z_max):
        low = tl.maximum(threshold, z_min)
        most_met = 5
        slots = none
        if num_left <= WIDTH // 4:  # few enough to be held in registers, unless one lane met too many
            slots, most_met = _collect(z_ptr, vocab_size, low, WIDTH)
        if most_met <= 4:
            nucleus = _nucleus(z_ptr, slots, vocab_size, low, beyond, z_max, top_p, True, WIDTH)
        else:
            nucleus = _nucleus(z_ptr, slots, vocab_size, low, beyond, z_max, top_p, False, WIDTH)
        threshold = tl.maximum(threshold, nucleus)
    tl.store(threshold_ptr + row, threshold)


def filter_threshold(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The lowest logit that survives min-p, then top-k, then top-p, float32 [S]; see `filter_threshold_ref`.

    The threshold may lie between two logits: what survives is the same, up to rounding of the mass.
    """
    require_kernels(z.device)
    num_rows, vocab_size = z.shape
    threshold = torch.empty(num_rows, dtype=torch.float32, device=z.device)
    if num_rows == 0:
        return threshold
    _filter_threshold_kernel[(num_rows,)](
        z,
        top_k,
        top_p,
        min_p,
        threshold,
        vocab_size,
        z.stride(0),
        WIDTH=min(4096, triton.next_power_of_2(vocab_size)),
        num_warps=32 if vocab_size > 4096 else 4,
        **launch_options(z.device),
    )
    return threshold
