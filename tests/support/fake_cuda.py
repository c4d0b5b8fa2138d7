"""Two CUDA devices without a GPU, on which the whole engine runs, and a record of what it asks of them.

A tensor on them is torch's FakeTensor: a device, a dtype and a shape without memory. Tensors on the CPU are
real. Kernels are specialised for a target instead of launched. No number is computed, but an operation or a
launch that mixes devices raises, launchers check their arguments as on a GPU, and each launch, upload,
download and wait of the host is recorded.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import JITFunction

from tests.support.absent_gpu import AbsentGPU, always, compiling

ROOT = Path(__file__).parents[2]
NUM_DEVICES = 2
GIB = 2**30
# Operations of torch that allocate or rename, and launch nothing.
NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "alias", "lift_fresh"}
_COPIES = {"_to_copy", "copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# Operations that read from the device what their result's size or the host depends on, and how often.
_READS = {"_local_scalar_dense": 1, "nonzero": 1, "bincount": 2}
_READ_AS = {"_local_scalar_dense": "item"}  # item(), bool(), int() and the like


class Event(NamedTuple):
    """What the engine asked of the device.

    kind: "launch" of a Triton kernel, "operation" of torch, "replay" of a graph and what is "within" it,
        "upload", "download", or "wait" of the host for the device; a blocking copy is two events.
    name: the kernel, the operation, how or for what something is transferred, or why the host waits.
    place: the file and function of the project that asked for a transfer or a wait; "" for the others.
    in_transfer: of a wait that is a part of the transfer before it.
    """

    kind: str
    name: str
    place: str
    in_transfer: bool = False


def lacks() -> str | None:
    """Return why there can be no fake device here, or None."""
    return None if shutil.which("g++") else "the fake CUDA device needs g++, which is not installed"


@functools.cache  # once in a process
def load_guard() -> None:
    """Compile the guard and load it: a second."""
    root, source = Path(torch.__file__).parent, Path(__file__).with_name("fake_guard.cpp")
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/guard.so"
        subprocess.run(["g++", *flags, str(source), "-o", library, "-lc10"], check=True)
        torch.ops.load_library(library)


class FakeCuda:
    """The devices: which of them is current, what was asked of them, and what a download holds.

    token: every integer that is downloaded. Other numbers are 0.5, and truth values True.
    """

    def __init__(self) -> None:
        self.current = 0
        self.token = 1
        self.events: list[Event] = []
        self.captured: _Graph | None = None  # that records what is launched
        self._pinned: dict[int, Tensor] = {}  # kept, so that no address is used again

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def note(self, kind: str, name: str) -> None:
        """Record an event."""
        if self.captured is not None:
            if kind not in ("launch", "operation"):
                raise RuntimeError(f"a {kind} ({name}) while a graph is captured, in {_place()}")
            self.captured.events.append(Event("within", name, ""))
            return
        self.events.append(Event(kind, name, "" if kind in ("launch", "operation") else _place()))

    def note_transfer(self, kind: str, name: str, *, blocking: bool) -> None:
        """Record an upload or a download, and the host's wait for it."""
        place = _place()
        if self.captured is not None:
            raise RuntimeError(f"a {kind} ({name}) while a graph is captured, in {place}")
        self.events.append(Event(kind, name, place))
        if blocking:
            self.events.append(Event("wait", f"{name} {kind}", place, in_transfer=True))

    def note_copy(self, source: Tensor, target: torch.device, *, blocking: bool, pinned: bool) -> None:
        """Record a copy to another device. pinned: whether its part on the host is in pinned memory."""
        kind = "upload" if target.type == "cuda" else "download"
        if source.device.type == target.type:
            raise RuntimeError(f"a copy from {source.device} to {target}: an engine has one device")
        # From or to pageable memory the driver stages a copy, for which the host may have to wait.
        name = "blocking" if blocking else "asynchronous" if pinned else "staged"
        self.note_transfer(kind, name, blocking=blocking)

    def downloaded(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return what a download holds. Words of 32 bits are pairs, which may be integers of 64."""
        if dtype == torch.int32:
            words = torch.tensor([self.token, 0], dtype=dtype).repeat(-(-shape.numel() // 2))
            return words[: shape.numel()].view(shape)
        return torch.full(shape, self.value(dtype), dtype=dtype)

    def value(self, dtype: torch.dtype) -> float | bool:
        """Return what every element of a download is, where it is not 32 bits of another."""
        return 0.5 if dtype.is_floating_point else True if dtype == torch.bool else self.token

    def pin(self, tensor: Tensor) -> Tensor:
        """Take a tensor on the CPU for pinned memory from now on."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in pinned memory."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._pinned


def _place() -> str:
    """Return the innermost function of the project that is running, with its file."""
    frame = sys._getframe(1)
    while frame := frame.f_back:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT / "paged"):
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            return f"{file.relative_to(ROOT)} {function}".replace("paged/kernels/", "kernels/")
    return "outside the project"


