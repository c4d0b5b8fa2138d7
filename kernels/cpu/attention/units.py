"""A unit of attention's work: what it is of, and where its scratch memory has what."""

from typing import NamedTuple

from ..products.amx import TILE_ROWS
from ..products.codes import PAIRS
from ..simd.memory import LINE, get_int, get_long
from ..simd.numbers import BFLOAT16, FLOAT8, INT8
from ..simd.vectors import HAS_DOT, LANES, VECTOR_BYTES, function
from .amx_attention import KEYS, in_place_bytes
from .decode import reads_in_place
from .softmax import TILE, TILE_BYTES, WORK_VECTORS, State, View, padded

SPLIT = 1024  # tokens that one softmax is over
TILE_BLOCK = 2 * TILE_ROWS  # query rows that go through a tile together by AMX
BY_FLOATS, BY_PAIRS, BY_TILES = range(3)  # products of float32, of pairs of bfloat16, of tiles of these


class Unit(NamedTuple):
    """Query tokens of one sequence with some of its KV heads, over some of its keys."""

    seq: int
    token: int  # the first one
    num_tokens: int
    first_head: int  # of K and V
    num_heads: int
    num_rows: int
    key_offset: int  # bytes from a token's K to that of the first head
    value_offset: int
    first_split: int
    end_split: int
    part: int  # the first place in what is merged, or -1
    low: int  # keys that any of the tokens sees
    high: int
    seen_by_all: int  # how many keys, from the first on, all the tokens see
    way: int  # BY_FLOATS and so on
    in_place: bool  # keys are read where they lie


class Memory(NamedTuple):
    """Addresses in a thread's scratch memory, and strides in bytes."""

    tile_keys: int  # rows of a tile's K, of the unit's heads one after the other
    key_stride: int
    tile_values: int
    value_stride: int
    keys: int  # of one head, transposed
    scores: int
    addresses: int  # of the tile's tokens in K's cache, then in V's
    others: int  # of what is fetched ahead, or of every 16th key
    queries: int
    settings: int  # of AMX


def scratch_size(
    head_dim: int, value_dim: int, num_heads: int, max_rows: int, max_heads: int, tiles: bool
) -> int:
    """Bytes for a unit of so many rows, all its KV heads together, up to max_heads; tiles: for these too."""
    width: int = padded.py_func(value_dim)
    score_rows = max(TILE_BLOCK, max_rows) + TILE_ROWS
    words = TILE * (max_heads * (head_dim + width + 2) + 2 * 16 + head_dim + score_rows + 2 * 2)
    size: int = 4 * (words + 2 * LANES + WORK_VECTORS * LANES + max_rows * (head_dim + 2 * width + 4))
    return size + (in_place_bytes(min(max_rows, num_heads), head_dim) if tiles else 0)


@function
def _way(args):
    """What products are of. Pairs of bfloat16 are neighbours in a head, and then neighbouring tokens.

    Weights are rounded to bfloat16 for it, as they are where attention is in that dtype elsewhere; it holds
    all numbers of 8 bits.
    """
    if args.query_kind != BFLOAT16:
        return BY_FLOATS
    is_whole = args.head_dim % KEYS == 0 and args.value_dim % KEYS == 0
    if args.tiles and is_whole and args.cache_kind in (BFLOAT16, INT8, FLOAT8):
        return BY_TILES
    is_whole = args.head_dim % LANES == 0 and args.head_dim >= 2 * LANES and args.value_dim >= LANES
    return BY_PAIRS if HAS_DOT and is_whole and args.cache_kind == BFLOAT16 else BY_FLOATS


@function
def row_words(args, way):
    """Words of 4 bytes that a row of K or Q has."""
    return args.head_dim if way == BY_FLOATS else args.head_dim // 2


@function
def unit_of(args, address):
    """The unit whose record is at the address, and what its rows are."""
    seq, first_token, end_token = get_long(address), get_long(address + 8), get_long(address + 16)
    first_head, end_head = get_long(address + 24), get_long(address + 32)
    first_split, end_split, part = get_long(address + 40), get_long(address + 48), get_long(address + 56)
    num_heads, num_tokens = end_head - first_head, end_token - first_token
    rows = num_tokens * (args.num_heads // args.num_kv_heads)  # for each KV head

    way = _way(args)
    kind = args.cache_kind if way == BY_FLOATS else PAIRS
    is_decode = num_tokens == 1
    in_place = is_decode and reads_in_place(kind, rows, args.head_dim, args.value_dim)
    if way == BY_TILES:
        in_place = is_decode and rows <= TILE_ROWS
        in_place &= args.cache_kind != BFLOAT16 or args.block_size % TILE_ROWS == 0

    first_row = get_int(args.cu_seqlens_q + 4 * seq)
    seq_len = get_int(args.seq_lens + 4 * seq)
    new_position = seq_len - (get_int(args.cu_seqlens_q + 4 * seq + 4) - first_row)
    token, position = first_row + first_token, new_position + first_token
    low, high, seen_by_all = 0, seq_len, seq_len
    if args.tree_mask:
        seen_by_all = new_position
    elif args.causal:
        high, seen_by_all = new_position + end_token, position + 1
    if args.window:
        low = max(0, position - args.window + 1)
    unit = Unit(
        seq, token, num_tokens, first_head, num_heads, rows * num_heads, first_head * args.key_head_stride,
        first_head * args.value_head_stride, first_split, end_split, part, low, high, seen_by_all, way,
        in_place,
    )  # fmt: skip
    return unit, View(first_head, rows, token, position, new_position)


@function
def memory_of(args, unit, scratch):
    """Where a unit has what, and the state of its rows: over all keys so far, and over one split."""
    depth, width, num_rows = row_words(args, unit.way), padded(args.value_dim), unit.num_rows
    # Rows of a tile's K and V are a line apart, so that they do not share the first cache's sets.
    key_stride, value_stride = 4 * unit.num_heads * depth + LINE, 4 * unit.num_heads * width + LINE
    tile_keys = scratch
    tile_values = tile_keys + TILE * key_stride
    keys = tile_values + TILE * value_stride
    scores = keys + depth * TILE_BYTES
    addresses = scores + (max(TILE_BLOCK, num_rows) + TILE_ROWS) * TILE_BYTES
    others = addresses + 16 * TILE
    queries = others + 8 * LANES
    sums = queries + num_rows * 4 * depth
    states = sums + 2 * num_rows * 4 * width
    work = states + 4 * num_rows * 4
    scales = work + WORK_VECTORS * VECTOR_BYTES
    settings = (scales + 2 * TILE_BYTES * unit.num_heads) // LINE * LINE + LINE
    total = State(scores, states, states + 4 * num_rows, sums, width // LANES, scales, work)
    apart = State(
        scores, states + 8 * num_rows, states + 12 * num_rows, sums + num_rows * 4 * width, width // LANES,
        scales, work,
    )  # fmt: skip
    memory = Memory(
        tile_keys, key_stride, tile_values, value_stride, keys, scores, addresses, others, queries, settings
    )
    return memory, total, apart
