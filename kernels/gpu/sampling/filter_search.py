"""The search for the thresholds of a row's filters, over the list of logits that `row_limits` gathers."""

import triton
import triton.language as tl

from .filter_row import (
    FLOAT_MAX,
    MASS_ONE,
    PARAMETERS,
    coarse_low,
    coarse_pivots,
    lowest_kept,
    mass_of,
    ordered,
    row_scale,
    scaled,
    share_of,
    unordered,
    wanted_of,
)


@triton.jit
def _weights_above(
    list_ptr,
    length,
    pivots,  # i32[PIVOTS]
    low,  # i32
    high,  # i32
    top,
    temperature,
    inverse,
    center,
    reach,
    BY_DISTANCE: tl.constexpr,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Return the mass or number of tokens above each pivot, and the least and greatest key in (low, high]."""
    above = tl.zeros([PIVOTS], tl.int64)
    least = high
    most = low
    for start in range(0, length, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < length
        x = tl.load(list_ptr + offs, mask=mask, other=float("-inf"))
        z = scaled(x, top, temperature, inverse)
        distance = tl.abs(z - center)
        mask = mask & (distance <= reach)
        key = ordered(tl.where(distance == 0.0, 0.0, -distance) if BY_DISTANCE else x)
        weight = tl.where(mask, mass_of(z) if BY_MASS else 1, 0)
        weight = tl.where(key[:, None] > pivots[None, :], weight[:, None], 0)
        above += tl.sum(weight, axis=0)
        inside = mask & (key > low) & (key <= high)
        least = tl.minimum(least, tl.min(tl.where(inside, key, high), axis=0))
        most = tl.maximum(most, tl.max(tl.where(inside, key, low), axis=0))
    return above, least, most


@triton.jit
def _search(
    list_ptr,
    length,
    target,  # i64
    low,  # i32: nothing at or below it is kept
    high,  # i32: the highest key there is
    top,
    temperature,
    inverse,
    center,
    reach,
    BY_DISTANCE: tl.constexpr,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Find the key above which tokens are kept: those with less than `target` strictly above them."""
    step = tl.arange(0, PIVOTS)
    part = tl.maximum(step - 2, 0).to(tl.float32) / (PIVOTS - 2)
    while high > low + 1:
        # Three pivots quarter the integers, so that every pass at least halves them; the others divide the
        # floats, over which logits are spread more evenly.
        quarters = low + ((high.to(tl.int64) - low) * (step + 1) // 4).to(tl.int32)
        first = tl.maximum(unordered(low), -FLOAT_MAX)
        evenly = ordered(first * (1.0 - part) + unordered(high) * part)
        pivots = tl.where(step < 3, quarters, evenly)
        pivots = tl.minimum(tl.maximum(pivots, low), high - 1)
        above, least, most = _weights_above(
            list_ptr, length, pivots, low, high, top, temperature, inverse, center, reach,
            BY_DISTANCE, BY_MASS, BLOCK, PIVOTS,
        )  # fmt: skip
        too_low = tl.max(tl.where(above >= target, pivots, low), axis=0)
        high_enough = tl.min(tl.where(above >= target, high, pivots), axis=0)
        # A threshold may lie anywhere between two neighbouring keys of the list.
        low = tl.maximum(too_low, least - 1)
        high = tl.maximum(tl.minimum(high_enough, most), low + 1)
    return low


@triton.jit(do_not_specialize=["flags"], do_not_specialize_on_alignment=PARAMETERS)
def search_kernel(
    maxima_ptr,
    moments_ptr,
    temperature_ptr,
    min_p_ptr,
    sigmas_ptr,
    typical_ptr,
    top_k_ptr,
    top_p_ptr,
    sums_ptr,
    list_ptr,
    limits_ptr,  # f32[n, NUM_LIMITS]
    flags,
    NUM_LIMITS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Find one row's limits by typical_p, top_k and top_p. Each filter works on the tokens that are left."""
    row = tl.program_id(0).to(tl.int64)
    typical, top_k, top_p = wanted_of(typical_ptr, top_k_ptr, top_p_ptr, row, flags, SIZE)
    top, temperature, inverse = row_scale(maxima_ptr, temperature_ptr, row, NUM_BLOCKS, BLOCKS)
    lowest_z, low = lowest_kept(top, moments_ptr, sigmas_ptr, min_p_ptr, row, flags, NUM_BLOCKS, BLOCKS)
    sums_ptr += row * (2 * PIVOTS + 2)
    list_ptr += row * SIZE
    length = tl.load(sums_ptr + 2 * PIVOTS + 1).to(tl.int32)
    high = ordered(top)
    center = tl.full([], 0.0, tl.float32)
    reach = tl.full([], 1000.0, tl.float32)
    if typical < 1.0:
        total = tl.full([], 0, tl.int64)
        drop = tl.full([], 0, tl.int64)
        for start in range(0, length, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(list_ptr + offs, mask=offs < length, other=float("-inf"))
            z = scaled(x, top, temperature, inverse)
            total += tl.sum(tl.where(offs < length, mass_of(z), 0), axis=0)
            # exp(z) * -z is at most 1 / e, so that it adds up as mass does.
            drop += tl.sum(tl.where(offs < length, (tl.exp(z) * -z * MASS_ONE).to(tl.int64), 0), axis=0)
        # Surprise is log(sum) - z: its distance to the entropy, its mean, is the distance of z to the mean z.
        center = -(drop.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)).to(tl.float32)
        near = _search(
            list_ptr, length, tl.maximum(share_of(typical, total), 1), ordered(-reach),
            tl.full([], 0, tl.int32), top, temperature, inverse, center, reach,
            True, True, BLOCK, PIVOTS,
        )  # fmt: skip
        reach = -unordered(near + 1)
    elif top_k < SIZE or top_p < 1.0:
        pivots = coarse_pivots(maxima_ptr, top, row, NUM_BLOCKS, BLOCKS, PIVOTS)
        low = coarse_low(sums_ptr, pivots, low, typical, top_k, top_p, PIVOTS, SIZE)
    if top_k < SIZE:
        low = _search(
            list_ptr, length, top_k.to(tl.int64), low, high, top, temperature, inverse, center, reach,
            False, False, BLOCK, PIVOTS,
        )  # fmt: skip
    if top_p < 1.0:
        total = tl.load(sums_ptr + 2 * PIVOTS)
        if top_k < SIZE or typical < 1.0:
            kept, _, _ = _weights_above(
                list_ptr, length, low + tl.zeros([PIVOTS], tl.int32), low, high, top, temperature, inverse,
                center, reach, False, True, BLOCK, PIVOTS,
            )  # fmt: skip
            total = tl.max(kept, axis=0)
        low = _search(
            list_ptr, length, tl.maximum(share_of(top_p, total), 1), low, high,
            top, temperature, inverse, center, reach, False, True, BLOCK, PIVOTS,
        )  # fmt: skip
    limits_ptr += row * NUM_LIMITS
    tl.store(limits_ptr, top)
    tl.store(limits_ptr + 1, temperature)
    tl.store(limits_ptr + 2, inverse)
    tl.store(limits_ptr + 3, unordered(tl.minimum(low, high - 1) + 1))
    tl.store(limits_ptr + 4, lowest_z)
    tl.store(limits_ptr + 5, center)
    tl.store(limits_ptr + 6, reach)
