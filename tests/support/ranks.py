"""Ranks as threads of one process, of which one at a time computes; what they send can be lost or changed."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paged.architectures.config import ModelConfig
from paged.base.errors import RankError
from paged.engine import engine as engine_module
from paged.options.config import EngineConfig
from paged.ranks.driver import DriverRunner
from paged.ranks.follower import FollowerRunner
from paged.ranks.layout import RankLayout

# What is done to each thing that is sent, a message or a tensor: it arrives as these things, in this order.
Fault = Callable[[int, int, Any], Sequence[Any]]
WAIT_S = 120.0  # after which a rank that waits for another reports a deadlock


class World:
    """The ranks of a model as threads. A rank has the lock while it computes, and gives it up to wait.

    fault: called with sender, receiver and what is sent.
    inside: returns a context that each follower runs in.
    error: of the first rank that failed.
    """

    def __init__(
        self,
        num_ranks: int,
        fault: Fault = lambda _a, _b, sent: [sent],
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.num_ranks = num_ranks
        self.fault = fault
        self.inside = inside
        self.lock = threading.Condition()
        self.error: BaseException | None = None
        self.sent: list[bytes] = []  # all messages of the driver
        self._arrived: dict[tuple[int, int, str], deque[Any]] = defaultdict(deque)
        self._threads: list[threading.Thread] = []
        self.counts: dict[str, list[list[int]]] = defaultdict(list)

    def start(self, rank: int, run: Callable[[], None]) -> None:
        """Run a follower on a thread of its own."""

        def guarded() -> None:
            with self.lock, self.inside():
                try:
                    run()
                except BaseException as error:
                    self.error = self.error or error
                finally:
                    self.lock.notify_all()

        self._threads.append(threading.Thread(target=guarded, name=f"rank {rank}", daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        """Wait until all followers have ended. Raise the error of one that failed."""
        self.lock.release()
        try:
            for thread in self._threads:
                thread.join(WAIT_S)
                assert not thread.is_alive(), f"{thread.name} does not end"
        finally:
            self.lock.acquire()
        if self.error is not None:
            raise RankError("a rank has failed") from self.error

    def send(self, sender: int, receiver: int, tag: str, sent: Any) -> None:
        """Deliver something, or what the fault makes of it."""
        self._arrived[sender, receiver, tag].extend(self.fault(sender, receiver, sent))
        self.lock.notify_all()

    def receive(self, sender: int, receiver: int, tag: str) -> Any:
        """Wait for the next thing that was sent. Let others compute meanwhile."""
        arrived = self._arrived[sender, receiver, tag]
        is_in_time = self.lock.wait_for(lambda: arrived or self.error is not None, WAIT_S)
        if not arrived and self.error is not None:
            raise RankError("another rank has failed") from self.error
        assert is_in_time, f"rank {receiver} waits for rank {sender} in vain"
        return arrived.popleft()

    def least(self, numbers: list[int], of: str = "blocks") -> list[int]:
        """Return the least of each number of all ranks."""
        found = self.counts[of]
        found.append(numbers)
        self.lock.notify_all()
        self.lock.wait_for(lambda: len(found) == self.num_ranks or self.error is not None, WAIT_S)
        assert len(found) == self.num_ranks, "a rank has not told its blocks"
        return [min(each) for each in zip(*found, strict=True)]


class ThreadTransport:
    """What one rank of a world sends and receives. A `Transport`, and its `Peers`."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.waited_s = 0.0

    def send_message(self, data: bytes) -> None:
        """Send a message of the driver to all other ranks."""
        self.world.sent.append(data)
        for rank in range(self.world.num_ranks):
            if rank != self.rank:
                self.world.send(self.rank, rank, "message", data)

    def receive_message(self) -> bytes:
        """Wait for the next message of the driver."""
        data: bytes = self.world.receive(0, self.rank, "message")
        return data

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a copy of a tensor, in host memory."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        self.world.send(self.rank, rank, "tensor", copy)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """Wait for a tensor of this shape."""
        started = time.perf_counter()
        tensor: Tensor = self.world.receive(rank, self.rank, "tensor")
        self.waited_s += time.perf_counter() - started
        assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype), "another tensor came"
        return tensor

    def loaded(self, weight_bytes: int) -> None:
        """Go on at once."""

    def least(self, num_blocks: int, num_host_blocks: int) -> tuple[int, int]:
        """Return the least that a rank has."""
        blocks, host_blocks = self.world.least([num_blocks, num_host_blocks])
        return blocks, host_blocks

    def least_seats(self, num_seats: int) -> int:
        """Return the least that a rank has."""
        return self.world.least([num_seats], "seats")[0]

    def least_snapshots(self, num_snapshots: int) -> int:
        """Return the least that a rank has."""
        return self.world.least([num_snapshots], "snapshots")[0]


@contextmanager
def ranked_engines(num_stages: int, num_shards: int = 1, **world: Any) -> Iterator[list[World]]:
    """Inside, new engines have ranks, which end behind it. Yields their worlds."""
    worlds: list[World] = []
    drivers: list[DriverRunner] = []

    def new_driver(
        config: EngineConfig, model_config: ModelConfig, directory: Path, draft: Any = None
    ) -> DriverRunner:
        assert draft is None, "ranks have no draft model"
        sizes = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_shards}
        layout = RankLayout.of(EngineConfig(**{**_options(config), **sizes}), model_config)
        ranks = World(layout.num_ranks, **world)
        worlds.append(ranks)
        ranks.lock.acquire()
        for rank in range(1, layout.num_ranks):
            transport = ThreadTransport(ranks, rank)

            def follow(rank: int = rank, transport: ThreadTransport = transport) -> None:
                options: dict[str, Any] = {"rank": rank, "transport": transport, "peers": transport}
                FollowerRunner(config, model_config, directory, layout=layout, **options).run()

            ranks.start(rank, follow)
        own = ThreadTransport(ranks, 0)
        drivers.append(DriverRunner(config, model_config, directory, layout=layout, transport=own, peers=own))
        return drivers[-1]

    with mock.patch.object(engine_module, "_new_executor", new_driver):
        try:
            yield worlds
            for driver, ranks in zip(drivers, worlds, strict=True):
                driver.end()
                ranks.join()
        finally:
            for ranks in worlds:
                ranks.error = ranks.error or RankError("the test is over")
                ranks.lock.notify_all()
                ranks.lock.release()


def _options(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
