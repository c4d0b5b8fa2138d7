"""Tiles and splits of products with weights in codes: decision tables in pure Python."""

from dataclasses import dataclass
from typing import Literal

import torch

from ..attention.config import FAMILIES

# How many rows x has, which decides over tiles and whether splits of the inputs have programs of their own:
# those of outputs and rows alone would be too few, up to many rows.
RowCount = Literal["few", "some", "many", "most"]
ROW_COUNTS: dict[RowCount, int] = {"few": 16, "some": 64, "many": 512, "most": 2**31}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """The tile shapes for which a specialisation of the product is compiled.

    All tile shapes of a target use the same instruction along the inputs, so that a row's bits do not depend
    on the tile shape.
    """

    BLOCK_N: int  # outputs
    BLOCK_M: int  # rows of x
    num_warps: int
    num_stages: int


# Programs that fill a GPU: twice as many as 128 multiprocessors. It is the same for every GPU, since splits
# follow from it.
_ENOUGH_PROGRAMS = 256
_SPLIT_OUTPUTS = 64  # of a program
_LEAST_SPLIT = 512  # inputs
_INTERPRETED = 4, 16, 64  # the same three, for short tests


def split_tiles(num_outputs: int, num_tiles: int, tile: int, target: str) -> int:
    """Return the number of tiles in a split. Each split of the inputs is summed alone, and then the sums are
    added in order.

    The number depends on the weight alone. The number of splits is a power of two, such that a product with
    few rows has _ENOUGH_PROGRAMS programs and a split has at least _LEAST_SPLIT inputs.
    """
    enough, outputs, least = (
        _INTERPRETED if target == "interpreter" else (_ENOUGH_PROGRAMS, _SPLIT_OUTPUTS, _LEAST_SPLIT)
    )
    num_splits = 1
    while -(-num_outputs // outputs) * num_splits < enough and num_tiles * tile >= 2 * num_splits * least:
        num_splits *= 2
    return -(-num_tiles // num_splits)


def row_count(num_rows: int) -> RowCount:
    """Return the class of row counts that selects the tile shapes for a product of num_rows rows."""
    return next(name for name, most in ROW_COUNTS.items() if num_rows <= most)


def linear_config(dtype: torch.dtype, rows: RowCount, target: str) -> LinearConfig:
    """Return the tile shapes for x of this dtype. Raises ValueError for an unsupported target."""
    if target == "interpreter":
        shape = 16, 16, 4, 1
    elif target not in FAMILIES:
        raise ValueError(
            f"the Triton kernels are made for {', '.join(FAMILIES)}, this is {target}; "
            "use the backend 'torch'"
        )
    else:
        table = _FLOAT32 if dtype == torch.float32 else _HALF
        shape = table[FAMILIES[target]]["many" if rows == "most" else rows]
    outputs, block_rows, warps, stages = shape
    return LinearConfig(BLOCK_N=outputs, BLOCK_M=block_rows, num_warps=warps, num_stages=stages)


# (outputs, rows, warps, stages): what compiles without a spill (COMPILED.md). wgmma and tcgen05 take 64
# outputs or more.
_Table = dict[str, dict[RowCount, tuple[int, int, int, int]]]
_HALF: _Table = {
    "cdna": {"few": (64, 16, 4, 2), "some": (64, 64, 4, 2), "many": (64, 128, 4, 2)},
    "rdna3": {"few": (64, 16, 4, 2), "some": (64, 64, 4, 2), "many": (64, 128, 8, 2)},
    "ampere": {"few": (64, 16, 4, 4), "some": (64, 64, 4, 3), "many": (128, 128, 8, 3)},
}
# Full float32 has no tensor cores on NVIDIA's and on RDNA 3: registers decide.
_FLOAT32: _Table = {
    "cdna": {"few": (64, 16, 4, 3), "some": (64, 16, 4, 3), "many": (64, 16, 4, 3)},
    "rdna3": {"few": (64, 16, 8, 2), "some": (64, 16, 8, 2), "many": (64, 16, 8, 2)},
    "ampere": {"few": (32, 16, 4, 3), "some": (32, 16, 4, 3), "many": (32, 16, 4, 3)},
}
for _table in (_HALF, _FLOAT32):
    _table |= dict.fromkeys(("hopper", "blackwell", "consumer"), _table["ampere"])
