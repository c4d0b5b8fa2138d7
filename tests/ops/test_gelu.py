import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import SAME_IN_FLOAT64, assert_gelu
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


@pytest.mark.parametrize("tanh", [False, True], ids="tanh={}".format)
@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 2100)], ids=str)
def test_matches_float64(name, dtype, shape, tanh):
    wide = torch.randn(shape[0], shape[1] + 5, dtype=dtype, device=DEVICE) * 4
    before, x = wide.clone(), wide[:, 2:-3]
    exact = x.double()
    reference.gelu(exact, tanh=tanh)
    load_kernels(name).gelu(x, tanh=tanh)
    assert_gelu(x, before[:, 2:-3], exact)
    before[:, 2:-3] = x
    torch.testing.assert_close(wide, before, rtol=0, atol=0)


@pytest.mark.parametrize("tanh", [False, True], ids="tanh={}".format)
@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_large_values_and_nan(name, dtype, tanh):
    x = torch.tensor([[-1e4, 1e4, 0.0, -30.0, float("nan")]], dtype=dtype, device=DEVICE)
    large = x[0, 1].item()
    load_kernels(name).gelu(x, tanh=tanh)
    assert x[0, :4].tolist() == [0.0, large, 0.0, 0.0]
    assert x[0, 4].isnan()


def test_reference_is_the_formula():
    x = torch.randn(3, 10, dtype=torch.float64)
    for tanh in (False, True):
        inner = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)) if tanh else torch.erf(x / 2**0.5)
        got = x.clone()
        reference.gelu(got, tanh=tanh)
        torch.testing.assert_close(got, x / 2 * (1 + inner), **SAME_IN_FLOAT64)


def test_wrong_inputs_are_named():
    gelu = load_kernels("triton").gelu
    with pytest.raises(ValueError, match=r"x must have shape \[any, any\], got \[3\]"):
        gelu(torch.randn(3), tanh=True)
    with pytest.raises(ValueError, match="tanh must be True or False, got 'none'"):
        gelu(torch.randn(2, 3), tanh="none")
    with pytest.raises(ValueError, match=r"x is written, .* must not share memory"):
        gelu(torch.randn(1, 3).expand(2, -1), tanh=True)
