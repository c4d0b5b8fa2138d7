"""Stacks: tensors that hold those of all experts of a layer, presented as one tensor for each expert."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..architectures.config import ExpertStack
from ..base.errors import CheckpointError
from .open_file import FileTensor
from .stored import StoredTensor

MAX_EXPERTS = 4096


def experts_of(name: str, tensor: StoredTensor, stack: ExpertStack) -> Iterator[tuple[str, StoredTensor]]:
    """Split a stack of experts into one tensor for each expert; yield the stack itself if it comes from a
    GGUF file.

    Raises CheckpointError for a stack that does not divide into its parts.
    """
    if not isinstance(tensor, FileTensor):
        yield name, tensor
        return
    place = f"{tensor.path}: {tensor.name} has shape {tensor.shape}, "
    if len(tensor.shape) != stack.rank or not 1 <= tensor.shape[0] <= MAX_EXPERTS:
        raise CheckpointError(
            f"{place}but must have {stack.rank} dimensions, the first of 1 to {MAX_EXPERTS} experts"
        )
    num_experts, num_rows, *columns = tensor.shape
    if num_rows % len(stack.parts):
        raise CheckpointError(f"{place}but its rows must divide into {' and '.join(stack.parts)}")
    if stack.flat:
        columns[-2:] = [columns[-2] * columns[-1]]
    shape = [num_rows // len(stack.parts), *columns]
    size = math.prod(shape) * tensor.dtype.itemsize
    layer = name.removesuffix(stack.name)
    start = tensor.start
    for expert in range(num_experts):
        for part in stack.parts:
            own = replace(tensor, name=f"{tensor.name}[{expert}]", shape=shape, start=start)
            yield f"{layer}mlp.experts.{expert}.{part}", own
            start += size
