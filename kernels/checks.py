"""What every launcher checks: a wrong shape is a ValueError here, not a fault on the GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_shape(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype | None = None
) -> None:
    """Raise ValueError unless `tensor` has this shape (None: any size) and, where given, this dtype."""
    if tensor.dim() != len(shape) or any(
        want is not None and got != want for got, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype] = KERNEL_DTYPES) -> None:
    """Raise ValueError unless `tensor` has one of the `allowed` dtypes."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {tensor.dtype}")


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless neighbours in the last dimension are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless `tensor` is on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is greater than zero."""
    if not value > 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")


def check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    """Raise ValueError unless `value` is a multiple of `of`."""
    if of < 1 or value % of:
        raise ValueError(f"{name} must be a multiple of {of_name}, got {value} and {of}")
