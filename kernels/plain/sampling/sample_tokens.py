"""Sampling in plain torch, written for speed on a CPU: the draws of attention_backend="torch".

No vocabulary is sorted. Rows in which top_k, min_p or top_n_sigma leave few candidates are reduced to these.
From the others a token is drawn at once, and drawn again if top_p or typical_p excludes it (rejection
sampling, Ye et al., FlashInfer, 2025). A draw is a race (see `_race`): logits that differ in their last bits,
as those of another batch do, then draw the same token, unlike a number looked up in a cumulative sum.
Batch-invariant.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...checked import checked
from ..rows.row_kernels import greedy
from . import selection as torch_selection
from .selection import (
    candidates,
    chunks,
    column_maxima,
    column_sums,
    column_sums_between,
    kth_largest,
    left_to_right,
    row_sums,
    smallest_bound,
)
from .splitmix import mixed, nth, splitmix64, uniforms

SMALLEST = 1e-30  # stands for a probability that a float32 rounds to 0
_LN_2 = math.log(2)


@checked
def sample_tokens(
    logits: Tensor,  # f32[n, vocab_size], destroyed; -inf is never drawn
    seeds: Tensor,  # i64[n]
    positions: Tensor,  # i64[n]
    *,
    temperature: Tensor,  # f32[n]; 0 takes the first of the highest logits, whatever the filters
    min_p: Tensor | None,  # f32[n]; None where no row uses it, as below
    top_n_sigma: Tensor | None,  # f32[n]
    typical_p: Tensor | None,  # f32[n]
    top_k: Tensor | None,  # i32[n]
    top_p: Tensor | None,  # f32[n]
    highest: Tensor | None = None,  # f32[n], receives each row's highest logit; NaN if the row has one
) -> Tensor:  # i64[n]
    """Draw a token for each row, among the tokens of `reference.kept_tokens`.

    Random numbers depend on (seed, position) alone. A tiny temperature is greedy. Rows with a NaN, or with
    nothing but -inf, get some token. Raises ValueError for a shape, dtype or device that does not fit.
    """
    columns = seeds, positions, temperature, (min_p, top_n_sigma, typical_p, top_k, top_p)
    is_drawn = temperature > 0
    if highest is None and is_drawn.all():
        return _drawn(logits, *columns)
    likeliest, greatest = greedy(logits)  # before the draw destroys the logits
    if highest is not None:
        highest.copy_(greatest)
    return _drawn(logits, *columns).where(is_drawn, likeliest)


def _drawn(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    filters: Sequence[Tensor | None],
) -> Tensor:
    """Draw a token of each row, whose temperature is above 0. filters: in the order of `sample_tokens`."""
    min_p, top_n_sigma, typical_p, top_k, top_p = filters
    # A temperature below float32's smallest is 0, and 0 / 0 is NaN.
    temperature = temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    if top_n_sigma is None:
        maxima = column_maxima(logits)
    else:
        maxima, deviations = _maxima_and_deviations(logits)
    highest = maxima.amax(1, keepdim=True)
    lowest = torch.full_like(highest, -torch.inf)
    if min_p is not None:
        lowest = highest + min_p[:, None].log() * temperature
    if top_n_sigma is not None:
        reach = (top_n_sigma[:, None] * deviations).where(top_n_sigma[:, None] > 0, torch.inf)
        lowest = torch.maximum(lowest, highest - reach)
    ones = torch.ones_like(highest[:, 0])
    rows = _Rows(
        logits,
        maxima,
        highest,
        temperature,
        lowest,
        ones if typical_p is None else typical_p,
        torch.full_like(seeds, logits.shape[1]) if top_k is None else top_k.long(),
        ones if top_p is None else top_p,
        mixed(seeds, positions),
    )
    few = _have_few(rows)
    if few.all():
        return _draw_from_few(rows)
    if not few.any():
        return _draw_from_all(rows)
    tokens = torch.zeros_like(seeds)
    for draw, mask in ((_draw_from_few, few), (_draw_from_all, ~few)):
        chosen = mask.nonzero()[:, 0]
        tokens[chosen] = draw(rows.of(chosen))
    return tokens


class _Rows(NamedTuple):
    """Logits and the parameters of each row."""

    logits: Tensor  # f32[n, vocab_size]
    maxima: Tensor  # f32[n, width], of its columns
    highest: Tensor  # f32[n, 1]
    temperature: Tensor  # f32[n, 1]
    lowest: Tensor  # f32[n, 1], logit that min_p and top_n_sigma keep
    typical_p: Tensor  # f32[n], 1 keeps all
    top_k: Tensor  # i64[n], vocab_size keeps all
    top_p: Tensor  # f32[n], 1 keeps all
    bits: Tensor  # i64[n], random

    def of(self, chosen: Tensor) -> "_Rows":  # i64[m]
        """Return the chosen rows."""
        return _Rows(*(column.index_select(0, chosen) for column in self))


def _maxima_and_deviations(logits: Tensor) -> tuple[Tensor, Tensor]:  # f32[n, width] and f32[n, 1]
    """Return column maxima, and the standard deviation of all logits that are not -inf."""
    num, vocab_size = logits.shape
    maxima = logits.new_empty(num, -(-vocab_size // torch_selection.HEIGHT))
    sums = torch.empty_like(maxima)
    squares = torch.empty_like(maxima)
    for part, highest, total, square in chunks(logits, maxima, sums, squares):
        highest.copy_(column_maxima(part))
        # Deviations from near the mean, so that subtracting the square of the rest loses little precision.
        some = part[:, :: torch_selection.HEIGHT]
        away = part - (left_to_right(some) / some.shape[1]).float()
        total.copy_(column_sums(away))
        square.copy_(column_sums(away.square_()))
    rest = (left_to_right(sums) / vocab_size).square_()
    variances = left_to_right(squares) / vocab_size - rest
    others = (~(rest < variances)).nonzero()[:, 0]
    if len(others):
        some = logits[others]
        possible = torch.gt(some, -torch.inf, out=torch.empty_like(some))
        count = row_sums(possible)[:, None]
        # A multiple of -inf may be NaN.
        below = (some - some.amax(1, keepdim=True)).clamp_(min=torch.finfo(some.dtype).min).mul_(possible)
        mean = (row_sums(below)[:, None] / count).float()
        variances[others] = row_sums(below.sub_(mean).mul_(possible).square_())[:, None] / count
    return maxima, variances.sqrt_().float()


def _have_few(rows: _Rows) -> Tensor:  # bool[n]
    """Return which rows are reduced to candidates: those with candidates in few columns."""
    width = rows.maxima.shape[1]
    reaching = (rows.maxima >= rows.lowest).sum(1)
    return (reaching <= width // 4) | ((rows.top_k <= _most_few(rows)) & (rows.typical_p >= 1.0))


def _most_few(rows: _Rows) -> int:
    """Return the largest top_k for which only candidate tokens, not the whole row, are sorted."""
    return rows.logits.shape[1] // torch_selection.HEIGHT


def _draw_from_few(rows: _Rows) -> Tensor:  # i64[n]
    """Draw from sorted candidates: those that min_p, top_n_sigma and a small top_k keep."""
    top_k = rows.top_k[:, None]
    typical_p = rows.typical_p[:, None]
    bound = rows.lowest
    limited = (top_k <= _most_few(rows)) & (typical_p >= 1.0)
    if limited.any():
        kth = kth_largest(rows.maxima, rows.top_k.clamp(max=max(1, _most_few(rows))))
        bound = torch.maximum(bound, kth.where(limited, -torch.inf))
    values, tokens = candidates(rows.logits, bound, rows.maxima)
    scaled = ((values - values[:, :1]) / rows.temperature).double()
    weights = scaled.exp()
    if (typical_p < 1.0).any():
        # A token of probability 0 adds nothing to the entropy.
        mean = left_to_right(weights * scaled.clamp(min=-1e30)) / left_to_right(weights)
        distance, order = (scaled - mean).abs().sort(dim=1)
        limit = typical_p.double().clamp(min=SMALLEST) * left_to_right(weights)
        near = _before(distance, weights.gather(1, order)) < limit
        kept = torch.zeros_like(near).scatter_(1, order, near)
        weights = weights.where(kept | (typical_p >= 1.0), 0.0)
    if (top_k < rows.logits.shape[1]).any():
        weights = weights.where(_before(values, (weights > 0.0).double()) < top_k, 0.0)
    if (rows.top_p < 1.0).any():
        top_p = rows.top_p.double().clamp_(min=SMALLEST)[:, None]
        within = _before(values, weights) < top_p * left_to_right(weights)
        weights = weights.where(within | (top_p >= 1.0), 0.0)
    return tokens.gather(1, _race(weights, nth(rows.bits[:, None], tokens)))[:, 0]


def _before(
    order: Tensor,  # [n, size], sorted
    weights: Tensor,  # f64[n, size]
) -> Tensor:  # f64[n, size]
    """Return the weight before each place, without values equal to its own."""
    sums = weights.cumsum(1)
    before = torch.zeros_like(sums)
    before[:, 1:] = sums[:, :-1].where(order[:, 1:] != order[:, :-1], 0.0).cummax(1).values
    return before


def _draw_from_all(rows: _Rows) -> Tensor:  # i64[n]
    """Draw from all tokens, again if typical_p or top_p excludes the token. Destroys the logits."""
    weights, sums, means = _to_weights(rows)
    typical = rows.typical_p < 1.0
    limited = rows.top_k < weights.shape[1]
    # Later filters need all tokens that typical_p keeps.
    first = typical & (limited | (rows.top_p < 1.0))
    for mask, drop in ((first, _drop_untypical), (limited, _drop_unlikely)):
        chosen = mask.nonzero()[:, 0]
        if len(chosen) == len(mask):
            sums = drop(weights, means, rows)
        elif len(chosen):
            part = weights.index_select(0, chosen)
            sums[chosen] = drop(part, means[chosen], rows.of(chosen))
            weights[chosen] = part
    tokens = _draw(weights, sums, rows.bits)
    last = (typical & ~first).nonzero()[:, 0]
    if len(last) == len(tokens):
        _redraw_untypical(tokens, weights, sums, means, rows)
    elif len(last):
        some = tokens[last]
        _redraw_untypical(some, weights.index_select(0, last), sums[last], means[last], rows.of(last))
        tokens[last] = some
    if (rows.top_p < 1.0).any():
        _redraw_improbable(tokens, weights, sums, rows)
    return tokens


def _to_weights(rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits into weights: 1 for the most likely token, 0 for those below the lowest.

    Returns f32[n, vocab_size] in the logits' memory, f32[n, width] column sums, and f32[n, 1] the mean of the
    weights' base-2 logarithms for typical_p: a token is as far from it as its surprise from the entropy.
    """
    weights = rows.logits
    sums = torch.empty_like(rows.maxima)
    moments = torch.zeros_like(rows.maxima)
    filtered = bool((rows.lowest > -torch.inf).any())
    typical = bool((rows.typical_p < 1.0).any())
    columns = (rows.highest, rows.temperature * _LN_2, rows.lowest, sums, moments)
    for part, top, t, lowest, total, moment in chunks(weights, *columns):
        kept = torch.ge(part, lowest, out=torch.empty_like(part)) if filtered else None
        part.sub_(top).div_(t)
        # A token of probability 0 adds nothing to the entropy.
        logarithm = part.clamp(min=torch.finfo(torch.float32).min) if typical else None
        # Unlike exp, as fast for very low logits: exp takes twenty times as long there.
        part.exp2_()
        if kept is not None:
            part.mul_(kept)
        if logarithm is not None:
            moment.copy_(column_sums(logarithm.mul_(part)))
        total.copy_(column_sums(part))
    return weights, sums, (left_to_right(moments) / left_to_right(sums)).float()


