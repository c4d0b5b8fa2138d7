"""Sampling, one row at a time: it is read from memory once and then stays in the core's cache.

The algorithm and the random numbers are those of `plain.sampling.sample_tokens`: where min_p, top_n_sigma or
a small top_k leave few candidates, a race of these in float64; else a race of columns and one within the
column, run again while top_p or typical_p exclude the token (rejection sampling). The latter works on `logs`:
base-2 logarithms of the tokens' weights relative to the likeliest token, whose logarithm is 0.
"""

import torch
from torch import Tensor

from ...checked import checked
from ...plain.sampling import selection as torch_selection
from ..launch.tasks import Task, are_contiguous
from ..rows.row_kernels import greedy, has_regular_rows, in_torch
from ..target import VECTOR_BYTES, padded

NUM_BINS = 16 * 256  # that the search for a radius counts tokens in
SAMPLE = Task(
    "sampling.sample_tokens.sample",
    (
        "logits", "tokens", "seeds", "positions",
        "temperature", "min_p", "top_n_sigma", "typical_p", "top_k", "top_p",
    ),
    ("size", "stride", "height", "width"),
)  # fmt: skip


by_torch = in_torch("sample_tokens")


@checked
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
    """Draw one token for each row; see `reference.sample_tokens`."""
    if highest is not None:
        highest.copy_(greedy(logits)[1])  # before the draw destroys the logits
    columns = seeds, positions, temperature, min_p, top_n_sigma, typical_p, top_k, top_p
    if not (has_regular_rows(logits) and are_contiguous(*columns)):
        return by_torch(
            logits,
            seeds,
            positions,
            temperature=temperature,
            min_p=min_p,
            top_n_sigma=top_n_sigma,
            typical_p=typical_p,
            top_k=top_k,
            top_p=top_p,
        )
    num_rows, size = logits.shape
    tokens = torch.empty_like(seeds)
    height = torch_selection.HEIGHT
    width = -(-size // height)
    pitch = padded(width)
    SAMPLE.run(
        num_rows,
        logits=logits,
        tokens=tokens,
        seeds=seeds,
        positions=positions,
        temperature=temperature,
        min_p=min_p,
        top_n_sigma=top_n_sigma,
        typical_p=typical_p,
        top_k=top_k,
        top_p=top_p,
        size=size,
        stride=logits.stride(0) * 4,
        height=height,
        width=width,
        # Columns; then candidates with weights, or logarithms with bins or keys.
        scratch_size=8 * pitch + max(16 * size, 12 * height * pitch + 8 * NUM_BINS + 2 * VECTOR_BYTES),
    )
    return tokens
