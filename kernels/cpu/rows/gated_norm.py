"""RMSNorm of each head, times silu of a gate."""

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task, are_contiguous
from .row_kernels import has_regular_rows, in_torch, units_of_rows

GATED_NORM = Task(
    "rows.gated_norm.gated_norm",
    ("x", "weight", "gate", "out"),
    ("kind", "num_rows", "num_heads", "size", "gate_stride", "rows_per_unit"),
    ("eps",),
)


by_torch = in_torch("gated_norm")


@checked
def gated_norm(
    x: Tensor,  # [num_tokens, num_heads, size]
    weight: Tensor,  # [size]
    gate: Tensor,  # [num_tokens, num_heads * size]
    eps: float,
) -> Tensor:  # [num_tokens, num_heads * size]
    """Return weight * x / sqrt(mean(x²) + eps) * silu(gate); see `reference.gated_norm`."""
    if not (has_regular_rows(gate) and are_contiguous(x, weight)):
        return by_torch(x, weight, gate, eps)
    num_tokens, num_heads, size = x.shape
    out = x.new_empty(num_tokens, num_heads * size)
    num_units, per_unit = units_of_rows(num_tokens * num_heads, size)
    GATED_NORM.run(
        num_units,
        x=x,
        weight=weight,
        gate=gate,
        out=out,
        kind=KINDS[x.dtype],
        num_rows=num_tokens * num_heads,
        num_heads=num_heads,
        size=size,
        gate_stride=gate.stride(0) * gate.itemsize,
        rows_per_unit=per_unit,
        eps=eps,
    )
    return out
