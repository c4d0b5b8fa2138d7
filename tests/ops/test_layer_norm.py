import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import SAME_IN_FLOAT64, assert_layer_norm
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


def operands(shape, dtype, shift=0.0):
    """Return x, weight and bias."""
    sizes = (shape, shape[-1:], shape[-1:])
    x, weight, bias = (torch.randn(size, dtype=dtype, device=DEVICE) for size in sizes)
    return x + shift, weight, bias


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 257), (3, 2048), (17, 96)], ids=str)
@pytest.mark.parametrize("shift", [0.0, 8.0], ids="shift={}".format)
def test_matches_float64(name, dtype, shape, shift):
    """Also where the mean is larger than what it is subtracted from."""
    x, weight, bias = operands(shape, dtype, shift)
    residual = torch.randn_like(x)
    expected_residual = residual.clone()
    reference.layer_norm(x, weight, bias, 1e-5, expected_residual)
    before, layer_norm = x.clone(), load_kernels(name).layer_norm
    plain, added = layer_norm(x, weight, bias, 1e-5), layer_norm(x, weight, bias, 1e-5, residual)
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    for got, given in ((plain, x), (added, residual)):
        assert_layer_norm(got, given, weight, bias, 1e-5)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_rows_of_a_wider_tensor(name, dtype):
    """Views of different strides in, a contiguous tensor out, neighbours untouched."""
    wide, wider = (torch.randn(3, size, dtype=dtype, device=DEVICE) for size in (53, 64))
    before = wider.clone()
    x, residual = wide[:, 16:], wider[:, 8:45]
    _, weight, bias = operands(x.shape, dtype)
    got = load_kernels(name).layer_norm(x, weight, bias, 1e-5, residual)
    assert got.is_contiguous()
    assert_layer_norm(got, residual, weight, bias, 1e-5)
    before[:, 8:45] = residual
    torch.testing.assert_close(wider, before, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_rows_alone_have_the_same_bits(name, dtype):
    """Also of so many rows of whole pages that the output is padded on a CPU."""
    layer_norm = load_kernels(name).layer_norm
    for shape in ((70, 2048), (5, 37)):
        x, weight, bias = operands(shape, dtype)
        residual = torch.randn_like(x)
        rows = [layer_norm(x[i : i + 1], weight, bias, 1e-5, residual[i : i + 1].clone()) for i in (0, 2, 4)]
        got = layer_norm(x, weight, bias, 1e-5, residual)
        torch.testing.assert_close(got[[0, 2, 4]], torch.cat(rows), rtol=0, atol=0)


def test_reference_matches_torch():
    x, weight, bias = operands((5, 33), torch.float64)
    expected = torch.nn.functional.layer_norm(x, (33,), weight, bias, 1e-5)
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, 1e-5), expected, **SAME_IN_FLOAT64)


def test_wrong_inputs_are_named():
    layer_norm, x, row = load_kernels("triton").layer_norm, torch.randn(2, 32), torch.randn(32)
    with pytest.raises(ValueError, match=r"bias must have shape \[32\], got \[31\]"):
        layer_norm(x, row, row[:31], 1e-5)
    with pytest.raises(ValueError, match=r"x must have shape \[any, any\], got \[32\]"):
        layer_norm(row, row, row, 1e-5)
    with pytest.raises(ValueError, match="bias must hold numbers, got a Tensor on meta"):
        layer_norm(x, row, row.to("meta"), 1e-5)
    with pytest.raises(ValueError, match="x must be contiguous in its last dimension"):
        layer_norm(torch.randn(32, 2).t(), row, row, 1e-5)
    both = torch.randn(3, 32)
    with pytest.raises(ValueError, match="residual and bias must not share memory: residual is written"):
        layer_norm(x, row, both[0], 1e-5, both[:2])
