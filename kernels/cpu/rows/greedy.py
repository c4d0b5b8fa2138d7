"""The highest logit of each row."""

import torch
from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from ..target import VECTOR_BYTES
from .row_kernel import has_regular_rows, in_torch

GREEDY = Task("rows.greedy.greedy", ("logits", "tokens", "highest"), ("size", "stride"))


by_torch = in_torch("greedy")


@checked
def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's maximum, f32[n], after its first index, i64[n]; see `reference.greedy`."""
    if not has_regular_rows(logits):
        return by_torch(logits)
    num_rows, size = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    highest = logits.new_empty(num_rows)
    GREEDY.run(
        num_rows,
        logits=logits,
        tokens=tokens,
        highest=highest,
        size=size,
        stride=logits.stride(0) * 4,
        scratch_size=2 * VECTOR_BYTES,
    )
    return tokens, highest
