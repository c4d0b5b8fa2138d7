"""The multiplication by the sigmoid of a gate: the output of attention in Qwen3.5."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from .row_kernels import has_regular_rows, in_torch, run_on_rows

SCALE_BY_SIGMOID = Task(
    "rows.scale_by_sigmoid.scale_by_sigmoid",
    ("x", "gate"),
    ("kind", "num_rows", "size", "x_stride", "gate_stride", "rows_per_unit"),
)


by_torch = in_torch("scale_by_sigmoid")


@checked
def scale_by_sigmoid(x: Tensor, gate: Tensor) -> None:  # [num_rows, size], both
    """Multiply x by the sigmoid of the gate, in place; see `reference.scale_by_sigmoid`."""
    if has_regular_rows(x, gate):
        run_on_rows(SCALE_BY_SIGMOID, x=x, gate=gate, gate_stride=gate.stride(0) * gate.itemsize)
    else:
        by_torch(x, gate)