class FakeMode(FakeTensorMode):
    avoid_device_init = True  # whatever torch.cuda.is_available() says


class _Recorder(TorchDispatchMode):
    """Every operation: run on the CPU if all its tensors are there, else faked and recorded."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        device = kwargs.get("device")
        if device is not None and device.type == "cuda" and device.index is None:
            device = kwargs["device"] = torch.device("cuda", self._cuda.current)
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        to_gpu = device is not None and device.type == "cuda"
        if not to_gpu and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            pin = kwargs.pop("pin_memory", None)
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
            return self._cuda.pin(out) if pin else out
        if name in _COPIES:
            return self._copy(func, name, args, kwargs)
        if name in _INDEXING:
            self._check_indices(args)
        if name in _READS:
            return self._read(name, args, kwargs)
        out = func(*args, **kwargs)
        if not func.is_view and name not in NO_KERNEL and any(t.numel() for t in tensors_in([out])):
            self._cuda.note("operation", name)
        return out

    def _copy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy or convert. What comes from the device to the CPU is a real tensor."""
        cuda, into = self._cuda, name == "copy_"
        source = args[1] if into else args[0]
        target = args[0].device if into else kwargs.get("device") or source.device
        non_blocking = kwargs.get("non_blocking") or (into and len(args) > 2 and args[2])
        if source.device == target:
            cuda.note("operation", name)
            return func(*args, **kwargs)
        # torch downloads into new pinned memory if it need not wait.
        pinned = cuda.is_pinned(args[0] if into and target.type == "cpu" else source)
        pinned = pinned or (target.type == "cpu" and not into and bool(non_blocking))
        cuda.note_copy(source, target, blocking=not non_blocking, pinned=pinned)
        if target.type == "cuda":
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            if into:
                return args[0].copy_(cuda.downloaded(source.shape, args[0].dtype))
            out = cuda.downloaded(source.shape, kwargs.get("dtype") or source.dtype)
        return cuda.pin(out) if non_blocking else out

    def _check_indices(self, args: tuple[Any, ...]) -> None:
        """Record the indices that torch would upload; refuse those that it would."""
        for index in tensors_in(args[1]):
            if index.device.type == "cpu":
                self._cuda.note_copy(index, args[0].device, blocking=True, pinned=False)
            elif index.device != args[0].device:
                raise RuntimeError(f"an index on {index.device} into a tensor on {args[0].device}")

    def _read(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a result that depends on the device's numbers."""
        (tensor, *rest), cuda = args, self._cuda
        cuda.note("operation", name)
        for _ in range(_READS[name]):
            cuda.note_transfer("download", _READ_AS.get(name, name), blocking=True)
        if name == "_local_scalar_dense":
            return cuda.value(tensor.dtype)
        if name == "nonzero":  # as if one element were not zero
            return torch.empty(1, tensor.dim(), dtype=torch.int64, device=tensor.device)
        weights, minlength = [*rest, *([None, 0][len(rest) :])]
        assert weights is None, "bincount with weights is not faked"
        return torch.empty(kwargs.get("minlength", minlength), dtype=torch.int64, device=tensor.device)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among values and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class _Driver(AbsentGPU):
    """Triton's driver for the current one of several devices."""

    def __init__(self, target: str, cuda: FakeCuda) -> None:
        super().__init__(target)
        self._cuda = cuda
        self._device_numbers = [next(self._numbers) for _ in range(NUM_DEVICES)]

    def get_current_device(self) -> int:
        return self._device_numbers[self._cuda.current]

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self._cuda.current)


