"""Filters and Gumbel-max sampling: kept sets against sorts in float64, draws bit for bit, noise to 2**-47."""

import math

import pytest
import torch
import triton
import triton.language as tl

from paged.kernels import gumbel, reference
from paged.kernels.backend import load_kernels
from paged.kernels.gpu.sampling import sample_tokens as sample_tokens_module
from paged.kernels.gpu.sampling.filter_row import NUM_LIMITS, finite, kept_and_scaled
from paged.kernels.gpu.sampling.row_limits import BlockMaxima, Filters, row_limits
from paged.kernels.gpu.sampling.sample_tokens import gumbel as gumbel_kernel
from paged.kernels.gpu.sampling.sample_tokens import sample_tokens
from tests.support.kernel_cases import DEVICE

FILTERS = {"min_p": 0.0, "top_n_sigma": 0.0, "typical_p": 1.0, "top_k": 1 << 20, "top_p": 1.0}
INF = math.inf


def parameters(rows, *, used=None):
    """Arguments by name from one dict for each row; a filter that no row has is None."""
    used = {name for row in rows for name in row} if used is None else used
    columns = {"temperature": [row.get("temperature", 1.0) for row in rows]}
    for name, off in FILTERS.items():
        columns[name] = [row.get(name, off) for row in rows] if name in used else None
    return {
        name: values
        and torch.tensor(values, dtype=torch.int32 if name == "top_k" else torch.float32, device=DEVICE)
        for name, values in columns.items()
    }


def counters(n):
    """Seeds and positions of all sizes, negative ones too."""
    seeds = torch.randint(-(2**62), 2**62, (n,), device=DEVICE) * 2
    return seeds, torch.randint(0, 2**40, (n,), device=DEVICE)


@triton.jit
def kept_kernel(logits_ptr, limits_ptr, out_ptr, SIZE: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * SIZE + offs, mask=offs < SIZE, other=float("-inf"))
    kept, _ = kept_and_scaled(finite(x), limits_ptr + row * NUM)
    tl.store(out_ptr + row * SIZE + offs, kept & (x > float("-inf")), mask=offs < SIZE)


def kept(logits, *, temperature, **filters):
    """Return which tokens the filters keep."""
    filters = Filters(**filters)
    maxima, moments, _ = BlockMaxima(logits, moments=filters.top_n_sigma is not None)(logits)
    limits = row_limits(logits, temperature, filters, maxima, moments)
    places = torch.empty_like(logits, dtype=torch.bool)
    num_rows, size = logits.shape
    kept_kernel[(num_rows, triton.cdiv(size, 1024))](
        logits, limits, places, size, NUM_LIMITS, 1024, enable_fp_fusion=False
    )
    return places


MIXED = [
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.95},
    {"min_p": 0.02, "top_k": 40},
    {"typical_p": 0.7, "top_k": 30, "top_p": 0.8},
    {"temperature": 2.0, "top_n_sigma": 1.5, "top_p": 0.6, "min_p": 0.01},
    {"temperature": 0.3},
]


@pytest.mark.parametrize(
    ("vocab_size", "rows"),
    [
        (1, MIXED[3:4]),
        (2, MIXED[:2]),
        (211, MIXED),
        (1023, MIXED[1:3]),
        (1025, MIXED[3:5]),
        (4099, MIXED[:2]),
    ],
    ids=["1", "2", "211", "1023", "1025", "4099"],
)
def test_filters_keep_what_sorts_keep(vocab_size, rows):
    """Rows with different parameters side by side, a third of all but the first masked."""
    logits = 3 * torch.randn(len(rows), vocab_size, device=DEVICE)
    logits[1:, 1::3] = -INF
    params = parameters(rows)
    assert torch.equal(kept(logits, **params), reference.kept_tokens(logits, **params))


