"""Device functions of the filters: scale, order and mass of a row's logits, and the row's parameters."""

import triton
import triton.language as tl

# Limits of a row, f32 each: see row_limits.row_limits.
NUM_LIMITS = 7
# Parameters of the rows, views at any offset.
PARAMETERS = ("temperature_ptr", "min_p_ptr", "sigmas_ptr", "typical_ptr", "top_k_ptr", "top_p_ptr")

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_INFINITE_KEY = tl.constexpr(-2139095041)  # ordered(-inf)
_FURTHEST = tl.constexpr(300.0)  # exp(-300) is 0 in float32; nothing below matters
MASS_ONE = tl.constexpr(4398046511104.0)  # 2**42


@triton.jit
def finite(x):
    """Map NaN to -inf, +inf to the largest float and -0 to 0, so that all values are ordered."""
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x == 0.0, 0.0, tl.minimum(x, FLOAT_MAX))


@triton.jit
def max_or_nan(x):
    """Return the highest number of a vector; NaN if it contains NaN."""
    is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    return tl.where(is_nan, float("nan"), tl.max(tl.where(x == x, x, float("-inf")), axis=0))


@triton.jit
def load_finite(logits_ptr, offs, SIZE: tl.constexpr):
    """Load logits and make them `finite`. Entries past the end become -inf."""
    return finite(tl.load(logits_ptr + offs, mask=offs < SIZE, other=float("-inf")))


@triton.jit
def ordered(x):
    """Map float32 to int32 keys in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """Map keys from `ordered` back to float32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def row_scale(maxima_ptr, temperature_ptr, row, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return a row's highest logit, its temperature (clamped to have a finite inverse), and the inverse."""
    offs = tl.arange(0, BLOCKS)
    maxima = tl.load(maxima_ptr + row * NUM_BLOCKS + offs, mask=offs < NUM_BLOCKS, other=float("-inf"))
    top = tl.maximum(tl.max(maxima, axis=0), -FLOAT_MAX)
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.minimum(tl.maximum(temperature, 1.1754943508222875e-38), 1e35)
    return top, temperature, tl.math.div_rn(1.0, temperature)


@triton.jit
def scaled(x, top, temperature, inverse):
    """Return z = (x - top) / temperature, from -300 to 0, without overflow. For -inf, look at x itself."""
    x = tl.maximum(x, tl.maximum(top, 0.0) - FLOAT_MAX)
    return tl.maximum(x - top, temperature * -_FURTHEST) * inverse


@triton.jit
def mass_of(z):
    """Return exp(z) in units of 2**-42."""
    return (tl.exp(z) * MASS_ONE).to(tl.int64)


@triton.jit
def share_of(part, total):
    """Return part * total, rounded up."""
    share = part.to(tl.float64) * total.to(tl.float64)
    floor = share.to(tl.int64)
    return floor + tl.where(floor.to(tl.float64) < share, 1, 0)


@triton.jit
def lowest_kept(
    top, moments_ptr, sigmas_ptr, min_p_ptr, row, flags, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Return the limits of min_p and top_n_sigma: they keep z >= lowest_z, and keys above `low`."""
    min_p = tl.load(min_p_ptr + row, mask=(flags & 1) != 0, other=0.0)
    lowest_z = tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1.1754943508222875e-38)), -1000.0)
    sigmas = tl.load(sigmas_ptr + row, mask=(flags & 2) != 0, other=0.0)
    low = tl.full([], _INFINITE_KEY, tl.int32)
    if sigmas > 0:
        offs = tl.arange(0, BLOCKS)
        mask = offs < NUM_BLOCKS
        places = moments_ptr + (row * NUM_BLOCKS + offs) * 3
        count = tl.load(places, mask=mask, other=0.0)
        mean = tl.load(places + 1, mask=mask, other=0.0)
        squares = tl.load(places + 2, mask=mask, other=0.0)
        total = tl.maximum(tl.sum(count, axis=0), 1.0)
        # Chan, Golub & LeVeque 1979
        away = mean - tl.sum(count * mean, axis=0) / total
        variance = tl.sum(squares + count * away * away, axis=0) / total
        lowest = top.to(tl.float64) - sigmas.to(tl.float64) * tl.sqrt(variance)
        low = ordered(tl.maximum(lowest, -FLOAT_MAX).to(tl.float32)) - 1
    return lowest_z, low


@triton.jit
def wanted_of(typical_ptr, top_k_ptr, top_p_ptr, row, flags, SIZE: tl.constexpr):
    """Return a row's typical_p, top_k and top_p. The value of an unused filter keeps all tokens."""
    typical = tl.load(typical_ptr + row, mask=(flags & 4) != 0, other=1.0)
    top_k = tl.load(top_k_ptr + row, mask=(flags & 8) != 0, other=SIZE)
    top_p = tl.load(top_p_ptr + row, mask=(flags & 16) != 0, other=1.0)
    return typical, tl.maximum(top_k, 1), top_p


@triton.jit
def coarse_pivots(maxima_ptr, top, row, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, PIVOTS: tl.constexpr):
    """Choose keys below the highest logit, denser near it, down to twice the lowest maximum's distance."""
    offs = tl.arange(0, BLOCKS)
    maxima = tl.load(maxima_ptr + row * NUM_BLOCKS + offs, mask=offs < NUM_BLOCKS, other=float("inf"))
    lowest = tl.min(tl.where(maxima > float("-inf"), maxima, float("inf")), axis=0)
    half = 0.5 * top
    reach = tl.minimum(2.0 * (half - 0.5 * tl.minimum(lowest, top)), 1e38)
    part = (tl.arange(0, PIVOTS) + 1).to(tl.float32) / PIVOTS
    return ordered(2.0 * tl.maximum(half - reach * part * part, -0.5 * FLOAT_MAX))


@triton.jit
def coarse_low(sums_ptr, pivots, low, typical, top_k, top_p, PIVOTS: tl.constexpr, SIZE: tl.constexpr):
    """Return the highest pivot with enough logits above it: top_k and top_p keep nothing at or below it."""
    offs = tl.arange(0, PIVOTS)
    if typical >= 1.0:
        if top_k < SIZE:
            enough = tl.load(sums_ptr + offs) >= top_k
            low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), axis=0))
        elif top_p < 1.0:
            target = tl.maximum(share_of(top_p, tl.load(sums_ptr + 2 * PIVOTS)), 1)
            enough = tl.load(sums_ptr + PIVOTS + offs) >= target
            low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), axis=0))
    return low


@triton.jit
def kept_and_scaled(x, limits_ptr):
    """Return which of these logits a row's limits keep, and (x - top) / temperature for all of them."""
    top = tl.load(limits_ptr)
    z = scaled(x, top, tl.load(limits_ptr + 1), tl.load(limits_ptr + 2))
    kept = (x >= tl.load(limits_ptr + 3)) & (z >= tl.load(limits_ptr + 4))
    near = tl.abs(z - tl.load(limits_ptr + 5)) <= tl.load(limits_ptr + 6)
    return kept & near, z
