import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import assert_norm, assert_within, norm_error, unit_roundoff
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 257), (17, 96)], ids=str)
@pytest.mark.parametrize("unit_offset", [False, True], ids="unit_offset={}".format)
def test_in_place_in_a_wider_tensor(name, dtype, shape, unit_offset):
    """As the norms of Q and K over their whole projections; neighbours stay as they are."""
    wide = torch.randn(shape[0], shape[1] + 24, dtype=dtype, device=DEVICE)
    weight, before = torch.randn(shape[1], dtype=dtype, device=DEVICE), wide.clone()
    x = wide[:, 8:-16]
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5, unit_offset=unit_offset)
    load_kernels(name).rms_norm_into(x, weight, 1e-5, x, unit_offset=unit_offset)
    assert_norm(x, exact, unit_offset=unit_offset)
    assert torch.equal(wide[:, :8], before[:, :8])
    assert torch.equal(wide[:, -16:], before[:, -16:])


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("num_heads", [1, 3], ids="num_heads={}".format)
def test_heads_in_place(name, dtype, num_heads):
    """As the norm of V; the heads before and what is between stay as they are."""
    wide = torch.randn(5, num_heads + 4, 50, dtype=dtype, device=DEVICE)
    weight, before, x = torch.ones(48, dtype=dtype, device=DEVICE), wide.clone(), wide[:, 4:, :48]
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    load_kernels(name).rms_norm_into(x, weight, 1e-5, x)
    assert_norm(x, exact)
    assert torch.equal(wide[:, :4], before[:, :4])
    assert torch.equal(wide[..., 48:], before[..., 48:])


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("unit_offset", [False, True], ids="unit_offset={}".format)
def test_adds_with_one_rounding(name, dtype, unit_offset):
    x, residual = torch.randn(2, 5, 257, dtype=dtype, device=DEVICE)
    weight, before = torch.randn(257, dtype=dtype, device=DEVICE), x.clone()
    exact = residual.double()
    normed = reference.rms_norm(x.double(), weight.double(), 1e-5, unit_offset=unit_offset)
    exact += normed
    load_kernels(name).rms_norm_into(x, weight, 1e-5, residual, unit_offset=unit_offset, add=True)
    allowed = 2 * norm_error(257) * (normed.abs() + 1e-3) + unit_roundoff(dtype) * exact.abs()
    assert_within(residual, exact, allowed)
    assert torch.equal(x, before)


def test_wrong_inputs_are_named():
    norm, x = load_kernels("triton").rms_norm_into, torch.randn(2, 32)
    with pytest.raises(ValueError, match=r"out must have shape \[2, 32\], got \[2, 31\]"):
        norm(x, torch.randn(32), 1e-5, torch.randn(2, 31))
    with pytest.raises(ValueError, match="add must be True or False, got 1"):
        norm(x, torch.randn(32), 1e-5, x, add=1)
    with pytest.raises(ValueError, match="must not"):
        norm(x[:1], x[1], 1e-5, x[1:])
