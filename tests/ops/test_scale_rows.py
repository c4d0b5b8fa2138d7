import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import U32, assert_within, unit_roundoff
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 2049)], ids=str)
def test_matches_float64(name, dtype, shape):
    """In place, and neighbours in memory stay as they are."""
    wide = torch.randn(shape[0], shape[1] + 3, dtype=dtype, device=DEVICE)
    factors, before = 1 + torch.rand(shape[0], device=DEVICE), wide.clone()
    exact = wide[:, 1:-2].double()
    reference.scale_rows(exact, factors.double())
    load_kernels(name).scale_rows(wide[:, 1:-2], factors)
    assert_within(wide[:, 1:-2], exact, (unit_roundoff(dtype) + U32) * exact.abs())
    assert torch.equal(wide[:, :1], before[:, :1])
    assert torch.equal(wide[:, -2:], before[:, -2:])


def test_wrong_inputs_are_named():
    scale_rows, x = load_kernels("triton").scale_rows, torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"factors must have shape \[2\]"):
        scale_rows(x, torch.ones(3))
    with pytest.raises(ValueError, match=r"factors must be .*float32"):
        scale_rows(x, torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="x and factors must not share memory"):
        scale_rows(x, x.flatten()[:2])
