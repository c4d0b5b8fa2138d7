"""The GPU that Triton compiles and launches for. Importing this module needs no Triton."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def in_interpreter() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@contextmanager
def listening(compiled: Callable[[], None]) -> Iterator[None]:
    """Call `compiled` for every kernel that Triton compiles or loads from its disk cache in this context."""
    from triton import knobs

    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **_: compiled()
    try:
        yield
    finally:
        knobs.compilation.listener = before


def current_target() -> str:
    """Return the target that kernels are now compiled for: "interpreter", "sm_90", "gfx942" and the like."""
    if in_interpreter():
        return "interpreter"
    from triton.runtime import driver

    return _target_of(driver.active.get_current_device())


def check_launchable(name: str, tensor: Tensor, *, or_pinned: bool = False) -> None:
    """Raise ValueError unless the tensor is on the current GPU, on which Triton launches.

    or_pinned: whether pinned host memory is accepted too, since the GPU can address it.
    """
    if in_interpreter():
        return
    from triton.runtime import driver

    try:
        current = driver.active.get_active_torch_device()
    except RuntimeError as error:
        raise ValueError(
            f"{name} is on {tensor.device}, and Triton finds no GPU here: use load_kernels('numba') or "
            "load_kernels('torch'), or set TRITON_INTERPRET=1 before paged is imported"
        ) from error
    if tensor.device != current and not (or_pinned and tensor.is_pinned()):
        raise ValueError(f"{name} must be on the current device {current}, got {tensor.device}")


def check_target(cache_dtype: torch.dtype, target: str) -> None:
    """Raise ValueError if kernels for this target cannot read a cache of this dtype."""
    lacks_e4m3 = target.startswith("gfx") or (target.startswith("sm_") and int(target[3:]) < 89)
    if cache_dtype == torch.float8_e4m3fn and lacks_e4m3:
        raise ValueError(f"a cache of {cache_dtype} needs sm_89 or newer, this is {target}; use torch.int8")


@lru_cache
def num_sms(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 1 in the interpreter, where programs then loop."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1


@lru_cache
def _target_of(device: int) -> str:  # noqa: ARG001  (the cache's key: asking the driver costs microseconds)
    from triton.runtime import driver

    target: Any = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":")[0]
