"""What LoRA adapters add to the output of a linear layer, each row by its own adapter."""

import torch
from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task
from ..target import LANES
from .row_kernels import has_regular_rows, in_torch

AT_ONCE = 4  # vectors of columns that a loop takes; ranks likewise
LEAST_COLUMNS = 8 * AT_ONCE * LANES  # of a unit, if a row is divided

ADD_LORA = Task(
    "rows.add_lora.add_lora",
    ("x", "out", "a", "b", "ranks", "columns", "slots"),
    (
        "kind",
        "out_kind",
        "in_features",
        "size",
        "max_rank",
        "num_parts",
        "num_ranges",
        "x_stride",
        "out_stride",
        "units_per_row",
    ),
)


by_torch = in_torch("add_lora")


@checked
def add_lora(
    x: Tensor,  # [num_tokens, in_features]
    out: Tensor,  # [num_tokens, size] like x or float32, changed in place
    a: Tensor,  # [num_slots, num_parts, max_rank, in_features], like x
    b: Tensor,  # [num_slots, max_rank, size], like x: transposed, and scaled
    ranks: Tensor,  # i32[num_slots, num_parts], at most max_rank; 0: the slot has no such part
    columns: Tensor,  # i32[num_ranges, 3]: first column of out, end, and the part that makes them
    slots: Tensor,  # i32[num_tokens]; -1: no adapter
) -> None:
    """Add x Aᵀ Bᵀ of each token's adapter to its row of `out`; see `reference.add_lora`."""
    if not has_regular_rows(x, out):
        by_torch(x, out, a, b, ranks, columns, slots)
        return
    num_tokens, in_features = x.shape
    size = out.shape[1]
    # Few rows are divided among the threads. Each unit then computes x Aᵀ by the same chain.
    units_per_row = max(1, min(torch.get_num_threads() // max(1, num_tokens), size // LEAST_COLUMNS))
    ADD_LORA.run(
        num_tokens * units_per_row,
        scratch_size=4 * (a.shape[2] + AT_ONCE),
        x=x,
        out=out,
        a=a,
        b=b,
        ranks=ranks,
        columns=columns,
        slots=slots,
        kind=KINDS[x.dtype],
        out_kind=KINDS[out.dtype],
        in_features=in_features,
        size=size,
        max_rank=a.shape[2],
        num_parts=a.shape[1],
        num_ranges=len(columns),
        x_stride=x.stride(0) * x.itemsize,
        out_stride=out.stride(0) * out.itemsize,
        units_per_row=units_per_row,
    )
