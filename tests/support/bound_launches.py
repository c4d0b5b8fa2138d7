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
    DTYPES,
    ROTARY_CASES,
    has_case,
    launch_attention,
    launch_others,
    launch_rotary_store_kv,
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
    metadata = SimpleNamespace(shared=50_000, num_warps=4)

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
    yield "others", lambda: launch_others(KERNELS, torch.bfloat16)


def compare(target: str) -> dict[str, Any]:
    """Compare the launches of second calls with those of first calls, which Triton dispatches."""
    found: dict[str, Any] = {"calls": 0, "launches": 0, "dispatched": 0, "differ": []}
    with two(target) as gpus:
        for name, call in calls_of(target):
            first, num_first = gpus.during(call)
            second, num_second = gpus.during(call)
            assert len(first) >= num_first > 0
            found["calls"] += 1
            found["launches"] += len(second)
            found["dispatched"] += num_second
            if first != second:
                found["differ"].append(name)
    return found


def change() -> dict[str, list[Any]]:
    """Return, for what may change between calls, whether Triton is asked again, and the stream."""
    weight = torch.ones(64, dtype=torch.bfloat16)
    long = torch.ones(2 * 64 + 8, dtype=torch.bfloat16)
    aligned, odd = long[:128].view(2, 64), long[1:129].view(2, 64)
    found: dict[str, list[Any]] = {}
    with two("sm_90") as gpus:

        def norm(name: str, x: torch.Tensor = aligned) -> None:
            launched, num_dispatched = gpus.during(lambda: KERNELS.rms_norm(x, weight, 1e-6))
            found[name] = [num_dispatched, launched[0][3], launched[0][1]]

        norm("first")
        norm("second")
        norm("an odd address", odd)
        norm("an address as at first")
        gpus.stream = 8
        norm("another stream")
        gpus.current = 1
        norm("another device, first")
        norm("another device, second")
        gpus.current = 0
        norm("the first device again")
        for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            hook.add(print_nothing)
            norm(f"a hook {len(found)}")
            hook.remove(print_nothing)
        norm("no hook")
    names = {place: i for i, place in enumerate(dict.fromkeys(place for *_, place in found.values()))}
    return {name: [*rest, names[place]] for name, (*rest, place) in found.items()}


def print_nothing(_: Any) -> None:
    """Do what a profiler's hook does, and nothing."""


if __name__ == "__main__":
    with TrustedContents():  # the tensors hold nothing
        results = {target: compare(target) for target in ("sm_90", "gfx942")}
        json.dump({**results, "changes": change()}, sys.stdout)
