"""Lookups of rows by index: in a plain table, and in a weight that is packed in panels."""

import torch
from torch import Tensor

from ...checked import checked
from ...checks import check_contiguous, check_device, check_dtype, check_indices, check_shape, is_trusted
from ..formats import (
    BF12,
    BF12_PAIRS,
    BFLOAT16,
    BFLOAT16_PAIRS,
    FLOAT32,
    INT8_PAIRS,
    KINDS,
    PANEL,
    expanded_bytes,
)
from ..launch.tasks import Task
from ..linear.panels import Panels, check_result_dtype, from_parts
from ..target import LANES, VECTOR_BYTES

_CPU = torch.device("cpu")
# kind: of numbers to widen to float32, or FLOAT32 to copy rows as they are.
TAKE_ROWS = Task(
    "rows.take_rows.take_rows", ("table", "indices", "out"), ("stride_bytes", "row_bytes", "kind")
)
TAKE_PANEL_ROWS = Task(
    "rows.take_rows.take_panel_rows",
    ("panels", "scales", "indices", "out"),
    ("in_features", "weight_kind", "out_kind"),
)


@checked
def take_rows(table: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    """Look up rows of a table [n, size] by their indices: i64[m] -> [m, size]; see `reference.take_rows`."""
    if not table.is_cpu:
        raise ValueError(f"table must be on cpu, got {table.device}")
    if table.stride(1) != 1:
        table = table.contiguous()
    if out is None:
        out = table.new_empty(len(indices), table.shape[1])
    check_contiguous("out", out)
    return _take_rows(table, indices.contiguous(), out, FLOAT32)


def widen_rows(table: Tensor, indices: Tensor) -> Tensor:
    """Look up rows of a contiguous 16-bit table [n, size] and convert them to float32: f32[m, size]."""
    if not is_trusted():
        from ...arguments import check_call

        check_call("take_rows", {"table": table, "indices": indices})
    check_dtype("table", table, (torch.float16, torch.bfloat16))
    check_device("table", table, _CPU)
    check_contiguous("table", table)
    out = table.new_empty(len(indices), table.shape[1], dtype=torch.float32)
    return _take_rows(table, indices.contiguous(), out, KINDS[table.dtype])


def _take_rows(table: Tensor, indices: Tensor, out: Tensor, kind: int) -> Tensor:
    TAKE_ROWS.run(
        len(indices),
        table=table,
        indices=indices,
        out=out,
        stride_bytes=table.stride(0) * table.itemsize,
        row_bytes=table.shape[1] * table.itemsize,
        kind=kind,
    )
    return out


def take_panel_rows(panels: Panels, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up rows of a packed weight by their indices: i64[m] -> [m, in_features].

    dtype: the dtype of the result, which must hold the weight's numbers exactly.
    """
    if not is_trusted():
        from ..linear.panel_checks import check_panels

        check_panels(panels)
        check_result_dtype(dtype)
        check_shape("indices", indices, (None,), torch.int64)
        check_device("indices", indices, _CPU)
        check_indices("indices", indices, "the weight's rows", panels.out_features)
    weight = panels.weight
    size = panels.in_features
    if size < LANES:
        if panels.kind == INT8_PAIRS:
            weight = from_parts(weight)
        places = indices % PANEL
        if panels.kind == BFLOAT16:
            places = places % LANES * 2 + places // LANES
        rows = weight[indices // PANEL, :, places].flatten(1)
        return (rows * panels.scales[indices, None]).to(dtype)
    indices = indices.contiguous()  # bound to a name: its memory must outlive the launch
    out = torch.empty(len(indices), size, dtype=dtype)
    is_bf12 = panels.kind in (BF12_PAIRS, BF12)
    if panels.kind in (BFLOAT16_PAIRS, BF12_PAIRS):
        check_dtype("rows", out, (torch.bfloat16, torch.float32))
    number_bytes = 4 + 2 * PANEL * is_bf12
    expanded = expanded_bytes(size) if panels.has_groups else 0
    TAKE_PANEL_ROWS.run(
        len(indices),
        panels=weight,
        scales=panels.scales,
        indices=indices,
        out=out,
        in_features=size,
        weight_kind=panels.kind,
        out_kind=KINDS[dtype],
        scratch_size=VECTOR_BYTES + number_bytes * size + expanded,
    )
    return out
