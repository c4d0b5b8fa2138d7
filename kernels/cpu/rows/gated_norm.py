"""RMSNorm of each head, times silu of a gate, or of the product."""

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task, are_contiguous
from .row_kernels import has_regular_rows, in_torch, units_of_rows

GATED_NORM = Task(
    "rows.gated_norm.gated_norm",
    ("x", "weight", "gate", "out"),
    ("kind", "num_rows", "num_heads", "size", "gate_stride", "weight_stride", "gate_first", "rows_per_unit"),
    ("eps",),
)


by_torch = in_torch("gated_norm")


@checked
def gated_norm(
    x: Tensor,  # [num_tokens, num_heads, size]
    weight: Tensor | None,  # [size], or [num_heads * size]
    gate: Tensor,  # [num_tokens, num_heads * size]
    eps: float,
    *,
    gate_first: bool = False,
) -> Tensor:  # [num_tokens, num_heads * size]
    """Return weight * x / sqrt(mean(x²) + eps) * silu(gate); see `reference.gated_norm`."""
    if not (has_regular_rows(gate) and are_contiguous(x) and (weight is None or are_contiguous(weight))):
        return by_torch(x, weight, gate, eps, gate_first=gate_first)
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
        weight_stride=0 if weight is None or len(weight) == size else size * x.itemsize,
        gate_first=gate_first,
        rows_per_unit=per_unit,
        eps=eps,
    )
    return out
