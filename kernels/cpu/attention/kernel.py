"""Paged attention on a CPU: ragged batches of prompts and decodes over K and V behind a block table.

Online softmax over tiles of 64 keys, in float32, or in pairs of bfloat16 where queries and cache are bfloat16
and the CPU multiplies them. For prompts a key tile is copied into scratch memory, transposed, once for all
query heads that share it (`prompt`); decodes read it in the cache (`decode`, `amx_attention`). A unit of work
is some query tokens of one sequence with some of its heads, over all their keys or some splits of them
(`units`).
"""

from ..launch.tasks import Task

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
