"""Sampling in plain torch, written for speed on a CPU: what attention_backend="torch" draws tokens with.

Nothing as long as the vocabulary is sorted. Rows with a small top_k are reduced to a few candidates; the
others are drawn from as they are, and where top_p excludes the token, again (Ye et al., FlashInfer, 2025).
Who is drawn is who wins a race (see `_race`): logits that differ in their last bits, as those of another
batch do, then draw the same token, which a number looked up in a cumulative sum does not.
What a row gets depends on it alone, bit for bit: sums go along a row, in an order that no neighbour changes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .splitmix import mixed, nth, splitmix64, uniforms

# A row is looked at as the columns of a matrix this high: sums and maxima of these are vectorised.
HEIGHT = 32
CHUNK = 2**18  # numbers that are worked on at once: new memory for more than a cache holds costs page faults
GATHER_COST = 30  # of a number picked here and there, in numbers that are read one after the other
SMALLEST = 1e-30  # stands for a probability that a float32 rounds to 0
INFINITY_BITS = 0x7F800000  # of a float32; below it, the bits of positive numbers are ordered as they are


def apply_penalties(
    logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    rows: Tensor,  # i64[n], which rows of it
    slots: Tensor,  # i64[n], where the history of each is
    output_counts: Tensor,  # i32[num_slots, vocab_size], how often each token was generated
    prompt_mask: Tensor,  # bool[num_slots, vocab_size], the tokens of the prompt
    repetition_penalty: Tensor,  # f32[n]
    frequency_penalty: Tensor,  # f32[n]
    presence_penalty: Tensor,  # f32[n]
) -> None:
    """Take the penalties off the logits of tokens in the prompt or the output; see SamplingParams.

    Repetition first: positive logits are divided, negative ones multiplied (Keskar et al., 2019).
    """
    num, vocab_size = rows.shape[0], logits.shape[1]
    if torch.equal(slots, torch.arange(num, device=slots.device)):  # no copy of what is large
        counts, prompts = output_counts[:num], prompt_mask[:num]
    else:
        counts, prompts = output_counts[slots], prompt_mask[slots]
    # What was seen are a few tokens of many.
    seen = _places_of_seen(counts, prompts)
    row = seen // vocab_size
    places = rows[row] * vocab_size + seen % vocab_size
    found, count = logits.view(-1)[places], counts.reshape(-1)[seen].float()
    penalty = repetition_penalty[row]
    found = torch.where(found > 0, found / penalty, found * penalty)
    found -= frequency_penalty[row] * count
    found -= presence_penalty[row] * (count > 0)
    logits.view(-1)[places] = found


def _places_of_seen(counts: Tensor, prompts: Tensor) -> Tensor:
    """Where either is not zero, in both of them flattened: i64[num_seen]."""
    if counts.device.type != "cpu":
        return ((counts != 0) | prompts).view(-1).nonzero().view(-1)
    # numpy compares and finds several times as fast as torch.
    seen = counts.numpy() != 0
    seen |= prompts.numpy()
    return torch.from_numpy(seen.reshape(-1).nonzero()[0])


def sample_tokens(
    logits: Tensor,  # f32[n, vocab_size], destroyed; -inf is never drawn
    seeds: Tensor,  # i64[n]
    positions: Tensor,  # i64[n]
    *,
    temperature: Tensor,  # f32[n], above 0
    min_p: Tensor | None,  # f32[n]; None where nobody uses it, as below
    top_n_sigma: Tensor | None,  # f32[n]
    typical_p: Tensor | None,  # f32[n]
    top_k: Tensor | None,  # i32[n]
    top_p: Tensor | None,  # f32[n]
) -> Tensor:  # i64[n]
    """One token of each row; see `reference.kept_tokens` for which may be drawn.

    The random numbers follow from (seed, position) alone. A tiny temperature is greedy. Rows with a NaN, or
    with nothing but -inf, get some token.
    """
    vocab_size = logits.shape[1]
    # A temperature below float32's smallest is 0, and 0 / 0 is NaN.
    temperature = temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    floor = None if min_p is None else min_p[:, None].log()
    if top_n_sigma is not None:
        sigma_floor = _sigma_floor(logits, top_n_sigma[:, None]) / temperature
        floor = sigma_floor if floor is None else torch.maximum(floor, sigma_floor)
    if typical_p is not None:
        _drop_untypical(logits, temperature, floor, typical_p[:, None])
    filters = _Filters(temperature, floor, top_k, top_p, mixed(seeds, positions))
    if top_k is None:
        return _draw_from_all(logits, filters)
    few = top_k <= vocab_size // HEIGHT
    if few.all():
        return _draw_from_few(logits, filters)
    if not few.any():
        return _draw_from_all(logits, filters)
    tokens = torch.zeros_like(seeds)
    for draw, rows in ((_draw_from_few, few.nonzero()[:, 0]), (_draw_from_all, (~few).nonzero()[:, 0])):
        tokens[rows] = draw(logits[rows], filters.of(rows))
    return tokens


class _Filters(NamedTuple):
    """The columns that both ways of drawing need."""

    temperature: Tensor  # f32[n, 1]
    floor: Tensor | None  # f32[n, 1], of the scaled logits, of which the highest is 0
    top_k: Tensor | None  # i32[n]
    top_p: Tensor | None  # f32[n]
    bits: Tensor  # i64[n], random

    def of(self, rows: Tensor) -> "_Filters":
        """Those of some rows."""
        return _Filters(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]


def _sigma_floor(
    logits: Tensor,  # f32[n, vocab_size]
    top_n_sigma: Tensor,  # f32[n, 1]
) -> Tensor:  # f32[n, 1]
    """How far below the highest logit top_n_sigma keeps, as a negative number; -inf where it is not used.

    The deviation is that of all logits that are not -inf.
    """
    sigmas = torch.empty_like(top_n_sigma)
    for rows, sigma in _chunks(logits, sigmas):
        possible = torch.gt(rows, -torch.inf, out=torch.empty_like(rows))
        num_possible = row_sums(possible)[:, None]
        # -inf * 0 is NaN; these logits are near each other once the highest is taken off.
        finite = (rows - rows.amax(-1, keepdim=True)).clamp_(min=torch.finfo(torch.float32).min)
        mean = row_sums(finite * possible)[:, None] / num_possible
        squares = finite.sub_(mean.float()).mul_(possible).square_()
        sigma.copy_((row_sums(squares)[:, None] / num_possible).sqrt_())
    return (-top_n_sigma * sigmas).where(top_n_sigma > 0, -torch.inf)


def _drop_untypical(
    logits: Tensor,  # f32[n, vocab_size], changed in place
    temperature: Tensor,  # f32[n, 1]
    floor: Tensor | None,  # f32[n, 1], what is that far below the highest logit is dropped before
    typical_p: Tensor,  # f32[n, 1]
) -> None:
    """Write -inf where typical_p excludes a token (Meister et al., 2022), in the rows that use it."""
    rows = (typical_p[:, 0] < 1.0).nonzero()[:, 0]
    chosen = logits[rows]
    floor = torch.full_like(temperature, -torch.inf) if floor is None else floor
    for part, *columns in _chunks(chosen, temperature[rows], floor[rows], typical_p[rows]):
        t, lowest, p = columns
        scaled = (part - part.amax(-1, keepdim=True)).div_(t)
        scaled = scaled.where(scaled >= lowest, -torch.inf)
        logprobs = scaled.log_softmax(-1)
        probs = logprobs.exp()
        # A token of probability 0 adds nothing to the entropy.
        surprise = logprobs.clamp_(min=torch.finfo(torch.float32).min).neg_()
        entropy = row_sums(probs * surprise)[:, None].float()
        distance = surprise.sub_(entropy).abs_()
        bound = _smallest_bound(distance, probs, row_sums(probs) * p[:, 0].clamp(min=SMALLEST))
        kept = (distance <= bound) & (scaled > -torch.inf) | (scaled == 0.0)  # the most likely one always
        part.masked_fill_(~kept, -torch.inf)
    logits[rows] = chosen


def _smallest_bound(
    numbers: Tensor,  # f32[n, vocab_size], none negative
    weights: Tensor | None,  # f32[n, vocab_size]; None: each weighs 1
    target: Tensor,  # [n]
) -> Tensor:  # f32[n, 1]
    """The smallest bound such that numbers up to it weigh `target` together; inf where all weigh less.

    Bisection over the bits of a float32: 31 passes, where torch's sort of a row takes as long as a hundred.
    """
    low = torch.zeros(numbers.shape[0], 1, dtype=torch.int32, device=numbers.device)
    high = torch.full_like(low, INFINITY_BITS)
    inside = torch.empty_like(numbers)
    for _ in range(31):
        middle = low + (high - low) // 2
        torch.le(numbers, middle.view(torch.float32), out=inside)
        if weights is not None:
            inside.mul_(weights)
        enough = (row_sums(inside) >= target)[:, None]
        high = middle.where(enough, high)
        low = torch.minimum(low.where(enough, middle + 1), high)
    return high.view(torch.float32)


def _draw_from_few(logits: Tensor, filters: _Filters) -> Tensor:  # f32[n, vocab_size] -> i64[n]
    """Draw from the most likely tokens, sorted. Every top_k is at most vocab_size // HEIGHT."""
    temperature, floor, top_k, top_p, bits = filters
    assert top_k is not None, "rows with a small top_k have one"
    values, tokens = top_candidates(logits, top_k)
    scaled = (values - values[:, :1]) / temperature
    last = (top_k.long()[:, None] - 1).clamp_(max=values.shape[1] - 1)
    kept = values >= values.gather(1, last)
    if floor is not None:
        kept &= scaled >= floor
    weights = scaled.double().exp().where(kept, 0.0)
    if top_p is not None:
        # A sum from left to right: zeros behind it do not change how it is rounded.
        cdf = weights.cumsum(1)
        # The mass before the first of equals.
        differs = values[:, 1:] != values[:, :-1]
        above = torch.zeros_like(cdf)
        above[:, 1:] = cdf[:, :-1].where(differs, 0.0).cummax(1).values
        limit = top_p.double().clamp_(min=SMALLEST)[:, None] * cdf[:, -1:]
        weights = weights.where(above < limit, 0.0)
    return tokens.gather(1, _race(weights, nth(bits[:, None], tokens)))[:, 0]


