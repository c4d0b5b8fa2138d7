import pytest
import torch

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from tests.support.error_bounds import SAME_IN_FLOAT64, assert_norm
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 257), (3, 2048), (17, 96)], ids=str)
@pytest.mark.parametrize(
    ("with_residual", "unit_offset"),
    [(False, False), (True, False), (True, True)],
    ids=["plain", "residual", "unit_offset"],
)
def test_matches_float64(name, dtype, shape, with_residual, unit_offset):
    x = torch.randn(shape, dtype=dtype, device=DEVICE)
    weight = torch.randn(shape[-1], dtype=dtype, device=DEVICE)
    residual = torch.randn_like(x) if with_residual else None
    expected_residual = residual.clone() if with_residual else None
    reference.rms_norm(x, weight, 1e-5, expected_residual)
    before = x.clone()
    got = load_kernels(name).rms_norm(x, weight, 1e-5, residual, unit_offset=unit_offset)
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)
    added = residual if with_residual else x
    exact = reference.rms_norm(added.double(), weight.double(), 1e-5, unit_offset=unit_offset)
    assert_norm(got, exact, unit_offset=unit_offset)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_rows_of_a_wider_tensor(name, dtype):
    """Views of different strides in, a contiguous tensor out, neighbours untouched."""
    wide, wider = (torch.randn(3, size, dtype=dtype, device=DEVICE) for size in (48, 56))
    before, wide_before = wider.clone(), wide.clone()
    x, residual = wide[:, 16:], wider[:, 8:40]
    expected_residual = residual.clone()
    weight = torch.randn(32, dtype=dtype, device=DEVICE)
    reference.rms_norm(x, weight, 1e-5, expected_residual)
    got = load_kernels(name).rms_norm(x, weight, 1e-5, residual)
    assert got.is_contiguous()
    assert_norm(got, reference.rms_norm(expected_residual.double(), weight.double(), 1e-5))
    before[:, 8:40] = expected_residual
    torch.testing.assert_close(wider, before, rtol=0, atol=0)
    torch.testing.assert_close(wide, wide_before, rtol=0, atol=0)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="a GPU's root is an approximation, which may differ from torch's"
)
@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize(("model", "unit_offset"), [("Llama", False), ("Gemma3", True)])
def test_rounds_as_transformers_does(name, dtype, with_residual, model, unit_offset):
    """Bit for bit, where the sum of squares does not depend on its order."""
    modeling = pytest.importorskip(f"transformers.models.{model.lower()}.modeling_{model.lower()}")
    norm = getattr(modeling, f"{model}RMSNorm")(64, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data = torch.randn(64, device=DEVICE).to(dtype)
    x, residual = (torch.randint(-15, 16, (50, 64), device=DEVICE).to(dtype) / 4 for _ in range(2))
    expected = norm(x + residual) if with_residual else norm(x)
    rms_norm = load_kernels(name).rms_norm
    got = rms_norm(
        x, norm.weight.detach(), 1e-5, residual if with_residual else None, unit_offset=unit_offset
    )
    torch.testing.assert_close(got, expected.detach(), rtol=0, atol=0)


def test_reference_matches_torch():
    x, weight = torch.randn(5, 33, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (33,), weight, 1e-5)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected, **SAME_IN_FLOAT64)


def test_wrong_inputs_are_named():
    rms_norm = load_kernels("triton").rms_norm
    x = torch.randn(2, 32)
    with pytest.raises(ValueError, match=r"weight must have shape \[32\], got \[31\]"):
        rms_norm(x, torch.randn(31), 1e-5)
    with pytest.raises(ValueError, match=r"x must have shape \[any, any\], got \[2, 4, 8\]"):
        rms_norm(torch.randn(2, 4, 8), torch.randn(8), 1e-5)
    with pytest.raises(ValueError, match="weight must hold numbers, got a Tensor on meta"):
        rms_norm(x, torch.randn(32, device="meta"), 1e-5)
    with pytest.raises(ValueError, match="x must be contiguous in its last dimension"):
        rms_norm(torch.randn(32, 2).t(), torch.randn(32), 1e-5)
    with pytest.raises(ValueError, match=r"residual must be torch.float32, got torch.float16"):
        rms_norm(x, torch.randn(32), 1e-5, x.half())
    with pytest.raises(
        ValueError, match=r"residual is written, .* must not share memory, .* with strides \(0, 1\)"
    ):
        rms_norm(x, torch.randn(32), 1e-5, torch.randn(1, 32).expand(2, -1))
    with pytest.raises(ValueError, match=r"x.shape\[-1\] must be greater than 0, got 0"):
        rms_norm(x[:, :0], torch.randn(0), 1e-5)
    with pytest.raises(ValueError, match="unit_offset must be True or False, got 2"):
        rms_norm(x, torch.randn(32), 1e-5, unit_offset=2)


@pytest.mark.parametrize("name", ["triton", "torch", "numba"] if DEVICE == "cpu" else ["triton", "torch"])
@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1e-6, None, "1"], ids=str)
def test_wrong_eps_is_named(name, eps):
    kernels, x = load_kernels(name), torch.randn(2, 32, device=DEVICE)
    with pytest.raises(ValueError, match="eps must be a number between 0 and 1, got "):
        kernels.rms_norm(x, x[0], eps)
    caches = torch.zeros(2, 2, 4, 1, 32, device=DEVICE)
    slots = torch.arange(2, device=DEVICE)
    with pytest.raises(ValueError, match="eps must be a number between 0 and 1, got "):
        kernels.rotary_store_kv(
            torch.randn(2, 3, 32, device=DEVICE), x[:, :16], x[:, :16], *caches, slots, eps=eps
        )
