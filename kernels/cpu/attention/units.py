"""A unit of attention's work, and the layout of its scratch memory."""

from ..target import LANES, LINE, TILE_ROWS, padded

SPLIT_KEYS = 1024  # keys that one softmax goes over; longer contexts are split and merged (split-KV)
MAX_DECODE = 8  # new tokens of a sequence that is computed as a decode: mostly it waits for memory
TILE = 64  # keys
TILE_BYTES = 4 * TILE
WORK_VECTORS = LANES + 2
AMX_BLOCK = 2 * TILE_ROWS  # query rows that AMX multiplies by a key tile at once


def scratch_size(
    head_dim: int, value_dim: int, num_heads: int, max_rows: int, max_heads: int, tiles: bool
) -> int:
    """Return the bytes for any unit of up to max_rows rows and max_heads KV heads. tiles: by AMX too."""
    width: int = padded(value_dim)
    score_rows = max(AMX_BLOCK, max_rows) + TILE_ROWS
    words = TILE * (max_heads * (head_dim + width + 2) + 2 * 16 + head_dim + score_rows + 4 * 2)
    size: int = 4 * (words + 2 * LANES + WORK_VECTORS * LANES + max_rows * (head_dim + 2 * width + 4))
    return size + (in_place_bytes(min(max_rows, num_heads), head_dim) if tiles else 0)


def in_place_bytes(num_rows: int, head_dim: int) -> int:
    """Return the bytes that a decode by AMX takes for so many rows: configurations, K Qᵀ and Qᵀ."""
    return 3 * LINE + TILE * LINE + 2 * num_rows * 2 * head_dim
