import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import SAME_IN_FLOAT64, assert_gelu_and_mul
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 1031)], ids=str)
def test_matches_float64(name, dtype, shape):
    num_tokens, size = shape
    x = torch.randn(num_tokens, 2 * size, dtype=dtype, device=DEVICE) * 4
    kernels, exact = load_kernels(name), reference.gelu_and_mul(x.double())
    assert_gelu_and_mul(kernels.gelu_and_mul(x), x, exact, name)
    gate, wide = x[:, :size].clone(), torch.cat([x, x], 1)
    assert_gelu_and_mul(kernels.gelu_and_mul(gate, wide[:, size : 2 * size]), x, exact, name)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_strided_rows_and_large_values(name, dtype):
    x = torch.tensor([[-1e4, 1e4, 2.0, 2.0, float("nan")]], dtype=dtype, device=DEVICE).repeat(2, 1)[:, :4]
    got = load_kernels(name).gelu_and_mul(x)
    assert got.tolist() == [[0.0, 2e4 if dtype != torch.bfloat16 else 19968.0]] * 2


def test_reference_is_the_formula():
    gate, up = torch.randn(2, 3, 10, dtype=torch.float64)
    expected = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    got = reference.gelu_and_mul(torch.cat([gate, up], -1))
    torch.testing.assert_close(got, expected, **SAME_IN_FLOAT64)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match=r"x.shape\[1\] must be a multiple of the two halves, got 3 and 2"):
        load_kernels("triton").gelu_and_mul(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"up must have shape \[2, 3\], got \[2, 4\]"):
        load_kernels("triton").gelu_and_mul(torch.randn(2, 3), torch.randn(2, 4))
