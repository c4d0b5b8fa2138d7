"""What launchers do in a later call of the same kind, compared with Triton's dispatch; nothing is compiled.

python -m tests.support.bound_launches        # JSON; needs TRITON_INTERPRET unset
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from tests.support.absent_gpu import AbsentGPU
from tests.support.kernel_launches import (
    ATTENTION_CASES,
    CODED_CASES,
    DTYPES,
    NUM_CODED_ROWS,
    ROTARY_CASES,
    has_case,
    launch_attention,
    launch_coded_linear,
    launch_coded_rows,
    launch_others,
    launch_rotary_store_kv,
    packed_of,
    targets_of,
)

KERNELS = load_kernels("triton")


class Gpus(AbsentGPU):
    """Two GPUs, of which one is current, with streams, and a record of what is launched on them."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.devices = [self.number, next(self._numbers)]
        self.current, self.stream = 0, 7
        self.launched: list[tuple[Any, ...]] = []
        self.num_dispatched = 0

    def get_current_device(self) -> int:
        return self.devices[self.current]

    def get_current_stream(self, device: int | None = None) -> int:
        return 100 * self.devices.index(device if device is not None else -1) + self.stream

    def during(self, call: Callable[[], Any]) -> tuple[list[tuple[Any, ...]], int]:
        """Return what a call launches, and how often it asks Triton's dispatch."""
        self.launched, self.num_dispatched = [], 0
        call()
        return self.launched, self.num_dispatched


class _Compiled(CompiledKernel):
    """A compiled kernel that notes how it is launched."""

    module, function, packed_metadata, n_regs = None, 0, (), 64
    metadata = SimpleNamespace(shared=70_000, num_warps=4)  # 3 on an SM of sm_90

    def __init__(self, name: str, gpus: Gpus) -> None:
        self._name, self._gpus = name, gpus

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *args: Any) -> None:
        *grid, stream, _, _, _, _, _ = args[:9]
        self._gpus.launched.append(
            (self._name, id(self), grid, stream, [_described(arg) for arg in args[9:]])
        )


def _described(arg: Any) -> Any:
    if isinstance(arg, TensorDescriptor):
        return _described(arg.base), arg.shape, arg.strides, arg.block_shape
    if isinstance(arg, torch.Tensor):
        return arg.shape, arg.stride(), arg.dtype, arg.data_ptr() % 16
    return type(arg), arg


@contextmanager
def two(target: str) -> Iterator[Gpus]:
    """Launch on two GPUs of this target that are not here."""
    gpus, run = Gpus(target), JITFunction.run

    def compile_nothing(self: JITFunction, key: Any, _: Any, device: int, *__: Any) -> Any:
        kernel = self.device_caches[device][0][key] = _Compiled(self.fn.__name__, gpus)
        return kernel

    def dispatch(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        gpus.num_dispatched += not kwargs["warmup"]
        return run(self, *args, **kwargs)

    driver.set_active(gpus)
    with mock.patch.multiple(JITFunction, run=dispatch, _do_compile=compile_nothing):
        yield gpus


def calls_of(target: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield calls of every launcher, by name."""
    for case in ATTENTION_CASES:
        if has_case(target, case):
            head_dim, group, dtype, block_size, options = case
            shape = head_dim, group, DTYPES[dtype], block_size
            yield str(case), lambda s=shape, o=options: launch_attention(KERNELS, *s, **o)
    for *shape, dtype, norm, cache in ROTARY_CASES:
        rest = DTYPES[dtype], norm, 5, cache
        if target not in targets_of(cache):
            continue
        yield f"rotary {shape} {rest}", lambda s=shape, r=rest: launch_rotary_store_kv(KERNELS, *s, *r)
    for case in CODED_CASES:
        weight = packed_of(case)
        for num_rows in NUM_CODED_ROWS.values():
            yield f"{case} {num_rows}", lambda c=case, w=weight, n=num_rows: launch_coded_linear(c, w, n)
        yield f"rows of {case}", lambda c=case, w=weight: launch_coded_rows(c, w, 5)
    yield "others", lambda: launch_others(KERNELS, torch.bfloat16)


def compare(target: str) -> dict[str, Any]:
    """Compare the launches of second calls with those of first calls, which Triton dispatches."""
    found: dict[str, Any] = {"calls": 0, "launches": 0, "dispatched": 0, "differ": [], "programs": 0}
    with two(target) as gpus:
        for name, call in calls_of(target):
            first, num_first = gpus.during(call)
            second, num_second = gpus.during(call)
            assert len(first) >= num_first > 0
            found["calls"] += 1
            found["launches"] += len(second)
            decodes = [grid[0] for kernel, _, grid, *_ in second if kernel == "decode_kernel"]
            found["programs"] = max(found["programs"], *decodes, 0)
            found["dispatched"] += num_second
            if first != second:
                found["differ"].append(name)
    return found


class Norms:
    """Calls of one launcher, by what changes: if Triton is asked, on which stream, and which kernel it is."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus, self._weight = gpus, torch.ones(64, dtype=torch.bfloat16)
        self._calls: dict[str, tuple[int, int, int]] = {}

    def call(self, name: str, memory: torch.Tensor, start: int = 0) -> None:
        """Normalise two rows of this memory."""
        x = memory[start : start + 128].view(2, 64)
        launched, num_dispatched = self._gpus.during(lambda: KERNELS.rms_norm(x, self._weight, 1e-6))
        ((_, kernel, _, stream, _),) = launched
        self._calls[name] = num_dispatched, stream, kernel

    def found(self) -> dict[str, tuple[int, int, int]]:
        """Return the calls, with kernels numbered as they came."""
        kernels = list(dict.fromkeys(kernel for _, _, kernel in self._calls.values()))
        return {name: (*rest, kernels.index(kernel)) for name, (*rest, kernel) in self._calls.items()}


def change() -> dict[str, tuple[int, int, int]]:
    """Return what becomes of a call when addresses, streams, devices and hooks change."""
    memory = torch.ones(136, dtype=torch.bfloat16)
    with two("sm_90") as gpus:
        norms = Norms(gpus)
        norms.call("first", memory)
        norms.call("second", memory)
        norms.call("an odd address", memory, start=1)
        norms.call("an address as at first", memory)
        gpus.stream = 8
        norms.call("another stream", memory)
        gpus.current = 1
        norms.call("another device, first", memory)
        norms.call("another device, second", memory)
        gpus.current = 0
        norms.call("the first device again", memory)
        hooks = {"before": knobs.runtime.launch_enter_hook, "after": knobs.runtime.launch_exit_hook}
        for name, hook in hooks.items():
            hook.add(print_nothing)
            norms.call(f"a hook {name}", memory)
            hook.remove(print_nothing)
        norms.call("no hook", memory)
    return norms.found()


def change_sizes() -> dict[str, tuple[int, int, int]]:
    """Return what becomes of a call on an AMD GPU when its tensors lie in larger memory."""
    little, much = (torch.empty(size, dtype=torch.bfloat16) for size in (128, 2**30))
    with two("gfx942") as gpus:
        norms = Norms(gpus)
        norms.call("first", little)
        norms.call("second", little)
        norms.call("in 2 GiB", much)
        norms.call("in little again", little)
        norms.call("and once more", little)
    return norms.found()


def print_nothing(_: Any) -> None:
    """Do what a profiler's hook does, and nothing."""


if __name__ == "__main__":
    with TrustedContents():  # the tensors hold nothing
        results = {target: compare(target) for target in ("sm_90", "gfx942")}
        json.dump({**results, "changes": change(), "sizes": change_sizes()}, sys.stdout)