def _drop_untypical(weights: Tensor, means: Tensor, rows: _Rows) -> Tensor:
    """Set to 0 the weights that typical_p excludes (Meister et al., 2022).

    Returns the column sums, f32[n, width].
    """
    sums = torch.empty_like(rows.maxima)
    for part, mean, typical_p, total in chunks(weights, means, rows.typical_p, sums):
        distance = part.clamp(min=SMALLEST).log2_().sub_(mean).abs_()
        bound = smallest_bound(distance, part, row_sums(part) * typical_p.clamp(min=SMALLEST))
        total.copy_(column_sums(part.mul_(torch.le(distance, bound, out=distance))))
    return sums


def _drop_unlikely(weights: Tensor, _means: Tensor, rows: _Rows) -> Tensor:
    """Set to 0 the weights that top_k excludes. Returns the column sums, f32[n, width]."""
    sums = torch.empty_like(rows.maxima)
    for part, least, total in chunks(weights, kth_largest(weights, rows.top_k), sums):
        total.copy_(column_sums(part.mul_(torch.ge(part, least, out=torch.empty_like(part)))))
    return sums


def _redraw_untypical(tokens: Tensor, weights: Tensor, sums: Tensor, means: Tensor, rows: _Rows) -> None:
    """Draw again where typical_p excludes the token. Changes the tokens.

    A token is excluded if those whose logarithm is nearer to the mean hold typical_p already. So are then all
    that are not nearer: the next token is drawn from the others. At least one is left.
    """
    limit = left_to_right(sums) * rows.typical_p[:, None].clamp(min=SMALLEST)
    of = torch.arange(len(tokens), device=tokens.device)
    latest = tokens
    bits = rows.bits
    while True:
        own = weights.gather(1, latest[:, None])
        mirrored = (2 * means - own.log2()).exp2()  # as far beyond the mean
        low = torch.minimum(own, mirrored)
        high = torch.maximum(own, mirrored)
        nearer = torch.empty_like(sums)
        for part, a, b, out in chunks(weights, low, high, nearer):
            out.copy_(column_sums_between(part, a, b))
        again = (left_to_right(nearer) >= limit)[:, 0].nonzero()[:, 0]
        if not len(again):
            return
        of, low, high, means, limit = (x[again] for x in (of, low, high, means, limit))
        weights = weights.index_select(0, again)
        weights.mul_(((weights > low) & (weights < high)).float())
        sums = column_sums(weights)
        bits = splitmix64(~bits[again])
        latest = _draw(weights, sums, bits)
        tokens[of] = latest


