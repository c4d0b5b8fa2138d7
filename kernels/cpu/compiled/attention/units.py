"""A unit of attention's work, and the layout of its scratch memory."""

from typing import NamedTuple

from ...attention.paged_attention import AMX_BLOCK, TILE, TILE_BYTES, WORK_VECTORS
from ...formats import BFLOAT16, BFLOAT16_PAIRS, FLOAT8, FLOAT16, FLOAT32, INT8
from ...target import CPU_HAS_TILES, HAS_DOT, LANES, LINE, TILE_ROWS, VECTOR_BYTES
from ...variants import ATTENTION_KERNEL, compiles
from ..simd.memory import get_int, get_long
from ..simd.vectors import function, padded
from .amx_attention import KEYS
from .softmax import State, end_of_keys

MAX_IN_PLACE_ROWS = 8  # of a KV head: with more, copying K and V into scratch memory pays
# Multiply-adds of float32, of pairs of bfloat16 (AVX512-BF16), of tiles of such pairs (AMX).
BY_FLOATS, BY_PAIRS, BY_TILES = range(3)
# Which of them the kernel is compiled with.
HAS_FLOATS = compiles(ATTENTION_KERNEL, FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8)
HAS_PAIRS = HAS_DOT and compiles(ATTENTION_KERNEL, BFLOAT16_PAIRS)
HAS_WORDS = HAS_PAIRS or CPU_HAS_TILES


class Unit(NamedTuple):
    """Some query tokens of one sequence, with some of its KV heads and some of its splits.

    A row is one query head of one token. Rows are ordered by KV head, then token, then query head.
    """

    seq: int
    first_token: int  # in the batch
    num_tokens: int
    position: int  # of the first token in its sequence
    first_head: int  # KV heads
    num_heads: int
    head_rows: int  # rows of one KV head
    num_rows: int
    key_offset: int  # bytes from a token's K to that of the first head
    value_offset: int
    first_split: int
    end_split: int
    first_part: int  # where its rows start in `parts`, which are merged later; -1: it writes the output
    first_key: int  # keys from here
    end_key: int  # to here are seen by at least one of the tokens
    last_keys: int  # address of the last position that each token sees; 0: its own
    arithmetic: int  # BY_FLOATS, BY_PAIRS or BY_TILES
    depth: int  # 4-byte words of a row of Q or K: float32, or pairs of bfloat16
    in_place: bool  # keys are read in the cache, not copied first


class Scratch(NamedTuple):
    """Addresses in a thread's scratch memory, and strides in bytes."""

    tile_keys: int  # the key tile: a row of K for each token, with the unit's heads side by side
    key_stride: int
    tile_values: int
    value_stride: int
    keys: int  # of one head, transposed
    scores: int
    addresses: int  # of K in the cache for the tile's tokens, then of V
    next_addresses: int  # of the next tile
    more_addresses: int  # of K: of tokens to prefetch, or by AMX of every 16th token
    queries: int
    tile_config: int  # of AMX


@function
def _choose_arithmetic(args):
    """Choose how products are computed.

    By pairs and tiles, weights are rounded to bfloat16, as other libraries do in that dtype; int8 and fp8 are
    exact in it.
    """
    if args.query_kind != BFLOAT16:
        return BY_FLOATS
    is_whole = args.head_dim % KEYS == 0 and args.value_dim % KEYS == 0
    if args.tiles and is_whole and args.cache_kind in (BFLOAT16, INT8, FLOAT8):
        return BY_TILES
    is_whole = args.head_dim % LANES == 0 and args.head_dim >= 2 * LANES and args.value_dim >= LANES
    return BY_PAIRS if HAS_DOT and is_whole and args.cache_kind == BFLOAT16 else BY_FLOATS


@function
def _reads_in_place(args, arithmetic, rows):
    """Return whether a decode with so many rows for each KV head reads keys in the cache."""
    if arithmetic == BY_TILES:
        return rows <= TILE_ROWS and (args.cache_kind != BFLOAT16 or args.block_size % TILE_ROWS == 0)
    kind = args.cache_kind if arithmetic == BY_FLOATS else BFLOAT16_PAIRS
    is_whole = args.head_dim % LANES == 0 and args.value_dim % LANES == 0
    return rows <= MAX_IN_PLACE_ROWS and is_whole and kind in (FLOAT32, BFLOAT16, INT8, BFLOAT16_PAIRS)


@function
def read_unit(args, address):
    """Return the unit whose record is at this address."""
    seq = get_long(address)
    first_token = get_long(address + 8)
    end_token = get_long(address + 16)
    first_head = get_long(address + 24)
    end_head = get_long(address + 32)
    first_split = get_long(address + 40)
    end_split = get_long(address + 48)
    part = get_long(address + 56)
    num_heads = end_head - first_head
    num_tokens = end_token - first_token
    rows = num_tokens * (args.num_heads // args.num_kv_heads)

    arithmetic = _choose_arithmetic(args)
    depth = args.head_dim if arithmetic == BY_FLOATS else args.head_dim // 2
    in_place = num_tokens == 1 and _reads_in_place(args, arithmetic, rows)

    first_row = get_int(args.cu_seqlens_q + 4 * seq)
    seq_len = get_int(args.seq_lens + 4 * seq)
    new_position = seq_len - (get_int(args.cu_seqlens_q + 4 * seq + 4) - first_row)
    token = first_row + first_token
    position = new_position + first_token
    first_key = 0
    end_key = new_position + end_token
    if args.window:
        first_key = max(0, position - args.window + 1)
    last_keys = 0
    if args.last_keys:
        last_keys = args.last_keys + 4 * token
        end_key = end_of_keys(last_keys, position, 0, num_tokens)
    return Unit(
        seq, token, num_tokens, position, first_head, num_heads, rows, rows * num_heads,
        first_head * args.key_head_stride, first_head * args.value_head_stride, first_split, end_split, part,
        first_key, end_key, last_keys, arithmetic, depth, in_place,
    )  # fmt: skip


@function
def lay_out(args, unit, scratch):
    """Divide scratch memory. Return it with two states of the rows: over all splits, and over one split."""
    depth = unit.depth
    width = padded(args.value_dim)
    num_rows = unit.num_rows
    # Rows of the key tile are padded by a cache line, so that they do not share the sets of the L1 cache.
    key_stride = 4 * unit.num_heads * depth + LINE
    value_stride = 4 * unit.num_heads * width + LINE
    tile_keys = scratch
    tile_values = tile_keys + TILE * key_stride
    keys = tile_values + TILE * value_stride
    scores = keys + depth * TILE_BYTES
    addresses = scores + (max(AMX_BLOCK, num_rows) + TILE_ROWS) * TILE_BYTES
    next_addresses = addresses + 16 * TILE
    more_addresses = next_addresses + 16 * TILE
    queries = more_addresses + 8 * LANES
    outputs = queries + num_rows * 4 * depth
    states = outputs + 2 * num_rows * 4 * width
    work = states + 4 * num_rows * 4
    scales = work + WORK_VECTORS * VECTOR_BYTES
    tile_config = (scales + 2 * TILE_BYTES * unit.num_heads) // LINE * LINE + LINE
    total = State(scores, states, states + 4 * num_rows, outputs, width // LANES, scales, work)
    partial = State(
        scores, states + 8 * num_rows, states + 12 * num_rows, outputs + num_rows * 4 * width,
        width // LANES, scales, work,
    )  # fmt: skip
    memory = Scratch(
        tile_keys, key_stride, tile_values, value_stride, keys, scores, addresses, next_addresses,
        more_addresses, queries, tile_config,
    )  # fmt: skip
    return memory, total, partial
