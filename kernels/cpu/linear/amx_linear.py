"""x Wᵀ by AMX (`products.amx`), for weights in pairs of bfloat16.

x in float32 is split into three bfloat16, its thirds, which add up to it exactly: each product is exact and
the result as accurate as a sum in float32. Subnormal thirds count as 0, so x below 2^-102 and products
below that lose bits; an infinite weight times a finite x may be NaN.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..formats import BFLOAT16_PAIRS, PANEL, PANEL_WIDTH, expanded_bytes
from ..launch.tasks import Field, Task, num_runs
from ..target import LINE, ROW_BLOCK
from .panels import Panels

THIRDS = 3
TILED_DEPTH = 128  # most steps of a panel at a time: 16 KiB
FEW_TILED_ROWS = 64  # up to these take half as many: they leave little to do while panels come from memory

TOGETHER = 2  # panels that rows are multiplied by while they are in the L1 cache
ROWS_BYTES = 2**20  # half of a core's L2 cache: about the most for a unit's rows in thirds
# of a unit, if x has as many
LEAST_UNIT_ROWS = 32
_MOST_ROWS = 256
_MOST_PANELS = 8  # of a unit: their accumulators and a part of the rows fit the L2 cache
# The least weights and inputs of a weight that is read from memory: smaller ones stay in the caches.
_LEAST_WEIGHTS = 2**19
_LEAST_INPUTS = 512

TILES = Task(
    "linear.amx_linear.tiles",
    ("x", "panels", "scales", "bias", "out", "offsets"),
    (
        "experts", "num_experts", "x_stride", "num_rows", "depth", "out_features", "out_stride", "num_panels",
        "weight_kind", "out_kind", "gated", "unit_rows", "unit_panels", "apart", "thirds", "thirds_stride",
        "expanded", "all_units", "num_threads",
    ),
    read_late=("offsets",),
)  # fmt: skip


def multiply_tiles(
    fields: Mapping[str, Field], rows: Tensor, weight: Panels, *, num_experts: int, has_groups: bool
) -> None:
    """Launch the product of rows [num_rows, in_features] and a weight, computed with AMX.

    fields: the fields of the kernel's record that `linear.LINEAR` also has.
    num_experts: the number of experts whose weights, of the same shape as `weight`, multiply the rows; 0 if
        only `weight` does.
    """
    num_threads = torch.get_num_threads()
    num_rows, depth = rows.shape
    num_panels = len(weight.weight)
    usual_rows = most_rows = num_rows
    num_used = 1
    if num_experts:
        # Experts have as many rows on average; those with more have several units, or larger ones.
        num_used = max(1, min(num_rows, num_experts))
        usual_rows = -(-num_rows // num_used)
        most_rows = min(num_rows, max(2 * usual_rows, LEAST_UNIT_ROWS))
    thirds, stride = thirds_of(rows.dtype == torch.float32, depth)
    unit_rows = rows_of_unit(most_rows, num_panels * num_used, depth, thirds, num_threads)
    some_rows = min(max(1, usual_rows), unit_rows)
    unit_panels = panels_of_unit(usual_rows, num_panels, depth, some_rows, thirds, weight.kind, num_threads)
    across = -(-num_panels // unit_panels)
    num_units = across * -(-num_rows // unit_rows)
    expanded = expanded_bytes(depth) if has_groups else 0
    TILES.run(
        num_threads if num_experts else num_runs(num_units, num_threads),
        **fields,
        unit_rows=unit_rows,
        unit_panels=unit_panels,
        apart=across if is_read_apart(usual_rows, num_panels, depth, thirds) else 1,
        thirds=thirds,
        thirds_stride=stride,
        expanded=expanded,
        all_units=num_units,
        num_threads=num_threads,
        scratch_size=scratch_bytes(unit_rows, unit_panels, thirds, stride, expanded),
    )


def scratch_bytes(unit_rows: int, unit_panels: int, thirds: int, thirds_stride: int, expanded: int) -> int:
    """Return the bytes of scratch memory for units of this size: accumulators, unpacked panels, thirds and
    factors.

    expanded: the bytes of a panel's expanded factors.
    """
    rows = unit_rows * thirds
    unpacked = TOGETHER * (TILED_DEPTH * PANEL_WIDTH + expanded)
    return LINE + unpacked + rows * (unit_panels * PANEL_WIDTH + thirds_stride)


def thirds_of(x_is_wide: bool, in_features: int) -> tuple[int, int]:
    """Return into how many bfloat16 rows a row of x is split, and their stride if they are stored.

    The stride is not a power of two; otherwise a tile's rows would share few sets of the L1 cache.
    """
    return (THIRDS, 2 * in_features + LINE) if x_is_wide else (1, 0)


def rows_of_unit(num_rows: int, num_panels: int, in_features: int, thirds: int, num_threads: int) -> int:
    """Return the number of rows of x in a unit: as many as fit into the L2 cache, or fewer to give every
    thread units.

    Rows in float32 are split into thirds once for all panels of a unit, and stored.
    """
    most = _MOST_ROWS
    if thirds > 1:
        most = max(LEAST_UNIT_ROWS, min(_MOST_ROWS, ROWS_BYTES // (2 * in_features * thirds)))
    while most > LEAST_UNIT_ROWS and -(-num_rows // most) * num_panels < 4 * num_threads:
        most = max(LEAST_UNIT_ROWS, most // 2)
    equal = -(-num_rows // max(1, -(-num_rows // most)))
    return max(1, min(num_rows, -(-equal // LEAST_UNIT_ROWS) * LEAST_UNIT_ROWS))


def panels_of_unit(
    num_rows: int, num_panels: int, in_features: int, unit_rows: int, thirds: int, kind: int, num_threads: int
) -> int:
    """Return the number of panels in a unit.

    It is two if the panels are read apart, and one if the rows are so few that unpacking takes all the time.
    Otherwise it is two, so that a part of the rows stays in the L1 cache, or for many wide rows up to
    _MOST_PANELS, so that the part stays in the L2 cache. It is lower if the threads would otherwise finish
    later.
    """
    if is_read_apart(num_rows, num_panels, in_features, thirds):
        return TOGETHER
    if kind != BFLOAT16_PAIRS and unit_rows * thirds <= ROW_BLOCK:
        return 1
    blocks = -(-num_rows // unit_rows)

    def passes(number: int) -> int:
        units = -(-num_panels // number) * blocks
        # A thread claims its next unit before it begins one: the first may have two while others have none.
        return max(-(-units // num_threads), min(2, units)) * number

    are_many = num_rows > FEW_TILED_ROWS and 2 * in_features * unit_rows >= ROWS_BYTES // 2
    number = _MOST_PANELS if are_many else TOGETHER
    while passes(number) > 1.1 * passes(1):
        number //= 2
    return number


def is_read_apart(num_rows: int, num_panels: int, in_features: int, thirds: int) -> bool:
    """Return whether the two panels of a unit lie half a weight apart.

    With few rows, a product takes as long as reading the weight, and memory is read faster at two places at
    once.
    """
    is_large = num_panels * PANEL * in_features >= _LEAST_WEIGHTS and in_features >= _LEAST_INPUTS
    return is_large and num_rows * thirds <= ROW_BLOCK // TOGETHER
