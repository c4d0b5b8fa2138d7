"""Checks for launchers: a wrong shape is a ValueError here, not a fault on the GPU."""

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Dtypes of a quantised cache, in which each token and head has a scale, and the largest value of each dtype.
QUANTIZED_DTYPES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def check_scales(
    key_cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, dtype: torch.dtype
) -> None:
    """Raise ValueError unless the scales suit the cache: none for a plain cache, both for a quantised cache.

    dtype: the dtype of queries, keys and values. A plain cache has the same dtype, or a narrower one if this
        is float32. Scales are contiguous f32[num_blocks, num_kv_heads, block_size].
    """
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    plain = KERNEL_DTYPES if dtype == torch.float32 else (dtype,)
    if key_cache.dtype in plain:
        for name, scale in scales.items():
            if scale is not None:
                raise ValueError(f"{name} belong to a quantised cache; this one is {key_cache.dtype}")
        return
    check_dtype("key_cache", key_cache, (*plain, *QUANTIZED_DTYPES))
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    for name, scale in scales.items():
        if scale is None:
            raise ValueError(f"a cache of {key_cache.dtype} needs {name}")
        check_shape(name, scale, (num_blocks, num_kv_heads, block_size), torch.float32)
        check_device(name, scale, key_cache.device)
        check_contiguous(name, scale)


def check_cache_dtype(dtype: torch.dtype, target: str) -> None:
    """Accept every dtype, since torch and the CPU kernels can read all of them."""


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is a tensor whose memory a kernel can use.

    Inside `TrustedContents`, only the type is checked.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if _trust.is_given:
        return
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be dense, got a nested tensor or {tensor.layout}: see Tensor.to_dense")
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(f"{name} must hold numbers, got a {type(tensor).__name__} on {tensor.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which no kernel computes: call it in torch.no_grad()")
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    if tensor.untyped_storage().nbytes() < needed:
        held = tensor.untyped_storage().nbytes()
        raise ValueError(
            f"{name} must have its memory, got {held} bytes of {needed}: its storage was resized"
        )


def check_shape(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype | None = None
) -> None:
    """Raise ValueError unless `tensor` has this shape (None: any size) and, if given, this dtype."""
    check_tensor(name, tensor)
    if tensor.dim() != len(shape) or any(
        want is not None and got != want for got, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype] = KERNEL_DTYPES) -> None:
    """Raise ValueError unless the dtype of `tensor` is one of `allowed`."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {tensor.dtype}")


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension has stride 1."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless `tensor` is on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_span(name: str, tensor: Tensor) -> None:
    """Raise ValueError if an offset within one `tensor[i]` needs more than 32 bits.

    Kernels compute offsets of whole tokens and blocks in 64 bits, and offsets inside a token or block in 32.
    """
    shape = tensor.shape
    strides = tensor.stride()
    if sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True)) >= 2**31:
        raise ValueError(
            f"{name} must span less than 2**31 elements in each {name}[i], got shape {list(shape)} with "
            f"strides {strides}"
        )


def check_positive(name: str, value: float, exponent: int = 126) -> None:
    """Raise ValueError unless float32 holds `value` and its inverse, and it is at most 2**exponent."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")
    most = min(2.0**exponent, 2**63 - 1 if isinstance(value, int) else 2.0**126)  # torch has no larger ints
    if not 2.0**-126 <= value <= most:
        raise ValueError(f"{name} must be a float between 2**-126 and 2**{exponent}, got {value}")


def check_between(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueError unless `value` is an int and low <= value <= high."""
    if type(value) is not int:
        raise ValueError(f"{name} must be an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")


def check_flag(name: str, value: bool) -> None:
    """Raise ValueError unless `value` is True or False. Other values would compile more specialisations."""
    if type(value) is not bool:
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    """Raise ValueError unless `value` is a multiple of `of`."""
    if of < 1 or value % of:
        raise ValueError(f"{name} must be a multiple of {of_name}, got {value} and {of}")


def check_indices(name: str, tensor: Tensor, of_name: str, size: int) -> None:
    """Raise ValueError unless all numbers in `tensor` are indices below `size`. Copies it to the host."""
    if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < size:
        found = f"{int(tensor.min())} to {int(tensor.max())}"
        raise ValueError(f"{name} must be between 0 and {size - 1}, {of_name}, got {found}")


class _Trust(threading.local):
    """Whether this thread's launches are trusted."""

    is_given = False


_trust = _Trust()


class TrustedContents:
    """A context in which arguments are known to be right, so that launchers do not check tensors' contents.

    An engine's steps run in this context. On a CPU nothing is checked; GPU launchers still check shapes,
    dtypes and strides. With PAGED_DEBUG=1 the context has no effect.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _trust.is_given
        _trust.is_given = not in_debug_mode()

    def __exit__(self, *_: object) -> None:
        _trust.is_given = self._before


def is_trusted() -> bool:
    """Return whether this thread is inside `TrustedContents`."""
    return _trust.is_given


def must_read_contents(device: torch.device) -> bool:
    """Return whether a launcher must check the indices, lengths and slots in its tensors.

    On a CPU it must, except inside `TrustedContents`. On a GPU the host would have to wait for the contents,
    so only PAGED_DEBUG=1 turns these checks on.
    """
    return not _trust.is_given if device.type == "cpu" else in_debug_mode()


def in_debug_mode() -> bool:
    """Return whether PAGED_DEBUG=1 is set. Launchers then check lengths, tables and slots on the host."""
    return os.environ.get("PAGED_DEBUG", "0") == "1"
