"""RMSNorm, with the addition to the residual stream before or after it."""

import math

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task, are_contiguous
from .row_kernels import has_regular_rows, in_torch, padded_rows, units_of_rows

RMS_NORM = Task(
    "rows.rms_norm.rms_norm",
    ("x", "weight", "residual", "out"),
    (
        "kind", "unit_offset", "adds", "num_rows", "num_heads", "size",
        "x_stride", "x_head_stride", "out_stride", "out_head_stride", "rows_per_unit",
    ),
    ("eps",),
)  # fmt: skip


rms_norm_by_torch = in_torch("rms_norm")


@checked
def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
    *,
    unit_offset: bool = False,
) -> Tensor:  # [..., size]
    """Return the RMS norm of x, or of residual += x if a residual is given; see `reference.rms_norm`.

    If x has two dimensions, many rows, and rows whose size is a multiple of a memory page, the output's rows
    are padded (see `padded_rows`), so the output is not contiguous.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if not (has_regular_rows(rows) and are_contiguous(weight, residual)):
        return rms_norm_by_torch(x, weight, eps, residual, unit_offset=unit_offset)
    out = padded_rows(rows) if x.dim() == 2 else rows.new_empty(rows.shape)
    _run(rows, weight, eps, residual, out, unit_offset=unit_offset, adds=False)
    return out.view(x.shape)


rms_norm_into_by_torch = in_torch("rms_norm_into")


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
    """Write the RMS norm of x into `out`, or add it to `out`; see `reference.rms_norm_into`."""
    if not (x.is_cpu and x.stride(-1) == out.stride(-1) == 1 and weight.is_contiguous()):
        rms_norm_into_by_torch(x, weight, eps, out, unit_offset=unit_offset, add=add)
        return
    _run(x, weight, eps, None, out, unit_offset=unit_offset, adds=add)


def _run(
    x: Tensor,  # [num_tokens, size] or [num_tokens, num_heads, size]
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    *,
    unit_offset: bool,
    adds: bool,
) -> None:
    num_tokens, *heads, size = x.shape
    num_heads = math.prod(heads)
    num_rows = num_tokens * num_heads
    num_units, per_unit = units_of_rows(num_rows, size)
    RMS_NORM.run(
        num_units,
        x=x,
        weight=weight,
        residual=residual,
        out=out,
        kind=KINDS[x.dtype],
        unit_offset=unit_offset,
        adds=adds,
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
