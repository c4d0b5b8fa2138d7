import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_views_are_added_and_rounded_once(name, dtype):
    wide = torch.randn(70, 40, dtype=dtype, device=DEVICE)
    x, expected = torch.randn(70, 60, dtype=dtype, device=DEVICE)[:, 7:40], wide.clone()
    reference.add(x, expected[:, 3:36])
    load_kernels(name).add(x, wide[:, 3:36])
    torch.testing.assert_close(wide, expected, rtol=0, atol=0)


def test_wrong_inputs_are_named():
    add, x = load_kernels("triton").add, torch.randn(2, 32)
    with pytest.raises(ValueError, match=r"out must have shape \[2, 32\], got \[1, 32\]"):
        add(x, x[:1])
    with pytest.raises(ValueError, match="out and x must not share memory: out is written"):
        add(x, x)
