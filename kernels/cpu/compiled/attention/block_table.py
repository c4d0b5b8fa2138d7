"""Where the keys and values of a tile lie: the block table, read by numba code. Addresses are int64."""

from ...attention.paged_attention import TILE
from ...formats import FLOAT32
from ...target import LANES, TILE_ROWS
from ..simd.memory import get_int, get_long, load_up_to, set_long, store_some_as
from ..simd.vectors import function
from .softmax import ZERO, fill


@function
def write_addresses(args, seq, tile, to):
    """For each token of a key tile, write the address of K and, TILE entries later, the address of V.

    If the tile's range starts or ends in the middle of a pair of tokens, the other token of the pair gets the
    same address.
    """
    table = args.block_tables + seq * args.table_stride
    place = tile.skip
    while place < tile.end:  # one block of the cache in each iteration
        offset = (tile.start + place) % args.block_size
        number = get_int(table + 4 * ((tile.start + place) // args.block_size))
        key = args.key_cache + number * args.key_block_stride + offset * args.key_token_stride
        value = args.value_cache + number * args.value_block_stride + offset * args.value_token_stride
        end = min(tile.end, place + args.block_size - offset)
        for other in range(place, end):
            set_long(to + 8 * other, key + (other - place) * args.key_token_stride)
            set_long(to + 8 * (TILE + other), value + (other - place) * args.value_token_stride)
        place = end
    if tile.skip % 2:
        set_long(to + 8 * (TILE + tile.skip - 1), get_long(to + 8 * (TILE + tile.skip)))
    if tile.end % 2:
        set_long(to + 8 * (TILE + tile.end), get_long(to + 8 * (TILE + tile.end - 1)))


@function
def write_next_addresses(args, seq, first, end, to):
    """Write the addresses of K for LANES tokens from `first` on. Past `end`, repeat the last address."""
    for place in range(LANES):
        token = min(first + place, end - 1)
        number = get_int(args.block_tables + seq * args.table_stride + 4 * (token // args.block_size))
        key = args.key_cache + number * args.key_block_stride
        set_long(to + 8 * place, key + token % args.block_size * args.key_token_stride)


@function
def write_block_addresses(args, seq, tile, to):
    """Write the addresses of K for every 16th token of a key tile; block_size is a multiple of 16.

    Groups of 16 tokens outside the tile's range get the address of the nearest group inside it.
    """
    for group in range(TILE // TILE_ROWS):
        inside = max(tile.skip // TILE_ROWS, min(group, (tile.end - 1) // TILE_ROWS))
        token = tile.start + TILE_ROWS * inside
        number = get_int(args.block_tables + seq * args.table_stride + 4 * (token // args.block_size))
        key = args.key_cache + number * args.key_block_stride
        set_long(to + 8 * group, key + token % args.block_size * args.key_token_stride)


@function
def copy_scales(args, unit, tile, to):
    """For each KV head, copy the scales of K and then of V for the tokens of a key tile.

    Entries outside the tile's range become 0, like the weights of these tokens.
    """
    if tile.end - tile.skip < TILE:
        fill(to, unit.num_heads * 2 * TILE // LANES, ZERO)
    table = args.block_tables + unit.seq * args.table_stride
    place = tile.skip
    while place < tile.end:  # one block of the cache in each iteration
        offset = (tile.start + place) % args.block_size
        number = get_int(table + 4 * ((tile.start + place) // args.block_size))
        size = min(args.block_size - offset, tile.end - place)
        for head in range(unit.num_heads):
            at = to + 4 * place + 8 * TILE * head
            row = number * args.num_kv_heads + unit.first_head + head
            first = 4 * (row * args.block_size + offset)
            for j in range(0, size, LANES):
                keys = args.key_scales + first + 4 * j
                values = args.value_scales + first + 4 * j
                store_some_as(FLOAT32, at + 4 * j, load_up_to(keys, size - j, ZERO), size - j)
                store_some_as(FLOAT32, at + 4 * (TILE + j), load_up_to(values, size - j, ZERO), size - j)
        place += size
