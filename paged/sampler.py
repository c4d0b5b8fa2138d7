"""Sampler: logits to tokens. Random numbers come from (request seed, position), from no shared stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .request import Request, TokenLogprobs
from .schedule import StepOutput
from .structured_outputs import GrammarMasks


def sample(
    logits: Tensor, requests: Sequence[Request], grammar_masks: GrammarMasks | None = None
) -> StepOutput:
    """One token for each row of f32[len(requests), vocab_size], which may be changed in place.

    grammar_masks: of the rows that have a grammar.

    None where a row has no finite maximum: the model overflowed, and a token would be made up.
    """
    if not requests:
        return StepOutput()
    rows = [row for row, request in enumerate(requests) if not request.is_greedy]
    asked = [row for row in rows if requests[row].wants_logprobs]
    logprobs = logits[asked].log_softmax(-1) if asked else logits
    if grammar_masks is not None:
        grammar_masks.apply(logits)
    tokens = _sample_tokens(logits, requests, rows)
    return StepOutput(tokens, _reports(logprobs, requests, asked, tokens))


def _reports(
    logprobs: Tensor, requests: Sequence[Request], rows: list[int], tokens: list[int | None]
) -> dict[int, TokenLogprobs]:
    """What the requests in these rows asked for: logprobs[i] is of rows[i]."""
    reports = {}
    for i, row in enumerate(rows):
        token = tokens[row]
        if token is None:
            continue
        num_top = requests[row].params.logprobs or 0
        top = logprobs[i].topk(logprobs.shape[1] if num_top < 0 else min(num_top, logprobs.shape[1]))
        own = logprobs[i, token]
        rank = int((logprobs[i] > own).sum()) + 1
        reports[row] = TokenLogprobs([token, *top.indices.tolist()], [own.item(), *top.values.tolist()], rank)
    return reports


def _sample_tokens(logits: Tensor, requests: Sequence[Request], rows: list[int]) -> list[int | None]:
    if any(requests[row].params.min_tokens for row in rows):
        _mask_early_stops(logits, requests)
    highest, tokens = _argmax(logits)
    random_rows = [row for row in rows if requests[row].params.temperature > 0.0]
    if random_rows:
        _sample_random_rows(logits, requests, random_rows, tokens)
    if not math.isfinite(sum(highest)):
        return [t if math.isfinite(h) else None for t, h in zip(tokens, highest, strict=True)]
    return list[int | None](tokens)


def _argmax(logits: Tensor) -> tuple[list[float], list[int]]:
    """Each row's highest logit and a token that has it, on a CPU the first."""
    if logits.device.type != "cpu":
        values, indices = logits.max(-1)
        return values.tolist(), indices.tolist()
    # numpy's argmax is vectorised; torch's is not on a CPU, and takes 7 times as long.
    array = logits.numpy()
    indices = array.argmax(-1)
    return array[_first_rows(len(indices)), indices].tolist(), indices.tolist()


@lru_cache(maxsize=4)
def _first_rows(n: int) -> NDArray[np.int64]:
    return np.arange(n)


def _mask_early_stops(logits: Tensor, requests: Sequence[Request]) -> None:
    for row, request in enumerate(requests):
        if request.num_output_tokens < request.params.min_tokens:
            logits[row, list(request.stop_ids)] = -torch.inf


def _sample_random_rows(
    logits: Tensor, requests: Sequence[Request], random_rows: list[int], tokens: list[int]
) -> None:
    """Write the tokens of these rows; rows that need a sort go apart from those that do not.

    Whether a row is sorted must depend on its own request alone: the order of a cumulative sum decides
    which token a random number falls on.
    """
    vocab_size = logits.shape[1]
    by_need: dict[bool, list[int]] = {False: [], True: []}
    for row in random_rows:
        params = requests[row].params
        by_need[0 < params.top_k < vocab_size or params.top_p < 1.0].append(row)
    for needs_sort, rows in by_need.items():
        if not rows:
            continue
        chosen = [requests[row] for row in rows]
        index = torch.tensor(rows, device=logits.device)
        probs = _probabilities(logits[index], chosen)
        uniform = uniforms([r.seed for r in chosen], [r.num_tokens for r in chosen])
        draws = torch.from_numpy(uniform).to(logits.device)
        drawn = _draw_filtered(probs, draws, chosen) if needs_sort else _draw(probs, draws)
        for row, token in zip(rows, drawn.tolist(), strict=True):
            tokens[row] = token


def _probabilities(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """softmax(logits / temperature), with min_p applied; f32, not normalised after it."""
    column = _columns(logits.device, [(r.params.temperature, r.params.min_p) for r in requests])
    # The maximum first: a tiny temperature then underflows to greedy instead of overflowing to NaN.
    scaled = (logits - logits.max(-1, keepdim=True).values) / column[0].clamp(min=1e-30)
    probs = scaled.nan_to_num_(nan=0.0).softmax(-1)
    if any(r.params.min_p for r in requests):
        probs = probs.where(probs >= column[1] * probs.max(-1, keepdim=True).values, 0.0)
    return probs


def _draw_filtered(probs: Tensor, draws: Tensor, requests: Sequence[Request]) -> Tensor:
    """Draw from the top_k most likely tokens, and of those from the smallest set that holds top_p."""
    vocab_size = probs.shape[1]
    # Compared as Python ints: a float32 cannot hold every top_k that is legal.
    top_ks = [r.params.top_k if 0 < r.params.top_k < vocab_size else vocab_size for r in requests]
    limits = [(float(k), r.params.top_p) for k, r in zip(top_ks, requests, strict=True)]
    top_k, top_p = _columns(probs.device, limits)
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    probs = probs.where(torch.arange(vocab_size, device=probs.device) < top_k, 0.0)
    mass_before = probs.double().cumsum(-1) - probs
    kept = mass_before < top_p * probs.double().sum(-1, keepdim=True)
    kept[:, 0] = True  # also where top_p is too small for a float32
    probs = probs.where(kept, 0.0)
    return order.gather(-1, _draw(probs, draws)[:, None]).squeeze(-1)


def _draw(probs: Tensor, draws: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: probs f32[n, vocab_size], draws f64[n] in [0, 1) -> i64[n]."""
    cdf = probs.double().cumsum(-1)
    total = cdf[:, -1:]
    # Strictly below the total, so that the token found has a probability above zero.
    target = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(-1)


def _columns(device: torch.device, rows: list[tuple[float, float]]) -> Tensor:
    """Per-request numbers as columns beside the logits: f32[2, n, 1]."""
    return torch.tensor(rows, dtype=torch.float32).T[:, :, None].to(device)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position), by two rounds of SplitMix64 (Steele et al., 2014)."""
    seed = np.array([s & (2**64 - 1) for s in seeds], np.uint64)
    mixed = _splitmix64(_splitmix64(seed) ^ np.array(positions, np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