def test_filters_search_past_what_is_coarse():
    """Near-flat rows, long tails, clusters of ties and logits of 30 orders of magnitude."""
    flat = torch.randn(1300, device=DEVICE) * 1e-3 + 7
    tail = -torch.arange(1300.0, device=DEVICE) / 40
    ties = (2 * torch.randn(1300, device=DEVICE)).round() / 2
    wide = torch.randn(1300, device=DEVICE).sign() * 10 ** (60 * torch.rand(1300, device=DEVICE) - 30)
    logits = torch.stack([flat, tail, ties, wide])
    params = parameters([{"top_p": 0.7}, {"top_p": 0.9}, {"top_k": 700, "top_p": 0.5}, {"top_k": 600}])
    assert torch.equal(kept(logits, **params), reference.kept_tokens(logits, **params))


LOG = math.log
# logits, parameters, the tokens that are kept
BY_HAND = [
    ([3, 1, 2, 3, 0], {"top_k": 1}, [0, 3]),  # ties stay together
    ([3, 1, 2, 2, 0], {"top_k": 2}, [0, 2, 3]),
    ([LOG(4), LOG(2), LOG(2), LOG(1), -INF], {"top_p": 0.5}, [0, 1, 2]),
    ([LOG(4), LOG(2), LOG(2), LOG(1), -INF], {"top_p": 0.4}, [0]),
    ([LOG(4), LOG(2), LOG(1), LOG(1), -INF], {"top_k": 2, "top_p": 0.65}, [0]),  # 4 of 6: renormalised
    ([LOG(4), LOG(2), LOG(1), LOG(1), -INF], {"top_k": 2, "top_p": 0.68}, [0, 1]),
    ([LOG(4), LOG(2), LOG(1), LOG(0.9), -INF], {"min_p": 0.6, "temperature": 2.0}, [0, 1]),
    ([1, -1, 1, -1, -INF], {"top_n_sigma": 1.99}, [0, 2]),  # the deviation is 1: -inf has no part in it
    ([1, -1, 1, -1, -INF], {"top_n_sigma": 2.01}, [0, 1, 2, 3]),
    ([LOG(90), LOG(5), LOG(5), 0, -INF], {"typical_p": 0.01}, [0]),
    # The entropy is 1.33, the surprises are 0.92, 1.51, 1.61 and 1.71: the most likely token comes last.
    ([LOG(40), LOG(22), LOG(20), LOG(18), -INF], {"typical_p": 0.01}, [1]),
    ([LOG(40), LOG(22), LOG(20), LOG(18), -INF], {"typical_p": 0.5}, [1, 2, 3]),
    ([LOG(40), LOG(22), LOG(20), LOG(18), -INF], {"typical_p": 0.61}, [0, 1, 2, 3]),
    ([LOG(40), LOG(22), LOG(20), LOG(18), -INF], {"typical_p": 0.5, "top_k": 2}, [1, 2]),
    ([LOG(40), LOG(22), LOG(20), LOG(18), -INF], {"typical_p": 0.5, "top_p": 0.3}, [1]),  # 22 of 60
    ([LOG(40), LOG(22), LOG(20), LOG(18), -INF], {"typical_p": 0.5, "top_k": 2, "top_p": 1e-9}, [1]),
    ([5, 5, 4, 3, 2], {"temperature": 1e-6, "top_p": 0.999}, [0, 1]),
    ([5, 5, 4, 3, 2], {"temperature": 1e-38, "typical_p": 0.9}, [0, 1]),
    ([1e30, 9e29, -1e30, 0, -INF], {"top_k": 3}, [0, 1, 3]),
    ([4, 3, 2, 1, -INF], {"temperature": 1e30, "top_p": 0.5}, [0, 1]),  # two of four equal masses
    ([3e38, -3e38, 1, 0, -INF], {"temperature": 1e-30, "min_p": 1e-9}, [0]),
    ([7, 7, 7, 7, 7], {"top_k": 1, "top_p": 1e-9, "typical_p": 0.1, "min_p": 1.0}, [0, 1, 2, 3, 4]),
    ([-INF, -INF, -2, -INF, -INF], {"top_k": 3, "top_p": 0.5, "typical_p": 0.5, "top_n_sigma": 1}, [2]),
    ([0, -20.8, -20.8, -20.8, -20.8], {"top_p": 0.999}, [0]),  # the others have 2**-30 each
    ([0, -20.8, -20.8, -20.8, -20.8], {"min_p": 1e-10}, [0, 1, 2, 3, 4]),
    ([0.0, -0.0, -1, -2, -3], {"top_k": 1}, [0, 1]),  # zeros are equal
    ([1, 2, 3, 4, 5], {"top_k": 5, "top_p": 1.0, "typical_p": 1.0}, [0, 1, 2, 3, 4]),
]


