"""RMS norm, with the residual addition before it."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous, check_shape
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_TILE = 2048  # values that one program normalises, or one row if that is longer


@triton.jit
def weighted(x, weight, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Return normalised x, rounded to `dtype` first unless UNIT_OFFSET, times its weight; float32."""
    weight = weight.to(tl.float32)
    if UNIT_OFFSET:
        return x * (1.0 + weight)
    return x.to(dtype).to(tl.float32) * weight


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,  # or None
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    stride_x: tl.constexpr,
    stride_residual: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    offs = tl.arange(0, BLOCK_SIZE)
    mask = (row < num_rows) & (offs < SIZE)[None, :]
    # [BLOCK_ROWS, BLOCK_SIZE]
    x = tl.load(x_ptr + row * stride_x + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    # Loaded here: after the store or the sum it would be a second wait for memory.
    weight = tl.load(weight_ptr + offs, mask=offs < SIZE, other=0.0)
    if residual_ptr is not None:
        residual_ptr += row * stride_residual + offs[None, :]
        x += tl.load(residual_ptr, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(out_ptr.dtype.element_ty)
        tl.store(residual_ptr, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    dtype = out_ptr.dtype.element_ty
    normed = weighted(x * inverse[:, None], weight[None, :], dtype, UNIT_OFFSET)
    tl.store(out_ptr + row * SIZE + offs[None, :], normed.to(dtype), mask=mask)


def rms_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
    *,
    unit_offset: bool = False,
) -> Tensor:  # [num_rows, size], contiguous
    """Return weight * x / sqrt(mean(x²) + eps), after residual += x where one is given.

    Zhang & Sennrich 2019, in float32. The sum is rounded to the residual's dtype before it is normalised, and
    the normalised value to x's dtype before the weight multiplies it, as in HF's LlamaRMSNorm. unit_offset:
    multiply by 1 + weight and round only the product, as in HF's Gemma3RMSNorm. Raises ValueError for a
    shape, dtype, stride or value that does not fit.
    """
    key = combination((x, weight, residual), eps, unit_offset)
    launch, size = _launches.find(key, x, weight, eps, residual, unit_offset)
    out = x.new_empty(size)
    launch(x, residual, weight, out)
    return out


@checked_as("rms_norm")
def _bind(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, unit_offset: bool
) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_shape("x", x, (None, None))
    check_launchable("x", x)
    for name, tensor in {"x": x, "weight": weight, "residual": residual}.items():
        if tensor is not None:
            check_last_dim_contiguous(name, tensor)
    num_rows, size = x.shape
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, _TILE // block_size)
    launch = BoundLaunch(
        _rms_norm_kernel,
        (triton.cdiv(num_rows, block_rows),),
        num_rows=num_rows,
        eps=float(eps),  # an int would be another specialisation
        stride_x=x.stride(0),
        stride_residual=None if residual is None else residual.stride(0),
        UNIT_OFFSET=unit_offset,
        SIZE=size,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=min(16, max(4, block_size // 1024)),
    )
    return launch, (num_rows, size)


_launches = Launches(_bind)
