"""The reader of each format of `formats`, and functions that are made for several formats."""

from collections.abc import Callable
from typing import Any

from ...formats import (
    BF12,
    BF12_PAIRS,
    BFLOAT16,
    BFLOAT16_PAIRS,
    CODES4,
    CODES4_PAIRS,
    CODES8,
    CODES8_PAIRS,
    E4M3,
    E4M3_PAIRS,
    FLOAT16,
    FLOAT32,
    FORMATS,
    INT8,
    INT8_PAIRS,
    STEP_BYTES,
)
from ..simd.vectors import dispatch_for, missing
from .bf12 import Bf12
from .codes import Codes4, Codes4Pairs, Codes8, E4m3
from .reader import Bfloat16, Bfloat16Pairs, Int8Pairs, Reader

READERS = {
    FLOAT32: Reader(FLOAT32),
    FLOAT16: Reader(FLOAT16),
    BFLOAT16: Bfloat16(),
    INT8: Reader(INT8),
    BF12: Bf12(Bfloat16()),
    CODES4: Codes4(),
    CODES8: Codes8(),
    E4M3: E4m3(),
    BFLOAT16_PAIRS: Bfloat16Pairs(),
    INT8_PAIRS: Int8Pairs(),
    BF12_PAIRS: Bf12(Bfloat16Pairs()),
    CODES4_PAIRS: Codes4Pairs(),
    CODES8_PAIRS: Codes8(pairs=True),
    E4M3_PAIRS: E4m3(pairs=True),
}


def step_bytes_of(reader: Reader) -> int:
    """Return the number of bytes that a step takes in this reader's format."""
    return next(STEP_BYTES[kind] for kind, own in READERS.items() if own is reader)


def for_kinds(make: Callable[[Reader], Any], kinds: list[int], kernel: str = "") -> Any:
    """Return call(kind, *args), which runs the function that make(reader) returned for this kind's format.

    `call` raises for a format for which this CPU lacks instructions.

    kernel: the name of a kernel with variants, see `dispatch_for`.
    """
    made = {kind: make(READERS[kind]) if FORMATS[kind].is_supported else missing for kind in kinds}
    return dispatch_for(kernel, made)
