"""The definition of operations on rows, which `reference` includes: norms, activations and factors."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Convert to float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
    *,
    unit_offset: bool = False,
) -> Tensor:  # [..., size]
    """Return weight * x / sqrt(mean(x²) + eps), after residual += x if given (Zhang & Sennrich 2019).

    The normalised value is rounded to x's dtype before the weight multiplies it, as in HF's LlamaRMSNorm.
    unit_offset: multiply by 1 + weight, and round only the product, as in HF's Gemma3RMSNorm.
    """
    if residual is not None:
        residual.copy_(upcast(residual) + upcast(x))
        x = residual
    x32 = upcast(x)
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1 + upcast(weight))).to(x.dtype).contiguous()
    return (normed.to(x.dtype) * weight).contiguous()


def rms_norm_into(
    x: Tensor,  # [num_tokens, size] or [num_tokens, num_heads, size]
    weight: Tensor,  # [size]
    eps: float,
    out: Tensor,  # like x, or x itself; written in place
    *,
    unit_offset: bool = False,
    add: bool = False,
) -> None:
    """Write the norm of x, see `rms_norm`, into `out`; add: add it to `out`, and round only the sum."""
    if add:
        x32 = upcast(x)
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        out.copy_(upcast(out) + normed * (upcast(weight) + unit_offset))
    else:
        out.copy_(rms_norm(x, weight, eps, unit_offset=unit_offset))


def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size]
    """Return weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, after residual += x if given.

    Ba et al. 2016. The variance is the mean of the squared differences. Only the result is rounded to x's
    dtype.
    """
    if residual is not None:
        residual.copy_(upcast(residual) + upcast(x))
        x = residual
    centred = upcast(x) - upcast(x).mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * upcast(weight) + upcast(bias)).to(x.dtype).contiguous()


def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side (Shazeer 2020)."""
    gate, up = upcast(x).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up (Shazeer 2020). x is gate and up side by side, or the gate where `up` is given.

    gelu(g) is g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g³))) (Hendrycks & Gimpel 2016).
    """
    gate, up = upcast(x).chunk(2, dim=-1) if up is None else (upcast(x), upcast(up))
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def gelu(x: Tensor, *, tanh: bool) -> None:  # [num_rows, size]
    """Turn x in place into x Φ(x), Φ being the normal distribution function (Hendrycks & Gimpel 2016).

    tanh: take (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))) / 2 for Φ(x).
    """
    x.copy_(torch.nn.functional.gelu(upcast(x), approximate="tanh" if tanh else "none"))


def scale_and_cap(x: Tensor, factor: float, softcap: float | None = None) -> None:  # [num_rows, size]
    """Multiply x by a factor in place; softcap: turn the product p into softcap tanh(p / softcap)."""
    product = upcast(x) * float(factor)
    x.copy_(product if softcap is None else softcap * (product / softcap).tanh())


def scale_rows(x: Tensor, factors: Tensor) -> None:  # [num_rows, size], f32[num_rows]
    """Multiply each row of x by its factor, in place."""
    x.copy_(upcast(x) * factors[:, None])


def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    out.copy_(upcast(out) + upcast(x))
