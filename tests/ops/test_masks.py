"""Masks of allowed tokens against the reference, at awkward sizes and for rows in any order."""

from __future__ import annotations

import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels

SIZES = [1, 31, 33, 500, 1024]


def masks(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits with a NaN and ties, rows, and masks: nothing, all, one token, and random ones."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(9, size, generator=generator).round(decimals=1)
    logits[8, size // 2] = torch.nan
    rows = torch.tensor([8, 1, 4, 2, 7, 0])
    num_words = -(-size // 32) + 1
    allowed = torch.randint(-(2**31), 2**31, (len(rows), num_words), generator=generator).int()
    allowed[1], allowed[2], allowed[3] = 0, -1, 0
    allowed[3, (size - 1) // 32] = torch.tensor(1, dtype=torch.int32) << (size - 1) % 32
    allowed[4] &= allowed[0] & allowed[5]
    return logits, rows, allowed


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("size", SIZES, ids="size={}".format)
def test_masked_logits_are_those_of_the_reference(backend, size):
    logits, rows, allowed = masks(size)
    found, expected = logits.clone(), logits.clone()
    reference.mask_logits(expected, rows, allowed)
    load_kernels(backend).mask_logits(found, rows, allowed)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    if size > 100:
        assert found[rows[3]].isfinite().nonzero().tolist() == [[size - 1]]


@pytest.mark.parametrize("size", SIZES, ids="size={}".format)
def test_the_token_is_the_first_of_the_highest_that_are_allowed(size):
    kernels = load_kernels("numba")
    assert kernels.greedy_of_allowed is not None
    logits, rows, allowed = masks(size)
    tokens, highest = kernels.greedy(logits)
    found, expected = (tokens.clone(), highest.clone()), (tokens.clone(), highest.clone())
    reference.greedy_of_allowed(logits, rows, allowed, *expected)
    kernels.greedy_of_allowed(logits, rows, allowed, *found)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
    chosen = expected[1] > -torch.inf
    assert found[0][chosen].tolist() == expected[0][chosen].tolist()
    others = [row for row in range(9) if row not in rows]
    assert found[0][others].tolist() == tokens[others].tolist()
    kernels.mask_logits(logits, rows, allowed)
    rest = [*range(8)]  # the last row has a NaN
    assert kernels.greedy(logits)[0][rest].tolist() == found[0][rest].tolist()


def test_masks_without_a_bit_for_each_token_are_refused():
    logits, rows, allowed = masks(500)
    with pytest.raises(ValueError, match="allowed must have a bit for each of 500 tokens, got 15 words"):
        load_kernels("numba").mask_logits(logits, rows, allowed[:, :15])
