"""Launches on a CPU, recorded once and repeated by one call: what a CUDA graph is on a GPU.

Between two kernels of a small step Python and the start of the threads take as long as the kernels. Here the
threads go through a table of the records that the kernels ran with, by themselves: whoever finds no unit left
waits until those who have one are done, and goes on to the next kernel. A thread that comes late, because the
system had it wait, holds nobody up.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..simd.memory import LINE, call, claim, get_long, pause, seen
from .tasks import Launch, Task, note_launches

_KERNEL, _ENTERED, _LEFT, _RECORD = 0, 8, 16, 24  # bytes, of a row of the table
_COUNTERS = slice(_ENTERED // 8, _RECORD // 8 + 2)  # with the record's own two
_PATIENCE = 2000  # looks at what another thread does, until this one lets others have its core

GRAPH = Task(("table", "num_rows", "row_bytes", "let_others"))
_GRAPH_RECORD = GRAPH.record


@GRAPH.kernel
def _graph_kernel(record):
    """All threads: the kernels of the table, one after the other."""
    args = carray(record, 1, _GRAPH_RECORD)[0]
    for number in range(args.num_rows):
        row = args.table + number * args.row_bytes
        claim(row + _ENTERED)
        call(get_long(row + _KERNEL), row + _RECORD)
        claim(row + _LEFT)
        # No unit is left. Those who have one entered before; whoever enters from now on gets none.
        looks = 0
        while True:
            num_left = seen(row + _LEFT)
            if seen(row + _ENTERED) == num_left:
                break
            looks += 1
            if looks < _PATIENCE or not args.let_others:
                pause()
            else:
                call(args.let_others, 0)


@lru_cache(maxsize=1)
def _let_others() -> int:
    """The address of the system's sched_yield; 0 where there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


class NotRecordableError(Exception):
    """What torch would compute itself, which no table repeats."""


class Recorder(TorchDispatchMode):
    """Inside, launches are noted and not carried out: no memory is touched. Raises NotRecordableError."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.allocated: list[Tensor] = []  # all of them, so that no two have the same address

    def __enter__(self) -> "Recorder":
        super().__enter__()
        note_launches(self.launches)  # last, and ended first: interrupted between, no launch goes missing
        return self

    def __exit__(self, *error: object) -> None:
        note_launches(None)
        super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler, to keep it away from here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ALLOCATIONS and not _is_view(func):
            raise NotRecordableError(str(func))
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(out)
        return out


def _is_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default}


class Graph:
    """What a recorder noted, to be repeated with other inputs of the same shapes.

    Numbers that were allocated inside lie in the memory of `use_memory` then, which graphs that do not run
    at once may share. What the launches read from elsewhere, weights for example, must stay where it is.

    num_bytes: how much memory that takes.
    """

    def __init__(
        self, recorder: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], num_threads: int
    ) -> None:
        self._tasks = [launch.task for launch in recorder.launches]
        self._table = _table(recorder.launches)
        self._flat = self._table.reshape(-1)
        self._counters = self._table[:, _COUNTERS]
        self._record = (self._table.ctypes.data, len(self._table), self._table.strides[0], _let_others())
        self._inputs = [np.flatnonzero(self._flat == tensor.data_ptr()) for tensor in inputs]
        self._num_threads, self._outputs = num_threads, tuple(outputs)
        self._table[:, _column("scratch")] = 0
        scratch = _whole_lines(int(self._table[:, _column("scratch_size")].max()) * num_threads)
        self._lay_out(recorder.allocated, scratch)

    def _lay_out(self, allocated: Sequence[Tensor], start: int) -> None:
        """Find places from `start` on, which tensors share that are not needed at the same time."""
        needed, results = [], [output.data_ptr() for output in self._outputs]
        tensors = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in allocated)
        firsts, sizes = np.array(tensors, np.int64).reshape(-1, 2).T
        # Which tensor every number of the table would be in, and whether it is.
        owners = np.searchsorted(firsts, self._flat, side="right") - 1
        found = np.flatnonzero((owners >= 0) & (self._flat < (firsts + sizes)[owners]))
        found = found[np.argsort(owners[found], kind="stable")]
        for where in np.split(found, np.flatnonzero(np.diff(owners[found])) + 1) if len(found) else ():
            first, num_bytes = tensors[owners[where[0]]]
            begin, end = (int(place) // self._table.shape[1] for place in where[[0, -1]])
            last = len(self._table) if first in results else end
            needed.append((begin, last, first, _whole_lines(num_bytes), where))
        taken: list[tuple[int, int, int]] = []  # start, end, and the last row that needs it
        inside, offsets, self.num_bytes = [], [], start
        places: dict[int, int] = {}
        for begin, last, first, size, where in sorted(needed, key=lambda entry: entry[0]):
            taken = sorted(place for place in taken if place[2] >= begin)
            at = start
            for low, high, _ in taken:
                if at + size <= low:
                    break
                at = high
            taken.append((at, at + size, last))
            inside.append(where)
            offsets.append(self._flat[where] - first + at)
            places[first] = at
            self.num_bytes = max(self.num_bytes, at + size)
        self._inside, self._offsets = np.concatenate(inside), np.concatenate(offsets)
        self._output_offsets = [places[first] for first in results]

    def use_memory(self, memory: Tensor) -> None:  # u8[at least num_bytes], from the start of a cache line
        """Work there from now on."""
        self._flat[self._inside] = memory.data_ptr() + self._offsets
        self._table[:, _column("scratch")] = memory.data_ptr()
        self._outputs = tuple(
            _placed(memory[at:], output)
            for at, output in zip(self._output_offsets, self._outputs, strict=True)
        )

    def launches_of(self, task: Task, **fields: int) -> NDArray[np.intp]:
        """Those of a task, with these values for its fields."""
        chosen = np.array([own is task for own in self._tasks])
        for field, value in fields.items():
            chosen &= self._table[:, _column(field, task)] == value
        return np.flatnonzero(chosen)

    def set(self, launches: NDArray[np.intp], task: Task, **fields: int) -> None:
        """Other values for fields of these launches."""
        for field, value in fields.items():
            self._table[launches, _column(field, task)] = value

    def use_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Read these from now on."""
        for where, tensor in zip(self._inputs, inputs, strict=True):
            self._flat[where] = tensor.data_ptr()

    def replay(self) -> tuple[Tensor, ...]:
        """Launch everything. Returns the outputs, which the next replay overwrites."""
        self._counters.fill(0)
        GRAPH.run(self._num_threads, *self._record)
        return self._outputs


def _placed(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor at the start of this memory, of the same shape and strides."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
    return memory[: span * like.itemsize].view(like.dtype).as_strided(like.shape, like.stride())


def _table(launches: Sequence[Launch]) -> NDArray[np.int64]:
    """Every launch in a row of whole cache lines."""
    longs = max(_RECORD + len(launch.record) for launch in launches)
    size = _whole_lines(longs) // 8
    room = np.zeros(len(launches) * size + LINE // 8, np.int64)
    start = -room.ctypes.data % LINE // 8
    table = room[start : start + len(launches) * size].reshape(len(launches), size)
    for row, (task, record) in zip(table, launches, strict=True):
        row[_KERNEL // 8] = task.address
        row[_RECORD // 8 : (_RECORD + len(record)) // 8] = np.frombuffer(record, np.int64)
    return table


def _column(field: str, task: Task = GRAPH) -> int:
    """Where a field is in a row; those at the start are the same for every task."""
    return _RECORD // 8 + task.fields.index(field)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
