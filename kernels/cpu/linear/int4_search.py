"""`kernels.int4_search`, compiled: a lane searches for the scale and the zero of a group."""

import torch
from torch import Tensor

from ...checks import check_dtype, check_shape
from ...int4_search import RANGES
from ..launch.tasks import Task
from ..target import LANES, VECTOR_BYTES

BEST_FIT = Task(
    "linear.int4_search.best_fit",
    ("levels", "ranges", "scales", "zeros"),
    ("size", "stride", "num_vectors", "vectors_of_unit"),
)
_VECTORS_OF_UNIT = 32
_RANGES = torch.tensor(RANGES, dtype=torch.float32, device="cpu")

FIT_BYTES = 3 * VECTOR_BYTES


def best_fit(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `kernels.int4_search.best_fit`, bit for bit except for NaN."""
    check_shape("levels", levels, (None, None))
    check_dtype("levels", levels)
    size, num_groups = levels.shape
    num_vectors = -(-num_groups // LANES)
    width = num_vectors * LANES
    whole = levels.new_zeros(size, width)
    whole[:, :num_groups] = levels
    scales, zeros = whole.new_empty(2, width)
    BEST_FIT.run(
        -(-num_vectors // _VECTORS_OF_UNIT),
        levels=whole,
        ranges=_RANGES,
        scales=scales,
        zeros=zeros,
        size=size,
        stride=whole.stride(0) * 4,
        num_vectors=num_vectors,
        vectors_of_unit=_VECTORS_OF_UNIT,
        scratch_size=2 * FIT_BYTES + (size + 1) * VECTOR_BYTES,
    )
    return scales[:num_groups], zeros[:num_groups]
