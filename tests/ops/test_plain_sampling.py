"""Sampling on a CPU: exact distributions, filters against Hugging Face's, rows that do not mix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from paged.kernels.backend import load_kernels
from paged.kernels.plain.sampling import selection as torch_selection
from paged.kernels.plain.sampling.selection import (
    column_sums_between,
    kth_largest,
    smallest_bound,
    top_candidates,
)
from paged.kernels.plain.sampling.splitmix import GOLDEN, mixed, nth, splitmix64, uniforms

VOCAB_SIZE = 29
DTYPES = {"top_k": torch.int32}
HF = {
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
}
CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"min_p": 0.15},
    {"top_n_sigma": 1.2},
    {"typical_p": 0.6},
    {"typical_p": 0.1, "temperature": 0.7},
    {"typical_p": 0.05},
    {"typical_p": 0.8, "top_p": 0.7},
    {"typical_p": 0.3, "top_k": 5},
    {"min_p": 0.5, "typical_p": 0.5, "top_k": 4, "top_p": 0.9},
    {"top_k": 3},
    {"top_k": 17},
    {"top_p": 0.7},
    {"top_p": 0.2, "temperature": 2.0},
    {"temperature": 2.0, "min_p": 0.05, "top_k": 5, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.02, "typical_p": 0.9, "top_k": 20, "top_p": 0.9},
]


@pytest.fixture(autouse=True)
def _low_columns(monkeypatch):
    """So that a small vocabulary has small and large values of top_k."""
    monkeypatch.setattr(torch_selection, "HEIGHT", 4)


def row_of(vocab_size: int = VOCAB_SIZE, seed: int = 5) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 1.3


Draw = Callable[..., Tensor]


@pytest.fixture(params=["torch", "numba"])
def draw(request: pytest.FixtureRequest) -> Draw:
    """draw(logits, seeds, positions, **filters); a filter is one number for all rows, or one for each."""
    sample_tokens = load_kernels(request.param).sample_tokens

    def drawn(logits: Tensor, seeds: Tensor, positions: Tensor, **filters: Any) -> Tensor:
        columns: dict[str, Tensor | None] = dict.fromkeys(
            ("min_p", "top_n_sigma", "typical_p", "top_k", "top_p")
        )
        for name, value in {"temperature": 1.0, **filters}.items():
            column = torch.tensor(value, dtype=DTYPES.get(name, torch.float32))
            columns[name] = column.expand(len(logits)).contiguous()
        return sample_tokens(logits.clone(), seeds, positions, **columns)

    return drawn


def hf_probabilities(row: Tensor, **filters: Any) -> NDArray[np.float64]:
    """Filter a row by Hugging Face's warpers, in the order of SamplingParams."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(filters.get("temperature", 1.0)))])
    scores = warpers(None, row[None].double())
    if n := filters.get("top_n_sigma"):  # they have none: Tang et al., 2024
        scores = scores.where(scores >= scores.max() - n * scores.std(correction=0), -math.inf)
    for name in ("min_p", "typical_p", "top_k", "top_p"):
        if name in filters:
            scores = HF[name](filters[name])(None, scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("filters", CONFIGURATIONS, ids=str)
def test_draws_are_distributed_as_the_warpers_say(filters, draw):
    row, n = row_of(), 10**5
    tokens = draw(row.expand(n, -1), torch.full((n,), 7), torch.arange(n), **filters)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB_SIZE)
    expected = n * hf_probabilities(row, **filters)
    possible = expected > 0
    assert not counts[~possible].any(), "a token was drawn that the filters exclude"
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    # Its mean is df and its standard deviation sqrt(2 df); the seeds are fixed, so it passes always or never.
    df = possible.sum() - 1
    assert chi_square <= df + 4 * math.sqrt(2 * df)


@pytest.mark.parametrize("vocab_size", [211, 1009], ids="vocab_size={}".format)
@pytest.mark.parametrize("filters", CONFIGURATIONS[3:], ids=str)
def test_what_is_drawn_is_what_the_warpers_keep(vocab_size, filters, draw):
    row, n = row_of(vocab_size), 3000
    tokens = draw(row.expand(n, -1), torch.arange(n), torch.zeros(n, dtype=torch.int64), **filters)
    probabilities = hf_probabilities(row, **filters)
    assert (probabilities[tokens.numpy()] > 0).all()
    likely = np.flatnonzero(probabilities > 0.01)
    assert set(likely) <= set(tokens.tolist())


