"""LayerNorm with a bias, with the residual addition before it."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_TILE = 2048  # values that one program normalises, or one row if that is longer


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,  # or None
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    eps,
    stride_x: tl.constexpr,
    stride_residual: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    offs = tl.arange(0, BLOCK_SIZE)
    mask = (row < num_rows) & (offs < SIZE)[None, :]
    dtype = out_ptr.dtype.element_ty
    # [BLOCK_ROWS, BLOCK_SIZE]
    x = tl.load(x_ptr + row * stride_x + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    # Loaded here: after the store or the sum it would be a second wait for memory.
    weight = tl.load(weight_ptr + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptr += row * stride_residual + offs[None, :]
        x += tl.load(residual_ptr, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(residual_ptr, rounded, mask=mask)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, axis=1) / SIZE
    centred = tl.where((offs < SIZE)[None, :], x - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / SIZE + eps)
    normed = centred * inverse[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + row * SIZE + offs[None, :], normed.to(dtype), mask=mask)


def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size], contiguous
    """Return weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, after residual += x where one is given.

    Ba et al. 2016, in float32. The sum is rounded to the residual's dtype before it is normalised, and the
    result to x's. Raises ValueError for a shape, dtype, stride or value that does not fit.
    """
    launch, size = _launches.find(
        combination((x, weight, bias, residual), eps), x, weight, bias, eps, residual
    )
    out = x.new_empty(size)
    launch(x, residual, weight, bias, out)
    return out


@checked_as("layer_norm")
def _bind(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None
) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_launchable("x", x)
    for name, tensor in {"x": x, "weight": weight, "bias": bias, "residual": residual}.items():
        if tensor is not None:
            check_last_dim_contiguous(name, tensor)
    num_rows, size = x.shape
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, _TILE // block_size)
    launch = BoundLaunch(
        _layer_norm_kernel,
        (triton.cdiv(num_rows, block_rows),),
        num_rows=num_rows,
        eps=float(eps),  # an int would be another specialisation
        stride_x=x.stride(0),
        stride_residual=None if residual is None else residual.stride(0),
        SIZE=size,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=min(16, max(4, block_size // 1024)),
    )
    return launch, (num_rows, size)


_launches = Launches(_bind)
