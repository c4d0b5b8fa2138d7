"""Selection among the numbers of each row in plain torch, without sorting the row.

Batch-invariant: sums go along a row, in an order that does not depend on other rows.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

# A row is looked at as the columns of a matrix this high: sums and maxima of these are vectorised.
HEIGHT = 32
CHUNK = 2**18  # numbers that are worked on at once: new memory for more than a cache holds costs page faults
GATHER_COST = 30  # of a number picked here and there, in numbers that are read one after the other
# The bits of positive float32 are ordered as they are. The first 14 of 32 are a bin's number, which makes 32
# bins of an octave; 2**-16 to 2**16 have bins of their own, what is beyond shares the first and the last.
BIN_SHIFT, FIRST_BIN, NUM_BINS = 18, (127 - 16) * 32, 32 * 32


def smallest_bound(
    numbers: Tensor,  # f32[n, vocab_size], none negative
    weights: Tensor,  # f32[n, vocab_size], none negative
    target: Tensor,  # [n]
) -> Tensor:  # f32[n, 1]
    """Return the smallest bound such that the numbers up to it have a total weight of at least `target`; inf
    if all numbers together weigh less.

    Weights are summed in bins. Only the bin in which the sum reaches the target is sorted.
    """
    num, vocab_size = numbers.shape
    target = target.double()[:, None]
    bins = (numbers.view(torch.int32) >> BIN_SHIFT).sub_(FIRST_BIN).clamp_(0, NUM_BINS - 1)
    # [n, 1 + NUM_BINS]
    sums = torch.zeros(num, 1 + NUM_BINS, dtype=torch.float64, device=numbers.device)
    sums[:, 1:].scatter_add_(1, bins.long(), weights.double())
    sums = sums.cumsum(1)
    reached = (sums[:, 1:] < target).sum(1, keepdim=True)
    if numbers.device.type == "cpu":
        places = places_where(torch.from_numpy(bins.numpy() == reached.int().numpy()))
    else:
        places = places_where(bins == reached)
    row = places // vocab_size
    at, most = _rectangle(row, num)
    inside = torch.full((num, most), torch.inf, device=numbers.device)
    heavy = torch.zeros_like(inside)
    inside[row, at] = numbers.reshape(-1)[places]
    heavy[row, at] = weights.reshape(-1)[places]
    inside, order = inside.sort(dim=1)
    short = heavy.gather(1, order).double().cumsum(1) + sums.gather(1, reached) < target
    # Added up in another order, all of a bin may be short of the target by a rounding: then it is the last.
    last = torch.bincount(row, minlength=num)[:, None] - 1
    return inside.gather(1, torch.minimum(short.sum(1, keepdim=True), last.clamp_(min=0)))


def candidates(
    x: Tensor,  # f32[n, vocab_size]
    bound: Tensor,  # f32[n, 1]
    maxima: Tensor,  # f32[n, width], of the columns of x
) -> tuple[Tensor, Tensor]:  # f32 and i64 [n, most]
    """Return the values of each row that are at least its bound, without -inf, and their indices.

    Values are in descending order, equal values in the order of their indices. Rows are padded with -inf.
    """
    num, vocab_size = x.shape
    places = _places_from(x, bound.clamp(min=torch.finfo(x.dtype).min), maxima)
    row = places // vocab_size
    at, most = _rectangle(row, num)
    values = torch.full((num, most), -torch.inf, device=x.device)
    tokens = torch.zeros(num, most, dtype=torch.int64, device=x.device)
    values[row, at] = x.reshape(-1)[places]
    tokens[row, at] = places - row * vocab_size
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def top_candidates(
    x: Tensor,  # f32[n, vocab_size]
    top_k: Tensor,  # int[n], from 1 to vocab_size // HEIGHT
) -> tuple[Tensor, Tensor]:  # f32 and i64 [n, most]
    """Return the top_k largest values of each row, with ties and perhaps more; see `candidates`."""
    maxima = column_maxima(x)
    return candidates(x, kth_largest(maxima, top_k), maxima)


def kth_largest(x: Tensor, k: Tensor) -> Tensor:  # f32[n, size], int[n] -> f32[n, 1]
    """Return the k-th largest number of each row. For column maxima, the k-th largest of all is no less."""
    if x.device.type != "cpu":
        return x.topk(int(k.max())).values.gather(1, k.long()[:, None] - 1)
    # numpy's quickselect is vectorised and four times as fast as torch; it takes one k for all rows, and is
    # ten times slower if the least numbers, not the greatest, are many equal ones.
    array = x.numpy()
    places = k.numpy() - 1
    found = np.empty((len(array), 1), array.dtype)
    for at in np.unique(places):
        rows = places == at
        negated = -(array if rows.all() else array[rows])
        negated.partition(at, axis=1)
        found[rows] = -negated[:, at : at + 1]
    return torch.from_numpy(found)


def _places_from(
    x: Tensor,  # f32[n, size]
    bound: Tensor,  # f32[n, 1]
    maxima: Tensor,  # f32[n, width], of the columns of x
) -> Tensor:  # i64[num_places], ascending
    """Return the indices in the flattened x at which a row reaches its bound."""
    size = x.shape[1]
    width = maxima.shape[1]
    columns = places_where(maxima >= bound)[:, None]
    if len(columns) * HEIGHT * GATHER_COST < x.numel():
        row = columns // width
        column = columns % width
        places = column + torch.arange(0, width * HEIGHT, width, device=x.device)
        inside = places < size
        places += row * size
        found = x.reshape(-1)[places.clamp_(max=x.numel() - 1)]
        return places[(found >= bound[row[:, 0]]) & inside].sort().values
    if x.device.type != "cpu":
        return places_where(x >= bound)
    # numpy compares several times as fast as torch.
    return places_where(torch.from_numpy(x.numpy() >= bound.numpy()))


def places_where(mask: Tensor) -> Tensor:  # bool[n, size] -> i64[num_places]
    """Return the indices at which the flattened mask is true."""
    if mask.device.type != "cpu":
        return mask.view(-1).nonzero().view(-1)
    # numpy is several times as fast as torch.
    return torch.from_numpy(mask.numpy().reshape(-1).nonzero()[0])


def _rectangle(row: Tensor, num: int) -> tuple[Tensor, int]:  # i64[m], ascending -> i64[m]
    """Return the column of each in a rectangle of `num` rows, and its width."""
    counts = torch.bincount(row, minlength=num)
    column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    return column, max(1, int(counts.max()))


def row_sums(x: Tensor) -> Tensor:  # f32[n, vocab_size] -> f64[n]
    """Return the sum of each row. Up to HEIGHT numbers are added in float32, and their sums in float64."""
    return left_to_right(column_sums(x))[:, 0]


def left_to_right(x: Tensor) -> Tensor:  # [n, size] -> f64[n, 1]
    """Return the sum of each row, added from left to right, so that trailing zeros change no bit."""
    return x.double().cumsum(1)[:, -1:]


def column_sums(x: Tensor) -> Tensor:  # [n, vocab_size] -> [n, width]
    """Arrange each row in at most HEIGHT lines, the last perhaps shorter, and sum the columns."""
    full, rest = _matrix(x)
    reduced = full.sum(1)
    reduced[:, : rest.shape[1]] += rest
    return reduced


def column_sums_between(
    x: Tensor,  # f32[n, vocab_size]
    low: Tensor,  # f32[n, 1]
    high: Tensor,  # f32[n, 1]
) -> Tensor:  # f32[n, width]
    """For each column, sum the numbers that lie strictly between low and high."""
    if x.device.type != "cpu":
        return column_sums(x * ((x > low) & (x < high)))
    # numpy compares, and multiplies and adds in one pass, in half of torch's time.
    inside = x.numpy() > low.numpy()
    inside &= x.numpy() < high.numpy()
    full, rest = _matrix(x)
    kept, kept_rest = _matrix(torch.from_numpy(inside))
    reduced = torch.from_numpy(np.einsum("nhw,nhw->nw", full.numpy(), kept.numpy()))
    reduced[:, : rest.shape[1]] += rest * kept_rest
    return reduced


def column_maxima(x: Tensor) -> Tensor:  # [n, vocab_size] -> [n, width]
    """Return the maximum of each column, in the arrangement of `column_sums`."""
    full, rest = _matrix(x)
    reduced = full.amax(1)
    head = reduced[:, : rest.shape[1]]
    torch.maximum(head, rest, out=head)
    return reduced


def _matrix(x: Tensor) -> tuple[Tensor, Tensor]:  # [n, vocab_size] -> [n, height, width], [n, rest]
    vocab_size = x.shape[1]
    width = -(-vocab_size // HEIGHT)
    full = vocab_size // width * width
    return x[:, :full].unflatten(1, (-1, width)), x[:, full:]


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors into chunks of rows such that a chunk of the first tensor fits in a CPU's cache."""
    first = tensors[0]
    num_rows = max(1, CHUNK // first.shape[1]) if first.device.type == "cpu" else max(1, first.shape[0])
    return zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)
