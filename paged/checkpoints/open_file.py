"""OpenFile: a file of tensors that is opened once and read part by part."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ..architectures.hf_config import check_file
from ..base.errors import CheckpointError
from .stored import StoredTensor

_ALL = slice(None)
_WRITABLE = 0x200  # PyBUF_WRITE
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def stamp_of(status: os.stat_result) -> str:
    """Return a file's stamp: times, size and inode identify its version, without reading it."""
    return f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_size} {status.st_ino}"


def last_change(stamp: str) -> int:
    """Return when a stamped file last changed, in nanoseconds since 1970."""
    return max(map(int, stamp.split()[:2]))


class OpenFile:
    """An open file. Use it as a context manager, or close it.

    has_data: whether the file has the data of its tensors, not only the header.
    stamp: identifies this version of the file; see `stamp_of`.

    Raises CheckpointError, which names the file, if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_data = True
        check_file(path, sys.maxsize)  # opening a FIFO would wait for its other end
        try:
            self._stream = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self._descriptor = self._stream.fileno()
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.stamp = stamp_of(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Its tensors can no longer be read."""
        self._stream.close()

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill memory with the file's bytes from `start` on. Raises CheckpointError if too few are left."""
        try:
            while memory and (count := os.preadv(self._descriptor, [memory], start)):
                memory = memory[count:]
                start += count
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        if memory:
            raise CheckpointError(f"{self.path}: became shorter while it was read")

    def read_bytes(self, start: int, count: int) -> bytearray:
        """Return `count` bytes of the file from `start` on. The caller ensures that the file has them."""
        memory = bytearray(count)
        self.read_into(memoryview(memory), start)
        return memory


@dataclass(frozen=True, slots=True)
class FileTensor(StoredTensor):
    """A tensor in an open file, read from there on demand."""

    file: OpenFile
    start: int  # byte of the file

    @property
    def has_data(self) -> bool:
        return self.file.has_data

    def read(self, rows: slice = _ALL, out: Tensor | None = None) -> Tensor:
        if not self.file.has_data:
            raise CheckpointError(f"{self.path}: has a header alone, so that {self.name} cannot be read")
        shape = self.shape
        start = self.start
        if shape and rows != _ALL:
            first, last, _ = rows.indices(shape[0])
            start += first * math.prod(shape[1:]) * self.dtype.itemsize
            shape = [last - first, *shape[1:]]
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device="cpu")
        self.file.read_into(_memory_of(out), start)
        return out

    def read_columns(self, rows: slice, columns: range) -> Tensor:
        """Read consecutive columns of these rows of a matrix, and no other bytes of the file."""
        num_rows, num_columns = self.shape
        if len(columns) == num_columns:
            return self.read(rows)
        size = self.dtype.itemsize
        wanted = range(num_rows)[rows]
        out = torch.empty(len(wanted), len(columns), dtype=self.dtype, device="cpu")
        memory = _memory_of(out)
        for place, row in enumerate(wanted):
            part = memory[place * len(columns) * size : (place + 1) * len(columns) * size]
            self.file.read_into(part, self.start + (row * num_columns + columns.start) * size)
        return out


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, which must stay. numpy() would take four times as long."""
    assert tensor.is_cpu, "files are read into CPU memory"
    assert tensor.is_contiguous(), "files are read into memory without gaps"
    num_bytes = tensor.nbytes
    return _memory_at(tensor.data_ptr(), num_bytes, _WRITABLE) if num_bytes else memoryview(b"")
