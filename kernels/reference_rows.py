"""The definition of operations on rows that `reference` includes: LayerNorm, GELU and the addition."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Convert to float32; float64 stays as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


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


def gelu(x: Tensor, *, tanh: bool) -> None:  # [num_rows, size]
    """Turn x in place into x Φ(x), Φ being the normal distribution function (Hendrycks & Gimpel 2016).

    tanh: take (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))) / 2 for Φ(x).
    """
    x.copy_(torch.nn.functional.gelu(upcast(x), approximate="tanh" if tanh else "none"))


def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    out.copy_(upcast(out) + upcast(x))
