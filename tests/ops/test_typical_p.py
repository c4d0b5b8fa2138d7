"""typical_p against transformers' TypicalLogitsWarper: the most likely token may be excluded."""

import math

import pytest
import torch
from transformers import TypicalLogitsWarper

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from paged.kernels.plain.sampling import selection
from tests.support.kernel_cases import DEVICE, on_cpu

INF = math.inf
TEMPERATURES = [0.4, 1.0, 1.7]


def rows_of(vocab_size):
    """Make normal logits, peaked, nearly flat and flat ones, ties, one heavy token, and -inf."""
    normal = torch.randn(vocab_size)
    heavy = 0.1 * normal
    heavy[vocab_size // 2] = math.log(vocab_size) - 1
    masked = 2 * normal
    masked[1::3] = -INF
    return torch.stack(
        [normal, 6 * normal, 1e-2 * normal, 0 * normal, (2 * normal).round() / 2, heavy, masked]
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 13, 211, 1009, 32003], ids="vocab_size={}".format)
def test_reference_keeps_what_transformers_keeps(vocab_size):
    logits = rows_of(vocab_size)
    num_without_top = 0
    for temperature in TEMPERATURES:
        scores = logits.double() / torch.tensor(temperature).double()
        for typical_p in (0.01, 0.1, 0.3, 0.5, 0.8, 0.95, 0.99):
            column = torch.full((len(logits),), typical_p)
            kept = reference.kept_tokens(
                logits, temperature=torch.full_like(column, temperature), typical_p=column
            )
            expected = TypicalLogitsWarper(column[0].item())(None, scores)
            assert torch.equal(kept, expected > -INF), (temperature, typical_p)
            num_without_top += int((~kept.gather(1, logits.argmax(1, keepdim=True))).sum())
    assert num_without_top > 0 or vocab_size < 3


@pytest.mark.parametrize(
    ("backend", "min_p"),
    [
        pytest.param("triton", 0.0, id="triton"),
        pytest.param("torch", 0.0, id="torch-all", marks=on_cpu),
        pytest.param("torch", 0.01, id="torch-few", marks=on_cpu),
        pytest.param("numba", 0.0, id="numba-all", marks=on_cpu),
        pytest.param("numba", 0.01, id="numba-few", marks=on_cpu),
    ],
)
@pytest.mark.parametrize("later", [{}, {"top_k": 7}, {"top_p": 0.4}, {"top_k": 30, "top_p": 0.5}], ids=str)
def test_the_most_likely_token_is_never_drawn_where_it_is_not_typical(backend, min_p, later, monkeypatch):
    monkeypatch.setattr(selection, "HEIGHT", 4)  # so that 51 of 1009 tokens are few
    # One token has 0.3 and a surprise of 1.2; the entropy is 3.4; the others have a surprise of about 4.3.
    row, top, n = torch.full((1009,), -INF), 40, 12 if backend == "triton" else 600
    row[:51] = math.log(0.014) - 0.002 * torch.arange(51)
    row[top] = math.log(0.3)
    given = {"temperature": 1.0, "min_p": min_p, "typical_p": 0.6, **later}
    params = dict.fromkeys(("min_p", "top_n_sigma", "typical_p", "top_k", "top_p"))
    for name, value in given.items():
        dtype = torch.int32 if name == "top_k" else torch.float32
        params[name] = torch.full((n,), value, dtype=dtype, device=DEVICE)
    logits = row.repeat(n, 1).to(DEVICE)
    kept = reference.kept_tokens(logits, **params)[0]
    assert not kept[top]
    seeds, zeros = torch.arange(n, device=DEVICE), torch.zeros(n, dtype=torch.int64, device=DEVICE)
    drawn = load_kernels(backend).sample_tokens(logits, seeds, zeros, **params)
    assert kept[drawn].all()
    assert len(set(drawn.tolist())) >= min(int(kept.sum()), n // 3)
