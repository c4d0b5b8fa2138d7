"""LayerNorm with a bias, with the addition to the residual stream before it."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task, are_contiguous
from ..numbers import KINDS
from .row_kernel import has_regular_rows, in_torch, padded_width, units_of_rows

LAYER_NORM = Task(
    "rows.layer_norm.layer_norm",
    ("x", "weight", "bias", "residual", "out"),
    ("kind", "num_rows", "size", "x_stride", "out_stride", "rows_per_unit"),
    ("eps",),
)  # fmt: skip


by_torch = in_torch("layer_norm")


@checked
def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size]
    """Return the norm of x, after residual += x if given; see `reference.layer_norm`.

    Many rows of whole pages are padded, see `padded_width`: the result is not contiguous.
    """
    if not (has_regular_rows(x) and are_contiguous(weight, bias, residual)):
        return by_torch(x, weight, bias, eps, residual)
    num_rows, size = x.shape
    width = padded_width(num_rows, size, x.itemsize)
    out = x.new_empty(num_rows, width)[:, :size]
    num_units, per_unit = units_of_rows(num_rows, size)
    LAYER_NORM.run(
        num_units,
        x=x,
        weight=weight,
        bias=bias,
        residual=residual,
        out=out,
        kind=KINDS[x.dtype],
        num_rows=num_rows,
        size=size,
        x_stride=x.stride(0) * x.itemsize,
        out_stride=width * x.itemsize,
        rows_per_unit=per_unit,
        eps=eps,
    )
    return out