def top_candidates(
    x: Tensor,  # f32[n, vocab_size]
    top_k: Tensor,  # int[n], from 1 to vocab_size // HEIGHT
) -> tuple[Tensor, Tensor]:  # f32 and i64 [n, most]
    """The top_k largest of each row and whatever equals the last of them, and perhaps more, but no -inf.

    Returns values, from the largest on, with -inf behind a row's own, and where in the row they are: equals
    in their order there.
    """
    num, vocab_size = x.shape
    maxima = _columns(x, "amax")
    # The k-th largest of the columns' maxima is not above the k-th largest of all.
    bound = _kth_largest(maxima.clone(), top_k.long()[:, None]).clamp_(min=torch.finfo(x.dtype).min)
    places = _places_from(x, bound, maxima)
    row = places // vocab_size
    # Each to its place in a rectangle.
    counts = torch.bincount(row, minlength=num)
    at = torch.arange(row.shape[0], device=x.device) - (counts.cumsum(0) - counts)[row]
    most = max(1, int(counts.max()))
    values = torch.full((num, most), -torch.inf, device=x.device)
    tokens = torch.zeros(num, most, dtype=torch.int64, device=x.device)
    values[row, at], tokens[row, at] = x.reshape(-1)[places], places - row * vocab_size
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def _kth_largest(x: Tensor, k: Tensor) -> Tensor:  # f32[n, size], i64[n, 1] -> f32[n, 1]; x is destroyed
    if x.device.type != "cpu":
        return x.topk(int(k.max())).values.gather(1, k - 1)
    # numpy has vectorised quickselect, where torch takes four times as long.
    at = x.shape[1] - k
    x.numpy().partition(at.unique().tolist(), axis=1)
    return x.gather(1, at)


