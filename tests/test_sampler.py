"""Sampling: the distribution, the filters against a brute-force rule, and that rows do not see each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.request import Request
from paged.sampler import sample, uniforms
from paged.sampling_params import SamplingParams

VOCAB_SIZE = 13


def new_request(seed: int = 0, num_tokens: int = 1, stop_ids: Sequence[int] = (), **params: Any) -> Request:
    sampling = SamplingParams(**params)
    return Request("r", None, [0] * num_tokens, sampling, 10**6, frozenset(stop_ids), seed)


def draw(logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
    return sample(logits.clone(), requests).tokens


def expected_probabilities(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """min_p, then top_k, then top_p, one token at a time as their definitions read."""
    weights = np.exp((logits - logits.max()).double().numpy() / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = [i for i in order if weights[i] >= min_p * weights.max()]
    kept = kept[: top_k if top_k > 0 else None]
    nucleus, mass, total = [], 0.0, sum(weights[i] for i in kept)
    for i in kept:
        nucleus.append(i)
        mass += weights[i]
        if mass >= top_p * total:
            break
    probabilities = np.zeros(len(weights))
    probabilities[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return probabilities


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": -1},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_frequencies_are_those_of_the_filtered_softmax(params, over):
    n = 4000
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 1.3
    if over == "seeds":
        requests = [new_request(seed=i, num_tokens=3, **params) for i in range(n)]
    else:
        requests = [new_request(seed=7, num_tokens=1 + i, **params) for i in range(n)]
    tokens = draw(logits.expand(n, -1), requests)
    counts = np.bincount(np.array(tokens), minlength=VOCAB_SIZE)
    expected = n * expected_probabilities(logits, **params)
    possible = expected > 0
    assert not counts[~possible].any(), "a token was drawn that the filters exclude"
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    # Its mean is df and its standard deviation sqrt(2 df); the seeds are fixed, so it passes always or never.
    df = possible.sum() - 1
    assert chi_square <= df + 5 * math.sqrt(2 * df)


def test_top_k_of_equal_logits_keeps_exactly_k():
    tokens = draw(torch.zeros(500, VOCAB_SIZE), [new_request(seed=i, top_k=3) for i in range(500)])
    assert set(tokens) == {0, 1, 2}


def test_greedy_takes_the_most_likely_token_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0]])
    assert draw(logits, [new_request(temperature=0.0)] * 2) == [1, 0]


def test_tiny_and_huge_temperatures_neither_overflow_nor_leave_the_vocabulary():
    logits = torch.tensor([1.0, 5.0, 4.9]).expand(200, -1)
    assert set(draw(logits, [new_request(seed=i, temperature=1e-40) for i in range(200)])) == {1}
    assert set(draw(logits, [new_request(seed=i, temperature=1e300) for i in range(200)])) == {0, 1, 2}


def mixed_requests(n: int) -> list[Request]:
    kinds = [*FILTERS, {"temperature": 0.0}, {"min_tokens": 5, "stop_ids": (1, 2)}]
    return [new_request(seed=i, num_tokens=1 + i, **kinds[i % len(kinds)]) for i in range(n)]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 1, 1009])
def test_rows_do_not_depend_on_their_neighbours(vocab_size):
    requests = mixed_requests(84) if vocab_size > 2 else [new_request(seed=i) for i in range(9)]
    logits = torch.randn(len(requests), vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    together = draw(logits, requests)
    assert [draw(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)] == together
    assert draw(logits.flip(0), requests[::-1]) == together[::-1]


def test_min_tokens_keeps_stop_ids_from_being_chosen():
    logits = torch.zeros(50, 3)
    logits[:, 1] = 40.0
    early = [new_request(seed=i, min_tokens=1, stop_ids=[1]) for i in range(50)]
    assert set(draw(logits, early)) == {0, 2}
    for request in early:
        request.token_ids.append(0)
    assert set(draw(logits, early)) == {1}
    # ignore_eos leaves nothing to mask.
    assert draw(logits[:1], [new_request(min_tokens=1)]) == [1]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_row_without_a_finite_maximum_has_no_token_and_harms_nobody(value, params):
    requests = [new_request(seed=i, **params) for i in range(4)]
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    sound = draw(logits, requests)
    logits[1, 3] = value
    logits[3] = -math.inf
    assert draw(logits, requests) == [sound[0], None, sound[2], None]


def test_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    tokens = draw(logits.expand(2000, -1), [new_request(seed=i) for i in range(2000)])
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.99}], ids=str)
def test_draws_at_both_ends_find_tokens_that_are_possible(params, monkeypatch):
    logits = torch.tensor([[-math.inf, 0.0, 0.5, 0.3, -math.inf]])
    for number, token in [(0.0, {1, 2}), (1 - 2.0**-53, {3, 1})]:  # in order of ids, or of likelihood
        monkeypatch.setattr("paged.sampler.uniforms", lambda *_, number=number: np.array([number]))
        assert draw(logits, [new_request(**params)])[0] in token


def test_uniforms_are_uniform_and_independent_along_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(-50, 50), np.arange(100))
    grid = uniforms(seeds.ravel().tolist(), positions.ravel().tolist()).reshape(100, 100)
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    assert len(np.unique(grid)) == grid.size
    assert abs(np.histogram(grid, bins=10, range=(0, 1))[0] - 1000).max() < 150
    for shifted in (np.roll(grid, 1, 0), np.roll(grid, 1, 1), grid.T):
        assert abs(np.corrcoef(grid.ravel(), shifted.ravel())[0, 1]) < 0.05
    # The extremes of what SamplingParams takes.
    assert uniforms([2**63 - 1, -(2**63), 0], [1, 1, 2**40]).shape == (3,)
