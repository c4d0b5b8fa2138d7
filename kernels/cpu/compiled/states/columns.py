"""What kernels of states share: columns of a matrix that begin at 0 or are copied, and copies of inputs."""

from typing import Any

import numpy as np

from ...formats import FLOAT32, ITEM_SIZES
from ...states.gated_delta import WIDE
from ...target import LANES, VECTOR_BYTES
from ..simd.memory import some_of
from ..simd.vectors import function, splat

load_columns, store_columns = some_of(FLOAT32)


@function
def forget(states, num_rows, row_bytes, count):
    """Begin with a state of zeros."""
    for i in range(num_rows):
        for c in range(0, count, LANES):
            store_columns(states + i * row_bytes + 4 * c, splat(np.float32(0.0)), count - c)


@function
def copy_state(states, row_bytes, num_rows, count, to):
    """Copy `count` columns of a state into rows of WIDE vectors."""
    for i in range(num_rows):
        for c in range(0, count, LANES):
            number = load_columns(states + i * row_bytes + 4 * c, count - c)
            store_columns(to + i * WIDE * VECTOR_BYTES + 4 * c, number, count - c)


def copy_of(kind: int) -> Any:
    """Return copy_numbers(source, to, count) for one kind of number."""
    size_of = ITEM_SIZES[kind]
    (load_some, store_some) = some_of(kind)

    @function
    def copy_numbers(source, to, count):
        for c in range(0, count, LANES):
            store_some(to + c * size_of, load_some(source + c * size_of, count - c), count - c)

    return copy_numbers
