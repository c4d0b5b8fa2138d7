"""Stacks: tensors that hold those of all experts of a layer, presented as one tensor for each expert."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ..architectures.config import ExpertStack
from ..base.errors import CheckpointError
from .open_file import FileTensor
from .stored import StoredTensor

MAX_EXPERTS = 4096


def experts_of(name: str, tensor: StoredTensor, stack: ExpertStack) -> Iterator[tuple[str, StoredTensor]]:
    """Split a stack of experts into one tensor per expert; a stack in a GGUF file is yielded as it is.

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
    if stack.num_inputs and tensor.shape[1] == stack.num_inputs:
        yield from _in_columns(name, tensor, stack)
        return
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


def _in_columns(name: str, tensor: FileTensor, stack: ExpertStack) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a stack whose experts are stored as [in_features, out_features]."""
    num_experts, num_inputs, num_columns = tensor.shape
    if num_columns % len(stack.parts):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has shape {tensor.shape}, but its columns must divide into "
            f"{' and '.join(stack.parts)}"
        )
    size = num_columns // len(stack.parts)
    num_bytes = num_inputs * num_columns * tensor.dtype.itemsize
    layer = name.removesuffix(stack.name)
    for expert in range(num_experts):
        start = tensor.start + expert * num_bytes
        own = f"{tensor.name}[{expert}]"
        whole = replace(tensor, name=own, shape=[num_inputs, num_columns], start=start)
        for number, part in enumerate(stack.parts):
            columns = ColumnsTensor(tensor.path, own, tensor.dtype, [size, num_inputs], whole, number * size)
            yield f"{layer}mlp.experts.{expert}.{part}", columns


@dataclass(frozen=True, slots=True)
class ColumnsTensor(StoredTensor):
    """Consecutive columns of a matrix in a file, read as rows.

    first: the index of the first column.
    """

    whole: FileTensor
    first: int

    @property
    def has_data(self) -> bool:
        return self.whole.has_data

    def read(self, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        columns = range(self.shape[0])[rows]
        # Not `read_columns`, which reads row by row: there are thousands of experts.
        read = self.whole.read()[:, self.first + columns.start : self.first + columns.stop].t()
        return read.contiguous() if out is None else out.copy_(read)
