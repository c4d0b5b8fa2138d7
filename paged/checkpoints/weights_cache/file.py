"""A file of packed weights: a header of JSON, and tensors that processes map or copy as they are.

    magic, length of the header (u64), sha256 of the header, header, padding to a page, tensors

The header has the sha256 of the sums of all pages of tensors, each of 512 integers of 64 bits. Sums are as
fast as memory, so that every start compares them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...device import host_memory
from ...kernels.panels import in_huge_pages
from .folder import CacheError, Kept, WeightsCache

_MAGIC = b"paged\0w1"
_FIXED = len(_MAGIC) + 8 + 32
_PAGE = 4096
_LARGE = 2**20  # tensors from so many bytes on begin with a page
_LINE = 64
_PART = 2**22
_MOST_HEADER = 2**28
_HUGE_PAGE = 2**21
_READ = 2**24  # bytes at a time
_MOST_READERS = 4
_NUM_PROBES = 16  # huge pages of a mapping that are looked at
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class TensorPlace(NamedTuple):
    """The place of a tensor in a file of packed weights.

    start: its first byte, counted from the first tensor.
    """

    dtype: str
    shape: list[int]
    start: int

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * _dtype_of(self.dtype).itemsize


class PackedFile(NamedTuple):
    """An open file of packed weights with an intact header.

    begin: the position of the first tensor in the file, in bytes.
    """

    file: BinaryIO
    header: dict[str, Any]
    begin: int

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in bytes, with the padding between them."""
        return int(self.header["num_bytes"])


