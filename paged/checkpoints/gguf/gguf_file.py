"""GgufFile: a GGUF file, whose header is checked before anything else is read or allocated.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is little-endian.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...architectures.gguf_paths import HEADERS_ALONE, part_paths
from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import shown
from ..open_file import FileTensor, OpenFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER_CEILING = 64 * 2**20  # bytes of metadata and tensor infos: objects of Python take ten times as much
_MAX_KEY_BYTES = 65535
_MAX_RANK = 4
_MAX_DEPTH = 4  # of arrays in arrays
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**16
_INFINITE = 0x7C  # the bits of a float16's high byte that NaN and infinity have
_NAN_EXPONENT = 0xFF  # the e8m0 that is NaN
_CHUNK = 2**20  # bytes of the header that are read at once
_LEAST_PAIR = 8 + 1 + 4 + 1  # bytes of a key of one letter and its value
_LEAST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8

_BOOL, _STRING, _ARRAY = 7, 8, 9
# The letter that struct and array call each type of numbers, by its number in the file.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
Value = int | float | bool | str | Sequence[Any]  # an array of numbers is an array.array


class GgmlType(NamedTuple):
    """How numbers are stored: plainly, or in blocks of `num_inputs` numbers that share factors.

    factors: the byte offsets of the float16 factors in a block.
    exponents: the byte offsets of the factors that are powers of two (e8m0).
    """

    name: str
    num_bytes: int  # of a block
    num_inputs: int = 1
    factors: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8  # of what is read: numbers, or the bytes of blocks
    exponents: tuple[int, ...] = ()

    @property
    def in_blocks(self) -> bool:
        """Whether a tensor of this type is read as the bytes of its blocks."""
        return self.num_inputs > 1


GGML_TYPES = {
    0: GgmlType("F32", 4, dtype=torch.float32),
    1: GgmlType("F16", 2, dtype=torch.float16),
    2: GgmlType("Q4_0", 18, 32, (0,)),
    3: GgmlType("Q4_1", 20, 32, (0, 2)),
    6: GgmlType("Q5_0", 22, 32, (0,)),
    7: GgmlType("Q5_1", 24, 32, (0, 2)),
    8: GgmlType("Q8_0", 34, 32, (0,)),
    12: GgmlType("Q4_K", 144, 256, (0, 2)),
    13: GgmlType("Q5_K", 176, 256, (0, 2)),
    14: GgmlType("Q6_K", 210, 256, (208,)),
    20: GgmlType("IQ4_NL", 18, 32, (0,)),
    23: GgmlType("IQ4_XS", 136, 256, (0,)),
    28: GgmlType("F64", 8, dtype=torch.float64),
    30: GgmlType("BF16", 2, dtype=torch.bfloat16),
    39: GgmlType("MXFP4", 17, 32, exponents=(0,)),
}
# The names of the others, for errors.
_OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class GgufTensor(FileTensor):
    """A tensor of an open GGUF file. Its rows may be read in another order than the file's.

    order: i64[n], the order in which each n consecutive rows of the file are read.
    columns: for each column in the file, the number of the model's input. `read` returns floats in the order
        of the inputs; callers that read blocks must reorder the numbers themselves.
    """

    config: ClassVar[str] = "its metadata"

    type: GgmlType
    order: Tensor | None = field(default=None, compare=False)
    added: int = 0  # what the file has added to each number
    columns: tuple[int, ...] | None = None

    @property
    def num_values(self) -> int:
        """The number of values that the tensor stores."""
        return (
            math.prod(self.shape)
            // (self.type.num_bytes if self.type.in_blocks else 1)
            * self.type.num_inputs
        )

    def read(self, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        if self.order is None:
            found = self._stored(rows, out)
        else:
            ordered = self._in_order(self.order, *rows.indices(self.shape[0])[:2])
            found = ordered if out is None else out.copy_(ordered)
        if self.columns is not None and not self.type.in_blocks:
            found.copy_(found[:, torch.tensor(self.columns, device="cpu").argsort()])
        return found.sub_(self.added) if self.added else found

    def read_columns(self, rows: slice, columns: range) -> Tensor:
        return self.read(rows)[:, columns.start : columns.stop]

    def _in_order(self, order: Tensor, first: int, last: int) -> Tensor:
        unit = len(order)
        start = first // unit * unit
        held = self._stored(slice(start, -(-last // unit) * unit))
        ordered = held.view(-1, unit, *self.shape[1:])[:, order].flatten(0, 1)
        return ordered[first - start : last - start]

    def _stored(self, rows: slice, out: Tensor | None = None) -> Tensor:
        """Read rows in the order of the file. Raises CheckpointError for a factor that is no number."""
        found = FileTensor.read(self, rows, out)
        for place in self.type.factors:
            high_bytes = found.view(-1, self.type.num_bytes)[:, place + 1]
            self._check_factors(high_bytes & _INFINITE == _INFINITE, place, rows)
        for place in self.type.exponents:
            exponents = found.view(-1, self.type.num_bytes)[:, place]
            self._check_factors(exponents == _NAN_EXPONENT, place, rows)
        return found

    def _check_factors(self, wrong: Tensor, place: int, rows: slice) -> None:
        """Raise CheckpointError if the factor of a block is wrong, which is at this byte of it."""
        if bool(wrong.any()):
            block = int(wrong.nonzero()[0])
            first_row, *_ = rows.indices(self.shape[0])
            start = self.start + first_row * self.shape[-1] + block * self.type.num_bytes
            raise CheckpointError(
                f"{self.path}: {self.name} has an infinite factor or NaN at byte {start + place}"
            )


class GgufFile(OpenFile):
    """The metadata and tensors of one open GGUF file.

    digest: the sha256 of its header.

    Raises CheckpointError, which names file and byte, for a damaged file, and UnsupportedModelError for
    features that are not implemented.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_data = not path.with_name(HEADERS_ALONE).exists()
        try:
            header = _Header(self)
            header.check_beginning()
            num_tensors = header.count("tensors", _LEAST_TENSOR)
            num_pairs = header.count("pairs of metadata", _LEAST_PAIR)
            self.metadata = header.metadata(num_pairs)
            self.tensors = self._read_tensors(header, num_tensors)
            self.digest = hashlib.sha256(header.data[: header.place]).digest()
        except BaseException:
            self.close()
            raise

    def _read_tensors(self, header: _Header, count: int) -> dict[str, GgufTensor]:
        alignment = self._alignment()
        infos: dict[str, _Info] = {}
        for _ in range(count):
            place = header.place
            info = header.info()
            if info.name in infos:
                raise header.damaged(f"tensor {shown(info.name)} is there twice", place)
            if info.start % alignment:
                message = f"offset {info.start} of {info.name} is not a multiple of {alignment}"
                raise header.damaged(message, info.place)
            infos[info.name] = info
        begin = -(-header.place // alignment) * alignment
        self._check_places(header, infos.values(), begin)
        return {
            name: GgufTensor(self.path, name, kind.dtype, info.shape(), self, begin + info.start, type=kind)
            for name, info in infos.items()
            for kind in [info.type]
        }

    def _alignment(self) -> int:
        given = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(given) is not int or not 8 <= given <= _MAX_ALIGNMENT or given & (given - 1):
            raise CheckpointError(
                f"{self.path}: general.alignment must be a power of two from 8 to {_MAX_ALIGNMENT}, "
                f"got {shown(given)}"
            )
        return given

    def _check_places(self, header: _Header, infos: Iterable[_Info], begin: int) -> None:
        reached = 0
        before = ""
        for info in sorted(infos, key=lambda info: info.start):
            end = info.start + info.num_bytes
            if begin + end > self.size:
                message = f"{info.name} ends at byte {begin + end}, the file at {self.size}"
                raise header.damaged(message, info.place)
            if info.start < reached:
                message = f"{info.name} begins at byte {begin + info.start}, within {before}"
                raise header.damaged(message, info.place)
            reached = end
            before = info.name


class _Info(NamedTuple):
    """What a header says of a tensor."""

    name: str
    type: GgmlType
    dims: Sequence[int]  # the fastest first
    start: int  # byte of the data
    place: int  # byte of the header that has `start`

    @property
    def num_bytes(self) -> int:
        return math.prod(self.dims) // self.type.num_inputs * self.type.num_bytes

    def shape(self) -> list[int]:
        """Return the shape of what is read: [rows, bytes] in blocks."""
        row = self.dims[0] // self.type.num_inputs * self.type.num_bytes
        return [*reversed(self.dims[1:]), row if self.type.in_blocks else self.dims[0]]


class _Header:
    """Reads the beginning of a file value after value, and checks each length before it reads so far."""

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.data = bytearray()  # as much as was needed so far
        self.place = 0

    def damaged(self, what: str, place: int | None = None) -> CheckpointError:
        """Return the error for what is wrong at a byte, by default the next."""
        return CheckpointError(f"{self.file.path}: at byte {self.place if place is None else place}: {what}")

    def skip(self, count: int, what: str) -> int:
        """Go on by so many bytes, and return where they begin. Raises CheckpointError if there are fewer."""
        start = self.place
        end = start + count
        if end > self.file.size:
            raise self.damaged(f"{what} of {count} bytes ends after the file, which has {self.file.size}")
        if end > _HEADER_CEILING:
            raise self.damaged(f"{what} of {count} bytes is beyond the {_HEADER_CEILING:,} of a header")
        if end > len(self.data):
            more = max(end - len(self.data), min(_CHUNK, self.file.size - len(self.data)))
            self.data += self.file.read_bytes(len(self.data), more)
        self.place = end
        return start

    def number(self, letter: str, what: str) -> Any:
        """Read one number."""
        form = f"<{letter}"
        return struct.unpack_from(form, self.data, self.skip(struct.calcsize(form), what))[0]

    def string(self, what: str, most: int = _HEADER_CEILING) -> str:
        """Read a string."""
        place = self.place
        length = self.number("Q", f"the length of {what}")
        if length > most:
            raise self.damaged(f"{what} has {length} bytes; at most {most:,} are read", place)
        start = self.skip(length, what)
        try:
            return self.data[start : self.place].decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8: {error.reason}", start + error.start) from error

    def check_beginning(self) -> None:
        """Read magic and version."""
        if self.file.size < 24 or self.file.read_bytes(0, 4) != _MAGIC:
            raise CheckpointError(f"{self.file.path}: is truncated or no GGUF file ({self.file.size} bytes)")
        self.skip(4, "the magic")
        version = self.number("I", "the version")
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(
                f"{self.file.path}: at byte 4: is a big-endian GGUF file, which is not supported"
            )
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self.file.path}: at byte 4: GGUF version {version} is not supported; 2 and 3 are"
            )

    def count(self, what: str, least: int) -> int:
        """Read a number of things that take at least so many bytes each."""
        place = self.place
        count: int = self.number("Q", f"the number of {what}")
        self._check_room(count, least, what, place)
        return count

    def _check_room(self, count: int, least: int, what: str, place: int) -> None:
        if count * least > self.file.size - self.place:
            raise self.damaged(f"{count} {what} do not fit into the file of {self.file.size} bytes", place)

    def metadata(self, count: int) -> dict[str, Value]:
        """Read pairs of keys and values."""
        found: dict[str, Value] = {}
        for _ in range(count):
            place = self.place
            key = self.string("a key", _MAX_KEY_BYTES)
            if key in found:
                raise self.damaged(f"key {shown(key)} is there twice", place)
            kind = self.number("I", f"the type of {shown(key)}")
            found[key] = self._value(kind, shown(key), 0)
        return found

    def _value(self, kind: int, what: str, depth: int) -> Value:
        if kind in _NUMBERS:
            number: int | float = self.number(_NUMBERS[kind], what)
            return number
        if kind == _BOOL:
            return self._flag(what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY and depth < _MAX_DEPTH:
            return self._array(what, depth)
        raise self.damaged(f"{what} has type {kind}, which no value has here", self.place - 4)

    def _flag(self, what: str) -> bool:
        value = self.number("B", what)
        if value > 1:
            raise self.damaged(f"{what} is no bool: {value}", self.place - 1)
        return bool(value)

    def _array(self, what: str, depth: int) -> Sequence[Any]:
        kind = self.number("I", f"the type of {what}")
        place = self.place
        count = self.number("Q", f"the length of {what}")
        if kind in _NUMBERS:
            numbers = array(_NUMBERS[kind])
            self._check_room(count, numbers.itemsize, f"numbers of {what}", place)
            start = self.skip(count * numbers.itemsize, what)
            numbers.frombytes(self.data[start : self.place])
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers
        if kind == _BOOL:  # at once: a file may hold millions
            self._check_room(count, 1, f"values of {what}", place)
            start = self.skip(count, what)
            flags = self.data[start : self.place]
            if any(flags.translate(None, b"\0\1")):
                raise self.damaged(f"{what} has a value that is no bool", start)
            return list(map(bool, flags))
        least = {_STRING: 8, _ARRAY: 12}.get(kind, 1)
        self._check_room(count, least, f"values of {what}", place)
        return [self._value(kind, what, depth + 1) for _ in range(count)]

    def info(self) -> _Info:
        """Read what there is of a tensor before the data."""
        name = self.string("the name of a tensor", _MAX_KEY_BYTES)
        place = self.place
        rank = self.number("I", f"the rank of {shown(name)}")
        if not 1 <= rank <= _MAX_RANK:
            raise self.damaged(f"{shown(name)} has {rank} dimensions; 1 to {_MAX_RANK} are read", place)
        place = self.place
        dims = [self.number("Q", f"a dimension of {shown(name)}") for _ in range(rank)]
        type_place = self.place
        number = self.number("I", f"the type of {shown(name)}")
        kind = GGML_TYPES.get(number)
        if kind is None:
            supported = ", ".join(each.name for each in GGML_TYPES.values())
            raise UnsupportedModelError(
                f"{self.file.path}: at byte {type_place}: {name} is of type "
                f"{_OTHER_TYPES.get(number, number)}; supported are {supported}"
            )
        info = _Info(name, kind, dims, 0, self.place)
        if min(dims) < 1 or info.num_bytes > self.file.size:
            raise self.damaged(f"{shown(name)} of shape {dims} does not fit into the file", place)
        if dims[0] % kind.num_inputs:
            raise self.damaged(
                f"{shown(name)} is {kind.name}, in blocks of {kind.num_inputs}, but its rows have {dims[0]} "
                "numbers",
                place,
            )
        return info._replace(start=self.number("Q", f"the offset of {shown(name)}"))


# Files in parts


class Gguf(NamedTuple):
    """The files of one model: the metadata of its first file, and the tensors of all files."""

    files: Sequence[GgufFile]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


@contextmanager
def open_gguf(path: Path, open_file: Callable[[Path], GgufFile] = GgufFile) -> Iterator[Gguf]:
    """Open all GGUF files of a model.

    path: the path of the file, or of any part of a model in several files.
    """
    paths = part_paths(path)
    with ExitStack() as stack:
        files = [stack.enter_context(open_file(each)) for each in paths]
        tensors: dict[str, GgufTensor] = {}
        for number, file in enumerate(files):
            _check_part(file, number, len(files))
            if twice := tensors.keys() & file.tensors.keys():
                name = min(twice)
                raise CheckpointError(f"{file.path}: {name} is in {tensors[name].path.name} too")
            tensors |= file.tensors
        total = files[0].metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise CheckpointError(
                f"{paths[0]}: split.tensors.count is {shown(total)}, but its parts have {len(tensors)}"
            )
        yield Gguf(files, files[0].metadata, tensors)


def _check_part(file: GgufFile, number: int, count: int) -> None:
    """Raise CheckpointError for a file that is another part of its model than its name says."""
    stated = file.metadata.get("split.count", 1)
    if stated in (0, 1) and count == 1:
        return
    if (file.metadata.get("split.no"), stated) != (number, count):
        no = file.metadata.get("split.no")
        raise CheckpointError(
            f"{file.path}: split.no {shown(no)} and split.count {shown(stated)} contradict its name; a part "
            "is called NAME-00001-of-00003.gguf, counted from 1"
        )
