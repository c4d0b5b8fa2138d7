"""x Wᵀ + b on a CPU, batch-invariant: a row's result is bitwise equal in any batch.

A BLAS chooses the order of a sum by the number of rows. Here each number is one chain of fused
multiply-adds in the order of the inputs; for x in bfloat16 a chain of dot products of pairs, if the CPU has
those; with AMX a chain of tile products (`amx_linear`). A weight is packed into panels of PANEL outputs,
each read from end to end by one thread. It may be narrower than the accumulators, which are float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import KERNEL_DTYPES, check_contiguous, check_device, check_dtype, check_shape, is_trusted
from ..formats import GATED, MOST_GROUP, PANEL, PANEL_WIDTH, expanded_bytes
from ..launch.huge_pages import in_huge_pages
from ..launch.tasks import Field, VariantTask, num_runs
from ..target import HAS_DOT, HAS_TILES, INPUTS, LANES
from .panels import (
    OUT_KINDS,
    Panels,
    check_outputs,
    check_result_dtype,
    check_weight,
    num_panels_of,
    to_parts,
)

if HAS_TILES:
    from .amx_linear import multiply_tiles

DEPTH = 320  # most steps of a panel at a time: 20 to 40 KiB, in the L1 cache while all rows use them

ROWS = 64  # of a unit of work
# Parts of whole groups have up to DEPTH steps and a group more, of two inputs each.
_EXPANDED = expanded_bytes(2 * (DEPTH + MOST_GROUP))

LINEAR = VariantTask(
    "linear.linear.linear",
    ("x", "panels", "scales", "bias", "out", "offsets"),
    (
        "experts", "num_experts", "x_stride", "num_rows", "depth", "out_features", "out_stride", "num_panels",
        "weight_kind", "out_kind", "gated", "all_units", "num_threads",
    ),
    read_late=("offsets",),
)  # fmt: skip

_PAIRS = {torch.bfloat16: torch.int32, torch.int8: torch.int16}  # dtypes that hold a pair of these


def can_pair(dtype: torch.dtype, in_features: int) -> bool:
    """Return whether this CPU multiplies x of this dtype and width by weights in pairs."""
    if dtype == torch.float32:
        return _fills_tiles(in_features)
    return HAS_DOT and dtype == torch.bfloat16 and in_features % 2 == 0


def _fills_tiles(in_features: int) -> bool:
    return HAS_TILES and in_features % INPUTS == 0


def pack(weight: Tensor, scales: Tensor | None = None, *, pairs: bool = False, gated: bool = False) -> Panels:
    """Pack a weight [out_features, in_features], times scales [out_features], into panels.

    pairs: whether inputs are stored in pairs, for x of a dtype that `can_pair`.
    gated: whether the first half of the outputs are gates; see Panels.

    Raises ValueError unless the weight has inputs and is float32, float16, bfloat16 or int8. In pairs it must
    be bfloat16, or int8 without -128. Scales must be given exactly for int8.
    """
    check_weight(weight, scales, pairs=pairs, gated=gated)
    out_features, in_features = weight.shape
    num_panels = num_panels_of(out_features, gated)
    shape = num_panels, in_features // (1 + pairs), PANEL, 1 + pairs
    panels = in_huge_pages(weight.new_empty(shape))
    by_halves = weight.dtype == torch.bfloat16 and not pairs
    by_parts = weight.dtype == torch.int8 and pairs
    # A step of an output is one element: only transposing a matrix is a fast copy in torch.
    step = _PAIRS[weight.dtype] if pairs else weight.dtype
    steps = panels.view(step).squeeze(3)
    for i, rows in enumerate(_rows_of_panels(weight, gated)):
        ordered = _alternate_halves(rows) if by_halves else rows
        steps[i, :, len(ordered) :] = 0
        steps[i, :, : len(ordered)] = ordered.contiguous().flatten().view(step).view(len(ordered), -1).t()
        if by_parts:
            panels[i] = to_parts(panels[i])
    factors = torch.ones(out_features, dtype=torch.float32) if scales is None else scales
    padded = pad(factors, gated=gated)
    return Panels(panels if pairs else panels.squeeze(3), padded, out_features, gated)


def pad(numbers: Tensor, *, gated: bool = False) -> Tensor:
    """Order a number per output as panels do: [out_features] -> f32[num_panels * PANEL]."""
    check_outputs("numbers", numbers, gated=gated)
    check_dtype("numbers", numbers)
    padded = torch.zeros(num_panels_of(len(numbers), gated), PANEL, dtype=torch.float32)
    for i, part in enumerate(_rows_of_panels(numbers, gated)):
        padded[i, : len(part)] = part
    return padded.flatten()


def _rows_of_panels(x: Tensor, gated: bool) -> Iterator[Tensor]:
    """Yield each panel's rows: up to PANEL, or of a gated weight LANES gates and as many others, padded."""
    if not gated:
        yield from torch.split(x, PANEL)
        return
    gates, others = x.chunk(2)
    for gate, other in zip(torch.split(gates, LANES), torch.split(others, LANES), strict=True):
        both = gate.new_zeros(2, LANES, *gate.shape[1:])
        both[0, : len(gate)] = gate
        both[1, : len(gate)] = other
        yield both.flatten(0, 1)


