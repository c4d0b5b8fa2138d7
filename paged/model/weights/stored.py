"""How a checkpoint stores weights: in which tensors, units of rows and order. A row is that of an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError
from .choice import MakeForm
from .forms import WeightForm
from .sources import Sources, StoredTensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The stored rows that make up the parameters of one module.

    A parameter `p` is stored as "{part}.{p}" for each of the parts. Their rows follow each other.
    """

    parts: Mapping[str, int]  # the number of rows of each part, by its name
    index: Tensor | None = None  # i64[n]: the stored row that each row of the module is; None: row i is row i
    transposed: bool = False  # weights are stored as [in_features, out_features]

    @property
    def num_rows(self) -> int:
        """The number of rows in the module."""
        return sum(self.parts.values()) if self.index is None else len(self.index)


class Layout(NamedTuple):
    """How a stored tensor holds rows.

    An entry along its dimension `dim` is that of `rows_per_entry` rows. It packs them, and `unpack` takes one
    out; or they share it, as the scale of a block of rows.
    """

    columns: tuple[int, ...]  # the other dimensions
    dtype: torch.dtype  # of rows in memory
    dim: int = 0
    rows_per_entry: int = 1
    # (entries [n, *columns], the place in each, i64[n]) -> rows [n, *columns]
    unpack: Callable[[Tensor, Tensor], Tensor] | None = None
    stored_dtypes: tuple[torch.dtype, ...] = FLOATS

    def shape_of(self, num_rows: int) -> list[int]:
        """Return the shape of the tensor of so many rows."""
        shape = list(self.columns)
        shape.insert(self.dim, -(-num_rows // self.rows_per_entry))
        return shape


class StoredFormat(Protocol):
    """A way to store weights [out_features, in_features]. Add one to STORED_FORMATS to have it loaded."""

    def layouts(self, rows: StoredRows, like: Tensor) -> dict[str, Layout]:
        """Return the layouts of its tensors by the last part of their names. The first one is its mark.

        like: the weight, on the meta device, as it would be in floats.
        """

    def form(self, tensors: Mapping[str, Tensor], of_floats: MakeForm) -> WeightForm:
        """Make the form that computes with the weight.

        tensors: the rows in the module's order, [num_rows, *columns]. of_floats: makes the form of a float
        weight in the same place.
        """


class FloatFormat(StoredFormat):
    """The weight itself, in floats."""

    def layouts(self, rows: StoredRows, like: Tensor) -> dict[str, Layout]:
        return {"weight": float_layout(rows, like)}

    def form(self, tensors: Mapping[str, Tensor], of_floats: MakeForm) -> WeightForm:
        return of_floats(tensors["weight"])


STORED_FORMATS: tuple[StoredFormat, ...] = (FloatFormat(),)


def float_layout(rows: StoredRows, like: Tensor) -> Layout:
    """Return the layout of a parameter of floats: a weight, or a number for each row."""
    return Layout(tuple(like.shape[1:]), like.dtype, dim=int(rows.transposed and like.dim() == 2))


def format_of(rows: StoredRows, like: Tensor, sources: Sources) -> StoredFormat:
    """Return the format of a weight. Raises CheckpointError if its parts are stored in several."""
    found: dict[str, tuple[StoredFormat, StoredTensor]] = {}
    for form in STORED_FORMATS:
        mark = next(iter(form.layouts(rows, like)))
        found |= {part: (form, tensor) for part in rows.parts if (tensor := sources.get(f"{part}.{mark}"))}
    if len({form for form, _ in found.values()}) > 1:
        names = [tensor.name for _, tensor in found.values()]
        path = next(tensor.path for _, tensor in found.values())
        raise CheckpointError(f"{path}: {', '.join(names)} make one product, so they must have one format")
    return next((form for form, _ in found.values()), STORED_FORMATS[0])


def read_rows(
    tensors: Sequence[tuple[StoredTensor, int]], index: Tensor | None, layout: Layout, device: torch.device
) -> Tensor:  # [num_rows, *columns]
    """Read rows of tensors whose rows follow each other; the numbers say how many each has.

    index: the rows to read, i64[num_rows]; None: all in their order.
    """
    counts = [count for _, count in tensors]
    if index is None and layout.unpack is None and layout.rows_per_entry == 1:
        memory = torch.empty(sum(counts), *layout.columns, dtype=layout.dtype, device=device)
        for (tensor, _), part in zip(tensors, torch.split(memory, counts), strict=True):
            tensor.copy_to(part.movedim(0, layout.dim))
        return memory
    if index is None:
        index = torch.arange(sum(counts), device="cpu")
    memory = torch.empty(len(index), *layout.columns, dtype=layout.dtype, device="cpu")
    start = 0
    for tensor, count in tensors:
        places = ((index >= start) & (index < start + count)).nonzero().squeeze(1)
        _place_rows(tensor, layout, index[places] - start, memory, places)
        start += count
    return memory.to(device)


def _place_rows(tensor: StoredTensor, layout: Layout, rows: Tensor, memory: Tensor, places: Tensor) -> None:
    """Copy rows of a tensor to places in memory, part by part of the tensor."""
    entries = rows // layout.rows_per_entry
    inner = rows % layout.rows_per_entry
    for part, held in tensor.read_parts():
        if layout.dim == 0:
            here = ((entries >= part.start) & (entries < part.stop)).nonzero().squeeze(1)
            memory[places[here]] = _taken(held[entries[here] - part.start], inner[here], layout)
        else:
            memory[places, part] = _taken(held.movedim(layout.dim, 0)[entries], inner, layout)


def _taken(entries: Tensor, inner: Tensor, layout: Layout) -> Tensor:
    rows = entries if layout.unpack is None else layout.unpack(entries, inner)
    return rows.to(layout.dtype)
