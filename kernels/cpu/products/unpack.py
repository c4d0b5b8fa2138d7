"""Panels in fewer bits become such as products read at once."""

from typing import Any

from numba import types

from ..simd.emit import operation
from ..simd.numbers import FLOAT32
from ..simd.vectors import HAS_DOT, HAS_LOOKUP, function
from .codes import HALVES, INT4, INT4_PAIRS, INT8_PAIRS, PAIRS, SHORT_HALVES, Int8Pairs, Rows
from .codes_int4 import Int4, Int4Pairs
from .codes_short import ShortHalves, ShortPairs


def _unpacker(rows: Rows) -> Any:

    @operation(types.void, *[types.int64] * 5)
    def unpack(builder: Any, *args: Any) -> None:
        rows.unpack(builder, *args)

    return unpack


_unpack_int4 = _unpacker(Int4())
_unpack_int8_pairs = _unpack_int4_pairs = _unpack_short_pairs = _unpack_short_halves = _unpack_int4
if HAS_DOT:  # elsewhere nothing is in pairs
    _unpack_int8_pairs, _unpack_int4_pairs = _unpacker(Int8Pairs()), _unpacker(Int4Pairs())
if HAS_LOOKUP:
    _unpack_short_halves = _unpacker(ShortHalves())
if HAS_DOT and HAS_LOOKUP:
    _unpack_short_pairs = _unpacker(ShortPairs())


@function
def unpacked_kind(kind):
    """What `unpack` makes of a panel: the same where it can do no more than the product itself."""
    if kind == INT4:
        return FLOAT32
    if kind == SHORT_HALVES:
        return HALVES
    return PAIRS if kind > PAIRS else kind


@function
def unpack(kind, to, panel, stride, factors, depth):
    """So many steps of a quantised or short panel, as `unpacked_kind` has them."""
    if kind == INT4:
        _unpack_int4(to, panel, stride, factors, depth)
    elif kind == INT8_PAIRS:
        _unpack_int8_pairs(to, panel, stride, factors, depth)
    elif kind == INT4_PAIRS:
        _unpack_int4_pairs(to, panel, stride, factors, depth)
    elif kind == SHORT_HALVES:
        _unpack_short_halves(to, panel, stride, factors, depth)
    else:
        _unpack_short_pairs(to, panel, stride, factors, depth)
