"""RMS norm and LayerNorm of rows, with a residual addition before or behind: one kernel."""

import math

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
    """Return normalised x times the weight in float32. Unless UNIT_OFFSET, x is first rounded to `dtype`."""
    weight = weight.to(tl.float32)
    if UNIT_OFFSET:
        return x * (1.0 + weight)
    return x.to(dtype).to(tl.float32) * weight


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,
    residual_ptr,  # to which x is added first, or None
    weight_ptr,
    bias_ptr,  # of a LayerNorm; None: an RMS norm
    out_ptr,  # or x_ptr
    num_rows,
    eps,
    stride_x: tl.constexpr,
    stride_x_head: tl.constexpr,
    stride_residual: tl.constexpr,
    stride_out: tl.constexpr,
    stride_out_head: tl.constexpr,
    NUM_HEADS: tl.constexpr,  # a row is one of a token
    UNIT_OFFSET: tl.constexpr,
    ADD: tl.constexpr,  # to what `out` holds
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    offs = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = (row < num_rows) & (offs < SIZE)
    if NUM_HEADS > 1:
        token, head = row // NUM_HEADS, row % NUM_HEADS
        x_ptr += token * stride_x + head * stride_x_head + offs
        out_ptr += token * stride_out + head * stride_out_head + offs
    else:
        # A sum of pointers, not of offsets: a long row has one pointer for all threads, and fewer registers.
        x_ptr = x_ptr + row * stride_x + offs
        out_ptr = out_ptr + row * stride_out + offs
    # [BLOCK_ROWS, BLOCK_SIZE]
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    # Loaded here: after a store or the sum they would be a second wait for memory. For each row where these
    # are short, so that every thread loads 16 bytes.
    mask_weight = offs < SIZE if BLOCK_SIZE >= 1024 else mask
    weight = tl.load(weight_ptr + offs, mask=mask_weight, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs, mask=mask_weight, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if ADD:
        before = tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptr += row * stride_residual + offs
        x += tl.load(residual_ptr, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(residual_ptr, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if bias_ptr is not None:
        mean = tl.sum(x, axis=1) / SIZE
        x = tl.where(offs < SIZE, x - mean[:, None], 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    if bias_ptr is not None:
        result = normed * weight.to(tl.float32) + bias
    elif ADD:
        result = before + weighted(normed, weight, tl.float32, UNIT_OFFSET)
    else:
        result = weighted(normed, weight, dtype, UNIT_OFFSET)
    tl.store(out_ptr, result.to(dtype), mask=mask)


def rms_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
    *,
    unit_offset: bool = False,
) -> Tensor:  # [num_rows, size], contiguous
    """Return weight * x / sqrt(mean(x²) + eps) of x, or of residual += x if a residual is given.

    The RMS norm (Zhang & Sennrich 2019), computed in float32. The residual's sum is rounded to its dtype
    before it is normalised, and the normalised value to x's dtype before it is multiplied by the weight, as
    in HF's LlamaRMSNorm. With unit_offset, multiply by 1 + weight and round only the product, as in HF's
    Gemma3RMSNorm. Raises ValueError for a shape, dtype, stride or value that does not fit.
    """
    key = combination((x, weight, residual), eps, unit_offset)
    launch = _rms_norms.find(key, x, weight, eps, residual, unit_offset)
    out = x.new_empty(x.shape)
    launch(x, residual, weight, None, out)
    return out


def rms_norm_into(
    x: Tensor,  # [num_tokens, size] or [num_tokens, num_heads, size]
    weight: Tensor,  # [size]
    eps: float,
    out: Tensor,  # like x, or x itself; written in place
    *,
    unit_offset: bool = False,
    add: bool = False,
) -> None:
    """Write the RMS norm of x into `out`; with `add`, add it to `out` and round only the sum. See `rms_norm`.

    Raises ValueError for a shape, dtype, stride or value that does not fit.
    """
    key = combination((x, weight, out), eps, unit_offset, add, pair=(x, out))
    launch = _rms_norms_into.find(key, x, weight, eps, out, unit_offset, add)
    launch(x, None, weight, None, out)


def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size], contiguous
    """Return weight * (x - mean(x)) / sqrt(var(x) + eps) + bias of x, or of residual += x if given.

    The layer norm (Ba et al. 2016), computed in float32. The residual's sum is rounded to its dtype before it
    is normalised, and the result to x's dtype. Raises ValueError for a shape, dtype, stride or value that
    does not fit.
    """
    key = combination((x, weight, bias, residual), eps)
    launch = _layer_norms.find(key, x, weight, bias, eps, residual)
    out = x.new_empty(x.shape)
    launch(x, residual, weight, bias, out)
    return out


@checked_as("rms_norm")
def _bind_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, unit_offset: bool
) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_shape("x", x, (None, None))
    return _bind({"x": x, "weight": weight, "residual": residual}, eps, unit_offset=unit_offset)


@checked_as("rms_norm_into")
def _bind_rms_norm_into(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, unit_offset: bool, add: bool
) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    return _bind({"x": x, "weight": weight, "out": out}, eps, unit_offset=unit_offset, add=add)


@checked_as("layer_norm")
def _bind_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None
) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    return _bind({"x": x, "weight": weight, "bias": bias, "residual": residual}, eps)


def _bind(
    tensors: dict[str, Tensor | None],  # by their names; without "out" it is contiguous
    eps: float,
    *,
    unit_offset: bool = False,
    add: bool = False,
) -> BoundLaunch:
    """Check that the kernel can address the tensors. Return the launch."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    x = given["x"]
    check_launchable("x", x)
    for name, tensor in given.items():
        check_last_dim_contiguous(name, tensor)
    num_tokens, *heads, size = x.shape
    num_heads = math.prod(heads)
    num_rows = num_tokens * num_heads
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, _TILE // block_size)
    stride_out = given["out"].stride() if "out" in given else (size, size)
    return BoundLaunch(
        _norm_kernel,
        (triton.cdiv(num_rows, block_rows),),
        num_rows=num_rows,
        eps=float(eps),  # an int would be another specialisation
        stride_x=x.stride(0),
        stride_x_head=x.stride(-2),
        stride_residual=given["residual"].stride(0) if "residual" in given else 0,
        stride_out=stride_out[0],
        stride_out_head=stride_out[-2],
        NUM_HEADS=num_heads,
        UNIT_OFFSET=unit_offset,
        ADD=add,
        SIZE=size,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=min(16, max(4, block_size // 1024)),
    )


_rms_norms = Launches(_bind_rms_norm)
_rms_norms_into = Launches(_bind_rms_norm_into)
_layer_norms = Launches(_bind_layer_norm)
