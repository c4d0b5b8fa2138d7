"""Paged attention on a CPU: ragged batches of prompts and decodes over K and V behind a block table.

Online softmax over tiles of 64 keys, in float32, or in pairs of bfloat16 where queries and cache are bfloat16
and the CPU multiplies them. For prompts a key tile is copied into scratch memory, transposed, once for all
query heads that share it (`prompt`); decodes read it in the cache (`decode`, `amx_attention`). A unit of work
is some query tokens of one sequence with some of its heads, over all their keys or some splits of them
(`compiled.attention.units`).
"""

from ..launch.tasks import Task
from ..target import LANES, LINE, TILE_ROWS, padded

SPLIT_KEYS = 1024  # keys that one softmax goes over; longer contexts are split and merged (split-KV)
MAX_DECODE = 8  # new tokens of a sequence that is computed as a decode: mostly it waits for memory
TILE = 64  # keys
TILE_BYTES = 4 * TILE
WORK_VECTORS = LANES + 2
AMX_BLOCK = 2 * TILE_ROWS  # query rows that AMX multiplies by a key tile at once


_ADDRESSES = (
    "units",  # i64[num_units, 8]: seq; first and end of tokens, KV heads and splits; first row in parts or -1
    "query",
    "key_cache",
    "value_cache",
    "block_tables",
    "seq_lens",
    "cu_seqlens_q",
    "out",
    "parts",  # f32[num_parts, padded value_dim + 2]: a row's maximum, normalizer and output over one split
    "sinks",  # this and the following are 0 where not given
    "key_scales",
    "value_scales",
)
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "block_size", "window")
_KINDS = ("query_kind", "cache_kind", "tiles")  # tiles: whether AMX may be used
_STRIDES = (  # bytes
    "table_stride",
    "query_token_stride",
    "query_head_stride",
    "key_block_stride",
    "key_token_stride",
    "key_head_stride",
    "value_block_stride",
    "value_token_stride",
    "value_head_stride",
)
ATTEND = Task("attention.kernel.attend", _ADDRESSES, (*_SIZES, *_KINDS, *_STRIDES), ("scale", "softcap"))
MERGE = Task(
    "attention.kernel.merge", ("merges", "parts", "out", "sinks"), ("num_heads", "value_dim", "query_kind")
)


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
