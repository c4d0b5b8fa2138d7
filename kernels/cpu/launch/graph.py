"""Recorded steps: launches on a CPU, recorded once and replayed by one call, as a CUDA graph is on a GPU.

In a small step, Python and the start of the threads take as long as the kernels. A replay starts the threads
once. They go through a table of the records that the kernels were launched with: a thread that finds no unit
left waits until the others have finished theirs, and goes on to the next kernel. A thread that the system
delays holds up none of the others.

A call of Python within a step, such as an exchange with other processes, has a row of the table too, so that
what it reads and writes keeps its place until it is over. A replay goes through the rows before it, calls it,
and goes on behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...steps import MOST_CALL_TENSORS, NotRecordableError, note_calls
from ..target import LINE
from .tasks import Launch, Task, note_launches
from .threads import threads

# byte offsets in a row of the table
ROW_KERNEL = 0
ROW_ENTERED = 8
ROW_LEFT = 16
ROW_RECORD = 24
_COUNTERS = slice(ROW_ENTERED // 8, ROW_RECORD // 8 + 2)  # these and the record's own two

GRAPH = Task("launch.graph.graph", ("table", "threads"), ("num_rows", "row_bytes"))

CALL = Task(
    "launch.graph.call", [f"tensor_{i}" for i in range(MOST_CALL_TENSORS)]
)  # its row has no kernel: it is Python's

Call = tuple[Callable[..., None], tuple[Tensor, ...]]


class Recorder(TorchDispatchMode):
    """A context in which launches are recorded, not executed, and no memory is touched.

    Only allocations such as `empty` are allowed. An operation of torch that computes raises
    NotRecordableError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.allocated: list[Tensor] = []  # kept alive, so that no two have the same address
        self.calls: list[Call] = []

    def __enter__(self) -> "Recorder":
        super().__enter__()
        note_calls(self._note_call)
        note_launches(self.launches)  # last, and ended first: an interrupt between loses no launch
        return self

    def __exit__(self, *error: object) -> None:
        note_launches(None)
        note_calls(None)
        super().__exit__(*error)

    def _note_call(self, call: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
        """Note a call in a row of its own."""
        self.calls.append((call, tensors))
        given = dict(zip(CALL.pointers, tensors, strict=False))
        CALL.run(1, scratch_size=0, **(dict.fromkeys(CALL.pointers) | given))

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
    """Recorded launches, to be replayed with other inputs of the same shapes.

    Tensors allocated during the recording lie in the memory given to `use_memory`. Graphs that never run
    concurrently may share this memory. Everything else that the launches read, such as weights, must stay at
    its address.

    num_bytes: the size of the memory for `use_memory`.
    """

    def __init__(
        self, recorder: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], num_threads: int
    ) -> None:
        self._tasks = [launch.task for launch in recorder.launches]
        self._table = _table(recorder.launches)
        self._flat = self._table.reshape(-1)
        self._counters = self._table[:, _COUNTERS]
        call_rows = self.launches_of(CALL).tolist()
        self._runs = self._runs_between(call_rows)
        starts = range(0, len(self._flat), self._table.shape[1])
        # Where the table holds pointers.
        self._pointers = np.array(
            [
                start + column(name, task)
                for start, task in zip(starts, self._tasks, strict=True)
                for name in task.pointers
            ]
        )
        self._are_read_late = np.array(
            [name in task.read_late for task in self._tasks for name in task.pointers]
        )
        self._inputs = [self._pointers_into(tensor) for tensor in inputs]
        self._num_threads = num_threads
        self._outputs = tuple(outputs)
        scratch = _whole_lines(int(self._table[:, column("scratch_size")].max()) * num_threads)
        self._lay_out(recorder.allocated, scratch)
        self._calls = [_RecordedCall(do, list(tensors), {}, {}) for do, tensors in recorder.calls]
        if self._calls:
            self._find_tensors(call_rows, inputs)

    def _runs_between(self, call_rows: list[int]) -> list[tuple[int, int, int]]:
        """Return the address, the number and the bytes of the rows before each call and behind the last."""
        row_bytes = self._table.strides[0]
        starts = [0, *(row + 1 for row in call_rows)]
        ends = [*call_rows, len(self._table)]
        return [
            (self._table.ctypes.data + start * row_bytes, end - start, row_bytes)
            for start, end in zip(starts, ends, strict=True)
        ]

    def _find_tensors(self, call_rows: list[int], inputs: Sequence[Tensor]) -> None:
        """Find where each call's tensors will be: in the memory of the step, or among its inputs."""
        offsets = dict(zip(self._inside.tolist(), self._offsets.tolist(), strict=True))
        for recorded, row in zip(self._calls, call_rows, strict=True):
            for number, tensor in enumerate(recorded.tensors):
                place = row * self._table.shape[1] + column(CALL.pointers[number], CALL)
                if place in offsets:
                    recorded.offsets[number] = offsets[place]
                    continue
                for own, given in enumerate(inputs):
                    if given.data_ptr() <= tensor.data_ptr() < given.data_ptr() + given.nbytes:
                        assert given.shape == tensor.shape, "a call gets whole inputs"
                        recorded.inputs[number] = own

    def _pointers_into(self, tensor: Tensor) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return which pointers point into a tensor, and how far from its start."""
        offsets = self._flat[self._pointers] - tensor.data_ptr()
        found = (offsets >= 0) & (offsets < tensor.nbytes)
        return self._pointers[found], offsets[found]

    def _lay_out(self, allocated: Sequence[Tensor], start: int) -> None:
        """Place the tensors from `start` on; those that are not needed at the same time share memory."""
        needed = []
        results = [output.data_ptr() for output in self._outputs]
        tensors = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in allocated)
        firsts, sizes = np.array(tensors, np.int64).reshape(-1, 2).T
        # Which tensor each pointer would point into, and whether it does.
        addresses = self._flat[self._pointers]
        owners = np.searchsorted(firsts, addresses, side="right") - 1
        found = np.flatnonzero((owners >= 0) & (addresses < (firsts + sizes)[owners]))
        found = found[np.argsort(owners[found], kind="stable")]
        for group in np.split(found, np.flatnonzero(np.diff(owners[found])) + 1) if len(found) else ():
            first, num_bytes = tensors[owners[group[0]]]
            where = self._pointers[group]
            begin, end = (int(place) // self._table.shape[1] for place in where[[0, -1]])
            is_kept = first in results or bool(self._are_read_late[group].any())
            last = len(self._table) if is_kept else end
            needed.append((begin, last, first, _whole_lines(num_bytes), where))
        taken: list[tuple[int, int, int]] = []  # start, end, and the last row that needs it
        inside = []
        offsets = []
        self.num_bytes = start
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
        self._inside = np.concatenate(inside)
        self._offsets = np.concatenate(offsets)
        self._output_offsets = [places[first] for first in results]

    def use_memory(self, memory: Tensor) -> None:  # u8[at least num_bytes], from the start of a cache line
        """Place the allocated tensors and the scratch memory in this memory from now on."""
        self._flat[self._inside] = memory.data_ptr() + self._offsets
        self._table[:, column("scratch")] = memory.data_ptr()
        self._outputs = tuple(
            _placed(memory[at:], output)
            for at, output in zip(self._output_offsets, self._outputs, strict=True)
        )
        for recorded in self._calls:
            for number, at in recorded.offsets.items():
                recorded.tensors[number] = _placed(memory[at:], recorded.tensors[number])

    def launches_of(self, task: Task, **fields: int) -> NDArray[np.intp]:
        """Return the launches of a task in which these fields have these values."""
        chosen = np.array([own is task for own in self._tasks])
        for field, value in fields.items():
            chosen &= self._table[:, column(field, task)] == value
        return np.flatnonzero(chosen)

    def set(self, launches: NDArray[np.intp], task: Task, **fields: int) -> None:
        """Set fields of these launches."""
        for field, value in fields.items():
            self._table[launches, column(field, task)] = value

    def use_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Read these inputs in later replays."""
        for (where, offsets), tensor in zip(self._inputs, inputs, strict=True):
            self._flat[where] = tensor.data_ptr() + offsets
        for recorded in self._calls:
            for number, own in recorded.inputs.items():
                recorded.tensors[number] = inputs[own]

    def replay(self) -> tuple[Tensor, ...]:
        """Launch everything. Return the outputs. The next replay overwrites them."""
        self._counters.fill(0)
        for (address, num_rows, row_bytes), recorded in zip_longest(self._runs, self._calls):
            # The threads are asked for at each replay, as a forked process has others.
            own = threads().address
            GRAPH.run(self._num_threads, table=address, threads=own, num_rows=num_rows, row_bytes=row_bytes)
            if recorded is not None:
                recorded.call(*recorded.tensors)
        return self._outputs