def _redraw_improbable(tokens: Tensor, weights: Tensor, sums: Tensor, rows: _Rows) -> None:
    """Draw again where top_p excludes the token. Changes the tokens and the weights.

    With a token all that are not more likely are excluded: the next one is drawn from the others.
    """
    limit = left_to_right(sums)[:, 0] * rows.top_p.double().clamp_(min=SMALLEST)
    # In float32 the sum without the lightest tokens may equal the whole; top_p = 1 keeps these all the same.
    limit.masked_fill_(rows.top_p >= 1.0, torch.inf)
    of = torch.arange(len(tokens), device=tokens.device)
    latest = tokens
    bits = rows.bits
    while True:
        own = weights.gather(1, latest[:, None])
        for part, least in chunks(weights, own):
            part.mul_(torch.gt(part, least, out=torch.empty_like(part)))
        # False for rows with NaN, which end the loop.
        outside = (row_sums(weights) >= limit).nonzero()[:, 0]
        if not len(outside):
            return
        of = of[outside]
        weights = weights[outside]
        limit = limit[outside]
        bits = splitmix64(~bits[outside])
        latest = _draw(weights, column_sums(weights), bits)
        tokens[of] = latest


def _draw(
    weights: Tensor,  # f32[n, vocab_size], none negative
    sums: Tensor,  # f32[n, width], of its columns
    bits: Tensor,  # i64[n], random
) -> Tensor:  # i64[n]
    """Draw a token of each row with probability proportional to its weight.

    First a column, then a place in it: far fewer random numbers than one for each token.
    """
    vocab_size = weights.shape[1]
    width = sums.shape[1]
    height = torch_selection.HEIGHT
    in_order = torch.arange(max(width, height), device=weights.device)
    column = _race(sums.double(), nth(bits[:, None], in_order[:width]))
    places = column + width * in_order[:height]
    inside = weights.gather(1, places.clamp(max=vocab_size - 1)).double().where(places < vocab_size, 0.0)
    # Other random numbers than the columns had.
    row = _race(inside, nth(bits[:, None], width + in_order[:height]))
    return places.gather(1, row)[:, 0].clamp_(max=vocab_size - 1)


def _race(
    weights: Tensor,  # f64[n, size], none negative
    bits: Tensor,  # i64[n, size], random
) -> Tensor:  # i64[n, 1]
    """Draw a place of each row with probability proportional to its weight: the smallest E / weight wins.

    E is exponential. This is Gumbel-max over logarithms, with one logarithm less. Zeros never win.
    """
    return torch.log1p(-uniforms(bits)).neg_().div_(weights).argmin(1, keepdim=True)
