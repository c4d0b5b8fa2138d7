"""Weights of random numbers, in the forms that those of a checkpoint will take: how large they get, and how
fast they are multiplied, before any is read.

The loader itself makes them, of headers and chance. Where a form depends on the numbers, a sample has such as
are usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoints.gguf.gguf_file import GgmlType, GgufTensor
from ...checkpoints.stored import Layout, StoredPart, StoredRows, StoredTensor, StoredWeight
from .forms import Role, WeightForm
from .loading import Loadable, Loader

_SAMPLE_NUMBERS = 2**20  # enough for a form that only large weights take
_ROW_STEP = 128  # whole panels, and halves of them
_SIZE = 0.02  # of weights; scales are positive and about as large


class Sample(NamedTuple):
    """A form made from a few rows of a weight, to measure the size of the whole form."""

    form: WeightForm
    num_rows: int
    num_inputs: int
    make: Callable[[int], WeightForm]  # of so many rows

    @property
    def num_bytes(self) -> int:
        """The size of the sampled form in bytes."""
        return bytes_of(self.form)


class SampledWeight(NamedTuple):
    """Rows of a weight that share one form, with a sample of this form."""

    sample: Sample
    num_rows: int

    @property
    def num_bytes(self) -> int:
        """The size of all rows in memory, in bytes."""
        return round(self.sample.num_bytes * self.num_rows / self.sample.num_rows)


class SampledModule(NamedTuple):
    """The sizes of a module's own parameters, in memory and in files."""

    weights: tuple[SampledWeight, ...]
    other_bytes: int  # of parameters that are no weights
    file_bytes: Counter[str]  # of all of them in their files, by the title of the format

    @property
    def num_bytes(self) -> int:
        """The size of all parameters in memory, in bytes."""
        return self.other_bytes + sum(weight.num_bytes for weight in self.weights)