@pytest.mark.parametrize("implementation", [kept, reference.kept_tokens], ids=["triton", "reference"])
def test_filters_by_hand(implementation):
    logits = torch.tensor([row for row, _, _ in BY_HAND], device=DEVICE)
    got = implementation(logits, **parameters([params for _, params, _ in BY_HAND]))
    for row, (values, params, expected) in zip(got, BY_HAND, strict=True):
        assert row.nonzero().flatten().tolist() == expected, (values, params)


@pytest.mark.skipif(DEVICE == "cuda", reason="for tensors on a CPU")
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_what_a_cpu_draws_is_kept(backend):
    """By hand again, but where float32 makes all weights equal: each is drawn that is not too unlikely."""
    n = 200
    for values, params, expected in BY_HAND:
        if params.get("temperature") == 1e30:
            continue
        logits = torch.tensor([values], dtype=torch.float32).repeat(n, 1)
        probs = (logits[0] / params.get("temperature", 1.0)).softmax(-1)
        zeros = torch.zeros(n, dtype=torch.int64)
        drawn = load_kernels(backend).sample_tokens(
            logits, torch.arange(n), zeros, **parameters([params] * n)
        )
        likely = {token for token in expected if probs[token] > 0.03}
        assert likely <= {*drawn.tolist()} <= {*expected}, (values, params)


@pytest.mark.parametrize(
    ("vocab_size", "n", "used"), [(1, 2, set()), (4099, 2, set()), (211, 6, set()), (211, 6, None)], ids=str
)
def test_draws_are_the_references(vocab_size, n, used):
    logits = 3 * torch.randn(n, vocab_size, device=DEVICE)
    logits[1:, 1::3] = -INF
    seeds, positions = counters(n)
    params = parameters(MIXED[:n], used=used)
    expected = reference.sample_tokens(logits, seeds, positions, **params)
    assert torch.equal(sample_tokens(logits.clone(), seeds, positions, **params), expected)


