"""Draws of a token for each row: the argmax of (logit - highest) / temperature + Gumbel noise.

The argmax with Gumbel noise is a draw from the softmax (Gumbel 1954; Maddison et al. 2014), without a softmax
or a sum. A token's noise depends on (seed, position, token) only, whatever else is in the batch: Philox
4x32-10 (Salmon et al. 2011) gives 64 bits, of which `gumbel` makes a float32 by operations that IEEE 754
rounds in one way. None are contracted: the noise is bitwise equal to that of the reference, `kernels.gumbel`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_contiguous
from ...gumbel import LN_2, LOG_POLYNOMIAL, SMALL_POLYNOMIAL, SQRT_HALF_BITS
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable
from .filter_row import NUM_LIMITS, kept_and_scaled, load_finite, max_or_nan, row_scale, scaled
from .row_limits import BLOCK, BlockMaxima, Filters, check_vocabulary, row_limits

_LN_2 = tl.constexpr(LN_2)
_SQRT_HALF_BITS = tl.constexpr(SQRT_HALF_BITS)
_LOG_POLYNOMIAL = tl.constexpr(LOG_POLYNOMIAL)
_SMALL_POLYNOMIAL = tl.constexpr(SMALL_POLYNOMIAL)


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, DEGREE: tl.constexpr):
    """Evaluate a polynomial by Horner's rule, rounding each product and each sum."""
    value = x * 0.0 + COEFFICIENTS[DEGREE]
    for i in tl.static_range(DEGREE):
        value = value * x + COEFFICIENTS[DEGREE - 1 - i]
    return value


@triton.jit
def _log(x):
    """Return the logarithm of a normal float32 above 0; see gumbel.py."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    rest = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return exponent.to(tl.float32) * _LN_2 + rest * _polynomial(rest, _LOG_POLYNOMIAL, 8)


@triton.jit
def gumbel(high, low):
    """Make Gumbel noise from 64 random bits, given as u32 high and low."""
    bits = (high.to(tl.int64) << 32) | low.to(tl.int64)
    near = ((bits ^ (bits >> 63)) | 1).to(tl.float32) * 5.421010862427522e-20
    log_near = _log(near)
    small = -(log_near + near * _polynomial(near, _SMALL_POLYNOMIAL, 7))
    return tl.where(bits >= 0, small, -_log(-log_near))


@triton.jit(do_not_specialize_on_alignment=["seeds_ptr", "positions_ptr", "temperature_ptr"])
def _best_kernel(
    logits_ptr,
    seeds_ptr,
    positions_ptr,
    temperature_ptr,
    maxima_ptr,  # f32[n, NUM_BLOCKS]
    limits_ptr,  # f32[n, NUM_LIMITS], or None: all tokens are kept
    scores_ptr,  # f32[n, NUM_BLOCKS]
    tokens_ptr,  # i32[n, NUM_BLOCKS]
    stride_row: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_LIMITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best score in one block of a row, and the first token that has it."""
    HALF: tl.constexpr = BLOCK // 2
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * NUM_BLOCKS + block
    highest = tl.load(maxima_ptr + place)
    if limits_ptr is not None:
        limits_ptr += row * NUM_LIMITS
        hopeless = highest < tl.load(limits_ptr + 3)
    else:
        top, temperature, inverse = row_scale(maxima_ptr, temperature_ptr, row, NUM_BLOCKS, BLOCKS)
        # Noise lies between -3.8 and 44.4: a token so far below the highest cannot win.
        hopeless = scaled(highest, top, temperature, inverse) < -50.0
    if hopeless:
        tl.store(scores_ptr + place, float("-inf"))
        tl.store(tokens_ptr + place, block * BLOCK)
        return
    # Two tokens half a block apart share four words of Philox.
    first = block * BLOCK + tl.arange(0, HALF)
    position = tl.load(positions_ptr + row)
    counter = block * HALF + tl.arange(0, HALF)
    zero = counter * 0
    is_greedy = tl.load(temperature_ptr + row + zero) == 0.0
    a, b, c, d = tl.philox(
        tl.load(seeds_ptr + row),
        counter,
        zero + position.to(tl.int32),
        zero + (position >> 32).to(tl.int32),
        zero,
    )
    best = tl.full([], float("-inf"), tl.float32)
    token = block * BLOCK
    for half in tl.static_range(2):
        offs = first + half * HALF
        x = load_finite(logits_ptr + row * stride_row, offs, SIZE)
        if limits_ptr is not None:
            kept, z = kept_and_scaled(x, limits_ptr)
            kept = kept | (is_greedy & (x > float("-inf")))
        else:
            kept, z = x > float("-inf"), scaled(x, top, temperature, inverse)
        noise = gumbel(a, b) if half == 0 else gumbel(c, d)
        score = tl.where(kept, z + tl.where(is_greedy, 0.0, noise), float("-inf"))
        best_here = tl.max(score, axis=0)
        token_here = tl.min(tl.where(score == best_here, offs, SIZE), axis=0)
        # In a tie the smaller token wins, which is in the first half.
        token = tl.where(best_here > best, token_here, token)
        best = tl.maximum(best, best_here)
    tl.store(scores_ptr + place, best)
    tl.store(tokens_ptr + place, token)