def _places_from(
    x: Tensor,  # f32[n, size]
    bound: Tensor,  # f32[n, 1]
    maxima: Tensor,  # f32[n, width], of the columns of x
) -> Tensor:  # i64[num_places], ascending
    """Where a row is at least its bound, in the flattened x."""
    size, width = x.shape[1], maxima.shape[1]
    columns = (maxima >= bound).view(-1).nonzero()
    if len(columns) * HEIGHT * GATHER_COST < x.numel():
        row, column = columns // width, columns % width
        places = column + torch.arange(0, width * HEIGHT, width, device=x.device)
        inside = places < size
        places += row * size
        found = x.reshape(-1)[places.clamp_(max=x.numel() - 1)]
        return places[(found >= bound[row[:, 0]]) & inside].sort().values
    if x.device.type != "cpu":
        return (x >= bound).view(-1).nonzero().view(-1)
    # numpy compares and finds several times as fast as torch.
    return torch.from_numpy((x.numpy() >= bound.numpy()).reshape(-1).nonzero()[0])


def _draw_from_all(logits: Tensor, filters: _Filters) -> Tensor:  # f32[n, vocab_size] -> i64[n]
    """Draw from what is left of all tokens; what top_p excludes is drawn again.

    Where a token is excluded, all that are not more likely are too: the next one is drawn from the others.
    The logits are destroyed.
    """
    weights, bits, top_p = _to_weights(logits, filters), filters.bits, filters.top_p
    tokens, total = _draw(weights, bits)
    if top_p is None:
        return tokens
    limit = total * top_p.double().clamp_(min=SMALLEST)
    # Without the lightest tokens, a sum of float32 may still be the whole: they are possible all the same.
    limit.masked_fill_(top_p >= 1.0, torch.inf)
    rows, latest = torch.arange(len(tokens), device=tokens.device), tokens
    while True:
        own = weights.gather(1, latest[:, None])
        for chunk, least in _chunks(weights, own):
            chunk.mul_(torch.gt(chunk, least, out=torch.empty_like(chunk)))
        # No row that is NaN is outside.
        outside = (row_sums(weights) >= limit).nonzero()[:, 0]
        if not len(outside):
            return tokens
        rows, weights, limit = rows[outside], weights[outside], limit[outside]
        bits = splitmix64(~bits[outside])
        latest, _ = _draw(weights, bits)
        tokens[rows] = latest