BACKENDS = ["triton"] if DEVICE == "cuda" else ["triton", "numba", "torch"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", [set(), None], ids=["plain", "filters"])
def test_temperature_0_takes_the_first_of_the_highest(backend, used):
    """Whatever the filters and the neighbours; the highest logits are the model's, NaN and inf among them."""
    logits = torch.randint(-3, 3, (12, 2100), device=DEVICE).float()
    logits[8, 7], logits[9, 2000], logits[10] = torch.nan, INF, -INF
    rows = [{"temperature": 0.0, "typical_p": 0.3, "top_k": 3}, {"top_p": 0.5}] * 6
    highest = torch.zeros(12, device=DEVICE)
    expected, expected_highest = load_kernels("torch").greedy(logits.cpu())
    drawn = load_kernels(backend).sample_tokens(
        logits.clone(), *counters(12), **parameters(rows, used=used), highest=highest
    )
    assert drawn[:8:2].tolist() == expected[:8:2].tolist()
    torch.testing.assert_close(highest.cpu(), expected_highest, rtol=0, atol=0, equal_nan=True)
    # As where all rows are greedy: a token does not depend on its neighbours.
    assert load_kernels(backend).greedy(logits)[0][:8].tolist() == expected[:8].tolist()


def test_neighbours_do_not_matter():
    """A row alone, or among others that use other filters: the same token."""
    rows = MIXED[1:4]
    logits = 2 * torch.randn(3, 1100, device=DEVICE)
    seeds, positions = counters(3)
    together = sample_tokens(logits.clone(), seeds, positions, **parameters(rows))
    for i, row in enumerate(rows[:2]):
        own = slice(i, i + 1)
        alone = sample_tokens(logits[own].clone(), seeds[own], positions[own], **parameters([row]))
        assert torch.equal(alone, together[own])
    assert len(set(together.tolist())) > 1


@pytest.mark.skipif(DEVICE == "cuda", reason="replaces a function inside an interpreted kernel")
def test_equal_scores_give_the_smallest_token(monkeypatch):
    """Of two tokens with the same logit and the same noise, in one half, two halves, two blocks."""
    logits = torch.full((3, 1100), -INF, device=DEVICE)
    for row, tokens in enumerate([[5, 9], [600, 300], [1030, 700]]):
        logits[row, tokens] = 1.0
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    monkeypatch.setattr(sample_tokens_module, "gumbel", lambda high, _: (high - high).to(tl.float32))
    got = sample_tokens(logits, zeros, zeros, **parameters([{}] * 3))
    assert got.tolist() == [5, 300, 700]


@pytest.mark.parametrize("used", [(), tuple(FILTERS)], ids=["plain", "filtered"])
def test_rows_that_are_not_finite_stay_in_the_vocabulary(used):
    """They take no longer, and leave their neighbour alone: the caller sees them by their maximum."""
    logits = torch.randn(5, 30, device=DEVICE)
    row = {"top_k": 20, "top_p": 0.9, "typical_p": 0.9, "min_p": 0.01, "top_n_sigma": 2.0}
    params = parameters([row] * 5, used=used)
    seeds, positions = counters(5)
    expected = reference.sample_tokens(logits, seeds, positions, **params)
    logits[0] = torch.nan
    logits[1, 5] = torch.nan
    logits[2] = -INF
    logits[3, 29] = INF
    got = sample_tokens(logits, seeds, positions, **params)
    assert ((got >= 0) & (got < 30)).all()
    assert got[1] != 5
    assert got[3] == 29
    assert got[4] == expected[4]


def test_philox_is_philox():
    """Known answers of Salmon et al.'s Random123, which the words of token 0 and 512 are too."""
    ones = 0xFFFFFFFF
    for counter, key, words in [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]:
        got = gumbel.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert [int(word) for word in got] == words
    zero = torch.tensor(0)
    bits = gumbel.random_bits(zero, zero, torch.tensor([0, 512, 1024]))
    assert [int(b) % 2**64 for b in bits[:2]] == [0x6627E8D5E169C58D, 0xBC57AC4C9B00DBD8]
    assert len({int(b) for b in bits}) == 3


def edges():
    """Random bits from one end of u to the other: powers of two, what lies beside them, and some between."""
    exact = [b + d for b in (1 << i for i in range(1, 63)) for d in (-1, 0, 1)]
    near = torch.tensor(exact + torch.randint(2**40, 2**62, (500,)).tolist())
    return torch.cat([near, ~near]).to(DEVICE)


def test_noise_is_right_at_both_ends():
    """Against float64, in which log1p keeps what is near 1; rounding to float32 alone costs 2e-6 at 44."""
    bits = edges()
    near = (bits ^ (bits >> 63) | 1).double() * 2.0**-64
    exponential = torch.where(bits >= 0, -torch.log1p(-near), -near.log())
    torch.testing.assert_close(gumbel.gumbel(bits).double(), -exponential.log(), rtol=2e-7, atol=4e-7)


def test_a_tail_has_its_mass_down_to_2_to_the_minus_47():
    """How many of the 2**64 give noise above a level: what decides whether an unlikely token wins."""
    mass = 2.0 ** -torch.arange(4, 48, dtype=torch.float64)
    level = -torch.log(-torch.log1p(-mass))
    low, high = torch.ones(len(mass), dtype=torch.int64), torch.full((len(mass),), 2**63 - 1)
    for _ in range(63):  # noise falls as bits rise
        middle = low + (high - low) // 2
        above = gumbel.gumbel(middle) > level
        low, high = middle.where(above, low), high.where(above, middle)
    torch.testing.assert_close(low.double() * 2.0**-64, mass, rtol=4e-6, atol=2.0**-64)


@triton.jit
def _noise_kernel(bits_ptr, out_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    bits = tl.load(bits_ptr + offs)
    tl.store(out_ptr + offs, gumbel_kernel((bits >> 32).to(tl.uint32), bits.to(tl.uint32)))


def test_noise_of_the_kernel_has_the_bits_of_the_reference():
    bits = edges()[:1024]
    out = torch.empty(1024, device=DEVICE)
    _noise_kernel[(1,)](bits, out, SIZE=1024, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), gumbel.gumbel(bits.cpu()))


@pytest.fixture(scope="module")
def noise():
    """Of a million positions and 8 tokens, three of them in each other's half and in another block."""
    tokens = torch.tensor([*range(5), 512, 1024, 1536])[:, None]
    parts = [
        gumbel.gumbel(gumbel.random_bits(torch.tensor(7), positions, tokens)).T
        for positions in torch.arange(1_000_000).split(10_000)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(
    "row", [{}, {"temperature": 0.5}, {"top_k": 6, "top_p": 0.9}, {"min_p": 0.05, "typical_p": 0.9}], ids=str
)
def test_a_million_draws_have_the_distribution(noise, row):
    """Chi-squared, at a chance of 1e-6 to fail were the numbers drawn anew; they never are."""
    logits = torch.tensor([[2.0, 1.5, 1.5, -1.0, 0.5, 1.2, 0.0, -3.0]])
    params = parameters([row])
    params = {name: value if value is None else value.cpu() for name, value in params.items()}
    allowed = reference.kept_tokens(logits, **params)
    scores = reference.gumbel_scores(logits, params["temperature"], noise).where(allowed, -INF)
    drawn = scores.argmax(-1).bincount(minlength=8).double()
    probs = (logits.double() / params["temperature"]).where(allowed, -INF).softmax(-1)[0]
    assert drawn[~allowed[0]].sum() == 0
    there = allowed[0]
    expected = len(noise) * probs[there]
    statistic = ((drawn[there] - expected) ** 2 / expected).sum().item()
    freedom = int(there.sum()) - 1
    # Wilson & Hilferty 1931; 4.75 standard deviations
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_wrong_inputs_are_named():
    logits, seeds = torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)
    params = parameters([{"top_k": 3}] * 2)
    params = {name: value if value is None else value.cpu() for name, value in params.items()}
    with pytest.raises(ValueError, match=r"logits must be torch.float32, got torch.float16"):
        sample_tokens(logits.half(), seeds, seeds, **params)
    with pytest.raises(ValueError, match=r"top_k must be torch.int32, got torch.int64"):
        sample_tokens(logits, seeds, seeds, **params | {"top_k": seeds})
    with pytest.raises(ValueError, match=r"positions must have shape \[2\], got \[1\]"):
        sample_tokens(logits, seeds, seeds[:1], **params)
    with pytest.raises(ValueError, match=r"the vocabulary must be greater than 0, got 0"):
        sample_tokens(logits[:, :0], seeds, seeds, **params)
    with pytest.raises(ValueError, match="top_p must be contiguous"):
        sample_tokens(logits, seeds, seeds, **params | {"top_p": torch.ones(4)[::2]})


def test_no_rows():
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    logits = torch.empty(0, 9, device=DEVICE)
    params = dict.fromkeys(FILTERS) | {"temperature": torch.empty(0, device=DEVICE)}
    assert sample_tokens(logits, none, none, **params).tolist() == []