@triton.jit(do_not_specialize_on_alignment=["out_ptr", "row_highest_ptr"])
def _pick_kernel(
    scores_ptr,  # f32[n, NUM_BLOCKS]
    tokens_ptr,  # i32[n, NUM_BLOCKS]
    highest_ptr,  # f32[n, NUM_BLOCKS], or None
    out_ptr,  # i64[n]
    row_highest_ptr,  # f32[n], or None
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Pick the best of one row's blocks; the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCKS)
    mask = offs < NUM_BLOCKS
    score = tl.load(scores_ptr + row * NUM_BLOCKS + offs, mask=mask, other=float("-inf"))
    token = tl.load(tokens_ptr + row * NUM_BLOCKS + offs, mask=mask, other=0x7FFFFFFF)
    best = tl.max(score, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0).to(tl.int64))
    if highest_ptr is not None:
        highest = tl.load(highest_ptr + row * NUM_BLOCKS + offs, mask=mask, other=float("-inf"))
        tl.store(row_highest_ptr + row, max_or_nan(highest))


def sample_tokens(
    logits: Tensor,  # f32[n, vocab_size], may be destroyed; -inf never drawn
    seeds: Tensor,  # i64[n]
    positions: Tensor,  # i64[n]
    *,
    temperature: Tensor,  # f32[n]; 0 takes the first of the highest logits, whatever the filters
    min_p: Tensor | None,  # f32[n], 0 keeps all; None: no row uses it
    top_n_sigma: Tensor | None,  # f32[n], 0 keeps all
    typical_p: Tensor | None,  # f32[n], 1 keeps all
    top_k: Tensor | None,  # i32[n], vocab_size keeps all
    top_p: Tensor | None,  # f32[n], 1 keeps all
    highest: Tensor | None = None,  # f32[n], receives each row's highest logit; NaN if the row has one
) -> Tensor:  # i64[n]
    """Draw a token from softmax(logits / temperature) of each row, over the tokens that the row's filters
    keep.

    Random numbers depend on (seed, position) alone. At equal scores the smallest token is drawn. A row's
    token depends only on its own logits and parameters. A row with NaN or +inf, or with nothing but -inf,
    gets some token of the vocabulary; the caller sees from the row's maximum, which is then not finite, that
    it must discard the token. (NaN counts as -inf and +inf as the largest float, so that no search hangs.)
    Raises ValueError for a shape, dtype or stride that does not fit.
    """
    filters = Filters(min_p, top_n_sigma, typical_p, top_k, top_p)
    tensors = logits, seeds, positions, temperature, *filters, highest
    bound = _launches.find(combination(tensors), *tensors)
    n = len(logits)
    device = logits.device
    out = torch.empty(n, dtype=torch.int64, device=device)
    if bound is None:
        return out
    maxima, moments, maxima_as_are = bound.maxima(logits)
    limits = None
    if any(value is not None for value in filters):
        limits = row_limits(logits, temperature, filters, maxima, moments)
    scores = torch.empty_like(maxima)
    tokens = torch.empty(maxima.shape, dtype=torch.int32, device=device)
    bound.best(logits, seeds, positions, temperature, maxima, limits, scores, tokens)
    bound.pick(scores, tokens, maxima_as_are, out, highest)
    return out


class _Bound(NamedTuple):
    """The launches of a draw."""

    maxima: BlockMaxima
    best: BoundLaunch
    pick: BoundLaunch


@checked_as("sample_tokens")
def _bind(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    min_p: Tensor | None,
    top_n_sigma: Tensor | None,
    typical_p: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    highest: Tensor | None,
) -> _Bound | None:
    """Check the arguments. Return the launches, if there are rows."""
    check_launchable("logits", logits)
    check_vocabulary(logits, temperature, Filters(min_p, top_n_sigma, typical_p, top_k, top_p))
    check_contiguous("seeds", seeds)
    check_contiguous("positions", positions)
    n, vocab_size = logits.shape
    if n == 0:
        return None
    maxima = BlockMaxima(logits, moments=top_n_sigma is not None, highest=highest is not None)
    blocks = triton.next_power_of_2(maxima.num_blocks)
    best = BoundLaunch(
        _best_kernel,
        (n, maxima.num_blocks),
        stride_row=logits.stride(0),
        SIZE=vocab_size,
        NUM_LIMITS=NUM_LIMITS,
        NUM_BLOCKS=maxima.num_blocks,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        num_warps=2,
        enable_fp_fusion=False,
    )
    pick = BoundLaunch(_pick_kernel, (n,), NUM_BLOCKS=maxima.num_blocks, BLOCKS=blocks, num_warps=4)
    return _Bound(maxima, best, pick)


_launches = Launches(_bind)
