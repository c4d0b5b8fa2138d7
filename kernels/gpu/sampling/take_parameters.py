"""The sampling parameters of a step's rows, out of a table that has a row of them for each seat."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checks import check_contiguous, check_device, check_shape
from ...seats import NUM_PARAMETER_FLOATS, NUM_PARAMETER_WORDS, RowParameters
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_BLOCK = 128  # rows of one program


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seats_ptr"])
def _take_parameters_kernel(
    table_ptr,  # i32[num_seats, WORDS]
    seats_ptr,  # i64[num_rows]
    seeds_ptr,  # i64[num_rows]
    floats_ptr,  # f32[FLOATS, num_rows]
    top_k_ptr,  # i32[num_rows]
    num_rows,
    WORDS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the parameters of BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    words_ptr = table_ptr + tl.load(seats_ptr + row, mask=mask, other=0) * WORDS
    low = tl.load(words_ptr, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(words_ptr + 1, mask=mask, other=0).to(tl.int64)
    tl.store(seeds_ptr + row, (high << 32) | low, mask=mask)
    for i in tl.static_range(FLOATS):
        word = tl.load(words_ptr + 2 + i, mask=mask, other=0)
        tl.store(floats_ptr + i * num_rows + row, word.to(tl.float32, bitcast=True), mask=mask)
    tl.store(top_k_ptr + row, tl.load(words_ptr + 2 + FLOATS, mask=mask, other=0), mask=mask)


def take_parameters(
    table: Tensor,  # i32[num_seats, NUM_PARAMETER_WORDS]
    seats: Tensor,  # i64[num_rows]
) -> RowParameters:
    """Return the parameters of these seats, as `sample_tokens` takes them.

    A row of the table holds the bits of a seed (lower half first), of the floats of `RowParameters`, and of
    top_k. Raises ValueError for a shape, dtype, stride or device that does not fit.
    """
    launch = _launches.find(combination((table, seats)), table, seats)
    num_rows = len(seats)
    seeds = torch.empty_like(seats)
    floats = torch.empty(NUM_PARAMETER_FLOATS, num_rows, dtype=torch.float32, device=table.device)
    top_k = torch.empty(num_rows, dtype=torch.int32, device=table.device)
    launch(table, seats, seeds, floats, top_k)
    temperature, min_p, top_n_sigma, typical_p, top_p = floats.unbind()
    return RowParameters(seeds, temperature, min_p, top_n_sigma, typical_p, top_p, top_k)


def _bind(table: Tensor, seats: Tensor) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_shape("table", table, (None, NUM_PARAMETER_WORDS), torch.int32)
    check_shape("seats", seats, (None,), torch.int64)
    check_device("seats", seats, table.device)
    for name, tensor in (("table", table), ("seats", seats)):
        check_contiguous(name, tensor)
        check_launchable(name, tensor)
    return BoundLaunch(
        _take_parameters_kernel,
        (triton.cdiv(len(seats), _BLOCK),),
        num_rows=len(seats),
        WORDS=NUM_PARAMETER_WORDS,
        FLOATS=NUM_PARAMETER_FLOATS,
        BLOCK=_BLOCK,
        num_warps=4,
    )


_launches = Launches(_bind)
