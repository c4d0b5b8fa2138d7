"""Tile shapes of `paged_attention`: decision tables in pure Python. Nothing is tuned at serve time."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from ...attention_options import MAX_GROUP, MAX_HEAD_DIM, MIN_HEAD_DIM

# Prefill: many query tokens of a sequence. Decode: one to BLOCK_Q of them.
Use = Literal["prefill", "decode"]
# Where a program has its rows' heads, tokens and mask after the loop over keys: in registers ("kept"), or
# computed again from the sequence's range ("reloaded"), or from the row numbers too ("recomputed"). Chosen so
# that a kernel does not spill, or that more programs run at once.
RowPlaces = Literal["kept", "reloaded", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The tile shapes for which one specialisation of the attention kernels is compiled.

    They affect the last bits of results. Therefore they depend only on model and target, never on the batch.
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
MAX_DECODE_Q = 64  # query tokens of a decode, of one head, in the tiles that have most rows
MAX_FEW_ROWS = 16  # heads of a group times query tokens, for the tiles of a decode of few rows


def split_size(target: str) -> int:
    """Return the number of keys in one split of a decode."""
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

    head_dim: the head dimension of query and key, and of value if `value_dim` is None.
    group: the number of query heads that share a KV head.
    dtype: the dtype of the query, and of the cache if `cache_dtype` is None.
    target: "sm_90", "gfx942", "interpreter" and the like.
    queries: maximum number of query tokens of a decode; BLOCK_Q may allow fewer.

    Raises ValueError for an unsupported head_dim, group or target.
    """
    largest = largest_head_dim(target)
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim or head_dim)):
        if not MIN_HEAD_DIM <= dim <= largest:
            raise ValueError(
                f"{name} must be between {MIN_HEAD_DIM} and {largest} on {target}, got {dim}; for any other "
                "there is the backend 'torch'"
            )
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"the GQA group must be between 1 and {MAX_GROUP}, got {group}")
    widest = max(head_dim, value_dim or head_dim)
    wide = next(width for width in (64, 128, 256, MAX_HEAD_DIM) if widest <= width)
    family = FAMILIES.get(target, "interpreter")
    converted = cache_dtype not in (None, dtype)
    if family == "interpreter":
        # Small tiles, so that short tests cross many edges.
        rows, tile, warps, stages = 64 if queries > 1 and queries * group > MAX_FEW_ROWS else 16, 16, 4, 1
    elif (value_dim or head_dim) > 512:
        rows, tile, warps, stages = _PADDED_TO_1024[family]
    else:
        few = queries * group <= MAX_FEW_ROWS
        table = _PREFILL if use == "prefill" else _DECODE if few else _MANY_ROWS
        tiles = (_FLOAT32 if dtype == torch.float32 else table)[family][wide]
        rows, tile, warps, stages = _CONVERTED[family].get(tiles, tiles) if converted else tiles
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
        ROW_PLACES=_row_places(use, dtype, family, converted, rows, head_dim, value_dim or head_dim),
        num_warps=warps,
        num_stages=stages,
    )


# The table row of each target. GPUs with the same instructions, registers and shared memory share one.
FAMILIES = {
    "sm_80": "ampere",
    "sm_86": "consumer",  # Ampere's instructions, and 99 KiB of shared memory for a block
    "sm_87": "ampere",
    "sm_89": "consumer",
    "sm_90": "hopper",
    "sm_100": "blackwell",
    "sm_103": "blackwell",
    "sm_120": "consumer",
    "sm_121": "consumer",
    "gfx90a": "cdna",
    "gfx942": "cdna",
    "gfx950": "cdna",
    "gfx1100": "rdna3",
    "gfx1101": "rdna3",
    "gfx1102": "rdna3",
    "gfx1151": "rdna3",
}
# RDNA 3's WMMA takes each operand twice, once for either half of a wave: a query of more than 128 dimensions
# and a tile of keys are all of its registers.
_LARGEST_HEAD_DIM = {"rdna3": 128}


def largest_head_dim(target: str) -> int:
    """Return the largest head_dim with tiles for this target. Raises ValueError for an unknown target."""
    if target == "interpreter":
        return MAX_HEAD_DIM
    if target not in FAMILIES:
        raise ValueError(
            f"the Triton kernels are made for {', '.join(FAMILIES)}, this is {target}; "
            "use the backend 'torch'"
        )
    return _LARGEST_HEAD_DIM.get(FAMILIES[target], MAX_HEAD_DIM)


