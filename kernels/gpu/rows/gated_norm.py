"""RMSNorm of each head, times silu of a gate."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_contiguous, check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable
from .scale_by_sigmoid import sigmoid

_TILE = 2048  # values that one program normalises, or one head if that is longer


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    num_rows,
    eps,
    stride_gate: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    offs = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = (row < num_rows) & (offs < SIZE)
    gate_ptr += row // NUM_HEADS * stride_gate + row % NUM_HEADS * SIZE + offs
    x = tl.load(x_ptr + row * SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    out = x * inverse[:, None] * weight * gate * sigmoid(gate)
    tl.store(out_ptr + row * SIZE + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(
    x: Tensor,  # [num_tokens, num_heads, size]
    weight: Tensor,  # [size]
    gate: Tensor,  # [num_tokens, num_heads * size]
    eps: float,
) -> Tensor:  # [num_tokens, num_heads * size]
    """Return weight * x / sqrt(mean(x²) + eps) * silu(gate), with the mean over each head.

    The result is computed in float32 and rounded once. Raises ValueError for a shape, dtype, stride or value
    that does not fit.
    """
    launch, size = _launches.find(combination((x, weight, gate), eps), x, weight, gate, eps)
    out = x.new_empty(size)
    launch(x, weight, gate, out)
    return out


@checked_as("gated_norm")
def _bind(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_contiguous("x", x)
    check_contiguous("weight", weight)
    check_last_dim_contiguous("gate", gate)
    check_launchable("x", x)
    num_tokens, num_heads, size = x.shape
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, _TILE // block_size)
    launch = BoundLaunch(
        _gated_norm_kernel,
        (triton.cdiv(num_tokens * num_heads, block_rows),),
        num_rows=num_tokens * num_heads,
        eps=float(eps),
        stride_gate=gate.stride(0),
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )
    return launch, (num_tokens, num_heads * size)


_launches = Launches(_bind)
