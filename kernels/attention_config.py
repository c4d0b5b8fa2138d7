"""Tile shapes of `paged_attention`: a decision table in pure Python, nothing is tuned at serve time."""

from dataclasses import dataclass
from functools import lru_cache

import torch

# A result's bits depend on the tile shapes: nothing here may look at the batch, only at model and target.
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """How one specialisation of the attention kernel is compiled."""

    BLOCK_M: int  # query rows of one program: BLOCK_Q query tokens times the GQA group
    BLOCK_Q: int
    TILE: int  # key tokens of one loop step
    SPLIT: int  # key tokens of one program; 0: all of them
    num_warps: int
    num_stages: int


@lru_cache(maxsize=256)
def choose_config(
    head_dim: int, group: int, dtype: torch.dtype, *, decode: bool, target: str
) -> AttentionConfig:
    """Return the tile shapes for one model on one target.

    `group` is the number of query heads that share a key head; `target` is "sm_90", "gfx942", "interpreter"
    and the like. Raises ValueError for a head_dim or group no kernel is made for.
    """
    if not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim must be between 16 and 256, got {head_dim}")
    if not 1 <= group <= 64:
        raise ValueError(f"the GQA group must be between 1 and 64, got {group}")
    wide = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    if target == "interpreter":
        rows, tile, warps, stages = 16, 16, 4, 1  # small, so that short tests cross many edges
    elif dtype == torch.float32:
        rows, tile, warps, stages = _FLOAT32[wide]
    else:
        rows, tile, warps, stages = (_DECODE if decode else _PREFILL)[_family(target)][wide]
    rows = max(rows, _next_power_of_2(group))
    split = 64 if target == "interpreter" else 512
    return AttentionConfig(
        BLOCK_M=rows,
        BLOCK_Q=1 if decode else rows // group,
        TILE=tile,
        SPLIT=split if decode else 0,
        num_warps=warps,
        num_stages=stages,
    )


# (rows, tile, warps, stages) by padded head_dim: what compiles without a spill (tests/aot.py).
# Full float32 has no tensor cores: registers decide.
_FLOAT32 = {64: (16, 32, 4, 2), 128: (16, 32, 8, 2), 256: (16, 16, 8, 2)}
# The look-up in the block table takes pipeline stages of its own: 3 keep one tile in shared memory, 5 two.
_DECODE = {
    "gfx": {64: (16, 64, 4, 2), 128: (16, 64, 4, 2), 256: (16, 32, 4, 2)},
    "hopper": {64: (16, 64, 4, 5), 128: (16, 64, 4, 5), 256: (16, 32, 4, 5)},
    "ampere": {64: (16, 64, 4, 5), 128: (16, 32, 4, 5), 256: (16, 32, 4, 3)},
}
# wgmma (sm_90) and tcgen05 (sm_100) need at least 64 rows.
_PREFILL = {
    "gfx": {64: (128, 64, 4, 2), 128: (128, 32, 8, 2), 256: (64, 32, 4, 2)},
    "hopper": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
    "ampere": {64: (64, 64, 4, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
}


def _family(target: str) -> str:
    """The targets that share a row: "ampere" is what has mma.sync, and at least 99 KiB for a block."""
    if target.startswith("gfx"):
        return "gfx"
    return "hopper" if target in ("sm_90", "sm_100", "sm_103") else "ampere"


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
