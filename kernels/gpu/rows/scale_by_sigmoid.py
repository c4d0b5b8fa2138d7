"""The multiplication by the sigmoid of a gate: the output of attention in Qwen3.5."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_BLOCK = 2048


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x), computed without overflow."""
    decayed = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, decayed) / (1.0 + decayed)


@triton.jit
def _scale_by_sigmoid_kernel(
    x_ptr,
    gate_ptr,
    stride_x: tl.constexpr,
    stride_gate: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    x_ptr += row * stride_x + offs
    gate = tl.load(gate_ptr + row * stride_gate + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32) * sigmoid(gate)
    tl.store(x_ptr, x.to(x_ptr.dtype.element_ty), mask=mask)


def scale_by_sigmoid(x: Tensor, gate: Tensor) -> None:  # [num_rows, size], both
    """Multiply x by the sigmoid of the gate, in place.

    The result is computed in float32 and rounded once. Raises ValueError for a shape, dtype, stride or device
    that does not fit.
    """
    launch = _launches.find(combination((x, gate)), x, gate)
    launch(x, gate)


@checked_as("scale_by_sigmoid")
def _bind(x: Tensor, gate: Tensor) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_last_dim_contiguous("x", x)
    check_last_dim_contiguous("gate", gate)
    check_launchable("x", x)
    num_rows, size = x.shape
    return BoundLaunch(
        _scale_by_sigmoid_kernel,
        (num_rows, triton.cdiv(size, _BLOCK)),
        stride_x=x.stride(0),
        stride_gate=gate.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


_launches = Launches(_bind)
