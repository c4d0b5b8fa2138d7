"""How a checkpoint stores weights: in which tensors, units of rows and order. Each output has a row.

Sources: what the loader asks of a file. Safetensors is one kind: `safetensors_file`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from .coded import Weight

# Of a tensor that is converted or compared at once: at least these bytes, in at most so many parts. Threads
# that share a part meet at its end, which takes milliseconds where they share their cores with others.
TENSOR_PART_BYTES = 16 * 2**20
MAX_PARTS = 16


@dataclass(frozen=True, slots=True)
class StoredTensor(ABC):
    """A tensor in a file, read on demand.

    config: the keys of config.json that determine its shape, for messages.
    """

    config: ClassVar[str] = "config.json"

    path: Path  # the file
    name: str  # in the file; it may be longer than that in the decoder
    dtype: torch.dtype
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in its file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_data(self) -> bool:
        """Whether the tensor can be read; False if only the header of its file was fetched."""
        return True

    @abstractmethod
    def read(self, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        """Read the whole tensor, or only these rows: consecutive indices of its first dimension.

        out: a contiguous tensor in CPU memory, of the same dtype, to read into.
        """

    def parts(self, unit: int = 1) -> list[slice]:
        """Divide the rows into parts of about TENSOR_PART_BYTES, but at most MAX_PARTS parts.

        unit: every part but the last has a multiple of this many rows.
        """
        num_rows = self.shape[0] if self.shape else 1
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, TENSOR_PART_BYTES // max(1, row_bytes), -(-num_rows // MAX_PARTS))
        step = -(-step // unit) * unit
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def read_parts(self, unit: int = 1, within: range | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the slices of `parts`, each with its rows. A part's rows are valid until the next part is
        read.

        within: read only these rows.
        """
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
        """Copy the tensor to one of the same shape. If dtype or device differ, copy part by part."""
        is_plain = destination.device.type == "cpu" and destination.is_contiguous()
        if is_plain and destination.dtype == self.dtype:
            self.read(out=destination)
        elif len(self.parts()) == 1:
            destination.copy_(self.read())
        else:
            for rows, part in self.read_parts():
                destination[rows].copy_(part)


Sources = Mapping[str, StoredTensor]  # by the name in the decoder


CHECKED_AT_ONCE = 2**20  # numbers, so that they stay in a cache
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of stored tensors that make up the parameters of one module.

    Parameter `p` of the module consists of the rows of the tensors "{part}.{p}", one part after the other.
    """

    parts: Mapping[str, int]  # the number of rows of each part, by its name
    index: Tensor | None = None  # i64[n]: the stored row that each row of the module is; None: row i is row i
    transposed: bool = False  # weights are stored as [in_features, out_features]
    whole: StoredRows | None = None  # what these are a share of

    @property
    def num_rows(self) -> int:
        """The number of rows in the module."""
        return sum(self.parts.values()) if self.index is None else len(self.index)

    def take(self, *shares: range) -> StoredRows:
        """Return only these rows of the module."""
        own = torch.cat([torch.arange(share.start, share.stop, device="cpu") for share in shares])
        index = own if self.index is None else self.index[own]
        return replace(self, index=index, whole=self)

    def part_read(self, part: str) -> float:
        """Return the share of a part's rows that belong to these rows, from 0 to 1."""
        if self.index is None:
            return 1.0
        start = 0
        for name, count in self.parts.items():
            if name == part:
                own = self.index[(self.index >= start) & (self.index < start + count)]
                return len(torch.unique(own)) / count
            start += count
        raise KeyError(part)


class ValueCheck(NamedTuple):
    """The range of values that a stored tensor may have."""

    is_wrong: Callable[[Tensor], Tensor]  # by element
    must: str  # "be finite"
    has_wrong: Callable[[Tensor], bool] | None = None  # the same of a whole tensor, faster