def positions_for(n: int, number: float) -> Tensor:  # i64[4096]
    """Of seed 0, such that the n-th random number of their streams is this one; others are as they come."""

    def unmixed(x: int) -> int:  # what splitmix64 makes x of
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            for by in (shift, 2 * shift):
                x ^= x >> by
            x = x * pow(factor, -1, 2**64) % 2**64
        return (x - GOLDEN) % 2**64

    first = splitmix64(torch.zeros(1, dtype=torch.int64)).item()
    found = [(int(number * 2**52) << 12) + low for low in range(4096)]
    positions = [unmixed((unmixed(bits) - n * GOLDEN) % 2**64) ^ first % 2**64 for bits in found]
    return torch.tensor([p - 2**64 if p >= 2**63 else p for p in positions])


def arrivals(positions: Tensor, n: int) -> Tensor:  # f64[4096]
    """When the n-th runner of weight 1 arrives."""
    zeros = torch.zeros_like(positions)
    return -torch.log1p(-uniforms(nth(mixed(zeros, positions), torch.tensor(n))))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.999999}, {"top_k": 20}], ids=str)
@pytest.mark.parametrize("other", [1, 8], ids=["another-column", "the-same-column"])
def test_tail_of_two_to_the_minus_30_has_its_share_of_the_random_numbers(other, filters, draw):
    row = torch.full((1, VOCAB_SIZE), -math.inf)
    row[0, 0], row[0, other] = 0.0, -30 * math.log(2)
    width = -(-VOCAB_SIZE // torch_selection.HEIGHT)
    height, column = divmod(other, width)
    assert (column == 0) == (other == 8)
    # By token among candidates, by column or then by the place there among all.
    among_few, apart = filters == {"top_k": 3}, column > 0
    own, rival = (other, 0) if among_few else (column, 0) if apart else (width + height, width)
    positions = positions_for(own, 0.5 * 2.0**-30)
    drawn = draw(row.expand(4096, -1), torch.zeros_like(positions), positions, **filters)
    wins = arrivals(positions, own) * 2.0**30 < arrivals(positions, rival)
    assert 2000 < int(wins.sum()) < 3000
    # But top_p excludes it.
    assert torch.equal(drawn, other * (wins & ("top_p" not in filters)))


def test_top_p_of_1_keeps_the_lightest_tokens_whatever_other_rows_use(draw, monkeypatch):
    # So light that the sum of float32 is the same without them.
    row = torch.full((1, 64), -22.0).index_fill_(1, torch.tensor([0, 1]), 0.0).expand(4096, -1)
    monkeypatch.setattr(torch_selection, "HEIGHT", 32)
    positions = positions_for(2 + 5, 1e-14)  # the sixth place of a column
    zeros = torch.zeros_like(positions)
    alone, among_others = (draw(row, zeros, positions, **filters) for filters in ({}, {"top_p": 1.0}))
    first_column = arrivals(positions, 0) < arrivals(positions, 1)
    assert (alone[first_column] == 10).float().mean() > 0.999
    assert torch.equal(among_others, alone)


@pytest.mark.parametrize("vocab_size", [1, 13, 1009, 4096], ids="vocab_size={}".format)
@pytest.mark.parametrize("height", [4, 32], ids="height={}".format)
def test_kernels_draw_the_tokens_of_plain_torch(height, vocab_size, monkeypatch):
    """Whatever the filters, rows of a wider tensor, -inf among them, and ties."""
    monkeypatch.setattr(torch_selection, "HEIGHT", height)
    n, rng = len(CONFIGURATIONS) * 8, torch.Generator().manual_seed(4)
    wide = torch.randn(n, vocab_size + 3, generator=rng) * 3
    wide[:, 1::3] = -math.inf
    wide[n // 2 :] = wide[n // 2 :].bfloat16().float()
    logits = wide[:, :vocab_size]
    used = {"temperature": 1.0, "min_p": 0.0, "top_n_sigma": 0.0, "typical_p": 1.0, "top_p": 1.0}
    columns = {name: [c.get(name, v) for c in CONFIGURATIONS] * 8 for name, v in used.items()}
    columns["top_k"] = [min(c.get("top_k", vocab_size), vocab_size) for c in CONFIGURATIONS] * 8
    filters = {k: torch.tensor(v, dtype=DTYPES.get(k, torch.float32)) for k, v in columns.items()}
    seeds, positions = torch.arange(n) - 50, torch.arange(n) * 2**40
    torchs, numbas = (
        load_kernels(name).sample_tokens(
            logits.clone() if name == "torch" else logits, seeds, positions, **filters
        )
        for name in ("torch", "numba")
    )
    assert torch.equal(numbas, torchs)


def test_noise_in_the_last_bits_of_the_logits_changes_no_token(draw):
    """A cumulative sum over so many tokens would turn one in some thousands."""
    row, n = torch.randn(4096) * 2, 3000
    noisy = row + torch.randn(4096) * 1e-5
    seeds, positions = torch.full((n,), 7), torch.arange(n)
    several = ({"top_p": 0.95}, {"top_k": 60}, {"top_k": 700}, {"typical_p": 0.9}, {"top_n_sigma": 1.5})
    for filters in ({}, *several):
        tokens = [draw(x.expand(n, -1), seeds, positions, **filters) for x in (row, noisy)]
        assert int((tokens[0] != tokens[1]).sum()) == 0, filters


def test_ties_stay_together(draw):
    n = 600
    seeds, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    row = torch.tensor([0.0, 3.0, 1.0, 3.0, 1.0, -1.0, 1.0, 0.0])
    for filters, kept in (
        ({"top_k": 1}, {1, 3}),  # from candidates
        ({"top_k": 3}, {1, 2, 3, 4, 6}),  # by a threshold
        ({"top_p": 0.01}, {1, 3}),
        ({"top_p": 0.85}, {1, 2, 3, 4, 6}),
        ({"top_k": 3, "top_p": 0.85}, {1, 2, 3, 4, 6}),
        ({"min_p": 1.0}, {1, 3}),
    ):
        assert set(draw(row.expand(n, -1), seeds, zeros, **filters).tolist()) == kept, filters
    assert len(set(draw(torch.zeros(n, 13), seeds, zeros, top_k=2).tolist())) == 13


def test_deviation_is_that_of_the_logits_that_are_possible(draw):
    row = row_of(1009)
    row[1], row[5::7] = -1e4, -math.inf
    row = torch.stack([row, row.where(row > -math.inf, 0.0), torch.full_like(row, 3.0), row + 1e6])
    n = 400
    for x in row:
        kept = x >= x.max() - 1.5 * x[x > -math.inf].double().std(correction=0)
        drawn = draw(
            x.expand(n, -1), torch.arange(n), torch.zeros(n).long(), top_n_sigma=1.5, temperature=9.0
        )
        assert kept[drawn].all()
        assert len(set(drawn.tolist())) >= min(n // 4, int(kept.sum()) // 2)


def test_tiny_and_huge_values_neither_overflow_nor_leave_the_vocabulary(draw):
    n = 300
    seeds, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    row = torch.tensor([1.0, 5.0, 4.9]).expand(n, -1)
    assert set(draw(row, seeds, zeros, temperature=0.0).tolist()) == {1}
    assert set(draw(row, seeds, zeros, temperature=1e-40, top_k=2, top_n_sigma=1.0).tolist()) == {1}
    assert set(draw(row, seeds, zeros, temperature=3e38).tolist()) == {0, 1, 2}
    assert set(draw(row, seeds, zeros, top_p=0.0).tolist()) == {1}
    assert set(draw(row, seeds, zeros, typical_p=0.0).tolist()) <= {1, 2}
    assert set(draw(torch.tensor([[-math.inf, 2.0, -math.inf]]).expand(n, -1), seeds, zeros).tolist()) == {1}


@pytest.mark.parametrize("filters", CONFIGURATIONS, ids=str)
def test_rows_that_are_not_finite_get_some_token_and_change_no_other(filters, draw):
    logits = row_of(31).expand(6, -1).clone()
    logits[0], logits[1, 5], logits[2], logits[3, 30], logits[4] = (
        math.nan,
        math.nan,
        -math.inf,
        math.inf,
        math.inf,
    )
    drawn = draw(logits, torch.arange(6), torch.arange(6), **filters)
    assert ((drawn >= 0) & (drawn < 31)).all()
    assert drawn[5:].equal(draw(logits[5:], torch.arange(5, 6), torch.arange(5, 6), **filters))


@pytest.mark.parametrize("vocab_size", [13, 1, 1009], ids="vocab_size={}".format)
def test_rows_do_not_depend_on_their_neighbours(vocab_size, draw):
    n = 72
    chosen = [CONFIGURATIONS[i % len(CONFIGURATIONS)] for i in range(n)]
    unused = {"temperature": 1.0, "min_p": 0.0, "top_n_sigma": 0.0, "typical_p": 1.0, "top_p": 1.0}
    filters = {name: [c.get(name, value) for c in chosen] for name, value in unused.items()}
    filters["top_k"] = [min(c.get("top_k", vocab_size), vocab_size) for c in chosen]
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    logits[5, 0], logits[7] = math.nan, -math.inf
    seeds, positions = torch.arange(n) % 5, torch.arange(n)
    together = draw(logits, seeds, positions, **filters)
    for i in range(n):
        if i not in (5, 7):
            own = {name: [values[i]] for name, values in filters.items()}
            assert draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], **own)[0] == together[i], i
            # A filter that no row uses may be left out.
            alone = draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], **chosen[i])
            assert alone[0] == together[i], i
    reverse = {name: values[::-1] for name, values in filters.items()}
    backwards = draw(logits.flip(0), seeds.flip(0), positions.flip(0), **reverse).flip(0)
    sound = [i for i in range(n) if i not in (5, 7)]
    assert backwards[sound].equal(together[sound])


