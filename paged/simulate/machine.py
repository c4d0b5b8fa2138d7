"""What this machine reaches in products with a model's own weight forms: bandwidth and arithmetic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.checks import TrustedContents
from ..model.weights.forms import WeightForm
from ..model.weights.samples import SampledWeight, bytes_of

_MOST_BYTES = 128 * 2**20  # of weights that one row is multiplied by, so that they come from memory
_MOST_NUMBERS = 2**23  # of a weight: enough rows for all cores
_SECONDS = 0.3
_LEAST_RUNS = 2
ROWS = 512


class Rates(NamedTuple):
    """What products reach: bytes of weights per second with one row, operations per second with many."""

    bytes_per_s: float
    flops_per_s: float


class _Product(NamedTuple):
    """Forms that stand for all weights that are stored alike."""

    forms: list[WeightForm]
    num_inputs: int
    times: float  # as many of these forms make up these weights

    def seconds(self, x: Tensor, count: int | None) -> float:
        """Return how long the product with all of them takes, from that with the first forms."""
        used = self.forms[:count]
        return self.times * _timed(used, x) / len(used)


def measure(weights: Sequence[SampledWeight], dtype: torch.dtype, device: torch.device) -> Rates:
    """Measure products with a model's weights, for about a second. dtype: of its activations."""
    num_bytes = sum(weight.num_bytes for weight in weights)
    part = min(1.0, _MOST_BYTES / num_bytes)
    products = [_product(weight, part * weight.num_bytes) for weight in weights]

    def seconds(num_rows: int, count: int | None) -> float:
        """Return how long the products of the whole model take."""
        inputs = [torch.ones(num_rows, each.num_inputs, dtype=dtype, device=device) for each in products]
        runs: list[float] = []
        started = time.perf_counter()
        while len(runs) < _LEAST_RUNS or time.perf_counter() - started < _SECONDS:
            runs.append(sum(map(_Product.seconds, products, inputs, repeat(count))))
        return min(runs)  # others that use this machine make the rest slower

    numbers = sum(weight.num_rows * weight.sample.num_inputs for weight in weights)
    return Rates(num_bytes / seconds(1, None), 2 * ROWS * numbers / seconds(ROWS, 1))


def _product(weight: SampledWeight, num_bytes: float) -> _Product:
    """Make forms for weights that take so many bytes together."""
    sample = weight.sample
    num_rows = min(sample.whole_rows, max(sample.num_rows, _MOST_NUMBERS // sample.num_inputs // 128 * 128))
    first = sample.make(num_rows)
    count = max(1, round(num_bytes / bytes_of(first)))
    forms = [first, *(sample.make(num_rows) for _ in range(count - 1))]
    return _Product(forms, sample.num_inputs, weight.num_rows / num_rows)


def _timed(forms: Sequence[WeightForm], x: Tensor) -> float:
    """Return the seconds of one product with each form."""
    with TrustedContents():  # as in an engine's steps
        started = time.perf_counter()
        for form in forms:
            form(x, None)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return time.perf_counter() - started
