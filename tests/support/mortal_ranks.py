"""Ranks as threads that end at random moments. What has ended begins again with nothing that it knew."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from paged import EngineConfig, LLMEngine, RankError
from paged.engine import engine as engine_module
from paged.model.config import ModelConfig
from paged.ranks.driver import DriverRunner
from paged.ranks.follower import FollowerRunner
from paged.ranks.layout import RankLayout
from tests.support.ranks import ThreadTransport, World


class MortalRanks:
    """The followers of an engine. A `Supervision` of its driver.

    mean_sends: after so many things are sent, on average, a rank ends.
    """

    def __init__(self, layout: RankLayout, seed: int, mean_sends: int) -> None:
        self.num_restarts = 0
        self.world = World(layout.num_ranks, self._deliver)
        self._random = random.Random(seed)
        self._mean_sends = mean_sends
        self._num_left: float = float("inf")  # none ends before all have begun
        self._runners: dict[int, FollowerRunner] = {}
        self._dead: int | None = None
        self.world.lock.acquire()

    def begin(self, make: Callable[[int], FollowerRunner]) -> None:
        """Make the followers and let them run."""

        def follow(rank: int) -> None:
            self._runners[rank] = make(rank)
            self._runners[rank].run()

        for rank in range(1, self.world.num_ranks):
            self.world.start(rank, lambda rank=rank: follow(rank))

    def draw(self) -> None:
        """Draw when the next rank ends."""
        self._num_left = self._random.expovariate(1 / self._mean_sends)

    def _deliver(self, sender: int, receiver: int, sent: Any) -> Sequence[Any]:
        self._num_left -= 1
        if self._num_left < 0 and self._dead is None:
            self._dead = receiver or sender  # the driver does not end
            self.world.error = RankError(f"rank {self._dead} was ended")
        return [] if self._dead in (sender, receiver) else [sent]

    def end_threads(self) -> None:
        """Wait until all followers have noticed that one has ended."""
        world = self.world
        world.error = world.error or RankError("the group is over")
        world.lock.notify_all()
        world.lock.release()
        for thread in world._threads:
            thread.join()
        world.lock.acquire()
        world._threads.clear()

    # Of the driver

    def on_step(self, number: int) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Raise RankError if a rank has ended."""
        if self.world.error is not None:
            raise self.world.error

    def recover(self, error: BaseException) -> RankError | None:
        """Begin a new group with the same runners. The one that has ended knows no K and V any more.

        Return the error if no rank was ended: a follower has failed by itself.
        """
        self.end_threads()
        if self._dead is None:
            return error if isinstance(error, RankError) else None
        self.world._arrived.clear()
        self.world.error = None
        self.num_restarts += 1
        for tensor in self._runners[self._dead].kv_cache.tensors.values():
            tensor.fill_(float("nan"))
        self._dead = None
        self.draw()
        for rank, runner in self._runners.items():
            runner.reset()
            self.world.start(rank, runner.run)
        return None

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Do nothing."""

    def describe(self) -> str:
        """Return what they are."""
        return "mortal ranks"

    def close(self, end: Callable[[], None]) -> None:  # noqa: ARG002
        """End all."""
        if self._runners:
            self.end_threads()
            self._runners.clear()
            self.world.lock.release()


@contextmanager
def mortal_engine(model: str, seed: int, mean_sends: int, **options: Any) -> Iterator[LLMEngine]:
    """Yield an engine whose ranks end at moments that the seed draws."""

    def new_driver(
        config: EngineConfig, model_config: ModelConfig, directory: Path, _draft: Any = None
    ) -> DriverRunner:
        layout = RankLayout.of(config, model_config)
        mortal = MortalRanks(layout, seed, mean_sends)

        def make(rank: int) -> FollowerRunner:
            transport = ThreadTransport(mortal.world, rank)
            ranked: dict[str, Any] = {"rank": rank, "transport": transport, "peers": transport}
            return FollowerRunner(config, model_config, directory, layout=layout, **ranked)

        mortal.begin(make)
        own = ThreadTransport(mortal.world, 0)
        shared: dict[str, Any] = {"transport": own, "peers": own, "supervision": mortal}
        driver = DriverRunner(config, model_config, directory, layout=layout, **shared)
        mortal.draw()
        return driver

    with mock.patch.object(engine_module, "_new_executor", new_driver):
        engine = LLMEngine(model, **options)
    try:
        yield engine
    finally:
        engine.runner.close()
