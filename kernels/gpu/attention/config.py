"""Tile shapes of `paged_attention`: decision tables in pure Python. Nothing is tuned at serve time."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from ...attention_options import MAX_GROUP, MAX_HEAD_DIM, MIN_HEAD_DIM

# Prefill: many query tokens of a sequence. Decode: one to BLOCK_Q of them. Shared: one query token of each of
# many sequences, over the prefix that these have in common.
Use = Literal["prefill", "decode", "shared"]
# Where a program has its rows' heads, tokens and mask after the loop over keys: in registers ("kept"), or
# computed again from the sequence's range ("reloaded"), or from the row numbers too ("recomputed"). Chosen so
# that a kernel does not spill, or that more programs run at once.
RowPlaces = Literal["kept", "reloaded", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The tile shapes that one specialisation of the attention kernels is compiled for.

    Results depend on them in their last bits: they follow from model and target alone, never from the batch.
    """

    BLOCK_M: int  # query rows of one program: BLOCK_Q query tokens times BLOCK_G heads
    BLOCK_G: int  # heads of one GQA group
    BLOCK_Q: int
    TILE: int  # key tokens of one loop step
    ROW_PLACES: RowPlaces
    num_warps: int
    num_stages: int


# Key tokens of one split of a decode, a multiple of every TILE.
SPLIT, INTERPRETED_SPLIT = 512, 64
MAX_FEW_ROWS = 16  # heads of a group times query tokens, for the tiles of a decode of few rows


def split_size(target: str) -> int:
    """Return the key tokens of one split of a decode."""
    return INTERPRETED_SPLIT if target == "interpreter" else SPLIT


@lru_cache(maxsize=256)
def choose_config(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    use: Use,
    target: str,
    value_dim: int | None = None,
    cache_dtype: torch.dtype | None = None,
    queries: int = 1,
) -> AttentionConfig:
    """Return the tile shapes for one model on one target.

    head_dim: of query and key, and of value where `value_dim` is None. group: query heads that share a KV
    head. dtype: of the query, and of the cache where `cache_dtype` is None. target: "sm_90", "gfx942",
    "interpreter" and the like. queries: the most query tokens of a decode, as far as BLOCK_Q has room. Raises
    ValueError for a head_dim or a group that no kernel is made for.
    """
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim or head_dim)):
        if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must be between {MIN_HEAD_DIM} and {MAX_HEAD_DIM}, got {dim}")
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"the GQA group must be between 1 and {MAX_GROUP}, got {group}")
    widest = max(head_dim, value_dim or head_dim)
    wide = next(width for width in (64, 128, 256, MAX_HEAD_DIM) if widest <= width)
    family, maker = _family(target), "gfx" if target.startswith("gfx") else "nvidia"
    converted = cache_dtype not in (None, dtype)
    if target == "interpreter":
        # Small tiles, so that short tests cross many edges.
        rows, tile, warps, stages = 64 if queries > 1 and queries * group > MAX_FEW_ROWS else 16, 16, 4, 1
    elif (value_dim or head_dim) > 512:
        rows, tile, warps, stages = _PADDED_TO_1024[maker]
    else:
        few = use == "decode" and queries * group <= MAX_FEW_ROWS
        table = _PREFILL if use == "prefill" else _DECODE if few else _MANY_ROWS
        tiles = _FLOAT32[maker][wide] if dtype == torch.float32 else table[family][wide]
        rows, tile, warps, stages = _CONVERTED.get(tiles, tiles) if converted and maker == "nvidia" else tiles
    if dtype == torch.float32 and (converted or (value_dim or head_dim) > 512):
        stages = 1  # a second tile in flight would take registers
    heads = min(group, rows)
    if group > 16:
        # Rows without a head cost less than dividing by an odd group.
        heads = min(1 << (group - 1).bit_length(), rows)
    return AttentionConfig(
        BLOCK_M=rows,
        BLOCK_G=heads,
        BLOCK_Q=rows // heads,
        TILE=tile,
        ROW_PLACES=_row_places(use, dtype, converted, head_dim, value_dim or head_dim),
        num_warps=warps,
        num_stages=stages,
    )


