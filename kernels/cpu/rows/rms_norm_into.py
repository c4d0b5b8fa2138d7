"""RMSNorm into a tensor that is there: norms of Q and K in place, and norms before a residual addition."""

import math

from torch import Tensor

from ...checked import checked
from ..numbers import KINDS
from .rms_norm import RMS_NORM
from .row_kernel import in_torch, units_of_rows

by_torch = in_torch("rms_norm_into")


@checked
def rms_norm_into(
    x: Tensor,  # [num_tokens, size] or [num_tokens, num_heads, size]
    weight: Tensor,  # [size]
    eps: float,
    out: Tensor,  # like x, or x itself; written in place
    *,
    unit_offset: bool = False,
    add: bool = False,
) -> None:
    """Write the norm of x into `out`, or add it; see `reference.rms_norm_into`."""
    if not (x.is_cpu and x.stride(-1) == out.stride(-1) == 1 and weight.is_contiguous()):
        by_torch(x, weight, eps, out, unit_offset=unit_offset, add=add)
        return
    num_tokens, *heads, size = x.shape
    num_heads = math.prod(heads)
    num_rows = num_tokens * num_heads
    num_units, per_unit = units_of_rows(num_rows, size)
    RMS_NORM.run(
        num_units,
        x=x,
        weight=weight,
        residual=None,
        out=out,
        kind=KINDS[x.dtype],
        unit_offset=unit_offset,
        adds=add,
        num_rows=num_rows,
        num_heads=num_heads,
        size=size,
        x_stride=x.stride(0) * x.itemsize,
        x_head_stride=x.stride(-2) * x.itemsize,
        out_stride=out.stride(0) * out.itemsize,
        out_head_stride=out.stride(-2) * out.itemsize,
        rows_per_unit=per_unit,
        eps=eps,
    )