def test_candidates_are_the_largest_in_order_with_what_ties():
    x = torch.tensor([[1.0, 5.0, 3.0, 5.0, 2.0, 3.0, 0.0, 3.0, 3.0], [-math.inf] * 8 + [2.0]])
    values, tokens = top_candidates(x, torch.tensor([2, 1]))
    assert values[0, :2].tolist() == [5.0, 5.0]
    assert tokens[0, :2].tolist() == [1, 3]
    assert (values[1] > -math.inf).tolist() == [True] + [False] * (values.shape[1] - 1)
    assert tokens[1, 0] == 8


@pytest.mark.parametrize("vocab_size", [13, 1009], ids="vocab_size={}".format)
def test_thresholds_are_those_of_a_sort(vocab_size):
    rng = torch.Generator().manual_seed(2)
    n, scales = 30, torch.tensor([1e-9, 1e-3, 1.0, 30.0, 1e9]).repeat(6)[:, None]
    numbers = torch.randn(n, vocab_size, generator=rng).mul_(scales).abs_()
    numbers[::3] = numbers[::3].bfloat16().float()  # ties
    numbers[1], weights = 0.0, torch.rand(n, vocab_size, generator=rng)
    weights[:, ::2] = 0.0
    ordered, order = numbers.sort(1)
    sums = weights.double().gather(1, order).cumsum(1)
    for share in (1e-30, 0.3, 0.9, 0.9999, 2.0):
        target = sums[:, -1] * share
        first = (sums < target[:, None]).sum(1, keepdim=True)
        expected = torch.cat([ordered, torch.full((n, 1), math.inf)], 1).gather(1, first)
        assert smallest_bound(numbers, weights, target).equal(expected)
    ks = torch.arange(n) % vocab_size + 1
    assert kth_largest(numbers, ks).equal(ordered.gather(1, vocab_size - ks[:, None]))
    low, high = ordered[:, 2:3], ordered[:, -3:-2]
    between = column_sums_between(numbers, low, high).sum(1)
    torch.testing.assert_close(between, (numbers * ((numbers > low) & (numbers < high))).sum(1))