def _to_weights(logits: Tensor, filters: _Filters) -> Tensor:  # f32[n, vocab_size], the same memory
    """The softmax, and 0 for what is below the floor or not among the top_k."""
    temperature, floor, top_k = filters.temperature, filters.floor, filters.top_k
    num, vocab_size = logits.shape
    if floor is None:
        floor = torch.full_like(temperature, -torch.inf)
    limited = top_k is not None and bool((top_k < vocab_size).any())
    filtered = limited or bool((floor > -torch.inf).any())
    ks = torch.full((num,), vocab_size, device=logits.device) if top_k is None else top_k
    for rows, t, lowest, k in _chunks(logits, temperature, floor, ks):
        rows.sub_(rows.amax(-1, keepdim=True)).div_(t)
        if limited:
            lowest = torch.maximum(lowest, -_smallest_bound(-rows, None, k))
        kept = torch.ge(rows, lowest, out=torch.empty_like(rows)) if filtered else None
        torch.softmax(rows, -1, out=rows)
        if kept is not None:
            rows.mul_(kept)
    return logits


def _draw(
    weights: Tensor,  # f32[n, vocab_size], none negative
    bits: Tensor,  # i64[n], random
) -> tuple[Tensor, Tensor]:  # i64[n], f64[n]
    """A token of each row with a probability like its weight, and the sum of the weights.

    First a column, then a place in it: far fewer random numbers than one for each token.
    """
    vocab_size = weights.shape[1]
    sums = _columns(weights, "sum").double()
    width = sums.shape[1]
    in_order = torch.arange(max(width, HEIGHT), device=weights.device)
    column = _race(sums, nth(bits[:, None], in_order[:width]))
    places = column + width * in_order[:HEIGHT]
    inside = weights.gather(1, places.clamp(max=vocab_size - 1)).double().where(places < vocab_size, 0.0)
    # Others than the columns had.
    height = _race(inside, nth(bits[:, None], width + in_order[:HEIGHT]))
    return places.gather(1, height)[:, 0].clamp_(max=vocab_size - 1), sums.cumsum(1)[:, -1]


def _race(
    weights: Tensor,  # f64[n, size], none negative
    bits: Tensor,  # i64[n, size], random
) -> Tensor:  # i64[n, 1]
    """A place of each row with a probability like its weight: the smallest exponential(weight) wins.

    The same as Gumbel-max over the logarithms, which costs one more of them. Zeros never win.
    """
    times = torch.log1p(-uniforms(bits)).neg_().div_(weights)
    return times.where(weights > 0.0, torch.inf).argmin(1, keepdim=True)


def row_sums(x: Tensor) -> Tensor:  # f32[n, vocab_size] -> f64[n]
    """The sum of each row: of up to HEIGHT numbers in float32, of these in float64."""
    return _columns(x, "sum").double().cumsum(1)[:, -1]


def _columns(x: Tensor, reduction: str) -> Tensor:  # [n, vocab_size] -> [n, width]
    """Sum or maximum of the columns of each row laid out HEIGHT numbers high; the last row may be shorter."""
    vocab_size = x.shape[1]
    width = -(-vocab_size // HEIGHT)
    full = vocab_size // width
    matrix = x[:, : full * width].unflatten(1, (full, width))
    reduced: Tensor = matrix.sum(1) if reduction == "sum" else matrix.amax(1)
    rest = x[:, full * width :]
    if rest.shape[1]:
        head = reduced[:, : rest.shape[1]]
        if reduction == "sum":
            head += rest
        else:
            torch.maximum(head, rest, out=head)
    return reduced


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each at a time, of the first as many as stay in a cache."""
    first = tensors[0]
    num_rows = max(1, CHUNK // first.shape[1]) if first.device.type == "cpu" else max(1, first.shape[0])
    return zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)
