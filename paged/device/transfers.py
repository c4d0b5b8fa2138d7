"""Transfers: what a step sends to its device in one upload, and what it brings back in one download.

On a GPU both go through pinned memory and neither blocks: the host waits once, for the download. On a CPU the
numbers are where they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[Any] | Sequence[Any]
# Of what is sent, and of what is received.
NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
ALIGNMENT = 16  # of each part, so that kernels are not compiled again for other alignments
# Steps whose transfers may be under way at once. One more waits.
NUM_BUFFERS = 2
# The most bytes of a transfer in pinned memory, which is not freed again. What is beyond goes without it.
MOST_PINNED = 2**24


class Sent:
    """Numbers that an `Upload` copies to the device.

    tensor: the copy on the device, available once the upload is sent.
    """

    __slots__ = ("dtype", "numbers", "tensor")

    def __init__(self, numbers: Numbers, dtype: torch.dtype) -> None:
        self.numbers: NDArray[Any] = np.array(numbers, NUMPY_DTYPES[dtype], order="C")
        self.dtype = dtype
        self.tensor: Tensor


def arrived(sent: Sent | None) -> Tensor | None:
    """Return the device tensor of numbers that were sent; None for None."""
    return None if sent is None else sent.tensor


class Received:
    """Numbers that a `Download` copies to the host.

    numbers: the copy on the host, available after `Download.wait`.
    """

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers: NDArray[Any]


class Transfers:
    """An engine's uploads and downloads, which take turns in using a few pinned buffers.

    in_place: whether the device reads host memory directly and nothing is copied; by default, True on a CPU.
    num_buffers: how many uploads, and how many downloads, may be under way at once.
    """

    def __init__(
        self, device: torch.device, *, in_place: bool | None = None, num_buffers: int = NUM_BUFFERS
    ) -> None:
        self.device = device
        self._uploads = _Ring(num_buffers)
        self._downloads = _Ring(num_buffers)
        self._in_place: tuple[Upload, Download] | None = None  # which keep nothing: the same for every step
        if device.type == "cpu" if in_place is None else in_place:
            self._in_place = Upload(device, None), Download(None)

    def new_upload(self) -> Upload:
        """Start a step's upload."""
        return self._in_place[0] if self._in_place else Upload(self.device, self._uploads)

    def new_download(self) -> Download:
        """Start a step's download."""
        return self._in_place[1] if self._in_place else Download(self._downloads)


class Upload:
    """Numbers for the device, collected by `put` and copied in one transfer by `send`.

    buffers: pinned memory; None if the device reads host memory directly.
    """

    def __init__(self, device: torch.device, buffers: _Ring | None) -> None:
        self.device = device
        self._buffers = buffers
        self._parts: list[Sent] = []

    def put(self, numbers: Numbers, dtype: torch.dtype) -> Sent:
        """Add numbers of int64, int32 or float32: an array of any shape, or a list."""
        sent = Sent(numbers, dtype)
        if self._buffers is None:
            sent.tensor = torch.from_numpy(sent.numbers)
        else:
            self._parts.append(sent)
        return sent

    def send(self) -> None:
        """Start copying all numbers that were put, without waiting."""
        if self._buffers is None or not self._parts:
            return
        parts = self._parts
        self._parts = []
        starts = []
        size = 0
        for sent in parts:
            starts.append(size)
            size += -(-sent.numbers.nbytes // ALIGNMENT) * ALIGNMENT
        # From pageable memory the driver takes a copy before it returns.
        buffer = self._buffers.take(size) if size <= MOST_PINNED else None
        staging = torch.empty(size, dtype=torch.uint8) if buffer is None else buffer.memory[:size]
        array = staging.numpy()
        for start, sent in zip(starts, parts, strict=True):
            numbers = sent.numbers
            array[start : start + numbers.nbytes] = numbers.reshape(-1).view(np.uint8)
        memory = staging.to(self.device, non_blocking=True)
        if buffer is not None:
            buffer.mark_in_use()
        typed: dict[Any, Tensor] = {}
        for start, sent in zip(starts, parts, strict=True):
            numbers = sent.numbers
            dtype = sent.dtype
            if dtype not in typed:
                typed[dtype] = memory.view(dtype)
            first = start // numbers.itemsize
            part = typed[dtype][first : first + numbers.size]
            sent.tensor = part if numbers.ndim == 1 else part.view(numbers.shape)


class Download:
    """Tensors for the host, requested by `get` and copied in one transfer by `send`; `wait` waits for them.

    buffers: pinned memory; None if the device reads host memory directly.
    """

    def __init__(self, buffers: _Ring | None) -> None:
        self._buffers = buffers
        self._parts: list[tuple[Received, Tensor]] = []
        self._num_bytes = 0  # of the parts
        self._buffer: _Buffer | None = None

    def get(self, tensor: Tensor) -> Received:
        """Request a tensor whose elements have 4 or 8 bytes.

        If all requests together exceed MOST_PINNED bytes, this tensor is copied at once, by a blocking copy.
        """
        received = Received()
        if self._buffers is None:
            received.numbers = tensor.numpy()
        elif self._num_bytes + tensor.nbytes > MOST_PINNED:
            received.numbers = tensor.cpu().numpy()
        else:
            self._parts.append((received, tensor))
            self._num_bytes += tensor.nbytes
        return received

    def send(self) -> None:
        """Start copying all requested tensors, without waiting."""
        if self._buffers is None or not self._parts:
            return
        self._parts.sort(key=lambda part: -part[1].itemsize)  # so that each part is aligned
        words = [tensor.reshape(-1).view(torch.int32) for _, tensor in self._parts]
        packed = words[0] if len(words) == 1 else torch.cat(words)
        buffer = self._buffers.take(packed.nbytes)
        buffer.memory[: packed.nbytes].view(torch.int32).copy_(packed, non_blocking=True)
        buffer.mark_in_use()
        self._buffer = buffer
        buffer.unread = self

    def wait(self) -> None:
        """Wait until all requested tensors are on the host."""
        buffer = self._buffer
        if buffer is None:
            return
        buffer.wait()
        arrived = buffer.memory[: self._num_bytes].numpy().copy()
        start = 0
        self._buffer = buffer.unread = None
        for received, tensor in self._parts:
            numbers = arrived[start : start + tensor.nbytes].view(NUMPY_DTYPES[tensor.dtype])
            received.numbers = numbers.reshape(tensor.shape)
            start += tensor.nbytes
        self._parts.clear()


class _Buffer:
    """Pinned memory, and an event after the last transfer that uses it.

    unread: the download whose bytes the memory holds.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.unread: Download | None = None
        self._event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until no transfer uses the memory."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def in_use(self) -> bool:
        """Whether a transfer may still use the memory."""
        return self._event is not None and not self._event.query()  # type: ignore[no-untyped-call]

    def mark_in_use(self) -> None:
        """Make `wait` wait for all work that the device was given until now."""
        if self._event is None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def hold(self, size: int) -> None:
        """Allocate memory for this many bytes unless there is as much."""
        if size > len(self.memory):
            self.memory = torch.empty(max(2 * size, 2**16), dtype=torch.uint8, pin_memory=True)


class _Ring:
    """Buffers that are taken in turns."""

    def __init__(self, num_buffers: int) -> None:
        self._buffers = [_Buffer() for _ in range(num_buffers)]
        self._next = 0

    def take(self, size: int) -> _Buffer:
        """Return a buffer of at least this many bytes that no transfer uses."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.unread is not None:
            buffer.unread.wait()
        if buffer.in_use:
            buffer.wait()
        buffer.hold(size)
        return buffer
