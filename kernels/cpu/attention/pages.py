"""Where attention finds the tokens of a tile: the block table for numba. Addresses are int64."""

from ..products.amx import TILE_ROWS
from ..simd.memory import get_int, get_long, load_up_to, set_long, store_some_as
from ..simd.numbers import FLOAT32
from ..simd.vectors import LANES, function
from .softmax import TILE, ZERO, fill


@function
def fill_addresses(args, seq, tile, skip, count, to):
    """Where K and V of the tile's tokens from `skip` to `count` are; neighbours that make pairs even get
    the same.
    """
    table, place = args.block_tables + seq * args.table_stride, skip
    while place < count:  # a block at a time
        offset = (tile + place) % args.block_size
        number = get_int(table + 4 * ((tile + place) // args.block_size))
        key = args.key_cache + number * args.key_block_stride + offset * args.key_token_stride
        value = args.value_cache + number * args.value_block_stride + offset * args.value_token_stride
        end = min(count, place + args.block_size - offset)
        for other in range(place, end):
            set_long(to + 8 * other, key + (other - place) * args.key_token_stride)
            set_long(to + 8 * (TILE + other), value + (other - place) * args.value_token_stride)
        place = end
    if skip % 2:
        set_long(to + 8 * (TILE + skip - 1), get_long(to + 8 * (TILE + skip)))
    if count % 2:
        set_long(to + 8 * (TILE + count), get_long(to + 8 * (TILE + count - 1)))


@function
def fill_next(args, seq, first, end, to):
    """Where K of the tokens from `first` on is, or of the last one before `end`: what is fetched ahead."""
    for place in range(LANES):
        token = min(first + place, end - 1)
        number = get_int(args.block_tables + seq * args.table_stride + 4 * (token // args.block_size))
        key = args.key_cache + number * args.key_block_stride
        set_long(to + 8 * place, key + token % args.block_size * args.key_token_stride)


@function
def fill_scales(args, seq, tile, skip, count, first_head, end_head, to):
    """Each head's scales of K in the tile's tokens from `skip` to `count`, and behind them those of V; 0 for
    others, whose weights are 0.
    """
    if count - skip < TILE:
        fill(to, (end_head - first_head) * 2 * TILE // LANES, ZERO)
    table, place = args.block_tables + seq * args.table_stride, skip
    while place < count:  # a block at a time
        offset = (tile + place) % args.block_size
        number = get_int(table + 4 * ((tile + place) // args.block_size))
        size = min(args.block_size - offset, count - place)
        for head in range(first_head, end_head):
            at = to + 4 * place + 8 * TILE * (head - first_head)
            first = 4 * ((number * args.num_kv_heads + head) * args.block_size + offset)
            for j in range(0, size, LANES):
                keys, values = args.key_scales + first + 4 * j, args.value_scales + first + 4 * j
                store_some_as(FLOAT32, at + 4 * j, load_up_to(keys, size - j, ZERO), size - j)
                store_some_as(FLOAT32, at + 4 * (TILE + j), load_up_to(values, size - j, ZERO), size - j)
        place += size


@function
def fill_blocks(args, seq, tile, skip, count, to):
    """Where K of four times 16 of the tile's tokens is, those there are; a block holds a multiple of 16."""
    for block in range(TILE // TILE_ROWS):
        token = tile + TILE_ROWS * max(skip // TILE_ROWS, min(block, (count - 1) // TILE_ROWS))
        number = get_int(args.block_tables + seq * args.table_stride + 4 * (token // args.block_size))
        key = args.key_cache + number * args.key_block_stride
        set_long(to + 8 * block, key + token % args.block_size * args.key_token_stride)