# (rows, tile, warps, stages) by padded head_dim: what compiles without a spill (COMPILED.md).
# Full float32 has no tensor cores: registers decide.
_FLOAT32 = {
    "gfx": {64: (16, 32, 4, 2), 128: (16, 32, 8, 2), 256: (16, 16, 4, 2), MAX_HEAD_DIM: (16, 16, 4, 2)},
    "nvidia": {64: (16, 32, 4, 2), 128: (16, 32, 8, 2), 256: (16, 16, 8, 3), MAX_HEAD_DIM: (16, 16, 8, 1)},
}
# Loading the block table takes pipeline stages of its own: 3 stages keep one tile in shared memory, 5 two.
_DECODE = {
    "gfx": {64: (16, 64, 4, 2), 128: (16, 64, 4, 2), 256: (16, 32, 4, 2), MAX_HEAD_DIM: (16, 16, 4, 1)},
    "hopper": {64: (16, 64, 4, 5), 128: (16, 64, 4, 5), 256: (16, 32, 4, 5), MAX_HEAD_DIM: (16, 16, 4, 3)},
    "ampere": {64: (16, 64, 4, 5), 128: (16, 32, 4, 5), 256: (16, 32, 4, 3), MAX_HEAD_DIM: (16, 16, 4, 3)},
}
# wgmma (sm_90) and tcgen05 (sm_100) need at least 64 rows.
_PREFILL = {
    "gfx": {64: (128, 64, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 4, 2), MAX_HEAD_DIM: (16, 16, 4, 1)},
    "hopper": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 3), MAX_HEAD_DIM: (64, 16, 8, 2)},
    "ampere": {64: (64, 64, 4, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2), MAX_HEAD_DIM: (16, 16, 4, 2)},
}
# A decode of a large group, or of many sequences that share a prefix. From 256 dimensions on, the partial
# results of 64 rows would not fit into Hopper's registers, and fewer rows cannot use wgmma.
_MANY_ROWS = {
    "gfx": {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 4, 2), MAX_HEAD_DIM: (16, 16, 4, 1)},
    "hopper": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (32, 32, 4, 3), MAX_HEAD_DIM: (32, 32, 8, 2)},
    "ampere": {64: (64, 32, 4, 5), 128: (64, 32, 4, 3), 256: (64, 32, 8, 2), MAX_HEAD_DIM: (16, 16, 4, 2)},
}
for _table in (_DECODE, _PREFILL, _MANY_ROWS):
    _table["blackwell"] = dict(_table["hopper"])
_PREFILL["blackwell"][256] = (128, 32, 8, 2)  # tcgen05 takes 128 rows, whose sums are not in registers
# For a cache narrower than the queries, on NVIDIA: its values are widened in registers, and these
# tiles replace those of the tables.
_CONVERTED = {
    (64, 16, 8, 2): (32, 32, 8, 2),  # Hopper's prefill beyond 256, without wgmma
    (32, 32, 4, 3): (64, 32, 8, 2),  # its many rows beyond 128
    (64, 32, 4, 5): (32, 32, 4, 5),  # Ampere's many rows up to 64
    (16, 16, 4, 2): (16, 16, 8, 2),  # and beyond 256, as its prefill
    (16, 32, 4, 2): (16, 32, 8, 2),  # float32 up to 64
}
# Values of more than 512 dimensions: 64 rows of them would take all registers of an SM.
_PADDED_TO_1024 = {"gfx": (16, 16, 4, 1), "nvidia": (16, 16, 8, 2)}


def _row_places(use: Use, dtype: torch.dtype, converted: bool, head_dim: int, value_dim: int) -> RowPlaces:
    is_float32 = dtype == torch.float32
    if use == "prefill":
        if is_float32 or 128 < value_dim <= 256:
            return "kept"
        return "recomputed" if value_dim > 256 else "reloaded"
    if is_float32:
        return "recomputed" if converted and value_dim > 256 else "reloaded"
    return "recomputed" if value_dim < head_dim and value_dim <= 128 else "kept"


def _family(target: str) -> str:
    """Return the table row of a target: "ampere" is any other with mma.sync and 99 KiB for a block."""
    if target.startswith("gfx"):
        return "gfx"
    if target in ("sm_100", "sm_103"):
        return "blackwell"
    return "hopper" if target == "sm_90" else "ampere"
