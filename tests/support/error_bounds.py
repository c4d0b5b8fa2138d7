"""How far a kernel's result may be from float64: what rounding can do, step by step, and no more.

Inputs are exact in float64. A result rounded to nearest is off by at most u times itself. Rounding errors do
not all point one way (Higham & Mary 2019): a sum of n terms is off by some sqrt(n) u times the sum of their
magnitudes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.kernel_cases import attend

# Of float64 against float64: some thousand roundings.
SAME_IN_FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


U32 = unit_roundoff(torch.float32)


def assert_within(got: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """`got` is as near to `exact` as `allowed`; numbers below the smallest normal one lie evenly."""
    allowed = allowed + 4 * unit_roundoff(got.dtype) * torch.finfo(got.dtype).smallest_normal
    error = (got.double() - exact).abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.2f} times what is allowed"


def in_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert floating-point tensors to float64."""
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def assert_exact_enough(
    got: Tensor, case: dict[str, Any], attention: Callable[..., Tensor], name: str = "triton"
) -> None:
    """`got`, paged_attention of backend `name`, against `attention` in float64.

    Scores, weights and sums are float32 in all of them: a score, a sum of head_dim products, is off by some
    (sqrt(head_dim) + 4) u |q| |k| scale; softcap and sinks are rounded twice beside it. A weight's
    relative error is twice that, its own and the normaliser's; exp2 and sums over keys add sqrt(keys) + 8.
    It reaches the output times sum(weight |v|). Queries, keys and values come as they are in the cache, or
    times one scale, and the output is rounded once.
    Where half precision is multiplied as such (Triton on a GPU, not in the interpreter, torch, and numba in
    bfloat16 on some CPUs, over 8 bits too where they have AMX), weights are rounded to it first, in float16
    to multiples of 2^-24 at most, or to bfloat16 where a scale multiplies them; torch rounds the keys and
    values that a scale has multiplied.
    """
    exact_case = in_float64(case)
    values = exact_case["value_cache"].double()
    exact, spread = attend(
        attention, **{**exact_case, "value_cache": torch.cat([values, values.abs()], -1)}
    ).chunk(2, dim=-1)
    key = exact_case["key_cache"].double().norm(dim=-1)
    if case.get("key_scales") is not None:
        key = key * exact_case["key_scales"].transpose(1, 2)
    score = exact_case["query"].norm(dim=-1, keepdim=True) * _largest(key) * case["scale"]
    keys = max(1.0, _largest(case["seq_lens"]))
    beside = _largest(case.get("sinks")) + (case.get("softcap") or 0)
    score_error = ((math.sqrt(case["query"].shape[-1]) + 4) * score + 2 * beside) * U32
    weight_error = 2 * score_error + (math.sqrt(keys) + 8) * U32
    u, least = unit_roundoff(got.dtype), 0.0
    quantized = case.get("key_scales") is not None
    in_half = {
        "torch": got.dtype != torch.float32,
        "triton": got.dtype != torch.float32 and got.is_cuda,
        "numba": name == "numba" and _multiplies_pairs(case),
    }[name]
    if in_half and quantized and name in ("triton", "numba"):
        weight_error = weight_error + unit_roundoff(torch.bfloat16)
    elif in_half:
        weight_error = weight_error + (2 * u * score + 2 * u if quantized else u)
        least = keys * 2.0**-25 * _largest(values) if got.dtype == torch.float16 else 0.0
    assert_within(got, exact, weight_error * spread + u * exact.abs() + least)


def _multiplies_pairs(case: dict[str, Any]) -> bool:
    from paged.kernels.cpu.target import HAS_DOT, HAS_TILES, LANES

    head_dim, value_dim = case["query"].shape[2], case["value_cache"].shape[3]
    if case["query"].dtype != torch.bfloat16:
        return False
    if case["key_cache"].dtype != torch.bfloat16:
        return HAS_TILES and head_dim % 32 == 0 and value_dim % 32 == 0
    return HAS_DOT and head_dim % LANES == 0 and head_dim >= 2 * LANES and value_dim >= LANES


def _largest(x: Tensor | None) -> float:
    """Return the largest absolute value; NaN, which must not be read, is ignored."""
    return float(x.double().nan_to_num().abs().max()) if x is not None and x.numel() else 0.0


def norm_error(size: int) -> float:
    """Relative error of x / sqrt(mean(x²) + eps) in float32.

    The squares are summed in four chains at least, and the root halves that error; four roundings more.
    """
    return (math.sqrt(size) / 4 + 4) * U32


