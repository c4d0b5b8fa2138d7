"""The search for the scales and zeros of int4, in plain torch; `cpu.linear.int4_search` compiles it.

Codes give the best scale and zero for them, in closed form, and these give new codes. It begins with the
codes of several ranges, narrower than the numbers', and goes on with the best of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# What the first ranges leave out at the lower and upper end of a group's, and how often the best is refined.
# More ranges and refinements lower the squared error a little, and made a model's perplexity worse.
CUTS = ((0, 0), (0.03, 0.03), (0.06, 0.06), (0.09, 0.09), (0, 0.06), (0.06, 0))
REFINEMENTS = 1
LEVELS = 15  # between the lowest and the highest number, which are at -LEVELS / 2 and LEVELS / 2
# A range's code of a level is factor * level + shift, rounded.
RANGES = tuple(
    (1 / (1 - low - high), LEVELS / 2 * (high - low) / (1 - low - high) - 0.5) for low, high in CUTS
)


class Fit(NamedTuple):
    """The best scale and zero [n] for some groups of codes, and how much of the squares they explain."""

    scale: Tensor
    zero: Tensor
    explained: Tensor


def best_fit(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Find the scales and zeros, f32[n], with which codes from -8 to 7 best approximate groups [size, n].

    levels: f32[size, n]; size is a power of two. The result is NaN for groups with NaN or with equal numbers
        only.
    """
    codes = torch.empty_like(levels)
    scratch = torch.empty_like(levels)
    sums = _sum(scratch.copy_(levels))
    best: Fit | None = None
    for factor, shift in RANGES:
        torch.mul(levels, factor, out=codes).add_(shift)
        best = _better(best, _fit(codes, levels, sums, scratch))
    assert best is not None
    for _ in range(REFINEMENTS):
        torch.sub(levels, best.zero, out=codes).div_(best.scale)
        best = _better(best, _fit(codes, levels, sums, scratch))
    return best.scale, best.zero


def _fit(codes: Tensor, numbers: Tensor, sums: Tensor, scratch: Tensor) -> Fit:
    """Round codes [size, n] in place, and fit scale * code + zero to the numbers by least squares.

    sums: the sum of the numbers of each group.
    """
    size = len(numbers)
    codes.round_().clamp_(-8, 7)
    mean = _sum(scratch.copy_(codes)) / size
    products = _sum(torch.mul(codes, numbers, out=scratch)) - mean * sums
    squares = _sum(torch.mul(codes, codes, out=scratch)) - mean * mean * size
    scale = products / squares
    return Fit(scale, sums / size - scale * mean, scale * products)


def _better(best: Fit | None, other: Fit) -> Fit:
    """Choose, for each group, the fit that explains more. NaN explains nothing."""
    if best is None:
        return other
    is_better = other.explained > best.explained
    return Fit(*(torch.where(is_better, new, old) for new, old in zip(other, best, strict=True)))


def _sum(numbers: Tensor) -> Tensor:
    """Add up [2**k, n], which it overwrites, in an order that does not depend on n, as torch's does."""
    while len(numbers) > 2:
        half = len(numbers) // 2
        numbers = numbers[:half].add_(numbers[half:])
    return numbers[0] + numbers[1]
