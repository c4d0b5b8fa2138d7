"""RMSNorm, with the addition to the residual stream before it."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task, are_contiguous
from ..numbers import KINDS
from .row_kernel import has_regular_rows, in_torch, padded_width, units_of_rows

RMS_NORM = Task(
    "rows.rms_norm.rms_norm",
    ("x", "weight", "residual", "out"),
    (
        "kind", "unit_offset", "adds", "num_rows", "num_heads", "size",
        "x_stride", "x_head_stride", "out_stride", "out_head_stride", "rows_per_unit",
    ),
    ("eps",),
)  # fmt: skip


by_torch = in_torch("rms_norm")


@checked
def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
    *,
    unit_offset: bool = False,
) -> Tensor:  # [..., size]
    """Return weight * x / sqrt(mean(x²) + eps), after residual += x if given; see `reference.rms_norm`.

    Many rows of whole pages are padded, see `padded_width`: the result is not contiguous.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if not (has_regular_rows(rows) and are_contiguous(weight, residual)):
        return by_torch(x, weight, eps, residual, unit_offset=unit_offset)
    num_rows, size = rows.shape
    width = padded_width(num_rows, size, x.itemsize) if x.dim() == 2 else size
    out = x.new_empty(num_rows, width)[:, :size].view(x.shape)
    num_units, per_unit = units_of_rows(num_rows, size)
    RMS_NORM.run(
        num_units,
        x=rows,
        weight=weight,
        residual=residual,
        out=out,
        kind=KINDS[x.dtype],
        unit_offset=unit_offset,
        adds=False,
        num_rows=num_rows,
        num_heads=1,
        size=size,
        x_stride=rows.stride(0) * x.itemsize,
        x_head_stride=0,
        out_stride=width * x.itemsize,
        out_head_stride=0,
        rows_per_unit=per_unit,
        eps=eps,
    )
    return out
