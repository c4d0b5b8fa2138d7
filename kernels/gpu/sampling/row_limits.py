"""Which tokens of a row may be drawn: min_p, top_n_sigma, typical_p, top_k and top_p without a sort.

A filter keeps the tokens above a threshold: of the logit, or (typical_p) of the distance between surprise and
entropy. A row's filters come down to a few numbers, its limits, found in four launches:

    maxima   of each block of 1024 tokens, over all programs: the first read of the row
    coarse   how many tokens, and what mass, lie above each of 8 pivots: a second read, from the L2 mostly
    gather   a list of the tokens above the lowest pivot that can matter; blocks below it are not read
    search   one program a row narrows the threshold over that list, 8 pivots at a time

The search is over floats mapped to integers of the same order. Each pass at least halves an interval of
integers, whatever the logits, and narrows it to the logits inside: about five passes do, 32 always. One
program is enough because its list is short: the kept tokens and those down to a pivot below the threshold. Of
128k normal logits of deviation 3, 30 of them raised by 4 to 12, these are 74 for a top_k of 20 or 50, 1900
for 1000 as for a top_p of 0.9, 22 thousand for 0.95. Only typical_p, which orders tokens anew, searches all
that min_p and top_n_sigma leave.

Mass is counted in units of 2**-42 of the most likely token's. Sums of integers do not depend on their order,
so a row depends neither on the order of its programs nor on its neighbours. Kept sets are exact but for this
unit and the rounding of exp: a token whose share is within some 1e-6 of top_p may fall on either side; within
1e-6 / typical_p after typical_p, which may leave so little mass.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checks import check_contiguous, check_last_dim_contiguous
from ...gumbel import NOISE_BLOCK
from ..launch import BoundLaunch
from ..target import current_target
from .filter_row import (
    NUM_LIMITS,
    PARAMETERS,
    coarse_low,
    coarse_pivots,
    finite,
    load_finite,
    lowest_kept,
    mass_of,
    max_or_nan,
    ordered,
    row_scale,
    scaled,
    wanted_of,
)
from .filter_search import search_kernel

BLOCK = NOISE_BLOCK  # tokens of one program
_PIVOTS = 8
MAX_VOCAB_SIZE = 1 << 20  # so many masses of at most 2**42 add up to an int64


@triton.jit
def _maxima_kernel(
    logits_ptr,
    maxima_ptr,  # f32[n, NUM_BLOCKS]
    moments_ptr,  # f64[n, NUM_BLOCKS, 3], or None: count, mean and squared deviations of all above -inf
    highest_ptr,  # f32[n, NUM_BLOCKS], or None: the maxima as they are, inf and NaN among them
    stride_row: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits_ptr + row * stride_row + offs, mask=offs < SIZE, other=float("-inf"))
    x = finite(raw)
    place = row * NUM_BLOCKS + block
    tl.store(maxima_ptr + place, tl.max(x, axis=0))
    if highest_ptr is not None:
        tl.store(highest_ptr + place, max_or_nan(raw))
    if moments_ptr is not None:
        there = (x > float("-inf")).to(tl.float64)
        values = tl.where(x > float("-inf"), x, 0.0).to(tl.float64)
        count = tl.sum(there, axis=0)
        mean = tl.sum(values, axis=0) / tl.maximum(count, 1.0)
        away = (values - mean) * there
        tl.store(moments_ptr + 3 * place, count)
        tl.store(moments_ptr + 3 * place + 1, mean)
        tl.store(moments_ptr + 3 * place + 2, tl.sum(away * away, axis=0))


@triton.jit(do_not_specialize=["flags"], do_not_specialize_on_alignment=PARAMETERS)
def _coarse_kernel(
    logits_ptr,
    maxima_ptr,
    moments_ptr,
    temperature_ptr,
    min_p_ptr,
    sigmas_ptr,
    typical_ptr,
    top_k_ptr,
    top_p_ptr,
    sums_ptr,  # i64[n, 2 * PIVOTS + 2], zero: tokens above each pivot, their mass, all mass, list length
    flags,  # bit i: whether the i-th of Filters is used
    stride_row: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    typical, top_k, top_p = wanted_of(typical_ptr, top_k_ptr, top_p_ptr, row, flags, SIZE)
    if typical < 1.0 or (top_k >= SIZE and top_p >= 1.0):
        return
    top, temperature, inverse = row_scale(maxima_ptr, temperature_ptr, row, NUM_BLOCKS, BLOCKS)
    lowest_z, low = lowest_kept(top, moments_ptr, sigmas_ptr, min_p_ptr, row, flags, NUM_BLOCKS, BLOCKS)
    pivots = coarse_pivots(maxima_ptr, top, row, NUM_BLOCKS, BLOCKS, PIVOTS)
    x = load_finite(logits_ptr + row * stride_row, block * BLOCK + tl.arange(0, BLOCK), SIZE)
    z = scaled(x, top, temperature, inverse)
    key = ordered(x)
    there = (key > low) & (z >= lowest_z)
    above = there[:, None] & (key[:, None] > pivots[None, :])
    sums_ptr += row * (2 * PIVOTS + 2)
    offs = tl.arange(0, PIVOTS)
    if top_k < SIZE:
        tl.atomic_add(sums_ptr + offs, tl.sum(above.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
    else:
        mass = tl.where(there, mass_of(z), 0)
        tl.atomic_add(sums_ptr + 2 * PIVOTS, tl.sum(mass, axis=0), sem="relaxed")
        masses = tl.sum(tl.where(above, mass[:, None], 0), axis=0)
        tl.atomic_add(sums_ptr + PIVOTS + offs, masses, sem="relaxed")


@triton.jit(do_not_specialize=["flags"], do_not_specialize_on_alignment=PARAMETERS)
def _gather_kernel(
    logits_ptr,
    maxima_ptr,
    moments_ptr,
    temperature_ptr,
    min_p_ptr,
    sigmas_ptr,
    typical_ptr,
    top_k_ptr,
    top_p_ptr,
    sums_ptr,
    list_ptr,  # f32[n, SIZE], in any order
    flags,
    stride_row: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    typical, top_k, top_p = wanted_of(typical_ptr, top_k_ptr, top_p_ptr, row, flags, SIZE)
    if typical >= 1.0 and top_k >= SIZE and top_p >= 1.0:
        return
    top, temperature, inverse = row_scale(maxima_ptr, temperature_ptr, row, NUM_BLOCKS, BLOCKS)
    lowest_z, low = lowest_kept(top, moments_ptr, sigmas_ptr, min_p_ptr, row, flags, NUM_BLOCKS, BLOCKS)
    pivots = coarse_pivots(maxima_ptr, top, row, NUM_BLOCKS, BLOCKS, PIVOTS)
    sums_ptr += row * (2 * PIVOTS + 2)
    low = coarse_low(sums_ptr, pivots, low, typical, top_k, top_p, PIVOTS, SIZE)
    if ordered(tl.load(maxima_ptr + row * NUM_BLOCKS + block)) <= low:
        return
    x = load_finite(logits_ptr + row * stride_row, block * BLOCK + tl.arange(0, BLOCK), SIZE)
    wanted = (ordered(x) > low) & (scaled(x, top, temperature, inverse) >= lowest_z)
    place = tl.cumsum(wanted.to(tl.int32), axis=0)
    start = tl.atomic_add(sums_ptr + 2 * PIVOTS + 1, tl.sum(wanted.to(tl.int64), axis=0), sem="relaxed")
    tl.store(list_ptr + row * SIZE + start + place - 1, x, mask=wanted)


class Filters(NamedTuple):
    """The filters of the rows. A filter is None if no row uses it."""

    min_p: Tensor | None  # f32[n], 0 keeps all
    top_n_sigma: Tensor | None  # f32[n], 0 keeps all
    typical_p: Tensor | None  # f32[n], 1 keeps all
    top_k: Tensor | None  # i32[n], vocab_size keeps all
    top_p: Tensor | None  # f32[n], 1 keeps all


def check_vocabulary(logits: Tensor, temperature: Tensor, filters: Filters) -> None:
    """Raise ValueError unless kernels can sum over this vocabulary, and all columns are contiguous."""
    check_last_dim_contiguous("logits", logits)
    if logits.shape[1] > MAX_VOCAB_SIZE:
        raise ValueError(f"logits must be of 1 to {MAX_VOCAB_SIZE} tokens, got {logits.shape[1]}")
    for name, column in {"temperature": temperature, **filters._asdict()}.items():
        if column is not None:
            check_contiguous(name, column)


class BlockMaxima:
    """The launch that finds the maximum of each block of logits, and further results if asked for."""

    def __init__(self, logits: Tensor, *, moments: bool, highest: bool = False) -> None:
        num_rows, vocab_size = logits.shape
        self.num_blocks = triton.cdiv(vocab_size, BLOCK)
        self._moments = moments
        self._highest = highest
        self._size = num_rows, self.num_blocks
        self._launch = BoundLaunch(
            _maxima_kernel,
            self._size,
            stride_row=logits.stride(0),
            SIZE=vocab_size,
            NUM_BLOCKS=self.num_blocks,
            BLOCK=BLOCK,
            num_warps=4,
        )

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return maxima, moments and the highest logits, [n, num_blocks, ...]; None is not asked for."""
        maxima = torch.empty(self._size, device=logits.device)
        highest = torch.empty_like(maxima) if self._highest else None
        moments = None
        if self._moments:
            moments = torch.empty(*self._size, 3, dtype=torch.float64, device=logits.device)
        self._launch(logits, maxima, moments, highest)
        return maxima, moments, highest


