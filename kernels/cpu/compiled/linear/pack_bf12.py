"""Encode bfloat16 weights as bf12: with few rows, a product takes as long as reading its weight.

`products.bf12` describes the format. In the weights of a model one in some hundred thousands is an exception.
"""

from ...formats import BF12_GROUP, BF12_GROUP_BYTES, HEAD_BYTES, PANEL, PART, PART_BYTES, PARTS, TABLE_BYTES
from ...linear.pack_bf12 import PACK_BF12, VALUES
from ..kernels import each_unit
from ..simd.memory import get_byte, get_int, set_byte, set_int, set_long
from ..simd.vectors import function


@function
def _make_table(source, entry, counts, codes, found):
    """Write a group's table and number of exceptions to its head, and the code of each upper byte to `codes`.

    counts: an int32 0 for each byte value, and left as that. found: memory for the values that occur.
    """
    number = 0
    left = BF12_GROUP
    last = 0
    for i in range(BF12_GROUP):
        value = get_byte(source + 2 * i + 1) & 255
        count = get_int(counts + 4 * value)
        if not count:
            set_byte(found + number, value)
            number += 1
        set_int(counts + 4 * value, count + 1)
    for code in range(TABLE_BYTES):
        most = 0
        best = last
        for i in range(number):
            value = get_byte(found + i) & 255
            count = get_int(counts + 4 * value)
            if count > most:
                most = count
                best = value
        if most:
            set_int(counts + 4 * best, 0)
            set_byte(codes + best, code)
        left = left - most
        last = best
        set_byte(entry + code, best)
    for i in range(number):
        value = get_byte(found + i) & 255
        if get_int(counts + 4 * value):  # an exception
            set_int(counts + 4 * value, 0)
            set_byte(codes + value, 0)
    set_long(entry + TABLE_BYTES + 8, left)


@function
def _encode_part(source, to, codes):
    """Write a part's lower bytes, then its codes, in the order in which they are put together to vectors."""
    for i in range(PANEL):
        first = source + 2 * (i // 8 % 2 * PANEL + i // 16 * 8 + i % 8)
        second = first + PANEL  # bytes: half as many weights
        set_byte(to + i, get_byte(first))
        set_byte(to + PANEL + i, get_byte(second))
        low = get_byte(codes + (get_byte(first + 1) & 255))
        high = get_byte(codes + (get_byte(second + 1) & 255))
        set_byte(to + PART + i, low | high << 4)


@each_unit(PACK_BF12)
def _encode_panel(args, panel, scratch):
    counts = scratch
    codes = scratch + 4 * VALUES
    found = scratch + 5 * VALUES
    for at in range(5 * VALUES):
        set_byte(scratch + at, 0)
    for group in range(panel * args.num_groups, (panel + 1) * args.num_groups):
        source = args.panels + group * 2 * BF12_GROUP
        to = args.encoded + group * BF12_GROUP_BYTES
        _make_table(source, to, counts, codes, found)
        for part in range(PARTS):
            _encode_part(source + 2 * part * PART, to + HEAD_BYTES + part * PART_BYTES, codes)
