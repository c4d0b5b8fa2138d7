"""Transport: how the ranks of a model send each other messages and tensors.

Messages are the driver's, to all other ranks. Tensors go from one rank to another; those between two ranks
arrive in the order in which they were sent. No send waits for its receiver: with traffic in both directions,
two ranks would wait for each other.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from ..base.errors import RankError

_FRAME = 1024  # bytes that every message takes; what is longer follows
_LENGTH = struct.Struct("<I")
_FOR_EVER = timedelta(days=365)
# Tags: a message may overtake the tensors of an earlier step.
_TENSORS = 0
_MESSAGES = 1
_MOST_SENDING = {_TENSORS: 3, _MESSAGES: 16}  # for each rank; tensors may be large


class Transport(Protocol):
    """Sends and receives messages and tensors for one rank.

    waited_s: the seconds that this rank has waited for tensors.
    """

    waited_s: float

    def send_message(self, data: bytes) -> None:
        """Send a message of the driver to all other ranks. Any thread may call this."""

    def receive_message(self) -> bytes:
        """Wait for the next message of the driver."""

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a copy of a tensor to a rank. The tensor may be changed right after the call."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """Wait for a tensor of this shape from a rank. Return it in host memory."""


class ShardGroup:
    """The ranks of one stage, which exchange shards of activations: a `TensorGroup`."""

    def __init__(self, transport: Transport, rank: int, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._rank = rank
        self._ranks = ranks

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return the tensors of all shards, joined in the order of shards."""
        for rank in self._ranks:
            if rank != self._rank:
                self._transport.send(tensor, rank)
        parts = [
            tensor if rank == self._rank else self._received(tensor, rank).to(tensor.device)
            for rank in self._ranks
        ]
        return torch.cat(parts, dim)

    def collect(self, tensor: Tensor) -> Tensor | None:
        """Return the columns of all shards, joined, at the first shard, and None at other shards."""
        if self._rank != self._ranks[0]:
            self._transport.send(tensor, self._ranks[0])
            return None
        others = [self._received(tensor, rank).to(tensor.device) for rank in self._ranks[1:]]
        return torch.cat([tensor, *others], -1)

    def _received(self, like: Tensor, rank: int) -> Tensor:
        return self._transport.receive(like.shape, like.dtype, rank)


class GlooTransport:
    """A `Transport` over gloo, in a process group that `connect` makes.

    num_ranks, rank: the number of ranks, and the number of this rank.
    timeout_s: maximum seconds to wait for a tensor.
    host: the address to bind to; None takes gloo's default: the address to which the host's name resolves.
    message_timeout_s: maximum seconds to wait for a message; None sets no limit.

    is_waiting: whether this rank is waiting for another rank.

    Errors are raised as RankError. After an error, the group is unusable.
    """

    def __init__(
        self,
        num_ranks: int,
        rank: int,
        *,
        timeout_s: float,
        host: str | None,
        message_timeout_s: float | None = None,
    ) -> None:
        self._num_ranks = num_ranks
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._host = host
        self._message_timeout = _FOR_EVER
        if message_timeout_s is not None:
            self._message_timeout = timedelta(seconds=message_timeout_s)
        self._lock = threading.Lock()  # of messages
        self._group: Any = None
        self.is_waiting = False
        self.waited_s = 0.0
        # What is being sent by tag, with its memory. Work that is done is found out by waiting for it.
        self._sending: dict[int, deque[tuple[Any, Tensor]]] = {_TENSORS: deque(), _MESSAGES: deque()}

    def connect(self, store: Any) -> None:
        """Meet the other ranks through a store."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [
            ProcessGroupGloo.create_default_device()
            if self._host is None
            else ProcessGroupGloo.create_device(hostname=self._host)
        ]
        with _as_rank_error("the ranks cannot meet"):
            self._group = ProcessGroupGloo(store, self._rank, self._num_ranks, options)

    def close(self) -> None:
        """Close the group. Any thread may call this. Waiting calls raise RankError."""
        group = self._group
        self._group = None
        if group is not None:
            group.abort()
        for sending in self._sending.values():
            sending.clear()

    def send_message(self, data: bytes) -> None:
        """Send a message of the driver to all other ranks. Any thread may call this."""
        framed = _LENGTH.pack(len(data)) + data
        first = _bytes(framed[:_FRAME].ljust(_FRAME, b"\0"))
        rest = _bytes(framed[_FRAME:]) if len(framed) > _FRAME else None
        with self._lock:
            for rank in range(self._num_ranks):
                if rank != self._rank:
                    self._post(first, rank, _MESSAGES)
                    if rest is not None:
                        self._post(rest, rank, _MESSAGES)

    def receive_message(self) -> bytes:
        """Wait for the next message of the driver."""
        first = self._received(_FRAME, 0, _MESSAGES, self._message_timeout).numpy().tobytes()
        (size,) = _LENGTH.unpack_from(first)
        data = first[_LENGTH.size : _LENGTH.size + size]
        if size > len(data):
            data += self._received(size - len(data), 0, _MESSAGES, self._timeout).numpy().tobytes()
        return data

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a copy of a tensor to a rank. The tensor may be changed right after the call."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        with self._lock:
            self._post(copy.view(-1).view(torch.uint8), rank, _TENSORS)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """Wait for a tensor of this shape from a rank. Return it in host memory."""
        started = time.perf_counter()
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self._receive_into(tensor.view(-1).view(torch.uint8), rank, _TENSORS, self._timeout)
        self.waited_s += time.perf_counter() - started
        return tensor

    def _received(self, size: int, rank: int, tag: int, timeout: timedelta) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        self._receive_into(memory, rank, tag, timeout)
        return memory

    def _receive_into(self, memory: Tensor, rank: int, tag: int, timeout: timedelta) -> None:
        self.is_waiting = True
        with _as_rank_error(f"rank {rank} sends nothing"):
            self._open_group().recv([memory], rank, tag).wait(timeout)
        self.is_waiting = False

    def _post(self, memory: Tensor, rank: int, tag: int) -> None:
        with _as_rank_error(f"rank {rank} receives nothing"):
            sending = self._sending[tag]
            sending.append((self._open_group().send([memory], rank, tag), memory))
            # More than the steps in flight have under way: the oldest has arrived long ago.
            while len(sending) > _MOST_SENDING[tag] * self._num_ranks:
                sending.popleft()[0].wait(self._timeout)

    def _open_group(self) -> Any:
        group = self._group
        if group is None:
            raise RankError("the ranks have no group: it is closed")
        return group


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def _as_rank_error(what: str) -> Iterator[None]:
    """Raise RankError in place of gloo's errors."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{what}: {str(error).partition(chr(10))[0]}") from error