def normed_roundings(unit_offset: bool) -> int:
    """How often a norm rounds to its dtype: before the weight too, unless that is added to 1."""
    return 1 if unit_offset else 2


def assert_norm(got: Tensor, exact: Tensor, *, unit_offset: bool = False) -> None:
    """Compare a norm's output in x's dtype with float64: two or three roundings in float32 beside."""
    allowed = normed_roundings(unit_offset) * unit_roundoff(got.dtype) + norm_error(got.shape[-1])
    assert_within(got, exact, (allowed + 2 * U32 * unit_offset) * exact.abs())


def assert_layer_norm(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    """Compare (x - mean) / sqrt(var + eps) * weight + bias with float64.

    The mean is off as the sum in `norm_error` is. What is off in the difference is divided and multiplied
    with it.
    """
    x, weight, bias = x.double(), weight.double(), bias.double()
    centred = x - x.mean(-1, keepdim=True)
    factor = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    exact = centred * factor + bias
    mean_error = norm_error(x.shape[-1]) * x.abs().mean(-1, keepdim=True)
    in_float32 = (mean_error + (norm_error(x.shape[-1]) + 3 * U32) * centred.abs()) * factor.abs()
    assert_within(got, exact, in_float32 + (U32 + unit_roundoff(got.dtype)) * exact.abs())


def assert_rotated(got: Tensor, exact: Tensor, *, norm: bool, unit_offset: bool = False) -> None:
    """Heads after rotary and maybe a norm: [..., head_dim].

    Two products and a sum are off by 2 u times the length of the pair, which a rotation keeps; what the norm
    rounded before is off by as much of it.
    """
    u = unit_roundoff(got.dtype)
    length = torch.hypot(*exact.chunk(2, dim=-1)).repeat(*[1] * (exact.dim() - 1), 2)
    before = 2 * U32
    if norm:
        before += normed_roundings(unit_offset) * u + norm_error(got.shape[-1]) + 2 * U32 * unit_offset
    assert_within(got, exact, before * length + u * exact.abs())


def assert_silu_and_mul(got: Tensor, x: Tensor, exact: Tensor, name: str) -> None:
    """silu(gate) * up, where exp(-gate) is off by gate u; a handful of roundings more are in float32.

    torch rounds silu(gate) to x's dtype first.
    """
    roundings = 2 if name == "torch" else 1
    gate = x.double().chunk(2, dim=-1)[0]
    allowed = roundings * unit_roundoff(got.dtype) + (gate.abs() + 8) * U32
    assert_within(got, exact, allowed * exact.abs())


def assert_gelu_and_mul(got: Tensor, x: Tensor, exact: Tensor, name: str) -> None:
    """gelu(gate) * up, whose sigmoid or tanh is off by a few u; torch rounds gelu(gate) first."""
    roundings = 2 if name == "torch" else 1
    gate, up = x.double().abs().chunk(2, dim=-1)
    assert_within(got, exact, roundings * unit_roundoff(got.dtype) * exact.abs() + 4 * U32 * gate * up)


def assert_gelu(got: Tensor, x: Tensor, exact: Tensor) -> None:
    """x Φ(x), where Φ is off by a few u."""
    assert_within(got, exact, unit_roundoff(got.dtype) * exact.abs() + 4 * U32 * x.double().abs())


def assert_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """x @ weight.T, summed in float32 and rounded once; once more where a bias may be added behind that."""
    x, weight = x.double(), weight.double()
    product = x @ weight.T
    exact = product if bias is None else product + bias.double()
    length = x.norm(dim=-1, keepdim=True) * weight.norm(dim=-1)
    rounded = exact.abs() if bias is None else exact.abs() + product.abs()
    summed = (math.sqrt(x.shape[-1]) + 4) * U32 * length
    assert_within(got, exact, summed + unit_roundoff(got.dtype) * rounded)


def assert_logprobs(got: Tensor, exact: Tensor, vocab_size: int) -> None:
    """log_softmax in float32: two differences, an exponential of each logit, their sum and its logarithm."""
    finite = exact.isfinite()
    torch.testing.assert_close(got[~finite], exact[~finite].float(), equal_nan=True)
    allowed = (3 * exact[finite].abs() + math.sqrt(vocab_size) + 8) * U32
    assert_within(got[finite], exact[finite], allowed)
