"""What this machine reaches with a model's own weight forms, cache and kernels: about a second to measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention_options import AttentionOptions, AttentionPlan
from ..kernels.checks import TrustedContents
from ..model.cache.kv_cache import KVCache
from ..model.weights.forms import WeightForm
from ..model.weights.samples import SampledWeight, bytes_of
from ..runner.footprint import Footprint
from .cost import Coefficients

_MOST_BYTES = 128 * 2**20  # of weights or KV that are read, so that they come from memory
_MOST_NUMBERS = 2**22  # of a weight: enough rows for all cores
_SECONDS = 0.1  # of each measurement
_LEAST_RUNS = 2
_ROWS = 512
_LAYERS = 2  # that many queries attend in
# Seconds of a step on a CPU beside products and attention: for each layer's other kernels, and once for
# scheduling and sampling. Assumed: `python -m benchmarks.plan` tells what predictions are worth with them.
_STEP_S = 0.3e-3
_LAYER_S = 40e-6


class Measured(NamedTuple):
    """Measured step times, and the bandwidth and the arithmetic speed that matrix products reach."""

    coefficients: Coefficients
    bytes_per_s: float
    flops_per_s: float


def measure(footprint: Footprint) -> Measured:
    """Measure matrix products of 1 and of 512 rows with a model's weights, and attention over its cache."""
    model = footprint.model
    sizes = footprint.sizes
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    with TrustedContents():  # as in an engine's steps
        layers = _products(model.layers, dtype, footprint.device)
        head = _products(model.head, dtype, footprint.device)
        context_s, pair_s = _attention(footprint, dtype)
    num_layers = sizes.model.num_layers
    numbers = sum(each.num_rows * each.sample.num_inputs for each in (*model.layers, *model.head))
    num_bytes = sum(each.num_bytes for each in (*model.layers, *model.head))
    bytes_per_s = num_bytes / (layers.one + head.one)
    return Measured(
        Coefficients(
            step_s=layers.of_no_row + head.of_no_row + _STEP_S + _LAYER_S * num_layers,
            token_s=layers.of_a_row,
            # A step reads and writes the states of a sequence.
            seq_s=head.of_a_row + 2 * sizes.state_bytes / bytes_per_s,
            context_s=context_s,
            pair_s=pair_s,
        ),
        bytes_per_s=bytes_per_s,
        flops_per_s=2 * _ROWS * numbers / (layers.many + head.many),
    )


class _Seconds(NamedTuple):
    """The time of products with one row, and with many."""

    one: float
    many: float

    @property
    def of_a_row(self) -> float:
        """The seconds that each further row takes."""
        return max(0.0, self.many - self.one) / (_ROWS - 1)

    @property
    def of_no_row(self) -> float:
        """The seconds of the product that do not depend on its rows."""
        return self.one - self.of_a_row


def _products(weights: Sequence[SampledWeight], dtype: torch.dtype, device: torch.device) -> _Seconds:
    """Return the times of products with weights that follow each other."""
    part = min(1.0, _MOST_BYTES / sum(weight.num_bytes for weight in weights))
    one = many = 0.0
    all_forms = [_forms(weight, part * weight.num_bytes) for weight in weights]
    for weight, (forms, times) in zip(weights, all_forms, strict=True):
        x = torch.ones(_ROWS, weight.sample.num_inputs, dtype=dtype, device=device)
        one += times / len(forms) * _best(partial(_multiply, x[:1], forms), device)
        many += times * _best(partial(_multiply, x, forms[:1]), device)
    return _Seconds(one, many)


def _multiply(x: Tensor, forms: Sequence[WeightForm]) -> None:
    for form in forms:
        form(x, None)


def _forms(weight: SampledWeight, num_bytes: float) -> tuple[list[WeightForm], float]:
    """Make forms that take so many bytes together. Return also how many of them make up the whole."""
    sample = weight.sample
    # As one large weight: steps are recorded, and lose little time between products.
    num_rows = min(weight.num_rows, max(sample.num_rows, _MOST_NUMBERS // sample.num_inputs // 128 * 128))
    first = sample.make(num_rows)
    count = max(1, round(num_bytes / bytes_of(first)))
    # Copied, as it takes seconds to make so many.
    return [first, *(deepcopy(first) for _ in range(count - 1))], weight.num_rows / num_rows


def _attention(footprint: Footprint, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds for each token whose K and V are read, and each pair of a query and a key."""
    sizes = footprint.sizes
    model = sizes.model
    token_bytes = sizes.block_bytes * len(model.layer_groups) // sizes.block_size
    length = max(_ROWS, 2 * sizes.block_size)
    # Of as many sequences as leave no cache what it will need again.
    num_seqs = max(1, _MOST_BYTES // (token_bytes * length))
    num_blocks = num_seqs * length // sizes.block_size
    cache = KVCache(model, num_blocks, sizes.block_size, getattr(torch, sizes.kv_dtype), footprint.device)
    for tensor in cache.tensors.values():
        tensor.view(torch.uint8).zero_()
    tables = torch.arange(num_blocks, dtype=torch.int32, device=footprint.device).view(num_seqs, -1)

    def attend(num_seqs: int, num_queries: int, length: int, num_layers: int) -> Callable[[], object]:
        """Return what attends from the last queries of sequences in the first layers."""
        lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=footprint.device)
        ends = num_queries * torch.arange(num_seqs + 1, dtype=torch.int32, device=footprint.device)
        plans: dict[object, AttentionPlan] = {}

        def in_layer(index: int) -> Tensor:
            spec = model.attentions[index]
            key, value, key_scales, value_scales = cache.layer(index)
            query = torch.zeros(
                num_seqs * num_queries,
                spec.num_heads,
                spec.kv.key_dim,
                dtype=dtype,
                device=footprint.device,
            )
            options = AttentionOptions(
                spec.scale, num_queries, num_queries, key_scales=key_scales, value_scales=value_scales
            )
            key_of = spec.kv, spec.num_heads
            inputs = query, key, value, tables[:num_seqs], lengths, ends, options
            if key_of not in plans:  # once for all steps, as an engine does for all layers
                plans[key_of] = footprint.kernels.plan_attention(*inputs)
            return footprint.kernels.paged_attention(*inputs, plans[key_of])

        return lambda: [in_layer(index) for index in islice(model.attentions, num_layers)]

    def seconds(*work: int) -> float:
        return _best(attend(*work), footprint.device)

    count = len(model.attentions)
    num_read = num_seqs * (length - sizes.block_size)
    context_s = seconds(num_seqs, 1, length, count) - seconds(num_seqs, 1, sizes.block_size, count)
    few = min(_LAYERS, count)
    pairs = _ROWS * (_ROWS + 1) / 2
    pair_s = seconds(1, _ROWS, _ROWS, few) - seconds(1, 1, sizes.block_size, few)
    context_s /= num_read
    pair_s *= count / few / pairs
    return max(0.0, context_s), max(0.0, pair_s)


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of several runs: others that use this machine make the rest slower."""
    best = float("inf")
    started = time.perf_counter()
    num_runs = 0
    while num_runs < _LEAST_RUNS or time.perf_counter() - started < _SECONDS:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
        num_runs += 1
    return best
