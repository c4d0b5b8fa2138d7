"""What the bounds of the kernel tests refuse: results that are off by a few times what rounding does."""

import pytest
import torch

from paged.kernels import reference
from tests.support.error_bounds import (
    assert_exact_enough,
    assert_logprobs,
    assert_norm,
    assert_product,
    assert_rotated,
    assert_silu_and_mul,
)
from tests.support.kernel_cases import attend, ragged_case

# 4 eps of half precision. In float32 sums and norms are off by some eps too: 16 of them.
OFF_BY = {torch.float32: 16 * 2**-23, torch.float16: 4 * 2**-10, torch.bfloat16: 4 * 2**-7}
each_dtype = pytest.mark.parametrize("dtype", OFF_BY, ids=str)


def check(assertion, exact, dtype):
    """Check that exact numbers, rounded, pass, and that slightly larger ones do not."""
    assertion(exact.to(dtype))
    with pytest.raises(AssertionError, match="times what is allowed"):
        assertion((exact * (1 + OFF_BY[dtype])).to(dtype))


@each_dtype
@pytest.mark.parametrize("unit_offset", [False, True], ids="unit_offset={}".format)
def test_norm(dtype, unit_offset):
    exact = torch.randn(5, 96, dtype=torch.float64)
    check(lambda got: assert_norm(got, exact, unit_offset=unit_offset), exact, dtype)


@each_dtype
@pytest.mark.parametrize("norm", [False, True], ids="norm={}".format)
def test_rotary(dtype, norm):
    exact = torch.randn(5, 4, 64, dtype=torch.float64)
    check(lambda got: assert_rotated(got, exact, norm=norm), exact, dtype)


@each_dtype
@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_silu_and_mul(dtype, name):
    x = torch.randn(5, 64).to(dtype)
    exact = reference.silu_and_mul(x.double())
    check(lambda got: assert_silu_and_mul(got, x, exact, name), exact, dtype)


@pytest.mark.parametrize(("dtype", "off_by"), [(torch.float32, 2e-5), (torch.bfloat16, 4 * 2**-7)], ids=str)
def test_product(dtype, off_by):
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(40, 64).to(dtype)
    exact = x.double() @ weight.double().T
    assert_product(exact.to(dtype), x, weight)
    for wrong in (exact * (1 + off_by), exact + 0.1):
        with pytest.raises(AssertionError, match="times what is allowed"):
            assert_product(wrong.to(dtype), x, weight)


def test_logprobs():
    exact = (3 * torch.randn(4, 100, dtype=torch.float64)).log_softmax(-1)
    check(lambda got: assert_logprobs(got, exact, 100), exact, torch.float32)


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
@pytest.mark.parametrize(
    ("dtype", "off_by"),
    [(torch.float32, 1e-4), (torch.float16, 4 * 2**-10), (torch.bfloat16, 4 * 2**-7)],
    ids=str,
)
def test_attention(name, dtype, off_by):
    """An output that is off, and a scale, which matters as much as the scores are large."""
    case = ragged_case([70, 40], [1, 9], dtype=dtype)
    wide = {key: case[key].float() for key in ("query", "key_cache", "value_cache")}
    for factor, scale in ((1.0, 1.0), (1 + off_by, 1.0), (1.0, 1 + 4 * off_by)):
        wrong = attend(reference.paged_attention, **{**case, **wide, "scale": scale * case["scale"]}) * factor
        if factor == scale == 1.0:
            assert_exact_enough(wrong.to(dtype), case, reference.paged_attention, name)
            continue
        with pytest.raises(AssertionError, match="times what is allowed"):
            assert_exact_enough(wrong.to(dtype), case, reference.paged_attention, name)
