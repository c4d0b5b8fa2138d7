"""Checks for calls from outside an engine: of memory that tensors share, and of the numbers in tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import is_trusted


def check_apart(name: str, tensor: Tensor) -> None:
    """Raise ValueError if elements of `tensor` share memory, as after `expand`. For tensors that are written.

    An inference tensor is refused outside torch.inference_mode(), because torch itself does not write to it
    there.
    """
    if not is_trusted() and tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} is written, and was made in torch.inference_mode(): make the call there too"
        )
    if not (tensor.is_contiguous() or _are_apart(tensor.shape, tensor.stride())):
        raise ValueError(
            f"{name} is written, and its elements must not share memory, got shape {list(tensor.shape)} with "
            f"strides {tensor.stride()}"
        )


def check_alone(written: Mapping[str, Tensor | None], read: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError if a `written` tensor shares memory with another written tensor or with a `read` one.

    Two tensors of the same shape and strides may interleave, as keys and values do in [num_blocks, 2, ...].
    """
    places = [
        (name, x, x.data_ptr(), x.data_ptr() + _span(x) * x.itemsize, name in written)
        for name, x in (*written.items(), *read.items())
        if x is not None and x.numel()
    ]
    places.sort(key=lambda place: place[2])
    for i, (name, x, start, end, is_written) in enumerate(places):
        for other_name, other, other_start, _, other_is_written in places[i + 1 :]:
            if other_start >= end:
                break
            if (is_written or other_is_written) and not _alternate(x, other, other_start - start):
                which = name if is_written else other_name
                raise ValueError(f"{name} and {other_name} must not share memory: {which} is written")


def _span(tensor: Tensor) -> int:
    """Return how many elements lie from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _are_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether each stride is beyond the reach of all smaller ones: then no place occurs twice."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += max(0, size - 1) * stride
    return True


def _alternate(x: Tensor, other: Tensor, distance: int) -> bool:
    """Return whether two tensors, so many bytes apart, are places 0 and 1 of one whose elements are apart."""
    same = x.shape == other.shape and x.stride() == other.stride() and x.itemsize == other.itemsize
    return (
        same
        and distance % x.itemsize == 0
        and _are_apart((2, *x.shape), (distance // x.itemsize, *x.stride()))
    )


def check_eps(eps: float) -> None:
    """Raise ValueError unless `eps` is a number between 0 and 1."""
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps <= 1:
        raise ValueError(f"eps must be a number between 0 and 1, got {eps!r}")


def check_limits(name: str, limits: tuple[float, float]) -> None:
    """Raise ValueError unless `limits` is a pair with 0 <= limits[0] <= limits[1]; the second may be
    infinite. Ints are below 2**63, as torch has no larger ones.
    """
    is_pair = isinstance(limits, tuple) and len(limits) == 2 and {*map(type, limits)} <= {int, float}
    if not is_pair or not 0 <= limits[0] <= limits[1] or any(type(n) is int and n >= 2**63 for n in limits):
        raise ValueError(f"{name} must be two ascending numbers from 0 on, got {limits!r}")


def check_range(name: str, tensor: Tensor, low: float, high: float) -> None:
    """Raise ValueError unless low <= number <= high for all numbers in `tensor`. Copies it to the host."""
    outside = tensor[~((tensor >= low) & (tensor <= high))]
    if len(outside):
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {outside[0].item()}")


def check_once(name: str, tensor: Tensor) -> None:
    """Raise ValueError if two numbers in `tensor` are equal. Copies it to the host."""
    values, counts = tensor.unique(return_counts=True)
    twice = values[counts > 1].tolist()
    if twice:
        raise ValueError(f"{name} must not name a place twice, got {twice} more than once")


def check_contents(
    key_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    num_tokens: int,
    options: Any,
) -> None:
    """Raise ValueError unless every read stays inside the tensors. Copies the int32 tensors to the host.

    options: the `AttentionOptions` of the call.
    """
    num_blocks, block_size = key_cache.shape[:2]
    starts = cu_seqlens_q.tolist()
    lengths = seq_lens.tolist()
    if starts[0] != 0 or starts[-1] > num_tokens or sorted(starts) != starts:
        raise ValueError(f"cu_seqlens_q must rise from 0 to at most {num_tokens}, got {starts}")
    for i, (start, end, seq_len) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        query_len = end - start
        if query_len > options.max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q is {options.max_seqlen_q}, and sequence {i} has {query_len} new tokens"
            )
        if query_len == 0:
            continue
        if options.max_seq_len is not None and seq_len > options.max_seq_len:
            raise ValueError(f"max_seq_len is {options.max_seq_len}, and sequence {i} has {seq_len} tokens")
        if query_len < options.min_seqlen_q:
            raise ValueError(
                f"min_seqlen_q is {options.min_seqlen_q}, and sequence {i} has {query_len} new tokens"
            )
        if not query_len <= seq_len <= block_tables.shape[1] * block_size:
            raise ValueError(
                f"seq_lens[{i}] must hold its {query_len} new tokens and fit {block_tables.shape[1]} blocks "
                f"of {block_size}, got {seq_len}"
            )
        if options.last_keys is not None:
            _check_last_keys(i, options.last_keys[start:end].tolist(), seq_len)
        low = max(0, seq_len - query_len - options.sliding_window + 1) if options.sliding_window else 0
        used = block_tables[i, low // block_size : -(-seq_len // block_size)]
        if not bool(((used >= 0) & (used < num_blocks)).all()):
            raise ValueError(f"block_tables[{i}] must hold blocks below {num_blocks}, got {used.tolist()}")


def _check_last_keys(i: int, last_keys: list[int], seq_len: int) -> None:
    """Raise ValueError unless each new token of sequence i sees itself, and nothing past its end."""
    for position, last in enumerate(last_keys, seq_len - len(last_keys)):
        if not position <= last < seq_len:
            raise ValueError(
                f"last_keys of position {position} of sequence {i} must be from {position} to {seq_len - 1}, "
                f"got {last}"
            )
