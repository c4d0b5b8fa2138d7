"""LayerNorm, with the addition to the residual stream before it."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task, are_contiguous
from .row_kernels import has_regular_rows, in_torch, padded_rows, run_on_rows

LAYER_NORM = Task(
    "rows.layer_norm.layer_norm",
    ("x", "weight", "bias", "residual", "out"),
    ("kind", "num_rows", "size", "x_stride", "out_stride", "rows_per_unit"),
    ("eps",),
)  # fmt: skip


layer_norm_by_torch = in_torch("layer_norm")


@checked
def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size]
    """Return the layer norm of x, or of residual += x if a residual is given; see `reference.layer_norm`.

    If there are many rows, and their size is a multiple of a memory page, the output's rows are padded (see
    `padded_rows`), so the output is not contiguous.
    """
    if not (has_regular_rows(x) and are_contiguous(weight, bias, residual)):
        return layer_norm_by_torch(x, weight, bias, eps, residual)
    out = padded_rows(x)
    run_on_rows(LAYER_NORM, x=x, out=out, weight=weight, bias=bias, residual=residual, eps=eps)
    return out