class WeightSampler:
    """Makes samples of the weights that a loader would load. Weights stored in the same way share a sample.

    device: the device on which samples are made: the loader's device, if this machine has it.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._made: dict[object, Sample] = {}

    def module(self, module: Loadable) -> SampledModule:
        """Return the sizes of a module on the meta device, without its submodules."""
        own = dict(module.named_parameters(recurse=False))
        weights: list[SampledWeight] = []
        file_bytes = Counter[str]()
        if module.role is not None and (like := own.pop("weight", None)) is not None:
            parts, found, role = self._loader.weights_of(module.stored, like, module.role)
            num_precise = module.num_precise if len(found) == 1 else 0
            for stored in found:
                file_bytes[stored.format.title] += self._file_bytes(stored, parts)
                numbers = self._loader.forms.split(stored.rows.num_rows, num_precise)
                for num_rows, is_precise in zip(numbers, (False, True), strict=True):
                    if num_rows:
                        sample = self._sample(stored, num_rows, parts, role, "bias" in own, is_precise)
                        weights.append(SampledWeight(sample, num_rows))
        rows = module.stored
        file_bytes[""] += sum(self._bytes_read(rows, part, name) for part in rows.parts for name in own)
        return SampledModule(tuple(weights), sum(each.nbytes for each in own.values()), file_bytes)

    def _file_bytes(self, stored: StoredWeight, parts: Mapping[str, StoredPart]) -> int:
        return sum(
            self._bytes_read(stored.rows, part, name)
            for part in stored.rows.parts
            for name, layout in stored.format.layouts(parts[part]).items()
            if layout.is_read
        )

    def _bytes_read(self, rows: StoredRows, part: str, name: str) -> int:
        """Return the bytes of a tensor that the rows of a module take."""
        return round(self._loader.sources[f"{part}.{name}"].num_bytes * rows.part_read(part))

    def _sample(
        self,
        stored: StoredWeight,
        whole_rows: int,
        parts: Mapping[str, StoredPart],
        role: Role,
        has_bias: bool,
        is_precise: bool,
    ) -> Sample:
        first = parts[next(iter(stored.rows.parts))]
        layouts = {name: x for name, x in stored.format.layouts(first).items() if x.is_read}
        real = {name: self._loader.sources[f"{first.name}.{name}"] for name in layouts}
        num_rows = whole_rows
        if num_rows * first.num_inputs > 2 * _SAMPLE_NUMBERS:
            num_rows = min(num_rows, -(-_SAMPLE_NUMBERS // first.num_inputs // _ROW_STEP) * _ROW_STEP)

        def make(num_rows: int) -> WeightForm:
            sources = {
                f"{first.name}.{name}": _random_like(real[name], layout, num_rows)
                for name, layout in layouts.items()
            }
            loader = Loader(sources, self._loader.forms, self._device)
            rows = StoredRows({first.name: num_rows}, transposed=stored.rows.transposed)
            num_precise = num_rows if is_precise else 0
            form = loader.form_of(StoredWeight(stored.format, rows), {first.name: first}, role, num_precise)
            if has_bias:
                form.lay_out(torch.zeros(num_rows, dtype=first.dtype, device=self._device))
            return form

        dtypes = tuple(tensor.dtype for tensor in real.values())
        key = stored.format, whole_rows, first.num_inputs, role, has_bias, is_precise, dtypes
        if key not in self._made:
            self._made[key] = Sample(make(num_rows), num_rows, first.num_inputs, make)
        return self._made[key]


def bytes_of(form: WeightForm) -> int:
    """Return the size in bytes of all tensors of a form that is not a `JoinedForm`."""
    tensors = _tensors_in(tuple(vars(form).values()))
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors_in(part)
    elif is_dataclass(value):
        yield from _tensors_in(tuple(getattr(value, field.name) for field in fields(value)))


@dataclass(frozen=True, slots=True)
class _RandomTensor(StoredTensor):
    """A tensor that no file has. usual: see `Layout`. blocks: the type of GGUF that its bytes are in."""

    usual: int | None
    blocks: GgmlType | None

    def read(self, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        shape = self.shape
        if shape:
            first, last, _ = rows.indices(shape[0])
            shape = [last - first, *shape[1:]]
        values = self._values(torch.Size(shape))
        return values if out is None else out.copy_(values)

    def _values(self, shape: torch.Size) -> Tensor:
        if self.usual is not None:
            return torch.full(shape, self.usual, dtype=self.dtype, device="cpu")
        random = torch.Generator().manual_seed(0)
        is_weight = self.name.endswith("weight")
        if self.dtype.is_floating_point:
            numbers = torch.empty(shape, device="cpu").normal_(generator=random)
            numbers = numbers if is_weight else numbers.abs_().add_(0.1)
            # Codes of 8 bits are of the size of 1.
            return (numbers if self.dtype.itemsize == 1 else numbers.mul_(_SIZE)).to(self.dtype)
        values = torch.empty(shape, dtype=self.dtype, device="cpu")
        if self.dtype == torch.uint8 and self.name.endswith("scale"):  # exponents of two
            return values.random_(118, 126, generator=random)
        limits = torch.iinfo(self.dtype)
        # The upper limit is left out, and torch's own default leaves out negative numbers.
        values.random_(limits.min, limits.max, generator=random)
        if self.blocks is None:
            return values
        blocks = values.view(-1, self.blocks.num_bytes)
        for place in self.blocks.factors:
            factors = torch.empty(len(blocks), 1, device="cpu").uniform_(_SIZE, 2 * _SIZE, generator=random)
            blocks[:, place : place + 2] = factors.half().view(torch.uint8)
        return values


def _random_like(tensor: StoredTensor, layout: Layout, num_rows: int) -> _RandomTensor:
    blocks = tensor.type if isinstance(tensor, GgufTensor) and tensor.type.in_blocks else None
    shape = layout.shape_of(num_rows)
    return _RandomTensor(tensor.path, tensor.name, tensor.dtype, shape, layout.usual, blocks)
