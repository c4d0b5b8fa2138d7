"""RMSNorm of each head, times silu of a gate, or of the product."""

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
    weight_ptr,  # None: nothing is normalised
    gate_ptr,
    out_ptr,
    num_rows,
    eps,
    stride_gate: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WEIGHT_PER_HEAD: tl.constexpr,  # or one that all heads share
    GATE_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    offs = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = (row < num_rows) & (offs < SIZE)
    gate_ptr += row // NUM_HEADS * stride_gate + row % NUM_HEADS * SIZE + offs
    x = tl.load(x_ptr + row * SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is None:
        out = x * (gate * sigmoid(gate))
    else:
        if WEIGHT_PER_HEAD:
            weight = tl.load(weight_ptr + row % NUM_HEADS * SIZE + offs, mask=mask, other=0.0)
        else:
            weight = tl.load(weight_ptr + offs, mask=offs < SIZE, other=0.0)
        weight = weight.to(tl.float32)
        if GATE_FIRST:
            x = x * (gate * sigmoid(gate))
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
        out = x * inverse[:, None] * weight
        if not GATE_FIRST:
            out = out * gate * sigmoid(gate)
    tl.store(out_ptr + row * SIZE + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(
    x: Tensor,  # [num_tokens, num_heads, size]
    weight: Tensor | None,  # [size], or [num_heads * size]
    gate: Tensor,  # [num_tokens, num_heads * size]
    eps: float,
    *,
    gate_first: bool = False,
) -> Tensor:  # [num_tokens, num_heads * size]
    """Return weight * x / sqrt(mean(x²) + eps) * silu(gate), with the mean over each head.

    gate_first: whether x is multiplied by silu(gate) before the norm instead. weight: None: no norm, only the
        product x * silu(gate).

    The result is computed in float32 and rounded once. Raises ValueError for a shape, dtype, stride or value
    that does not fit.
    """
    given = x, weight, gate, eps, gate_first
    launch, size = _launches.find(combination(given[:3], *given[3:]), *given)
    out = x.new_empty(size)
    launch(x, weight, gate, out)
    return out


@checked_as("gated_norm")
def _bind(
    x: Tensor, weight: Tensor | None, gate: Tensor, eps: float, gate_first: bool
) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_contiguous("x", x)
    if weight is not None:
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
        WEIGHT_PER_HEAD=weight is not None and len(weight) > size,
        GATE_FIRST=gate_first,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=4 if block_size <= _TILE else 16,
    )
    return launch, (num_tokens, num_heads * size)


_launches = Launches(_bind)
