import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import SAME_IN_FLOAT64, assert_silu_and_mul
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 1024), (2, 1031)], ids=str)
def test_matches_float64(name, dtype, shape):
    num_tokens, size = shape
    x = torch.randn(num_tokens, 2 * size, dtype=dtype, device=DEVICE) * 4
    got = load_kernels(name).silu_and_mul(x)
    assert_silu_and_mul(got, x, reference.silu_and_mul(x.double()), name)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_strided_rows_and_large_values(name, dtype):
    x = torch.tensor([[-1e4, 1e4, -80.0, 2.0, float("nan")]], dtype=dtype, device=DEVICE).repeat(2, 1)[:, :4]
    got = load_kernels(name).silu_and_mul(x)
    assert_silu_and_mul(got, x, reference.silu_and_mul(x.double()), name)


def test_reference_matches_torch():
    x = torch.randn(3, 10, dtype=torch.float64)
    expected = torch.nn.functional.silu(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(reference.silu_and_mul(x), expected, **SAME_IN_FLOAT64)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match=r"x.shape\[1\] must be a multiple of the two halves, got 3 and 2"):
        load_kernels("triton").silu_and_mul(torch.randn(2, 3))
