"""bfloat16 in 12 bits without loss: with few rows a product takes as long as reading its weight.

See `_Short` in `cpu.products.codes_short`. Of weights that are near each other in size, as those of a
model are, one in some hundred thousands is an exception.
"""

import torch
from numba import carray
from torch import Tensor

from ..launch.huge_pages import in_huge_pages
from ..launch.tasks import NEXT_THREAD, NEXT_UNIT, Task
from ..products.codes import (
    HALVES,
    PAIRS,
    PANEL,
    SHORT_GROUP,
    SHORT_GROUP_BYTES,
    SHORT_HALVES,
    SHORT_HEAD_BYTES,
    SHORT_PAIRS,
    SHORT_PART,
    SHORT_PART_BYTES,
    SHORT_PARTS,
    TABLE_BYTES,
    whole_steps,
)
from ..simd.memory import address_of, claim, get_byte, get_int, set_byte, set_int, set_long
from ..simd.vectors import HAS_LOOKUP, function
from .linear import Panels

_VALUES = 256  # of a byte
_HEAD_END = TABLE_BYTES + 16  # of what a group's head has; the rest is 0
_MOST_EXCEPTIONS = 1 / 64  # of all weights: 4 bytes each are half a bit of a weight then
_GROUPS_AT_A_TIME = 4096  # whose exceptions are looked for, so that it takes little memory
# A megabyte, with what fills the last panel: models of smaller ones stay in the caches between two steps.
_LEAST_WEIGHTS = 2**19

SHORTEN = Task(("panels", "short", "num_groups"))
_RECORD = SHORTEN.record


def shortened(panels: Panels) -> Panels:
    """Panels of bfloat16 in 12.25 bits a weight, 12.5 with AVX2, and 32 an exception; products have the same
    bits.

    Others as they are, and so those that are on no CPU or on one that looks no bytes up, whose inputs fill no
    groups, that are so small that a cache has them, or of which so many would be exceptions that little was
    left.
    """
    num_panels, num_weights, kinds = len(panels.weight), panels.weight.numel(), (PAIRS, HALVES)
    if panels.kind not in kinds or num_weights < _LEAST_WEIGHTS or not panels.weight.is_cpu or not HAS_LOOKUP:
        return panels
    steps = whole_steps.py_func(SHORT_PAIRS if panels.in_pairs else SHORT_HALVES)
    if panels.depth % steps:
        return panels
    num_groups = panels.depth // steps
    shape = num_panels, num_groups, SHORT_GROUP_BYTES
    short = in_huge_pages(panels.weight.new_empty(shape, dtype=torch.uint8))
    addresses = panels.weight.data_ptr(), short.data_ptr()
    SHORTEN.run(num_panels, *addresses, num_groups, scratch_size=(4 + 1 + 1) * _VALUES)
    groups = short.flatten(0, 1)
    numbers = groups[:, TABLE_BYTES:_HEAD_END].contiguous().view(torch.int64)
    count = numbers[:, 1]
    if count.sum() > _MOST_EXCEPTIONS * num_weights:
        return panels
    numbers[:, 0] = count.cumsum(0) - count
    groups[:, TABLE_BYTES:_HEAD_END] = numbers.view(torch.uint8)
    groups[:, _HEAD_END:SHORT_HEAD_BYTES] = 0
    upper = panels.weight.view(torch.uint8).view(-1, SHORT_GROUP, 2)[..., 1]
    with_some = count.nonzero().squeeze(1).split(_GROUPS_AT_A_TIME)
    exceptions = [_exceptions(upper[own], groups[own, :TABLE_BYTES]) for own in with_some]
    weight = short.view(torch.int16)
    weight = weight.unsqueeze(3) if panels.in_pairs else weight
    return Panels(weight, torch.cat(exceptions), panels.out_features, panels.gated)


def _exceptions(upper: Tensor, tables: Tensor) -> Tensor:
    """Of upper halves [groups, numbers] those that tables [groups, TABLE_BYTES] lack, with their places."""
    is_known = torch.zeros(len(upper), _VALUES, dtype=torch.bool, device="cpu")
    is_known.scatter_(1, tables.long(), True)
    group, place = is_known.gather(1, upper.long()).logical_not_().nonzero(as_tuple=True)
    return ((2 * place + 1) << 8 | upper[group, place]).int()


@function
def _make_table(source, entry, counts, codes, found):
    """The upper halves that are most frequent in a group, and how many weights have another one.

    counts: 0 for each value, as they are left. found: room for the values that there are.
    """
    number, left, last = 0, SHORT_GROUP, 0
    for i in range(SHORT_GROUP):
        value = get_byte(source + 2 * i + 1) & 255
        count = get_int(counts + 4 * value)
        if not count:
            set_byte(found + number, value)
            number += 1
        set_int(counts + 4 * value, count + 1)
    for code in range(TABLE_BYTES):
        most, best = 0, last
        for i in range(number):
            value = get_byte(found + i) & 255
            count = get_int(counts + 4 * value)
            if count > most:
                most, best = count, value
        if most:
            set_int(counts + 4 * best, 0)
            set_byte(codes + best, code)
        left, last = left - most, best
        set_byte(entry + code, best)
    for i in range(number):
        value = get_byte(found + i) & 255
        if get_int(counts + 4 * value):  # an exception
            set_int(counts + 4 * value, 0)
            set_byte(codes + value, 0)
    set_long(entry + TABLE_BYTES + 8, left)


@function
def _shorten_part(source, to, codes):
    """Lower halves, then codes, in the order in which vectors are put together of them."""
    for i in range(PANEL):
        first = source + 2 * (i // 8 % 2 * PANEL + i // 16 * 8 + i % 8)
        second = first + PANEL  # bytes: half as many weights
        set_byte(to + i, get_byte(first))
        set_byte(to + PANEL + i, get_byte(second))
        low = get_byte(codes + (get_byte(first + 1) & 255))
        high = get_byte(codes + (get_byte(second + 1) & 255))
        set_byte(to + SHORT_PART + i, low | high << 4)


@SHORTEN.kernel
def _shorten_kernel(record):
    """All threads: a panel at a time."""
    args, counters = carray(record, 1, _RECORD)[0], address_of(record)
    counts = args.scratch + claim(counters + NEXT_THREAD) * args.scratch_size
    codes = counts + 4 * _VALUES
    found = codes + _VALUES
    panel = claim(counters + NEXT_UNIT)
    if panel < args.num_units:  # else its scratch memory may be another kernel's by now
        for at in range(5 * _VALUES):
            set_byte(counts + at, 0)
    while panel < args.num_units:
        for group in range(panel * args.num_groups, (panel + 1) * args.num_groups):
            source = args.panels + group * 2 * SHORT_GROUP
            to = args.short + group * SHORT_GROUP_BYTES
            _make_table(source, to, counts, codes, found)
            for part in range(SHORT_PARTS):
                place = to + SHORT_HEAD_BYTES + part * SHORT_PART_BYTES
                _shorten_part(source + 2 * part * SHORT_PART, place, codes)
        panel = claim(counters + NEXT_UNIT)