# (rows, tile, warps, stages) by padded head_dim: what compiles without a spill (COMPILED.md).
# Full float32 has no tensor cores: registers decide.
_FLOAT32 = {
    "cdna": {64: (16, 32, 4, 2), 128: (16, 32, 8, 2), 256: (16, 16, 4, 2), MAX_HEAD_DIM: (16, 16, 4, 2)},
    "rdna3": {64: (16, 32, 8, 1), 128: (16, 16, 16, 1)},
    "ampere": {64: (16, 32, 4, 2), 128: (16, 32, 8, 2), 256: (16, 16, 8, 3), MAX_HEAD_DIM: (16, 16, 8, 1)},
}
# Loading the block table takes pipeline stages of its own: 3 stages keep one tile in shared memory, 5 two.
# One is what a consumer GPU's memory needs (an RTX 5090's 1.8 TB/s for 600 ns are 6 KB of each SM), and
# leaves room for more blocks.
_DECODE = {
    "cdna": {64: (16, 64, 4, 2), 128: (16, 64, 4, 2), 256: (16, 32, 4, 2), MAX_HEAD_DIM: (16, 16, 4, 1)},
    "rdna3": {64: (16, 32, 4, 2), 128: (16, 16, 4, 2)},
    "hopper": {64: (16, 64, 4, 5), 128: (16, 64, 4, 5), 256: (16, 32, 4, 5), MAX_HEAD_DIM: (16, 16, 4, 3)},
    "ampere": {64: (16, 64, 4, 5), 128: (16, 32, 4, 5), 256: (16, 32, 4, 3), MAX_HEAD_DIM: (16, 16, 4, 3)},
    "consumer": {64: (16, 64, 4, 3), 128: (16, 32, 4, 3), 256: (16, 16, 4, 3), MAX_HEAD_DIM: (16, 16, 4, 3)},
}
# wgmma (sm_90) and tcgen05 (sm_100) need at least 64 rows.
_PREFILL = {
    "cdna": {64: (128, 64, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 4, 2), MAX_HEAD_DIM: (16, 16, 4, 1)},
    "rdna3": {64: (128, 32, 8, 2), 128: (64, 16, 8, 2)},
    "hopper": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 3), MAX_HEAD_DIM: (64, 16, 8, 2)},
    "ampere": {64: (64, 64, 4, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2), MAX_HEAD_DIM: (16, 16, 4, 2)},
}
# A decode of a large group, or of several query tokens. From 256 dimensions on, the partial results of 64
# rows would not fit into Hopper's registers, and fewer rows cannot use wgmma.
_MANY_ROWS = {
    "cdna": {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 4, 2), MAX_HEAD_DIM: (16, 16, 4, 1)},
    "rdna3": {64: (64, 32, 8, 1), 128: (32, 16, 8, 1)},
    "hopper": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (32, 32, 4, 3), MAX_HEAD_DIM: (32, 32, 8, 2)},
    "ampere": {64: (64, 32, 4, 5), 128: (64, 32, 4, 3), 256: (64, 32, 8, 2), MAX_HEAD_DIM: (16, 16, 4, 2)},
}
for _table in (_DECODE, _PREFILL, _MANY_ROWS):
    _table["blackwell"] = dict(_table["hopper"])
_PREFILL["blackwell"][256] = (128, 32, 8, 2)  # tcgen05 takes 128 rows, whose sums are not in registers
_PREFILL["consumer"] = _PREFILL["ampere"]
_MANY_ROWS["consumer"] = _MANY_ROWS["ampere"] | {64: (64, 32, 4, 3), 128: (64, 32, 8, 3)}
_FLOAT32 |= dict.fromkeys(("hopper", "blackwell", "consumer"), _FLOAT32["ampere"])
# For a cache narrower than the queries: its values are widened in registers, and these tiles replace those of
# the tables.
_NVIDIA_CONVERTED = {
    (64, 16, 8, 2): (32, 32, 8, 2),  # Hopper's prefill beyond 256, without wgmma
    (32, 32, 4, 3): (64, 32, 8, 2),  # its many rows beyond 128
    (64, 32, 4, 5): (32, 32, 4, 5),  # Ampere's many rows up to 64
    (16, 16, 4, 2): (16, 16, 8, 2),  # and beyond 256, as its prefill
    (16, 32, 4, 2): (16, 32, 8, 2),  # float32 up to 64
}
_CONVERTED = {
    "cdna": {},
    "rdna3": {
        (16, 32, 4, 2): (16, 16, 4, 2),  # decode up to 64
        (16, 16, 4, 2): (16, 16, 8, 1),  # and up to 128
        (128, 32, 8, 2): (128, 32, 8, 1),  # prefill up to 64
        (64, 16, 8, 2): (32, 16, 8, 1),  # and up to 128
        (32, 16, 8, 1): (32, 16, 16, 1),  # many rows up to 128
        (16, 32, 8, 1): (16, 16, 8, 1),  # float32 up to 64
    },
    **dict.fromkeys(("ampere", "hopper", "blackwell"), _NVIDIA_CONVERTED),
    "consumer": _NVIDIA_CONVERTED
    | {
        (64, 64, 4, 3): (64, 64, 4, 2),  # prefill up to 64
        (128, 32, 8, 3): (128, 32, 8, 2),  # and up to 128
        (64, 32, 4, 3): (32, 32, 4, 5),  # many rows up to 64
        (16, 16, 8, 1): (16, 16, 16, 1),  # float32 beyond 256
    },
}
# Values of more than 512 dimensions: 64 rows of them would take all registers of an SM.
_PADDED_TO_1024 = {
    "cdna": (16, 16, 4, 1),
    **dict.fromkeys(("ampere", "consumer", "hopper", "blackwell"), (16, 16, 8, 2)),
}


def _row_places(
    use: Use, dtype: torch.dtype, family: str, converted: bool, rows: int, head_dim: int, value_dim: int
) -> RowPlaces:
    is_float32 = dtype == torch.float32
    if use == "prefill":
        if is_float32 or 128 < value_dim <= 256:
            return "kept"
        return "recomputed" if value_dim > 256 else "reloaded"
    if is_float32:
        return "recomputed" if converted and value_dim > 256 else "reloaded"
    if family == "consumer" and 64 < head_dim <= 128:
        return "reloaded"
    if family in ("hopper", "blackwell") and rows == 16 and 256 < value_dim < head_dim and not converted:
        return "reloaded"  # MLA: kept, they spill on sm_90, and on sm_100 take the registers of a third block
    return "recomputed" if value_dim < head_dim and value_dim <= 128 else "kept"
