"""Tasks: numba kernels that run on several threads.

A kernel is a function of the address of a record, its arguments. All threads run it at once; each claims
units of work until none is left, so that none waits for a slow one.
"""

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from . import code_cache
from .machine_code import MachineCode, machine_code
from .threads import threads

# The first fields of every record: two counters, and what all threads share.
_COMMON = [(name, "i8") for name in ("next_unit", "next_thread", "num_units", "scratch", "scratch_size")]
# byte offsets of the counters
NEXT_UNIT = 0
NEXT_THREAD = 8


Field = torch.Tensor | float | None


class Task:
    """A kernel and the fields of its record: int64 fields, beginning with pointers, and then float64 fields.

    name: the name of the kernel: the module below `compiled` that defines it, and its own name.
    read_late: pointers to memory that a thread may read before it knows whether any unit is left. In a
        recorded step, other threads may then be several kernels ahead, so this memory is not reused before
        the step's end.
    """

    def __init__(
        self,
        name: str,
        pointers: Sequence[str],
        ints: Sequence[str] = (),
        floats: Sequence[str] = (),
        *,
        read_late: Sequence[str] = (),
    ) -> None:
        self.name = name
        ints = (*pointers, *ints)
        self.pointers = tuple(pointers)
        self.read_late = frozenset(read_late)
        own = [*((name, "i8") for name in ints), *((name, "f8") for name in floats)]
        self.record = np.dtype(_COMMON + own)
        self.fields: tuple[str, ...] = self.record.names or ()
        self._own = (*ints, *floats)  # the fields that a launch gives
        self._layout = struct.Struct(f"={len(_COMMON) + len(ints)}q{len(floats)}d")
        self._local = threading.local()

    @cached_property
    def code(self) -> MachineCode:
        """The kernel's code, loaded at the first launch."""
        return machine_code(self.name)

    def run(self, num_units: int, *, scratch_size: int = 0, **fields: Field) -> None:
        """Launch the kernel for units 0 to num_units - 1 with these fields of its record.

        A pointer is given as a tensor or an address; None is the address 0. Only addresses reach the kernel,
        so the caller must keep tensors alive. Every thread gets its own scratch_size bytes, aligned to a
        cache line.

        Raises TypeError unless exactly the record's fields are given.
        """
        values = self._values(fields)
        num_threads = min(torch.get_num_threads(), num_units)
        scratch = _scratch(num_threads * scratch_size) if scratch_size else 0
        record = getattr(self._local, "record", None)
        if record is None:
            record = self._local.record = ctypes.create_string_buffer(self._layout.size)
        self._layout.pack_into(record, 0, 0, 0, num_units, scratch, scratch_size, *values)
        launches: list[Launch] | None = getattr(_local, "launches", None)
        if launches is not None:
            launches.append(Launch(self, bytes(record)))
        elif num_threads < 2:
            self.code.call(record)
        else:
            threads().run(self.code, record, num_threads)

    def _values(self, fields: Mapping[str, Field]) -> list[int | float]:
        """Order the fields as the record has them, tensors as their addresses."""
        if len(fields) != len(self._own):
            raise TypeError(f"{self.name} takes {', '.join(self._own)}; got {', '.join(fields)}")
        try:
            given = [fields[name] for name in self._own]
        except KeyError as error:
            raise TypeError(f"{self.name} takes {', '.join(self._own)}; {error} is missing") from None
        return [
            value.data_ptr() if isinstance(value, torch.Tensor) else 0 if value is None else value
            for value in given
        ]


class VariantTask(Task):
    """A task whose kernel may be compiled only for some kinds. A launcher calls `require` for its kinds."""

    _kinds: frozenset[int] = frozenset()  # of the code that is loaded
    _is_whole = False
    _earlier: tuple[MachineCode, ...] = ()  # kept, as recorded steps call it

    def require(self, *kinds: int) -> None:
        """Load code for launches with these kinds, unless the loaded code supports them."""
        if not self._is_whole and not self._kinds.issuperset(kinds):
            announced = code_cache.announced.get(self.name, ())
            self._load(self._kinds.union(announced, kinds))

    def _load(self, kinds: frozenset[int] | None) -> None:
        found = machine_code(code_cache.variant(self.name, kinds))
        self._earlier += (found,)
        self.code = found
        self._is_whole = found.kinds is None
        self._kinds = found.kinds or frozenset()

    @cached_property
    def code(self) -> MachineCode:
        """The kernel's code. It supports all kinds, unless a launcher has required some."""
        self._load(None)
        return self._earlier[-1]


class Launch(NamedTuple):
    """One recorded launch of a kernel, as the bytes of its record."""

    task: Task
    record: bytes


def note_launches(launches: list[Launch] | None) -> None:
    """Append the calling thread's launches to this list instead of running them. None ends the recording."""
    _local.launches = launches


def cache_strides(name: str, cache: torch.Tensor | None) -> dict[str, int]:
    """Return the strides of a cache's blocks, tokens and heads, in bytes, as fields of a record."""
    strides = (0, 0, 0) if cache is None else cache.stride()[:3]
    size = 0 if cache is None else cache.itemsize
    kinds = ("block", "token", "head")
    return {f"{name}_{kind}_stride": stride * size for kind, stride in zip(kinds, strides, strict=True)}


def are_contiguous(*tensors: torch.Tensor | None) -> bool:
    """Return whether all tensors are contiguous. None counts as contiguous."""
    return all(x is None or x.is_contiguous() for x in tensors)


_local = threading.local()


def _scratch(size: int) -> int:
    """Return the address of a scratch buffer of `size` bytes, which the calling thread reuses."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < size + 64:
        buffer = _local.buffer = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
    return -(-buffer.data_ptr() // 64) * 64


# Runs: ranges of units that are neighbours in memory, so that a thread reads its weights sequentially. They
# shrink from half a thread's share to single units: guided self-scheduling (Polychronopoulos and Kuck, 1987).
# So no thread waits long for one that is slower, or was interrupted.
@lru_cache(maxsize=4096)
def num_runs(num_units: int, num_threads: int) -> int:
    """Return the number of runs into which num_units units are divided."""
    number = 0
    while first_unit(number, num_units, num_threads) < num_units:
        number += 1
    return number


def first_unit(run: int, num_units: int, num_threads: int) -> int:
    """Return the first unit of a run. If the run does not exist, return num_units or more."""
    first = 0
    while True:
        size = max(1, (num_units - first) // (2 * num_threads))
        if size == 1 or run < num_threads:
            return first + size * run
        first += size * num_threads
        run -= num_threads
