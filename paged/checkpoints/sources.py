"""Sources of tensors: what the loader asks of a file. Safetensors is one kind: `safetensors_file`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

# Of a tensor that is converted or compared at once: at least these bytes, in at most so many parts. Threads
# that share a part meet at its end, which takes milliseconds where they share their cores with others.
TENSOR_PART_BYTES = 16 * 2**20
MAX_PARTS = 16


@dataclass(frozen=True, slots=True)
class StoredTensor(ABC):
    """A tensor that is read when it is asked for.

    config: where its shape should follow from, for messages.
    """

    config: ClassVar[str] = "config.json"

    path: Path  # the file
    name: str  # in the file; it may be longer than that in the decoder
    dtype: torch.dtype
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in its file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_data(self) -> bool:
        """Whether it can be read: not if only the header of its file was fetched."""
        return True

    @abstractmethod
    def read(self, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        """Read the tensor, or these rows: consecutive indices of its first dimension.

        out: a contiguous tensor in CPU memory, of the same dtype, to read into.
        """

    def parts(self, unit: int = 1) -> list[slice]:
        """Return the rows in parts of about TENSOR_PART_BYTES, or larger ones of a very large tensor.

        unit: what the number of rows of each part but the last is a multiple of.
        """
        num_rows = self.shape[0] if self.shape else 1
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, TENSOR_PART_BYTES // max(1, row_bytes), -(-num_rows // MAX_PARTS))
        step = -(-step // unit) * unit
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def read_parts(self, unit: int = 1, within: range | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows in `parts`, or what of them is within these rows. Each is valid until the next."""
        parts = self.parts(unit)
        if within is not None:
            cut = [slice(max(part.start, within.start), min(part.stop, within.stop)) for part in parts]
            parts = [part for part in cut if part.start < part.stop]
        # New memory for each part would take longer to map than to read.
        most = max((part.stop - part.start for part in parts), default=0)
        memory = torch.empty([most, *self.shape[1:]], dtype=self.dtype, device="cpu")
        for rows in parts:
            yield rows, self.read(rows, memory[: rows.stop - rows.start])

    def read_columns(self, rows: slice, columns: range) -> Tensor:
        """Read consecutive columns of these rows of a matrix."""
        return self.read(rows)[:, columns.start : columns.stop]

    def copy_to(self, destination: Tensor) -> None:
        """Copy the tensor into one of the same shape, part by part where it is converted or moved."""
        is_plain = destination.device.type == "cpu" and destination.is_contiguous()
        if is_plain and destination.dtype == self.dtype:
            self.read(out=destination)
        elif len(self.parts()) == 1:
            destination.copy_(self.read())
        else:
            for rows, part in self.read_parts():
                destination[rows].copy_(part)


Sources = Mapping[str, StoredTensor]  # by the name in the decoder