class Layout(NamedTuple):
    """How a stored tensor holds the rows of a weight.

    Each entry along dimension `dim` covers `rows_per_entry` rows. Either the entry packs these rows, and
    `unpack` separates them, or the rows share the entry, as a block of rows shares a scale. If `dim` is None,
    all rows share the tensor.
    """

    columns: tuple[int, ...]  # the other dimensions
    dtype: torch.dtype  # of rows in memory
    dim: int | None = 0
    rows_per_entry: int = 1
    # entries [n, *columns] -> rows [n * rows_per_entry, *columns_in_memory]
    unpack: Callable[[Tensor], Tensor] | None = None
    stored_dtypes: tuple[torch.dtype, ...] = FLOATS
    is_read: bool = True  # or only checked, as what a weight is computed without
    check: ValueCheck | None = None  # of what is read
    usual: int | None = None  # what every number of the tensor should be, if that is known without it
    columns_in_one: int = 1  # how many columns `unpack` packs into one, in the last dimension

    @property
    def columns_in_memory(self) -> tuple[int, ...]:
        """The dimensions of a row in memory."""
        return tuple(-(-count // self.columns_in_one) for count in self.columns)

    def shape_of(self, num_rows: int) -> list[int]:
        """Return the shape of the stored tensor for num_rows rows."""
        shape = list(self.columns)
        if self.dim is not None:
            shape.insert(self.dim, -(-num_rows // self.rows_per_entry))
        return shape


class StoredPart(NamedTuple):
    """One part [num_rows, num_inputs] of a weight in a checkpoint. Its tensors determine its format."""

    name: str  # in the decoder, without that of a tensor
    num_rows: int
    num_inputs: int
    dtype: torch.dtype  # of the model
    transposed: bool  # floats are stored as [num_inputs, num_rows]
    sources: Sources

    def get(self, tensor: str) -> StoredTensor | None:
        """Return the part's tensor with this last component of its name; None if there is none."""
        return self.sources.get(f"{self.name}.{tensor}")


class StoredFormat(Protocol):
    """The format in which a weight is stored, such as floats or GPTQ's codes and scales.

    The parts of a weight whose formats are equal are read together and become one weight in memory.
    """

    title: str  # what people call it, such as "GPTQ 4 bits"; "" for floats

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        """Return the layout of each tensor that the part must have, by the last component of its name."""

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        """Make the weight of a module from the tensors that were read.

        tensors: [num_rows, *columns], by the names in `layouts`, with the rows in the order of the module.
        """


# Returns the format of a part, or None for one that it does not know. Raises CheckpointError where tensors
# of it do not fit each other, and UnsupportedModelError for what is not supported.
Recognizer = Callable[[StoredPart], StoredFormat | None]


@dataclass(frozen=True, slots=True)
class FloatFormat(StoredFormat):
    """A weight stored as floats."""

    title = ""

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        return {"weight": Layout((part.num_inputs,), part.dtype, dim=int(part.transposed))}

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        return tensors["weight"]


def float_layout(like: Tensor) -> Layout:
    """Return the layout of a float parameter that is not a weight, such as a bias: numbers for each row.

    One without dimensions is stored as a single number.
    """
    if not like.dim():
        return Layout((), like.dtype, dim=None)
    return Layout(tuple(like.shape[1:]), like.dtype)


def format_of(part: StoredPart, recognizers: Sequence[Recognizer]) -> StoredFormat:
    """Return the format of a part, by the first recognizer that knows it; floats if none does."""
    for recognize in recognizers:
        if (found := recognize(part)) is not None:
            return found
    return FloatFormat()


class StoredWeight(NamedTuple):
    """Rows of a module's weight that are stored in one format."""

    format: StoredFormat
    rows: StoredRows


def split_by_format(rows: StoredRows, formats: Mapping[str, StoredFormat]) -> list[StoredWeight]:
    """Divide a module's rows into consecutive runs that are stored in one format each.

    formats: the format of each part, by the part's name.
    """
    if len(set(formats.values())) == 1:
        return [StoredWeight(next(iter(formats.values())), rows)]
    counts = torch.tensor(list(rows.parts.values()), device="cpu")
    ends = counts.cumsum(0)
    index = torch.arange(int(ends[-1]), device="cpu") if rows.index is None else rows.index
    part_of_row = torch.searchsorted(ends, index, right=True)
    kinds = list(dict.fromkeys(formats.values()))
    kind_of_part = torch.tensor([kinds.index(formats[part]) for part in rows.parts], device="cpu")
    # Where each part begins among those of its own format.
    starts = torch.empty_like(counts)
    for kind in range(len(kinds)):
        own = kind_of_part == kind
        starts[own] = counts[own].cumsum(0) - counts[own]
    own_index = index - (ends - counts)[part_of_row] + starts[part_of_row]
    runs, lengths = torch.unique_consecutive(kind_of_part[part_of_row], return_counts=True)
    found = []
    for kind, own_rows in zip(runs.tolist(), torch.split(own_index, lengths.tolist()), strict=True):
        parts = {part: count for part, count in rows.parts.items() if formats[part] == kinds[kind]}
        as_stored = torch.arange(sum(parts.values()), device="cpu")
        order = None if torch.equal(own_rows, as_stored) else own_rows
        found.append(StoredWeight(kinds[kind], StoredRows(parts, order, rows.transposed)))
    if rows.whole is None:
        return found
    wholes = split_by_format(rows.whole, formats)
    return [
        StoredWeight(own.format, replace(own.rows, whole=whole.rows))
        for own, whole in zip(found, wholes, strict=True)
    ]


def read_rows(
    tensors: Sequence[tuple[StoredTensor, int]], index: Tensor | None, layout: Layout, device: torch.device
) -> Tensor:  # [num_rows, *columns]
    """Read rows of several tensors, counted as if the tensors were joined along their rows.

    index: the rows to read, i64[num_rows]; None reads all rows in order.
    """
    counts = [count for _, count in tensors]
    if layout.dim is None:
        shared = [tensor.read().to(layout.dtype).expand(count, *layout.columns) for tensor, count in tensors]
        memory = torch.cat(shared) if len(shared) > 1 else shared[0]
        return (memory if index is None else memory[index]).to(device)
    if index is None and layout.unpack is None and layout.rows_per_entry == 1:
        memory = torch.empty(sum(counts), *layout.columns, dtype=layout.dtype, device=device)
        for (tensor, _), part in zip(tensors, torch.split(memory, counts), strict=True):
            tensor.copy_to(part.movedim(0, layout.dim))
        return memory
    if index is None:
        index = torch.arange(sum(counts), device="cpu")
    memory = torch.empty(len(index), *layout.columns_in_memory, dtype=layout.dtype, device="cpu")
    start = 0
    for tensor, count in tensors:
        places = ((index >= start) & (index < start + count)).nonzero().squeeze(1)
        _place_rows(tensor, layout, index[places] - start, memory, places)
        start += count
    return memory.to(device)


def _place_rows(tensor: StoredTensor, layout: Layout, rows: Tensor, memory: Tensor, places: Tensor) -> None:
    """Copy rows of a tensor to places in memory, part by part of the tensor. Other rows are not read."""
    assert layout.dim is not None, "a tensor that all rows share is read whole"
    for run in _runs_of(rows // layout.rows_per_entry):
        first = run.start * layout.rows_per_entry
        here = _between(rows, first, run.stop * layout.rows_per_entry)
        if layout.dim == 0:
            _place_entries(tensor, layout, run, rows[here], memory, places[here])
        else:
            _place_columns(tensor, layout, run, rows[here] - first, memory, places[here])


def _place_entries(
    tensor: StoredTensor, layout: Layout, run: range, rows: Tensor, memory: Tensor, places: Tensor
) -> None:
    """Copy rows whose entries are a run along the first dimension."""
    for part, held in tensor.read_parts(within=run):
        first = part.start * layout.rows_per_entry
        here = _between(rows, first, part.stop * layout.rows_per_entry)
        memory[_as_slice(places[here])] = _taken(held, rows[here] - first, layout)


def _place_columns(
    tensor: StoredTensor, layout: Layout, run: range, rows: Tensor, memory: Tensor, places: Tensor
) -> None:
    """Copy rows whose entries are a run along the second dimension. rows: counted from the run's first."""
    unit = layout.columns_in_one
    where = _as_slice(places)
    is_all = len(run) == tensor.shape[1]
    for part, held in (
        tensor.read_parts(unit) if is_all else ((p, tensor.read_columns(p, run)) for p in tensor.parts(unit))
    ):
        columns = slice(part.start // unit, -(-part.stop // unit))
        memory[where, columns] = _taken(held.movedim(1, 0), rows, layout)


def _runs_of(entries: Tensor) -> Iterator[range]:
    """Yield the runs of consecutive numbers that occur, in their order."""
    found = torch.unique(entries)
    if not len(found):
        return
    breaks = ((found[1:] - found[:-1]) != 1).nonzero().squeeze(1) + 1
    for run in torch.tensor_split(found, breaks.tolist()):
        yield range(int(run[0]), int(run[-1]) + 1)


def _between(rows: Tensor, first: int, end: int) -> Tensor:
    """Return the places of the rows that are in this range."""
    return ((rows >= first) & (rows < end)).nonzero().squeeze(1)


def _taken(entries: Tensor, rows: Tensor, layout: Layout) -> Tensor:
    """Return these rows of entries that follow each other."""
    if layout.unpack is None:
        return entries[_as_slice(rows // layout.rows_per_entry)].to(layout.dtype)
    return layout.unpack(entries)[_as_slice(rows)].to(layout.dtype)


def _as_slice(index: Tensor) -> Tensor | slice:
    """Return an index as a slice if it is one: an index takes three times as long."""
    if not len(index):
        return slice(0)
    first = int(index[0])
    in_order = torch.arange(first, first + len(index), device="cpu")
    return slice(first, first + len(index)) if torch.equal(index, in_order) else index


def check_values(tensors: Sequence[StoredTensor], values: Tensor, check: ValueCheck) -> None:
    """Check values that were read from tensors. Raises CheckpointError naming file, tensor and position."""
    has_wrong = check.has_wrong or (lambda part: bool(check.is_wrong(part).any()))
    step = max(1, CHECKED_AT_ONCE // max(1, values[:1].numel()))
    if not values.numel() or not any(map(has_wrong, torch.split(values, step))):
        return
    for tensor in tensors:
        for rows, part in tensor.read_parts():
            wrong = check.is_wrong(part).nonzero()
            if len(wrong):
                place = wrong[0].tolist()
                value = float(part[tuple(place)])
                place[0] += rows.start
                place = place[: len(tensor.shape)]
                raise CheckpointError(
                    f"{tensor.path}: {tensor.name} is {value:g} at {place}, but must {check.must}"
                )
    raise AssertionError("what is wrong in memory is wrong in a file")
