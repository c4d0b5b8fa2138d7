"""The sum of the products of a token's experts, times their weights."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from ..numbers import KINDS
from .row_kernel import has_regular_rows, in_torch, units_of_rows

SUM_EXPERTS = Task(
    "rows.sum_experts.sum_experts",
    ("x", "places", "weights", "shared", "shared_gate", "out"),
    ("kind", "num_rows", "size", "num_chosen", "x_stride", "shared_stride", "rows_per_unit"),
)


by_torch = in_torch("sum_experts")


@checked
def sum_experts(
    x: Tensor,  # [num_rows, size], sorted by expert
    places: Tensor,  # i64[num_tokens, num_chosen]
    weights: Tensor,  # f32[num_tokens, num_chosen]
    shared: Tensor | None = None,  # [num_tokens, size]
    shared_gate: Tensor | None = None,  # f32[num_tokens, 1]
) -> Tensor:  # [num_tokens, size]
    """Return for each token the weighted sum of its experts' outputs; see `reference.sum_experts`."""
    rows = (x,) if shared is None else (x, shared)
    others = [y for y in (places, weights, shared_gate) if y is not None]
    if not (has_regular_rows(*rows) and all(y.is_contiguous() for y in others)):
        return by_torch(x, places, weights, shared, shared_gate)
    num_tokens, num_chosen = places.shape
    size = x.shape[1]
    out = x.new_empty(num_tokens, size)
    num_units, per_unit = units_of_rows(num_tokens, (num_chosen + 1) * size)
    SUM_EXPERTS.run(
        num_units,
        x=x,
        places=places,
        weights=weights,
        shared=shared,
        shared_gate=shared_gate,
        out=out,
        kind=KINDS[x.dtype],
        num_rows=num_tokens,
        size=size,
        num_chosen=num_chosen,
        x_stride=x.stride(0) * x.itemsize,
        shared_stride=0 if shared is None else shared.stride(0) * x.itemsize,
        rows_per_unit=per_unit,
    )
    return out
