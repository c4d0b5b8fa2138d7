"""Root-mean-square norm, with the residual addition before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_dtype, check_last_dim_contiguous, check_shape

_TILE = 2048  # values one program normalises, where the row is not longer


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    stride_x_outer: tl.constexpr,
    stride_x_inner: tl.constexpr,
    stride_residual_outer: tl.constexpr,
    stride_residual_inner: tl.constexpr,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = (row < num_rows)[:, None] & (offs < SIZE)[None, :]
    outer = row // INNER
    inner = row % INNER
    offs_x = (outer * stride_x_outer + inner * stride_x_inner)[:, None] + offs[None, :]
    # [BLOCK_ROWS, BLOCK_SIZE]
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        offs_r = (outer * stride_residual_outer + inner * stride_residual_inner)[:, None] + offs[None, :]
        x += tl.load(residual_ptr + offs_r, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + offs_r, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    weight = tl.load(weight_ptr + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    normed = (x * inverse[:, None]).to(dtype).to(tl.float32) * weight[None, :]
    tl.store(out_ptr + row[:, None] * SIZE + offs[None, :], normed.to(dtype), mask=mask)


def rms_norm(
    x: Tensor,  # [..., size], last dimension contiguous
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [..., size], contiguous
    """Return weight * x / sqrt(mean(x²) + eps), after residual += x where one is given.

    Zhang & Sennrich 2019, in float32. The sum is rounded to the residual's dtype before it is normalised, and
    the normalised value to x's dtype before the weight multiplies it, as HF's LlamaRMSNorm does. Raises
    ValueError for a shape, dtype or stride that does not fit.
    """
    size = x.shape[-1]
    check_dtype("x", x)
    check_shape("weight", weight, (size,), x.dtype)
    x_rows = _rows("x", x)
    residual_rows = x_rows
    if residual is not None:
        check_shape("residual", residual, x.shape, x.dtype)
        residual_rows = _rows("residual", residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, inner = x_rows.shape[0] * x_rows.shape[1], x_rows.shape[1]
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, _TILE // block_size)
    _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x_ptr=x_rows,
        residual_ptr=residual_rows,
        weight_ptr=weight,
        out_ptr=out,
        num_rows=num_rows,
        eps=eps,
        stride_x_outer=x_rows.stride(0),
        stride_x_inner=x_rows.stride(1),
        stride_residual_outer=residual_rows.stride(0),
        stride_residual_inner=residual_rows.stride(1),
        INNER=inner,
        SIZE=size,
        HAS_RESIDUAL=residual is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=min(16, max(4, block_size // 1024)),
    )
    return out


def _rows(name: str, x: Tensor) -> Tensor:
    """View `x` as [outer, inner, size]; a contiguous tensor is [rows, 1, size] whatever its shape was."""
    check_last_dim_contiguous(name, x)
    if x.is_contiguous():
        return x.view(-1, 1, x.shape[-1])
    if x.dim() == 2:
        return x.unsqueeze(1)
    if x.dim() != 3:
        raise ValueError(f"{name} must be contiguous or have 2 or 3 dimensions, got strides {x.stride()}")
    return x


def rms_norm_cost(num_rows: int, size: int, element_size: int, *, residual: bool) -> tuple[int, int]:
    """(bytes, flops): x read and the norm written, the residual read and written too where there is one."""
    passes = 4 if residual else 2
    return (passes * num_rows + 1) * size * element_size, (5 if residual else 4) * num_rows * size
