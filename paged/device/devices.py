"""Choose the device, the dtype, the attention backend and whose linear kernels to use."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..base.errors import ConfigError, ResourceError
from ..kernels.backend import BackendName, has_numba
from ..options.config import EngineConfig

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

logger = logging.getLogger(__name__)


def resolve_device(name: str) -> torch.device:
    """Return the device of this name. "auto" is a GPU if there is one, else the CPU. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        raise ResourceError(
            f"device {name!r} does not exist: torch sees {count} GPUs; device='cpu' needs none"
        )
    return device


def is_here(device: torch.device) -> bool:
    """Return whether this machine has the device. A plan may name a device that only another machine has."""
    return device.type == "cpu" or torch.cuda.is_available()


def sum_in_float32() -> None:
    """Make cuBLAS add partial sums in float32, not in bfloat16 or float16, for the rest of this process."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def target_of(device: torch.device) -> str:
    """Return the target that kernels are compiled for: "sm_90", "gfx942" and the like; "" on a CPU."""
    if device.type == "cpu":
        return ""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def failure_of(device: torch.device) -> Exception | None:
    """Wait for a device. Return its error if it has failed; this process can then no longer use it."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:  # torch.AcceleratorError, since torch 2.8
        return error
    return None


def resolve_dtype(requested: str, checkpoint: str, device: torch.device, exceeds_float16: bool) -> str:
    """Return the dtype to compute in: the one requested, or for "auto" the checkpoint's.

    On a CPU that is slow in the checkpoint's dtype, "auto" is float32, since float32 represents every value
    exactly. On a GPU, it is bfloat16 in place of float16 where activations exceed that.
    """
    dtype = checkpoint if requested == "auto" else requested
    if (requested, dtype, device.type) == ("auto", "float16", "cuda") and exceeds_float16:
        logger.info("dtype bfloat16 instead of the checkpoint's float16, which activations exceed")
        return "bfloat16"
    is_slow = device.type == "cpu" and (
        dtype == "float16" or (dtype == "bfloat16" and not cpu_has_bfloat16())
    )
    if not is_slow:
        return dtype
    if requested == "auto":
        logger.info("dtype float32 instead of the checkpoint's %s, in which this CPU is slow", checkpoint)
        return "float32"
    _warn_of_slow(dtype)
    return dtype


@cache  # once for all engines
def _warn_of_slow(dtype: str) -> None:
    logger.warning("dtype %s is slow on this CPU; dtype='auto' chooses one that is not", dtype)


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions. Without them, float32 is faster."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def only_torch_has_bfloat16() -> bool:
    """Return whether this is an ARM CPU with bfloat16 instructions; torch uses them, our kernels do not."""
    return "bf16" in cpu_flags()


def cpu_flags() -> set[str]:
    """Return the CPU's instruction sets, as Linux names them; an empty set on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    return set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()


def resolve_backend(requested: str, device: torch.device) -> BackendName:
    """Return the attention backend; "auto" is Triton on a GPU, and numba on a CPU, or torch without numba."""
    if requested == "auto":
        if device.type == "cuda":
            return "triton"
        if has_numba():
            return "numba"
        logger.warning(
            "numba is not installed, so attention runs in plain torch, slower: pip install 'paged[cpu]'"
        )
        return "torch"
    from .named_backend import named_backend

    return named_backend(requested, device)


def weights_in_panels(
    config: EngineConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether linear layers use the backend's own, batch-invariant kernel instead of torch's.

    With deterministic=True they do; ConfigError is raised if the backend has no such kernel. Without that
    option, torch's kernel is used in bfloat16 where `only_torch_has_bfloat16`.
    """
    if not config.deterministic:
        left_to_torch = dtype == torch.bfloat16 and only_torch_has_bfloat16()
        return kernels.has_linear and not left_to_torch
    if device.type != "cpu" or not kernels.has_linear:
        raise ConfigError(
            f"deterministic=True needs a CPU with attention_backend='numba' so far; got {device} with "
            f"{kernels.name!r}: use those, or leave it out"
        )
    return True


def is_shortage(error: BaseException) -> bool:
    """Return whether an error means that an allocation ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch has no narrower one for a CPU; of the system's: Cannot allocate memory.
    return isinstance(error, (RuntimeError, OSError)) and "allocate memory" in str(error)
