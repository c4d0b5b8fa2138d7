"""A stand-in for a GPU that computes: on the CPU, late, and in any order that streams and events allow.

A tensor on the device is a DeviceTensor: it has memory on the CPU, which holds its numbers once the stream
has come so far. Operations and launches, which Triton's interpreter runs, are queued and return at once. They
run when the host waits, or earlier by chance: whatever the host reads, or changes, too soon is wrong.
"""

from __future__ import annotations

import random
import sys
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.support.fake_cuda import NO_KERNEL, FakeMode, few_sizes, load_guard, tensors_in

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)
GIB = 2**30
NOT_YET = 77  # what memory holds before the device has come so far
# Operations whose result the host has to wait for.
_READS = {
    *("_local_scalar_dense", "nonzero", "bincount", "masked_select", "repeat_interleave"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}


_ALIVE: Counter[int] = Counter()  # how many tensors of the program there are of each storage
_UPLOADS: set[int] = set()  # storages that uploads of steps were copied to


def _drop(storage: int) -> None:
    """Take note of a tensor that the program has dropped."""
    _ALIVE[storage] -= 1
    if not _ALIVE[storage]:
        _UPLOADS.discard(storage)


class DeviceTensor(Tensor):
    """A tensor on the device. memory: on the CPU, of the same shape and strides."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> DeviceTensor:
        layout = {"strides": memory.stride(), "storage_offset": memory.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, memory.shape, dtype=memory.dtype, device=GPU, **layout)
        made.memory = memory
        storage = memory.untyped_storage().data_ptr()
        _ALIVE[storage] += 1
        weakref.finalize(made, _drop, storage)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the device outside of `late_cuda`")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def record_stream(self, _: Any) -> None: ...


class Stream:
    """Work in order: functions, and events that other streams or the host have to wait for."""

    cuda_stream, device = 0, GPU

    def __init__(self, gpu: LateCuda) -> None:
        self._gpu, self.queue = gpu, deque[Callable[[], None] | Event]()
        gpu.streams.append(self)

    @property
    def can_run(self) -> bool:
        """Whether there is work, and it does not wait for another stream."""
        return bool(self.queue) and (not isinstance(self.queue[0], Event) or self.queue[0].done)

    def run_one(self) -> None:
        work = self.queue.popleft()
        if not isinstance(work, Event):
            work()

    def query(self) -> bool:
        self._gpu.run_by_chance()
        return not self.queue

    def synchronize(self) -> None:
        if self._gpu.warns:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        self._gpu.run_until(lambda: not self.queue)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.recorded)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    """A point in a stream. `recorded` is that of the last `record`; a wait is for the one known then."""

    def __init__(self, gpu: LateCuda) -> None:
        self._gpu, self.done, self.recorded = gpu, True, self

    def record(self, stream: Stream | None = None) -> None:
        point = self.recorded = Event(self._gpu)
        point.done = False
        (stream or self._gpu.current_stream).queue.append(lambda: setattr(point, "done", True))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._gpu.current_stream).wait_event(self)

    def query(self) -> bool:
        self._gpu.run_by_chance()
        return self.recorded.done

    def synchronize(self) -> None:
        point = self.recorded
        self._gpu.run_until(lambda: point.done)

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Graph:
    """A CUDA graph: work that is noted instead of queued while it is captured.

    A replay runs it in memory that holds nothing of an earlier one: NaN, or bytes of 0x7f. What is captured
    may use the memory that is allocated meanwhile, and what lasts. An upload does not, nor does anything that
    the program has dropped at a replay.
    """

    def __init__(self, gpu: LateCuda) -> None:
        self._gpu, self._work, self._pool = gpu, list[Callable[[], Any]](), dict[int, Tensor]()
        self._used: dict[int, str] = {}  # storages from outside of the pool, and where they are used
        self._handle: Any = None
        self.is_lost = False  # whether the host has waited, or a transfer begun: the device drops the capture

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self._gpu.current_stream is not self._gpu.streams[0], "the default stream cannot be captured"
        assert pool not in self._gpu.recording, "already recording to mempool_id"
        self._gpu.recording.add(pool)
        self._pool, self._gpu.captured = self._gpu.pools.setdefault(pool, {}), self
        self._handle = pool

    def capture_end(self) -> None:
        self._gpu.captured = None
        if self.is_lost:  # torch 2.11 leaves the pool as it is
            raise RuntimeError("operation failed due to a previous error during capture")
        self._gpu.recording.remove(self._handle)

    def lose(self, why: str) -> RuntimeError:
        """Drop the capture. Return the error of the call that no capture allows."""
        self.is_lost = True
        return RuntimeError(f"{why} while a graph is captured, in {_place()}")

    def allocate(self, memory: Tensor) -> None:
        self._pool[memory.untyped_storage().data_ptr()] = memory

    def note(self, work: Callable[[], Any], used: Iterable[Tensor]) -> None:
        for memory in used:
            storage = memory.untyped_storage().data_ptr()
            if storage in self._pool or not memory.numel():
                continue
            if storage in _UPLOADS:
                raise RuntimeError(f"a captured operation reads an upload, in {_place()}")
            self._used.setdefault(storage, _place())
        self._work.append(work)

    def replay(self) -> None:
        for storage, place in self._used.items():
            if _ALIVE[storage] <= 0:
                raise RuntimeError(f"a graph uses memory that has been freed, in {place}")
        self._gpu.num_replays += 1
        self._gpu.enqueue(self._run)

    def _run(self) -> None:
        for memory in self._pool.values():
            if memory.dtype.is_floating_point:
                memory.fill_(float("nan"))
            else:
                memory.view(torch.uint8).fill_(0x7F)
        for work in self._work:
            work()


def _place() -> str:
    """Return the innermost line of the project that is running."""
    frame = sys._getframe(1)
    while frame := frame.f_back:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT / "paged") or file.is_relative_to(ROOT / "kernels"):
            return f"{file.relative_to(ROOT)}:{frame.f_lineno}"
    return "outside the project"


class LateCuda:
    """The device: its streams, and the host's pinned memory. seed: of the order in which work is done."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.eagerness = self._rng.choice([0.0, 0.2, 0.6])  # how much is done before the host waits
        self.streams: list[Stream] = []
        self.current_stream = Stream(self)
        self.num_late = 0  # how much work was still to be done when the host waited
        self.free_bytes = GIB
        # Called before anything is queued, and whenever the host waits. An exception is the device's error.
        self.fault: Callable[[], None] = lambda: None
        self.warns = False  # of waits, as torch.cuda.set_sync_debug_mode("warn") does
        self._pinned: dict[int, Tensor] = {}
        self.captured: Graph | None = None
        self.pools: dict[Any, dict[int, Tensor]] = {}  # the memory of graphs
        self.recording: set[Any] = set()  # pools that captures have begun to use
        self.num_replays = 0

    def enqueue(self, work: Callable[[], Any], used: Iterable[Tensor] = ()) -> None:
        """Queue work on the current stream, or note it for a graph. used: the memory that it works on."""
        self.fault()
        if self.captured is not None:
            self.captured.note(work, used)
            return
        self.current_stream.queue.append(work)
        self.run_by_chance()

    def allocated(self, memory: Any) -> Any:
        """Take note of tensors of memory that was allocated, and return it."""
        if self.captured is not None:
            for tensor in tensors_in([memory]):
                self.captured.allocate(tensor)
        return memory

    def run_by_chance(self) -> None:
        """Run some of what is queued."""
        if self.captured is not None:
            return
        while self._rng.random() < self.eagerness and self._run_one():
            pass

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run what is queued, in an order that is left to chance, until the host need not wait any more."""
        self.fault()
        if self.captured is not None:
            raise self.captured.lose("the host waits")
        self.num_late += sum(len(stream.queue) for stream in self.streams)
        while not is_done():
            assert self._run_one(), "the streams wait for each other"

    def _run_one(self) -> bool:
        able = [stream for stream in self.streams if stream.can_run]
        if able:
            with _disable_current_modes():
                self._rng.choice(able).run_one()
        return bool(able)

    def pin(self, tensor: Tensor) -> Tensor:
        """Take a tensor on the CPU for pinned memory from now on."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in pinned memory."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._pinned

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, this thread sees the device. Only one thread at a time may run."""
        with FakeMode(), _Queueing(self):
            yield

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Inside, this is the current stream."""
        before, self.current_stream = self.current_stream, stream
        try:
            yield
        finally:
            self.current_stream = before


class _Queueing(TorchDispatchMode):
    """Every operation: run on the CPU if all its tensors are there, else queued."""

    def __init__(self, gpu: LateCuda) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        to_gpu = (device := kwargs.get("device")) is not None and device.type == "cuda"
        pin = kwargs.pop("pin_memory", None)
        on_gpu = any(isinstance(tensor, DeviceTensor) for tensor in tensors_in([*args, *kwargs.values()]))
        with _disable_current_modes():
            if not to_gpu and not on_gpu:
                out = func(*args, **kwargs)
                return self._gpu.pin(out) if pin else out
            if name in ("_to_copy", "copy_"):
                source, target = (args[1], args[0].device) if name == "copy_" else (args[0], device or GPU)
                if source.device.type != target.type:
                    return self._transfer(name, args, kwargs)
            if to_gpu:
                kwargs["device"] = torch.device("cpu")
            return self._compute(func, name, args, kwargs)

    def _compute(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gpu = self._gpu
        # What is given on the CPU, such as a scalar, is read now.
        given = tree_map_only(Tensor, _memory_or_copy, (args, kwargs))
        if name in _READS:
            gpu.current_stream.synchronize()
        if name in NO_KERNEL:
            return _on_gpu(gpu.allocated(func(*given[0], **given[1])))
        if name in _READS or func.is_view:
            return _on_gpu(func(*given[0], **given[1]))
        used = [*tensors_in([*given[0], *given[1].values()])]
        if func._schema.is_mutable:
            run = _copy_in_another_order if name == "index_copy_" else func
            gpu.enqueue(lambda: run(*given[0], **given[1]), used)
            return kwargs.get("out", args[0])
        shapes, options = tree_map_only(Tensor, _shape_of, given)
        if "device" in options:
            options["device"] = torch.device("meta")
        outs = gpu.allocated(tree_map_only(Tensor, _memory_like, func(*shapes, **options)))

        def work() -> None:
            made = func(*given[0], **given[1])
            for out, result in zip(tensors_in([outs]), tensors_in([made]), strict=True):
                out.copy_(result)

        gpu.enqueue(work, used)
        return _on_gpu(outs)

    def _transfer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue a copy between host and device; wait for it where CUDA does."""
        gpu, into = self._gpu, name == "copy_"
        if gpu.captured is not None:
            raise gpu.captured.lose("a transfer")
        source = args[1] if into else args[0]
        blocking = not (kwargs.get("non_blocking") or (into and len(args) > 2 and args[2]))
        if into:
            out = _memory(args[0])
            blocking = blocking or (out is args[0] and not gpu.is_pinned(out))
        else:
            out = torch.full(source.shape, NOT_YET, dtype=kwargs.get("dtype") or source.dtype)
        is_upload = not isinstance(source, DeviceTensor)
        # Pageable memory is staged at once; pinned memory is read when the copy runs.
        numbers = source.clone() if is_upload and not gpu.is_pinned(source) else _memory(source)
        gpu.enqueue(lambda: out.copy_(numbers))
        if blocking:
            gpu.current_stream.synchronize()
        if into:
            return args[0]
        if is_upload and not blocking:
            _UPLOADS.add(out.untyped_storage().data_ptr())
        return DeviceTensor(out) if is_upload else out if blocking else gpu.pin(out)


def _memory(tensor: Tensor) -> Tensor:
    return tensor.memory if isinstance(tensor, DeviceTensor) else tensor


def _memory_or_copy(tensor: Tensor) -> Tensor:
    return tensor.memory if isinstance(tensor, DeviceTensor) else tensor.clone()


def _copy_in_another_order(target: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """Compute `index_copy_`. Of rows with the same index any may stay on a GPU, and the first does here."""
    target.index_copy_(dim, index.flip(0), source.flip(dim))


def _shape_of(memory: Tensor) -> Tensor:
    return torch.empty_strided(memory.shape, memory.stride(), dtype=memory.dtype, device="meta")


def _memory_like(shape: Tensor) -> Tensor:
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype).fill_(NOT_YET)


def _on_gpu(values: Any) -> Any:
    return tree_map_only(Tensor, DeviceTensor, values)


def _queued_launch(gpu: LateCuda, run: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(value: Any) -> Any:
        if isinstance(value, TensorDescriptor):
            return TensorDescriptor(on_cpu(value.base), value.shape, value.strides, value.block_shape)
        if isinstance(value, Tensor):  # a kernel reaches pinned memory too
            assert isinstance(value, DeviceTensor) or gpu.is_pinned(value), "a launch with pageable memory"
        return _memory(value)

    def launch(self: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
        arguments = [on_cpu(value) for value in args], {k: on_cpu(value) for k, value in kwargs.items()}
        given = [getattr(value, "base", value) for value in [*arguments[0], *arguments[1].values()]]
        used = [value for value in given if isinstance(value, Tensor)]

        def work() -> None:
            with warnings.catch_warnings():  # rows that pad a step hold anything
                warnings.simplefilter("ignore", RuntimeWarning)
                run(self, *arguments[0], **arguments[1])

        gpu.enqueue(work, used)

    return launch


@contextmanager
def late_cuda(seed: int) -> Iterator[LateCuda]:
    """Inside the block, torch sees one GPU, which does its work late. Needs Triton's interpreter."""
    load_guard()
    gpu = LateCuda(seed)
    properties = SimpleNamespace(name="late", multi_processor_count=1, total_memory=GIB)
    names = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda _: _Nothing(),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: gpu.run_until(lambda: not any(s.queue for s in gpu.streams)),
        "Stream": lambda *_, **__: Stream(gpu),
        "Event": lambda *_, **__: Event(gpu),
        "CUDAGraph": lambda: Graph(gpu),
        "graph_pool_handle": object,
        "current_stream": lambda *_: gpu.current_stream,
        "mem_get_info": lambda *_: (gpu.free_bytes, GIB),
        "memory_reserved": lambda *_: GIB // 8,
        "max_memory_allocated": lambda *_: GIB // 8,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: setattr(gpu, "warns", mode == "warn"),
        "stream": gpu.stream,
    }
    with ExitStack() as stack:
        stack.enter_context(few_sizes())
        for name, function in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        end = {"_cuda_endAllocateToPool": lambda _, pool: gpu.recording.remove(pool)}
        stack.enter_context(mock.patch.multiple(torch._C, create=True, **end))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda t: gpu.pin(t.clone())))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", lambda t, *_: gpu.is_pinned(t)))
        launch = _queued_launch(gpu, InterpretedFunction.run)
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", launch))
        stack.enter_context(gpu.here())
        yield gpu


class _Nothing:
    """torch.cuda.device of the only device; entered again and again."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