@dataclass(slots=True)
class _RecordedCall:
    """A call of Python in a recorded step, and the tensors that the next replay gives it.

    offsets: of those in the memory of the step, by their number. inputs: which input others are.
    """

    call: Callable[..., None]
    tensors: list[Tensor]
    offsets: dict[int, int]
    inputs: dict[int, int]


def _placed(memory: Tensor, like: Tensor) -> Tensor:
    """Return a tensor at the start of this memory, of the same shape and strides."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
    return memory[: span * like.itemsize].view(like.dtype).as_strided(like.shape, like.stride())


def _table(launches: Sequence[Launch]) -> NDArray[np.int64]:
    """Write each launch to a row of whole cache lines."""
    longs = max(ROW_RECORD + len(launch.record) for launch in launches)
    size = _whole_lines(longs) // 8
    room = np.zeros(len(launches) * size + LINE // 8, np.int64)
    start = -room.ctypes.data % LINE // 8
    table = room[start : start + len(launches) * size].reshape(len(launches), size)
    for row, (task, record) in zip(table, launches, strict=True):
        row[ROW_KERNEL // 8] = 0 if task is CALL else task.code.address
        row[ROW_RECORD // 8 : (ROW_RECORD + len(record)) // 8] = np.frombuffer(record, np.int64)
    return table


def column(field: str, task: Task = GRAPH) -> int:
    """Return the index of a field in a row of launches. The first fields are the same for every task."""
    return ROW_RECORD // 8 + task.fields.index(field)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
