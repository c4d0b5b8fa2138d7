"""Attention backends that options name."""

from __future__ import annotations

from typing import cast

import torch

from ..base.errors import ConfigError
from ..kernels.backend import BackendName


def named_backend(name: str, device: torch.device) -> BackendName:
    """Return the backend of this name. Raises ConfigError if it is not for this device."""
    if name == "numba" and device.type != "cpu":
        raise ConfigError(
            f"attention_backend='numba' is for a CPU, not for device {device}; use 'triton' there"
        )
    if name == "triton" and device.type == "cpu":
        from ..kernels.gpu.target import in_interpreter

        if not in_interpreter():
            raise ConfigError(
                "attention_backend='triton' on a CPU runs in Triton's interpreter, for tests only: set "
                "TRITON_INTERPRET=1 before Python starts, or use attention_backend='numba' or 'torch'"
            )
    return cast(BackendName, name)
