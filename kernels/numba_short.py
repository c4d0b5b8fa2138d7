"""bfloat16 in 12 bits without loss: with few rows a product takes as long as reading its weight.

See `ShortPairs` in `numba_codes`. Of weights that are near each other in size, as those of a model are, one
in some hundred thousands is an exception.
"""

import torch
from numba import carray
from torch import Tensor

from .numba_codes import (
    PAIRS,
    PANEL,
    SHORT_GROUP_BYTES,
    SHORT_HEAD_BYTES,
    SHORT_STEP_BYTES,
    SHORT_STEPS,
    TABLE_BYTES,
)
from .numba_linear import Panels
from .numba_memory import address_of, claim, get_byte, get_int, set_byte, set_int, set_long
from .numba_threads import NEXT_THREAD, NEXT_UNIT, Task
from .numba_vectors import function

_VALUES = 256  # of a byte
_STEP = 2 * PANEL  # weights
_GROUP = SHORT_STEPS * _STEP
_MOST_EXCEPTIONS = 1 / 64  # of all weights: 4 bytes each are half a bit of a weight then
_GROUPS_AT_A_TIME = 4096  # whose exceptions are looked for, so that it takes little memory
_LEAST_WEIGHTS = 2**19  # a megabyte: models of smaller ones stay in the caches between two steps

SHORTEN = Task(("panels", "short", "num_groups"))
_RECORD = SHORTEN.record


def shortened(panels: Panels) -> Panels:
    """Panels of bfloat16 in pairs in 12.25 bits a weight, whose products have the same bits.

    Others as they are, and so those whose inputs fill no groups, that are so small that a cache has them, or
    of which so many would be exceptions that little was left.
    """
    num_panels, depth = panels.weight.shape[:2]
    num_weights = panels.weight.numel()
    if panels.kind != PAIRS or depth % SHORT_STEPS or num_weights < _LEAST_WEIGHTS:
        return panels
    num_groups = depth // SHORT_STEPS
    short = panels.weight.new_empty(num_panels, num_groups, SHORT_GROUP_BYTES, dtype=torch.uint8)
    addresses = panels.weight.data_ptr(), short.data_ptr()
    SHORTEN.run(num_panels, *addresses, num_groups, scratch_size=4 * _VALUES + _VALUES)
    groups = short.flatten(0, 1)
    numbers = groups[:, TABLE_BYTES:SHORT_HEAD_BYTES].contiguous().view(torch.int64)
    count = numbers[:, 1]
    if count.sum() > _MOST_EXCEPTIONS * num_weights:
        return panels
    numbers[:, 0] = count.cumsum(0) - count
    groups[:, TABLE_BYTES:SHORT_HEAD_BYTES] = numbers.view(torch.uint8)
    upper = panels.weight.view(torch.uint8).view(-1, _GROUP, 2)[..., 1]
    with_some = count.nonzero().squeeze(1).split(_GROUPS_AT_A_TIME)
    exceptions = [_exceptions(upper[own], groups[own, :TABLE_BYTES]) for own in with_some]
    weight = short.view(torch.int16).view(num_panels, depth, -1, 1)
    return Panels(weight, torch.cat(exceptions), panels.out_features, panels.gated)


def _exceptions(upper: Tensor, tables: Tensor) -> Tensor:
    """Of upper halves [groups, _GROUP] those that tables [groups, TABLE_BYTES] lack, with their places."""
    is_known = torch.zeros(len(upper), _VALUES, dtype=torch.bool, device="cpu")
    is_known.scatter_(1, tables.long(), True)
    group, place = is_known.gather(1, upper.long()).logical_not_().nonzero(as_tuple=True)
    return ((2 * place + 1) << 8 | upper[group, place]).int()


@function
def _make_table(source, entry, counts, codes):
    """The upper halves that are most frequent in a group, and how many weights have another one."""
    for value in range(_VALUES):
        set_int(counts + 4 * value, 0)
        set_byte(codes + value, 0)
    for i in range(_GROUP):
        place = counts + 4 * (get_byte(source + 2 * i + 1) & 255)
        set_int(place, get_int(place) + 1)
    left, last = _GROUP, 0
    for code in range(TABLE_BYTES):
        most, best = 0, 0
        for value in range(_VALUES):
            count = get_int(counts + 4 * value)
            if count > most:
                most, best = count, value
        if most:
            set_int(counts + 4 * best, 0)
            set_byte(codes + best, code)
            left -= most
            last = best
        set_byte(entry + code, best if most else last)
    set_long(entry + TABLE_BYTES + 8, left)


@function
def _shorten_step(source, to, codes):
    """Lower halves, then codes, in the order in which vectors are put together of them."""
    for i in range(_STEP):
        part, at = i // 16, i % 16
        place = source + 2 * (at // 8 * PANEL + 8 * part + at % 8)
        set_byte(to + i, get_byte(place))
        code = get_byte(codes + (get_byte(place + 1) & 255))
        byte = to + _STEP + i % PANEL
        set_byte(byte, code if i < PANEL else get_byte(byte) | code << 4)


@SHORTEN.kernel
def _shorten_kernel(record):
    """All threads: a panel at a time."""
    args, counters = carray(record, 1, _RECORD)[0], address_of(record)
    counts = args.scratch + claim(counters + NEXT_THREAD) * args.scratch_size
    codes = counts + 4 * _VALUES
    panel = claim(counters + NEXT_UNIT)
    while panel < args.num_units:
        for group in range(panel * args.num_groups, (panel + 1) * args.num_groups):
            source = args.panels + group * 2 * _GROUP
            to = args.short + group * SHORT_GROUP_BYTES
            _make_table(source, to, counts, codes)
            for step in range(SHORT_STEPS):
                place = to + SHORT_HEAD_BYTES + step * SHORT_STEP_BYTES
                _shorten_step(source + 2 * step * _STEP, place, codes)
        panel = claim(counters + NEXT_UNIT)