def _checked_launch(cuda: FakeCuda, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap JITFunction.run: every tensor must be where the kernel is launched, or in pinned memory."""

    def launch(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        current = torch.device("cuda", cuda.current)
        for name, value in [*enumerate(args), *kwargs.items()]:
            tensor = getattr(value, "base", value)  # of a descriptor
            if isinstance(tensor, Tensor) and tensor.device != current and not cuda.is_pinned(tensor):
                raise RuntimeError(
                    f"{self.fn.__name__} is launched on {current}, and {name} is on {tensor.device}"
                )
        if not kwargs["warmup"]:
            cuda.note("launch", self.fn.__name__.strip("_").removesuffix("_kernel"))
        return run(self, *args, **kwargs)

    return launch


class _CurrentDevice:
    """torch.cuda.device: inside, this device is the current one."""

    def __init__(self, cuda: FakeCuda, device: Any) -> None:
        self._cuda, self._index = cuda, _index(device, cuda)

    def __enter__(self) -> None:
        self._before, self._cuda.current = self._cuda.current, self._index

    def __exit__(self, *_: object) -> None:
        self._cuda.current = self._before


def _index(device: Any, cuda: FakeCuda) -> int:
    if device is None or isinstance(device, int):
        return cuda.current if device is None else device
    index = torch.device(device).index
    return cuda.current if index is None else index


class _Queue:
    """A stream or an event: whatever it is asked for has happened. Only `synchronize` makes the host wait."""

    cuda_stream = 0

    def __init__(self, cuda: FakeCuda, kind: str) -> None:
        self._cuda, self._kind = cuda, kind
        self.device = torch.device("cuda", cuda.current)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._cuda.note("wait", self._kind)

    def elapsed_time(self, _: _Queue) -> float:
        return 0.0

    def record(self, _: _Queue | None = None) -> None: ...

    def wait(self, _: _Queue | None = None) -> None: ...

    def wait_stream(self, _: _Queue) -> None: ...

    def wait_event(self, _: _Queue) -> None: ...

    def record_event(self, event: _Queue | None = None) -> _Queue:
        return event or _Queue(self._cuda, "event")


class _Graph:
    """A CUDA graph: what was launched while it was captured."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.events = cuda, list[Event]()

    def capture_begin(self, **_: Any) -> None:
        self._cuda.captured = self

    def capture_end(self) -> None:
        self._cuda.captured = None

    def replay(self) -> None:
        self._cuda.events += [Event("replay", "graph", ""), *self.events]


def _torch_cuda(cuda: FakeCuda, target: str) -> dict[str, Any]:
    """Return the functions of torch.cuda as of a machine with these devices."""
    major, minor = divmod(int(target[3:]), 10) if target.startswith("sm_") else (9, 4)
    properties = SimpleNamespace(
        name="fake",
        major=major,
        minor=minor,
        gcnArchName=f"{target}:sramecc+:xnack-",
        multi_processor_count=132,
        total_memory=80 * GIB,
    )
    return {
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: cuda.current,
        "set_device": lambda device: setattr(cuda, "current", _index(device, cuda)),
        "device": lambda device: _CurrentDevice(cuda, device),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_name": lambda *_: "fake",
        "mem_get_info": lambda *_: (64 * GIB, 80 * GIB),
        "memory_reserved": lambda *_: 4 * GIB,
        "memory_allocated": lambda *_: 4 * GIB,
        "max_memory_allocated": lambda *_: 6 * GIB,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: cuda.note("wait", "synchronize"),
        "Stream": lambda *_, **__: _Queue(cuda, "stream"),
        "Event": lambda *_, **__: _Queue(cuda, "event"),
        "CUDAGraph": lambda: _Graph(cuda),
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda *_: _Queue(cuda, "stream"),
        "default_stream": lambda *_: _Queue(cuda, "stream"),
        "stream": lambda _: nullcontext(),
    }


def _data_ptr(tensor: FakeTensor) -> int:
    """Return an address of its own for each storage, aligned as CUDA's allocator aligns."""
    return (tensor.untyped_storage()._cdata // 16 << 20) + tensor.storage_offset() * tensor.element_size()


@contextmanager
def few_sizes() -> Iterator[None]:
    """Inside, engines capture graphs of few sizes, since 33 take a minute, and on streams of this device."""
    from paged.device import cuda_graphs  # here: tests.mutants plants bugs before anything is imported
    from paged.runner import graph_store

    sizes_of = graph_store.capture_sizes

    def few(config: Any) -> list[int]:
        found = sizes_of(config)
        return found if config.cudagraph_capture_sizes is not None else found[:1]

    with (
        mock.patch.object(graph_store, "capture_sizes", few),
        mock.patch.dict(cuda_graphs._streams, clear=True),
    ):
        yield


@contextmanager
def fake_cuda(target: str = "sm_90") -> Iterator[FakeCuda]:
    """Inside the block, torch and Triton see two GPUs of this target."""
    load_guard()
    cuda = FakeCuda()
    with ExitStack() as stack:
        stack.enter_context(few_sizes())
        for name, function in _torch_cuda(cuda, target).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        is_rocm = target.startswith("gfx")
        stack.enter_context(mock.patch.object(torch.version, "hip", "6.4" if is_rocm else None))
        for name, method in {
            "data_ptr": _data_ptr,
            "tolist": lambda tensor: tensor.cpu().tolist(),
            "record_stream": lambda *_: None,
        }.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, method, create=True))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda t: cuda.pin(t.clone())))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", lambda t, *_: cuda.is_pinned(t)))
        stack.enter_context(compiling(_Driver(target, cuda), skip=always))
        stack.enter_context(mock.patch.object(JITFunction, "run", _checked_launch(cuda, JITFunction.run)))
        stack.enter_context(FakeMode(allow_non_fake_inputs=True))
        stack.enter_context(_Recorder(cuda))
        yield cuda
