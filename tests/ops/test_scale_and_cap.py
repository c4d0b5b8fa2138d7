import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import U32, assert_within, unit_roundoff
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("softcap", [None, 30.0], ids="softcap={}".format)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 2049)], ids=str)
def test_matches_float64(name, dtype, softcap, shape):
    """In place, and neighbours in memory stay as they are."""
    wide = torch.randn(shape[0], shape[1] + 3, dtype=dtype, device=DEVICE) * 20
    before = wide.clone()
    exact = wide[:, 1:-2].double()
    reference.scale_and_cap(exact, 1.7, softcap)
    load_kernels(name).scale_and_cap(wide[:, 1:-2], 1.7, softcap)
    allowed = (unit_roundoff(dtype) + 2 * U32) * exact.abs() + 8 * U32 * (softcap or 0.0)
    if softcap is not None:  # the product is rounded before, which the slope at 0 keeps
        allowed += 4 * U32 * (before[:, 1:-2].double().abs() * 1.7)
    assert_within(wide[:, 1:-2], exact, allowed)
    assert torch.equal(wide[:, :1], before[:, :1])
    assert torch.equal(wide[:, -2:], before[:, -2:])


@pytest.mark.parametrize("name", ["triton", "numba", "torch"] if DEVICE == "cpu" else ["triton", "torch"])
def test_large_values_end_at_the_cap(name):
    x = torch.tensor([[-1e30, 1e30, float("-inf"), float("inf"), float("nan"), 0.0]], device=DEVICE)
    load_kernels(name).scale_and_cap(x, 2.0, 5.0)
    assert x[0, :4].tolist() == [-5.0, 5.0, -5.0, 5.0]
    assert x[0, 4].isnan()
    assert x[0, 5] == 0.0


def test_wrong_inputs_are_named():
    scale_and_cap, x = load_kernels("triton").scale_and_cap, torch.randn(2, 3)
    with pytest.raises(ValueError, match="factor must be greater than 0, got 0"):
        scale_and_cap(x, 0.0)
    with pytest.raises(ValueError, match="softcap must be greater than 0, got -1"):
        scale_and_cap(x, 1.0, -1.0)