@pytest.mark.parametrize("name", ["torch", "numba"])
def test_penalties_are_those_of_their_definition(name):
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0, 5.0]] * 3)
    before = logits.clone()
    counts = torch.tensor([[0, 0, 0, 0, 0], [0, 3, 1, 0, 0], [0, 1, 0, 0, 0]], dtype=torch.int32)
    seen = torch.tensor([[False] * 5, [True, True, True, False, False], [False, True, False, False, False]])
    columns = [torch.tensor(values) for values in ([2.0, 1.0], [0.5, 0.0], [0.25, -1.0])]
    rows, slots = torch.tensor([2, 0]), torch.tensor([1, 2])
    load_kernels(name).apply_penalties(logits, rows, slots, counts, seen, *columns)
    # Token 0 was in the prompt, 1 was generated three times, 2 both and once.
    assert logits[2].tolist() == [1.0, -2.0 * 2 - 3 * 0.5 - 0.25, 0.5 - 0.5 - 0.25, 0.0, 5.0]
    assert logits[0].tolist() == [2.0, -1.0, 1.0, 0.0, 5.0]
    assert logits[1].equal(before[1])


def test_random_numbers_are_uniform_and_independent_along_seeds_and_positions():
    seeds, positions = torch.meshgrid(torch.arange(-50, 50), torch.arange(100), indexing="ij")
    grid = uniforms(mixed(seeds.reshape(-1), positions.reshape(-1))).view(100, 100).numpy()
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    assert len(np.unique(grid)) == grid.size
    assert abs(np.histogram(grid, bins=10, range=(0, 1))[0] - 1000).max() < 150
    for shifted in (np.roll(grid, 1, 0), np.roll(grid, 1, 1), grid.T):
        assert abs(np.corrcoef(grid.ravel(), shifted.ravel())[0, 1]) < 0.05
    # As the authors' C code gives it for the first output of seed 1234567.
    assert splitmix64(torch.tensor([1234567])).item() == 6457827717110365317
