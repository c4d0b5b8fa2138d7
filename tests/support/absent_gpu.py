"""A GPU that is not here: kernels are compiled for it, on CPU tensors, instead of launched."""

import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

DATA_CENTER_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CONSUMER_TARGETS = {
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
TARGETS = DATA_CENTER_TARGETS | CONSUMER_TARGETS


class AbsentGPU:
    """The part of a Triton driver that compiling needs; launching is impossible."""

    launcher_cls = None
    utils = None
    _numbers = itertools.count()

    def __init__(self, target: str) -> None:
        self.target = TARGETS[target]
        self.number = next(self._numbers)  # Triton caches by device: none finds what another has

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int | None = None) -> int:  # noqa: ARG002
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return divmod(self.target.arch, 10) if isinstance(self.target.arch, int) else (9, 4)

    def map_python_to_cpp_type(self, _: str) -> str:
        return "int"


class Launch(NamedTuple):
    """A launched kernel, the key of the binary it takes, and the binary, if it was compiled."""

    kernel: str
    key: str
    binary: Any | None


def never(_: str) -> bool:
    """Skip nothing."""
    return False


def always(_: str) -> bool:
    """Compile nothing."""
    return True


@contextmanager
def compiling(gpu: str | AbsentGPU, skip: Callable[[str], bool] = never) -> Iterator[list[Launch]]:
    """Compile for a GPU, or a target's, what is launched inside the block, unless `skip` is true of its key.

    Yields the launches as they come. As in Triton's own caches a key is made of all that a binary follows
    from: the source of the kernel and of what it calls, arguments as far as they are specialised, options,
    target and compiler.
    """
    launches: list[Launch] = []
    run, compile_now = JITFunction.run, JITFunction._do_compile

    @functools.wraps(run)
    def note_launch(self: JITFunction, *args: Any, **kwargs: Any) -> Launch:
        is_launch, kwargs["warmup"] = not kwargs["warmup"], True
        launch = run(self, *args, **kwargs)
        if is_launch:
            launches.append(launch)
        return launch

    @functools.wraps(compile_now)
    def compile_or_skip(
        self: JITFunction, jit_key: Any, signature: Any, device: int, constants: Any, options: Any, *rest: Any
    ) -> Launch:
        cache, _, _, backend, _ = self.device_caches[device]
        source = self.ASTSource(self, signature, constants, rest[0])
        parts = triton.__version__, source.hash(), backend.hash(), options.hash()
        key, binary = hashlib.sha256("-".join(parts).encode()).hexdigest(), None
        if not skip(key):
            binary = compile_now(self, jit_key, signature, device, constants, options, *rest)
        elif knobs.compilation.listener is not None:
            knobs.compilation.listener()  # as Triton does when a binary is ready
        cache[jit_key] = launch = Launch(self.fn.__name__, key, binary)
        return launch

    driver.set_active(AbsentGPU(gpu) if isinstance(gpu, str) else gpu)
    JITFunction.run, JITFunction._do_compile = note_launch, compile_or_skip
    try:
        yield launches
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_now
