"""Launches that are checked once and kept, so that a later call of the same kind costs little Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from ..checks import in_debug_mode, is_trusted
from .occupancy import blocks_per_sm
from .target import in_interpreter

MOST_COMBINATIONS = 256  # that a launcher keeps: a prompt of another length is another combination
_UNCOMPILED_PROGRAMS = 4
P = ParamSpec("P")
T = TypeVar("T")


def combination(
    tensors: tuple[Tensor | None, ...], *options: object, pair: tuple[Tensor, Tensor] | None = None
) -> tuple[object, ...] | None:
    """Return a key of everything that a call's checks and launch depend on; None if the call must be checked.

    The key has the current device, and each tensor's shape, strides, dtype and device. Outside
    `TrustedContents` it also has what `check_tensor` looks at, and it is None if checks read the contents of
    tensors. Addresses are left to `BoundLaunch`; only for `pair` the key says whether both addresses are
    equal, and multiples of 16. Options are compared together with their types: True is not 1.
    """
    try:
        device = _current_device()
        key = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        if pair is not None:
            first, second = pair[0].data_ptr(), pair[1].data_ptr()
            options = (*options, first == second, (first | second) % 16 == 0)
        if not is_trusted():
            if getattr(tensors[0], "is_cpu", True) or in_debug_mode():
                return None
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            return (device, options, *map(type, options), *key, modes, *map(_memory, tensors))
    except (AttributeError, TypeError, RuntimeError):
        return None  # no tensor, or no GPU: the checks say so
    return (device, options, *map(type, options), *key)


def _memory(tensor: Tensor | None) -> tuple[object, ...] | None:
    """Return what else may be wrong with a tensor, see `check_tensor` and `check_apart`."""
    if tensor is None:
        return None
    held = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    return (type(tensor), tensor.requires_grad, tensor.is_inference(), tensor.layout, tensor.is_nested, held)


class Launches(Generic[P, T]):
    """A launcher's bound launches, by `combination` of arguments. If there are too many, the oldest is
    dropped.

    bind: checks arguments and returns their launches, or raises ValueError.
    """

    def __init__(self, bind: Callable[P, T]) -> None:
        self._bind = bind
        self._kept: dict[object, T] = {}
        self._lock = threading.Lock()

    def find(self, key: tuple[object, ...] | None, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the launches bound for this `combination`. Without any, check the arguments and bind."""
        try:
            bound = self._kept.get(key)
        except TypeError:  # an option that has no hash: the checks refuse it
            bound = key = None
        if bound is not None:
            return bound
        bound = self._bind(*args, **kwargs)
        if key is not None:
            with self._lock:
                if key not in self._kept and len(self._kept) >= MOST_COMBINATIONS:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = bound
        return bound


class _Compiled(NamedTuple):
    """A kernel for tensors that all begin at multiples of 16 bytes, on one device."""

    device: int
    run: Callable[..., None]
    function: int
    metadata: Any
    aligned: tuple[int, ...]  # the tensors whose addresses it was specialised on
    large: tuple[bool, ...] | None  # of an AMD GPU: see `_are_large`


class BoundLaunch:
    """A kernel with its grid and all arguments except tensors. The tensors come first and are passed in
    calls.

    The tensors of all calls must have the same `combination`. The first call goes through Triton's dispatch.
    Later calls launch the compiled kernel directly, on the current stream, because of what Triton's dispatch
    specialises on only addresses can change (and, on AMD GPUs, whether memory is large). They go through the
    dispatch again if this has changed, if an address is not a multiple of 16, if hooks are set, and always in
    the interpreter. Triton's other settings stay as in the first call.

    grid: the grid, or a function that returns it for a compiled kernel (None in the interpreter).
    """

    __slots__ = ("_compiled", "_fixed", "_grid", "_kernel", "_rest")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...] | Callable[[CompiledKernel | None], tuple[int, ...]],
        **fixed: Any,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._fixed = fixed
        self._rest = tuple(fixed[name] for name in kernel.arg_names if name in fixed)
        self._compiled: _Compiled | None = None

    def __call__(self, *tensors: Any) -> None:
        """Launch on these tensors: every one, descriptor or None that the kernel takes, in its order."""
        compiled = self._compiled
        if compiled is not None:
            device, run, function, metadata, aligned, large = compiled
            addresses = 0
            for i in aligned:
                addresses |= tensors[i].data_ptr()
            if not (addresses & 15 or _has_hooks() or (large is not None and large != _are_large(tensors))):
                stream = driver.active.get_current_stream(device)
                run(*self._grid, stream, function, metadata, None, None, None, *tensors, *self._rest)  # type: ignore[misc]
                return
        self._dispatch(tensors)

    def compile(self, *tensors: Any) -> None:
        """Compile the kernel for tensors like these, without launching it."""
        names = self._kernel.arg_names
        arguments = dict(zip(names[: len(tensors)], tensors, strict=True)) | self._fixed
        self._kernel.run(grid=None, warmup=True, **arguments)

    def _dispatch(self, tensors: tuple[Any, ...]) -> None:
        """Launch through Triton, and keep the kernel that it found."""
        kernel = self._kernel
        names = self._kernel.arg_names
        arguments = dict(zip(names[: len(tensors)], tensors, strict=True)) | self._fixed
        grid = self._grid  # another thread may replace it meanwhile, by the same
        if callable(grid):
            found = kernel.run(grid=None, warmup=True, **arguments)
            grid = grid(found if isinstance(found, CompiledKernel) else None)
        self._grid = grid = (*grid, 1, 1)[:3]
        found = kernel[grid](**arguments)
        if not isinstance(found, CompiledKernel):
            return
        aligned = tuple(
            i
            for i, (tensor, parameter) in enumerate(zip(tensors, kernel.params, strict=False))
            if isinstance(tensor, Tensor) and not parameter.do_not_specialize_on_alignment
        )
        if all(tensors[i].data_ptr() % 16 == 0 for i in aligned):
            device = driver.active.get_current_device()
            large = _are_large(tensors) if driver.active.get_current_target().backend == "hip" else None
            self._compiled = _Compiled(
                device, found.run, found.function, found.packed_metadata, aligned, large
            )


def programs_per_sm(compiled: CompiledKernel | None, target: str) -> int:
    """Return how many programs of a kernel run on an SM at once. Launching more programs has no use.

    compiled: the compiled kernel; None in the interpreter, where a few programs loop.
    """
    if compiled is None:
        return _UNCOMPILED_PROGRAMS
    _ = compiled.run  # loads the kernel, before which its registers are not known
    return blocks_per_sm(target, compiled.n_regs, compiled.metadata.shared, compiled.metadata.num_warps)


def _are_large(tensors: tuple[Any, ...]) -> tuple[bool, ...]:
    """Return of each tensor whether offsets into its memory need more than 31 bits."""
    return tuple(x.untyped_storage().nbytes() >= 2**31 for x in tensors if isinstance(x, Tensor))


def _has_hooks() -> bool:
    """Return whether a profiler, say, wants to know of launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))


def _current_device() -> int:
    """Return the number of the GPU that Triton launches on. Raises RuntimeError if it finds none."""
    return -1 if _INTERPRETED else driver.active.get_current_device()


_INTERPRETED = in_interpreter()  # as the kernels, which are made when their modules are imported
