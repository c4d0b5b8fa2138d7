"""SafetensorsFile: a file of tensors that is opened once, checked, and read part by part.

Not by the safetensors library: its errors name neither file nor tensor, it accepts a header that contains a
name twice, and the pages that it maps stay in memory until the file is closed.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..architectures.config import LLAMA_NAMES, TensorNames
from ..base.errors import CheckpointError
from ..base.validation import shown
from .open_file import FileTensor, OpenFile

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
HEADER_ONLY = "paged.header_only"  # in the metadata of a file that has no data: see `checkpoints.headers`
HEADER_CEILING = 100 * 2**20
MAX_RANK = 8
_SPLIT_AT_ONCE = 2**16  # bytes of a header
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)

Entry = tuple[str, list[int], int, int]  # dtype, shape, start and end of a tensor in a file


class SafetensorsFile(OpenFile):
    """The tensors of one file.

    names: decides which tensors are left out. Left-out tensors may have any dtype.

    Raises CheckpointError, which names file and tensor, for a damaged file.
    """

    def __init__(self, path: Path, names: TensorNames = LLAMA_NAMES) -> None:
        super().__init__(path)
        try:
            self.tensors = self._read_header(names)
        except BaseException:
            self.close()
            raise

    def _read_header(self, names: TensorNames) -> dict[str, FileTensor]:
        size = self.size
        length = int.from_bytes(self.read_bytes(0, min(size, 8)), "little")
        if size < 8 or length > min(size - 8, HEADER_CEILING):
            raise CheckpointError(f"{self.path}: is truncated or no safetensors file ({size} bytes)")
        text = self.read_bytes(8, length)
        try:
            header = _parse(text)
            metadata = header.pop("__metadata__", {})
            _check_metadata(metadata)
            self.has_data = HEADER_ONLY not in (metadata or {})
            entries = {name: _read_entry(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: has a damaged header: {error}") from error
        read = {name: entry for name, entry in entries.items() if names.is_read(name)}
        self._check_entries(entries, read, begin=8 + length, size=size)
        return {
            name: FileTensor(
                self.path, name, STORED_DTYPES[dtype], shape, file=self, start=8 + length + start
            )
            for name, (dtype, shape, start, _) in read.items()
        }

    def _check_entries(
        self, entries: Mapping[str, Entry], read: Mapping[str, Entry], *, begin: int, size: int
    ) -> None:
        """Check that each tensor has the bytes of its shape, and that all fill the file without gaps.

        read: the entries that are not left out. begin: where the data begins.
        """
        for name, (_, _, _, end) in entries.items():
            if begin + end > size:
                raise CheckpointError(
                    f"{self.path}: is truncated: {name} ends at byte {begin + end}, the file at {size}"
                )
        for name, (dtype, shape, start, end) in read.items():
            if dtype not in STORED_DTYPES:
                raise CheckpointError(
                    f"{self.path}: {name} is {dtype}; supported are {', '.join(STORED_DTYPES)}"
                )
            if end - start != math.prod(shape) * STORED_DTYPES[dtype].itemsize:
                raise CheckpointError(
                    f"{self.path}: {name} has {end - start} bytes, which is not what {dtype}{shape} takes"
                )
        reached = 0
        for start, end, name in sorted((start, end, name) for name, (_, _, start, end) in entries.items()):
            if start != reached:
                raise CheckpointError(
                    f"{self.path}: {name} begins at byte {start} of the data, but the one before ends at "
                    f"{reached}"
                )
            reached = end
        if reached != size - begin:
            raise CheckpointError(
                f"{self.path}: has {size - begin} bytes of data, of which tensors take {reached}"
            )


def _parse(text: bytearray) -> dict[str, Any]:
    """Parse a header. Raises ValueError for damaged JSON, and for a name that is there twice."""
    bare = _without_strings(text)
    num_keys = _check_brackets(bare)
    header: dict[str, Any] = json.loads(text)
    # Parsing keeps one of equal names: there are fewer then than there were colons.
    if num_keys != len(header) + sum(len(entry) for entry in header.values() if isinstance(entry, dict)):
        header = json.loads(text, object_pairs_hook=_unique_keys)
    return header


def _without_strings(text: bytearray) -> bytearray:
    """Return what is between the strings of JSON."""
    if b"\\" in text:
        return bytearray(_STRING.sub(b"", text))
    # In a tenth of the time. The pieces of a short part take little memory, however many quotes it has.
    bare = bytearray()
    is_inside = 0
    for start in range(0, len(text), _SPLIT_AT_ONCE):
        pieces = bytes(text[start : start + _SPLIT_AT_ONCE]).split(b'"')
        bare += b"".join(pieces[is_inside::2])
        is_inside ^= (len(pieces) - 1) % 2
    return bare


def _check_brackets(bare: bytearray) -> int:
    """Return the number of keys of a header, without its strings.

    Raises ValueError if it has lists and objects that no tensor has: they take many times the memory of
    their text.
    """
    num_lists, num_objects, num_keys = (bare.count(character) for character in (b"[", b"{", b":"))
    # A tensor is one object of two lists. It has three keys and is the value of a fourth.
    if num_lists > 2 * num_objects or 4 * num_objects > num_keys + 16:
        raise ValueError(f"{num_lists} lists and {num_objects} objects are more than its tensors need")
    return num_keys


def _read_entry(entry: dict[str, Any]) -> Entry:
    """Return dtype, shape, start and end of one tensor in a header."""
    start, end = entry["data_offsets"]
    dtype = entry["dtype"]
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise ValueError(f"an entry is {shown(entry)}")
    if not isinstance(dtype, str):
        raise ValueError(f"an entry is {shown(entry)}")
    for number in (start, end, *shape):
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"an entry is {shown(entry)}")
    return dtype, shape, start, end


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"__metadata__ must be an object of strings, got {shown(metadata)}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name)} is there twice")
    return unique