def places_for(tensors: Sequence[Tensor]) -> tuple[list[TensorPlace], int]:
    """Return the place of each tensor in a file, and the size of all tensors in bytes."""
    places = []
    end = 0
    for tensor in tensors:
        step = _PAGE if tensor.nbytes >= _LARGE else _LINE
        start = -(-end // step) * step
        places.append(TensorPlace(str(tensor.dtype).removeprefix("torch."), [*tensor.shape], start))
        end = start + tensor.nbytes
    return places, -(-end // _PAGE) * _PAGE


def write(
    file: BinaryIO,
    facts: Mapping[str, Any],
    tensors: Sequence[Tensor],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Write the tensors, then the header. Raises OSError, or InterruptedError once `is_over` returns True.

    No torch operation runs here, since torch's threads would compete with the threads of a step.
    """
    places, num_bytes = places_for(tensors)
    header = {**facts, "tensors": places, "num_bytes": num_bytes, "sums": "0" * 64}
    begin = -(-(_FIXED + len(_text(header))) // _PAGE) * _PAGE
    digest = sha256()
    memory = np.zeros(_PART, dtype=np.uint8)
    filled = 0
    file.seek(begin)

    def put(part: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        nonlocal filled
        while len(part):
            if is_over():
                raise InterruptedError("writing packed weights was ended")
            count = min(len(part), _PART - filled)
            memory[filled : filled + count] = part[:count]
            filled += count
            part = part[count:]
            if filled == _PART:
                flush()

    def flush() -> None:
        nonlocal filled
        digest.update(_sums(memory[:filled]))
        left = memory[:filled].data
        while left:
            left = left[file.write(left) :]
        filled = 0

    end = 0
    gap = np.zeros(_PAGE, dtype=np.uint8)
    for tensor, place in zip(tensors, places, strict=True):
        put(gap[: place.start - end])
        put(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        end = place.start + tensor.nbytes
    put(gap[: num_bytes - end])
    flush()
    header["sums"] = digest.hexdigest()
    text = _text(header)
    file.seek(0)
    file.write(_MAGIC + len(text).to_bytes(8, "little") + sha256(text).digest() + text)


def _text(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def _sums(pages: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Return the sum of each page."""
    sums: bytes = np.add.reduce(pages.view(np.int64).reshape(-1, _PAGE // 8), axis=1).tobytes()
    return sums


def read_header(file: BinaryIO) -> PackedFile:
    """Read the header of a file. Raises CacheError if it is damaged or not a file of packed weights."""
    try:
        fixed = file.read(_FIXED)
        length = int.from_bytes(fixed[8:16], "little")
        if len(fixed) < _FIXED or not fixed.startswith(_MAGIC) or length > _MOST_HEADER:
            raise CacheError("it is no file of packed weights, or of another version")
        text = file.read(length)
        size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CacheError(f"it cannot be read: {error.strerror}") from error
    if sha256(text).digest() != fixed[16:]:
        raise CacheError("its header is damaged")
    try:
        header = json.loads(text)
        begin = -(-(_FIXED + length) // _PAGE) * _PAGE
        ends = [
            (place.start + place.num_bytes, place.start >= 0)
            for place in (TensorPlace(*each) for each in header["tensors"])
        ]
        is_right = all(end <= header["num_bytes"] and positive for end, positive in ends)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheError("its header is damaged") from error
    if not is_right or size != begin + header["num_bytes"] or not size:
        raise CacheError(f"it has {size} bytes, and its header describes {begin + header['num_bytes']}")
    return PackedFile(file, header, begin)


class Listed(NamedTuple):
    """One file of the cache, as `paged cache` lists it.

    title: a description of the weights; None if the file is damaged.
    content: the digest of the checkpoint's files.
    """

    kept: Kept
    title: str | None
    content: str | None = None


def listed(cache: WeightsCache) -> Iterator[Listed]:
    """Yield the files of the cache, the most recently used first."""
    for kept in cache.kept():
        title = content = None
        with suppress(CacheError), ExitStack() as stack:
            stream = cache.open(kept.path.stem, is_use=False)
            if stream is not None:
                header = read_header(stack.enter_context(stream)).header
                title = str(header.get("title"))
                content = str(header.get("content"))
        yield Listed(kept, title, content)


class PackedTensors:
    """The tensors of a file of packed weights in memory, verified by checksums.

    is_mapped: whether the tensors lie in the file's own pages, which all processes share. They do if these
        are huge pages, or if other processes have opened the file too. Otherwise the tensors are copied into
        huge pages, because weights are read from end to end in each step.

    Raises CacheError for damage, and OSError on a file system without mmap.
    """

    def __init__(self, packed: PackedFile) -> None:
        self._places = [TensorPlace(*each) for each in packed.header["tensors"]]
        is_shared = _is_shared(packed.file)
        self._memory = _map(packed)
        self.is_mapped = is_shared or not _may_have_huge_pages() or _has_huge_pages(self._memory)
        if not self.is_mapped:
            self._memory = _new_memory(packed)
        self._read(packed)

    def _read(self, packed: PackedFile) -> None:
        """Compare all pages with their sums, after reading them unless they are mapped."""
        memory = self._memory.numpy()
        descriptor = packed.file.fileno()

        def read(start: int) -> bytes:
            part = memory[start : start + _READ]
            if not self.is_mapped:
                _fill(part, descriptor, packed.begin + start)
            return _sums(part)

        digest = sha256()
        with ThreadPoolExecutor(min(_MOST_READERS, torch.get_num_threads())) as readers:
            for sums in readers.map(read, range(0, len(memory), _READ)):
                digest.update(sums)
        if digest.hexdigest() != packed.header["sums"]:
            raise CacheError("its tensors are damaged")

    def __getitem__(self, index: int) -> Tensor:
        place = self._places[index]
        part = self._memory[place.start : place.start + place.num_bytes]
        return part.view(_dtype_of(place.dtype)).view(place.shape)


def _fill(part: np.ndarray[Any, np.dtype[np.uint8]], descriptor: int, start: int) -> None:
    """Read bytes of a file. Raises CacheError if it has fewer."""
    left = part.data
    while left:
        count = os.preadv(descriptor, [left], start)
        if not count:
            raise CacheError("it became shorter while it was read")
        left = left[count:]
        start += count


def _is_shared(file: BinaryIO) -> bool:
    """Return whether another process has this file. From then on, others find that this one has.

    The lock lasts as long as any descriptor of the open file; a mapping has one.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = False
    except BlockingIOError:
        found = True
    except OSError:  # a file system without locks
        return False
    fcntl.flock(file, fcntl.LOCK_SH)
    return found


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


class _Mapping(mmap.mmap):
    """A mapping that can be referred to weakly."""


def _map(packed: PackedFile) -> Tensor:
    """Map the pages of a file's tensors for reading: u8[num_bytes].

    A write into them would end the process, so that no process changes what others compute with.
    """
    size = packed.begin + packed.num_bytes
    mapping = _Mapping(packed.file.fileno(), size, prot=mmap.PROT_READ)
    # The system counts pages of files as free memory, which these are not while they are mapped.
    host_memory.held_in_files += packed.num_bytes
    weakref.finalize(mapping, _release, packed.num_bytes)
    return _tensor_of(mapping, packed.begin)


def _release(num_bytes: int) -> None:
    host_memory.held_in_files -= num_bytes


def _new_memory(packed: PackedFile) -> Tensor:
    """Return memory for a copy of a file's tensors, u8[num_bytes], which keeps the file locked."""
    mapping = _Mapping(-1, packed.num_bytes)
    weakref.finalize(mapping, os.close, os.dup(packed.file.fileno()))
    return _tensor_of(mapping, 0)


def _tensor_of(mapping: _Mapping, begin: int) -> Tensor:
    """Return the bytes of a mapping, which stays as long as any tensor of it, in huge pages if it can."""
    pages = np.frombuffer(mapping, np.uint8)
    memory = (ctypes.c_ubyte * (len(pages) - begin)).from_address(pages.ctypes.data + begin)
    memory.pages = pages  # type: ignore[attr-defined]
    return in_huge_pages(torch.frombuffer(memory, dtype=torch.uint8))


def _may_have_huge_pages() -> bool:
    """Return whether the memory of this process may have huge pages."""
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _has_huge_pages(memory: Tensor) -> bool:
    """Return whether the system has mapped a file in huge pages: it depends on its version and the disk."""
    first = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE - memory.data_ptr()
    num_pages = (len(memory) - first) // _HUGE_PAGE
    if sys.platform != "linux" or num_pages < 1:
        return False
    num_probes = min(_NUM_PROBES, num_pages)
    for probe in range(num_probes):
        int(memory[first + num_pages * probe // num_probes * _HUGE_PAGE])
    huge = _huge_bytes(memory.data_ptr())
    return huge >= num_probes * 3 // 4 * _HUGE_PAGE


def _huge_bytes(address: int) -> int:
    """Return how many bytes of the mapping around an address are in huge pages of its file."""
    is_inside = False
    found = 0
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                name, *values = line.split()
                if "-" in name and not name.endswith(":"):
                    if is_inside:
                        break
                    start, end = (int(part, 16) for part in name.split("-"))
                    is_inside = start <= address < end
                elif is_inside and name in ("FilePmdMapped:", "ShmemPmdMapped:"):
                    found += int(values[0]) * 1024
    except (OSError, ValueError):
        return 0
    return found