def _alternate_halves(rows: Tensor) -> Tensor:
    """Alternate outputs i and i + LANES: [n, in_features] -> [PANEL, in_features]."""
    halves = rows.new_zeros(2, LANES, rows.shape[1])
    halves.flatten(0, 1)[: len(rows)] = rows
    return halves.transpose(0, 1).flatten(0, 1)


def linear(
    x: Tensor,
    weight: Panels,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply x [num_rows, in_features] by the weight: [num_rows, out_features], gated half as wide.

    bias: f32[num_panels * PANEL], as `pad` makes it.
    dtype: the dtype of the result, by default the dtype of x; accumulators are float32.
    out: where to store the result; its rows may be apart.

    Raises ValueError if x has another width or dtype than the weight was packed for, or if `out` has the
    wrong shape or dtype.
    """
    if not is_trusted():
        from .panel_checks import check_bias, check_panels

        check_panels(weight)
        check_bias(weight, bias)
        check_result_dtype(torch.float32 if dtype is None else dtype)
    return multiply(x, weight, bias, dtype, out)


class WeightsOfRows(NamedTuple):
    """The weights of all experts, and the range of rows for each. All weights have the same packed form."""

    table: Tensor  # i64[num_experts, 4], see `units`
    offsets: Tensor  # i32[num_experts + 1]: the rows of expert e are offsets[e] to offsets[e + 1]
    has_groups: bool  # whether any is in codes with factors for groups of inputs
    kinds: frozenset[int]  # all their formats


def multiply(
    x: Tensor,
    weight: Panels,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    experts: WeightsOfRows | None = None,
) -> Tensor:
    """Multiply as `linear` does, without its checks of the weight.

    experts: multiply rows by the weights of their experts instead. These have the shape of `weight`; their
        formats may differ.
    """
    check_shape("x", x, (None, weight.in_features))
    in_tiles = weight.in_pairs and _fills_tiles(weight.in_features)
    in_pairs = (torch.bfloat16, torch.float32) if in_tiles else (torch.bfloat16,)
    check_dtype("x", x, in_pairs if weight.in_pairs else KERNEL_DTYPES)
    check_device("x", x, weight.weight.device)
    num_rows = x.shape[0]
    num_panels = len(weight.weight)
    out_features = weight.out_features // (1 + weight.gated)
    if out is None:
        out = x.new_empty(num_rows, out_features, dtype=dtype or x.dtype)
    else:
        check_shape("out", out, (num_rows, out_features), dtype or x.dtype)
        check_device("out", out, x.device)
        check_contiguous("a row of out", out[:1])
    rows = x if weight.in_pairs else x.float()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    offsets, table = (None, None) if experts is None else (experts.offsets, experts.table)
    num_experts = 0 if experts is None else len(experts.table)
    fields: dict[str, Field] = {
        "x": rows,
        "panels": weight.weight,
        "scales": weight.scales,
        "bias": bias,
        "out": out,
        "offsets": offsets,
        "experts": table,
        "num_experts": num_experts,
        "x_stride": rows.stride(0) * rows.itemsize,
        "num_rows": num_rows,
        "depth": weight.depth,
        "out_features": out_features,
        "out_stride": out.stride(0) * out.itemsize,
        "num_panels": num_panels,
        "weight_kind": weight.kind,
        "out_kind": OUT_KINDS[out.dtype],
        "gated": GATED if weight.gated else 0,
    }
    if in_tiles:
        has_groups = weight.has_groups if experts is None else experts.has_groups
        multiply_tiles(fields, rows, weight, num_experts=num_experts, has_groups=has_groups)
    else:
        LINEAR.require(weight.kind, *(() if experts is None else experts.kinds))
        num_threads = torch.get_num_threads()
        size = (ROWS + 1 + DEPTH) * PANEL_WIDTH + _EXPANDED
        num_units = num_panels * -(-num_rows // ROWS)
        launched = num_threads if experts else num_runs(num_units, num_threads)
        LINEAR.run(launched, **fields, all_units=num_units, num_threads=num_threads, scratch_size=size)
    return out
