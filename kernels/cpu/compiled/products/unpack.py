"""Unpack panels to the format that products read fastest, once for many register tiles."""

from typing import Any

from numba import types

from ...formats import FORMATS
from ...variants import LINEAR_KERNEL
from ..simd.emit import operation
from .kinds import for_kinds
from .reader import Reader


def _unpacker(reader: Reader) -> Any:

    @operation(types.void, *[types.int64] * 5)
    def unpack(builder: Any, *args: Any) -> None:
        reader.unpack(builder, *args)

    return unpack


_KINDS = [kind for kind, row in FORMATS.items() if row.unpacked != kind]
# unpack(kind, to, panel, stride, factors, depth) writes `depth` steps of a panel as kind UNPACKED[kind].
unpack = for_kinds(_unpacker, _KINDS)
unpack_for_linear = for_kinds(_unpacker, _KINDS, LINEAR_KERNEL)