def row_limits(
    logits: Tensor, temperature: Tensor, filters: Filters, maxima: Tensor, moments: Tensor | None
) -> Tensor:
    """Return the limits of each row, f32[n, NUM_LIMITS], for `kept_and_scaled`.

    They are the highest logit, temperature and 1 / temperature; the lowest logit and the lowest z = (logit -
    highest) / temperature that are kept; and the center and half width of the range of z that typical_p
    keeps.
    """
    n, vocab_size = logits.shape
    num_blocks = maxima.shape[1]
    sums = torch.zeros(n, 2 * _PIVOTS + 2, dtype=torch.int64, device=logits.device)
    candidates = torch.empty(n, vocab_size, device=logits.device)
    limits = torch.empty(n, NUM_LIMITS, device=logits.device)
    # A filter that is not used is never read, but has a type: one binary serves every combination.
    standing_in = [temperature] * 3 + [temperature.view(torch.int32), temperature]
    pointers = zip(PARAMETERS[1:], filters, standing_in, strict=True)
    arguments = {
        "maxima_ptr": maxima,
        "moments_ptr": sums.view(torch.float64) if moments is None else moments,
        "temperature_ptr": temperature,
        **{name: stand_in if value is None else value for name, value, stand_in in pointers},
        "sums_ptr": sums,
        "flags": sum(1 << bit for bit, value in enumerate(filters) if value is not None),
        "SIZE": vocab_size,
        "NUM_BLOCKS": num_blocks,
        "BLOCKS": triton.next_power_of_2(num_blocks),
        "BLOCK": BLOCK,
        "PIVOTS": _PIVOTS,
        # A token at the edge of what typical_p keeps must be on the same side in every kernel.
        "enable_fp_fusion": False,
    }
    over_blocks = {"logits_ptr": logits, "stride_row": logits.stride(0), "num_warps": 4}
    _coarse_kernel[(n, num_blocks)](**arguments, **over_blocks)
    _gather_kernel[(n, num_blocks)](list_ptr=candidates, **arguments, **over_blocks)
    # There ptxas spills to run a third block on an SM, unless it is told how many registers there are.
    registers = {"maxnreg": 128} if current_target() in ("sm_120", "sm_121") else {}
    search_kernel[(n,)](
        list_ptr=candidates, limits_ptr=limits, NUM_LIMITS=NUM_LIMITS, **arguments, **registers, num_warps=8
    )
    return limits
