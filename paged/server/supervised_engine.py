"""SupervisedEngine: an engine in processes of its own, one after another."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ..base.errors import ConfigError, EngineDeadError
from ..scheduler.picture import EnginePicture
from ..scheduler.stats import EngineStats
from . import frames
from .connection import EngineConnection, Owner
from .deaths import Death
from .launcher import EXIT_CODE, Launcher

RESTART_WINDOW_S = 600.0  # in which restarts are counted
HANG_S = 30.0  # without heartbeats, after which a process is replaced
MOST_START_RATIO = 3.0  # of the times that a later start and the first one may take
LEAST_START_S = 60.0  # that a later start may take
FIRST_PAUSE_S = 1.0  # between a start that fails and the next one; it doubles
MOST_PAUSE_S = 8.0

logger = logging.getLogger(__name__)


def next_pause(pause_s: float) -> float:
    """Return the seconds to wait before the next start. The last one, after pause_s, has failed."""
    return min(MOST_PAUSE_S, 2 * pause_s or FIRST_PAUSE_S)


class SupervisedEngine:
    """An `EngineReplica` whose process is replaced when it ends.

    connection: the connection to the newest process.
    is_up: whether the newest process serves requests.
    is_leaving: whether the process is about to end and gets no new requests.
    error: the error that every call raises once the supervisor has ended.
    num_resumed: how many requests another process had begun.
    """

    def __init__(self, start: frames.Start, owner: Owner, launcher: Launcher) -> None:
        self._start = start
        self._owner = owner
        self._launcher = launcher
        self._began_at = time.monotonic()
        self._begun_with = start.adapters
        self.connection = EngineConnection(start, owner, launcher)
        self.is_up = False
        self.is_leaving = False
        self.error: EngineDeadError | None = None
        self.num_resumed = 0
        self._num_restarts = 0
        self._restarts: deque[Death] = deque()  # what the last ones were for
        self._death: Death | None = None  # of the newest process, for which none was started yet
        self._first: frames.Ready | None = None
        self._start_s = 0.0  # that the first start took
        self._down_since: float | None = None
        self._earlier: EngineStats | None = None  # of the processes that have ended

    @property
    def replica(self) -> int:
        """The number of this engine."""
        return self._start.replica

    @property
    def dead(self) -> EngineDeadError | None:
        """The error that every call raises once no process will serve any more."""
        return self.error

    def check(self) -> None:
        """Raise EngineDeadError if no process will serve any more."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    # Starts

    def wait_ready(self, max_restarts: int) -> frames.Ready:
        """Wait until a process has made its engine. Raises the errors of `LLMEngine`, and EngineDeadError.

        A process that is killed meanwhile is started again, at most `max_restarts` times.
        """
        pause_s = 0.0
        while True:
            try:
                self._first = self.connection.wait_ready()
                break
            except EngineDeadError as error:
                # With an exit code, it has ended by itself, and would again.
                if str(error.__cause__).startswith(EXIT_CODE) or not max_restarts:
                    raise
                if not self.may_restart(max_restarts):
                    raise EngineDeadError(
                        f"{error}, as did {max_restarts} before it; it is not started again"
                    ) from error.__cause__
                logger.warning("%s; it is started again", error)
            self.connection.close()
            time.sleep(pause_s)
            pause_s = next_pause(pause_s)
            self._began_at = time.monotonic()
            self.begin_restart()
        self._start_s = time.monotonic() - self._began_at
        # Others have as many blocks, whatever memory is free then: what fitted the first one must fit them.
        options: dict[str, Any] = {**self._start.options, "num_blocks": self._first.stats.num_blocks}
        self._start = msgspec.structs.replace(self._start, options=options)
        self.is_up = True
        return self._first

    def on_death(self) -> Death:
        """Keep the totals of a process that has ended or is about to end. Return its death."""
        self._death = death = Death()
        self._earlier = self._counted(self.connection.stats)
        self.is_up = False
        self._down_since = time.monotonic()
        return death

    def may_restart(self, most: int) -> bool:
        """Return whether fewer than `most` restarts count within RESTART_WINDOW_S."""
        while self._restarts and time.monotonic() - self._restarts[0].at > RESTART_WINDOW_S:
            self._restarts.popleft()
        return sum(death.counts for death in self._restarts) < most

    def begin_restart(self) -> EngineConnection:
        """Start a process to replace a process that has ended, or whose start has failed."""
        self._restarts.append(self._death or Death())
        self._death = None
        self._num_restarts += 1
        return self._begin()

    def _begin(self) -> EngineConnection:
        self._begun_with = self._start.adapters
        self.connection = EngineConnection(self._start, self._owner, self._launcher)
        return self.connection

    @property
    def device(self) -> str:
        """The type of the device that computes, such as "cpu"."""
        assert self._first is not None
        return self._first.device

    def has_share_of(self, num_sharing: int) -> bool:
        """Return whether the process has the share of cores that one of `num_sharing` engines gets."""
        return self.device != "cpu" or self._start.num_replicas == num_sharing

    def begin_with_share_of(self, num_sharing: int) -> EngineConnection:
        """Start a process with the share of one of `num_sharing` engines, after the last one has ended."""
        self._start = msgspec.structs.replace(self._start, num_replicas=num_sharing)
        return self._begin()

    def begin_another(self, replica: int, num_sharing: int, earlier: EngineStats | None) -> SupervisedEngine:
        """Start the first process of another engine that is like this one but has its own number.

        earlier: the stats of an earlier engine with this number. Its totals continue.
        """
        options = dict(self._start.options)
        start = msgspec.structs.replace(
            self._start, options=options, replica=replica, num_replicas=num_sharing
        )
        another = SupervisedEngine(start, self._owner, self._launcher)
        another._first = self._first
        another._start_s = self._start_s
        if earlier is not None:
            another._earlier = earlier
            another._num_restarts = earlier.num_restarts
            another.num_resumed = earlier.num_resumed
        return another

    @property
    def most_start_s(self) -> float:
        """Maximum time in seconds that a start may take."""
        return max(LEAST_START_S, MOST_START_RATIO * self._start_s)

    def on_ready(self, ready: frames.Ready) -> None:
        """Let a new process serve. Raises ConfigError if its engine differs from the first one."""
        first = self._first
        assert first is not None
        for name in ("max_model_len", "block_size"):
            if getattr(ready, name) != getattr(first, name):
                raise ConfigError(
                    f"{name} is {getattr(ready, name)}, and was {getattr(first, name)} at the first start"
                )
        self.is_up = True
        self._down_since = None
        for adapter in self._start.adapters:  # those that were loaded since this process has begun
            if adapter not in self._begun_with:
                self.connection.load_again(adapter)
        if (weights := self._start.options.get("tenant_weights")) is not None:  # perhaps newer ones
            self.connection.tell(frames.Weigh(weights))

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Divide the engine's service among tenants by these weights, also in later processes."""
        self._start.options["tenant_weights"] = dict(weights)
        if self.is_up:
            self.connection.tell(frames.Weigh(dict(weights)))

    def set_adapters(self, adapters: Sequence[frames.Adapter]) -> None:
        """Have later processes read these LoRA adapters, which the present one has read."""
        self._start = msgspec.structs.replace(self._start, adapters=[*adapters])

    def share_threads(self, num_engines: int) -> None:
        """Have the process compute with its share of the CPU threads among so many engines."""
        if self.is_up:
            self.connection.tell(frames.ShareThreads(num_engines))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        if self.is_up:
            self.connection.tell(frames.ForgetPrefixes())

    # Its state

    @property
    def num_queued_tokens(self) -> int:
        """The number of tokens in waiting requests, as of the last heartbeat."""
        return self.connection.stats.num_queued_tokens

    @property
    def is_fit(self) -> bool:
        """Whether the engine serves requests and has sent something lately."""
        return self.is_up and not self.connection.hangs

    @property
    def trouble(self) -> str | None:
        """What is wrong with the engine; None while it serves or is replaced in time."""
        name = self.connection.name
        if self.is_up and self.connection.silent_s > HANG_S:
            silent_s = self.connection.silent_s
            return f"{name} has sent nothing for {silent_s:.0f} s, and it sends a heartbeat every second"
        if self._down_since is None or (down_s := time.monotonic() - self._down_since) <= self.most_start_s:
            return None
        return f"{name} ended {down_s:.0f} s ago, and no other one has its engine yet; the log says why"

    def why_hung(self, step_timeout: float) -> str | None:
        """Return why the process counts as hung; None if it does not."""
        connection = self.connection
        if connection.silent_s > HANG_S:
            return f"has sent nothing for {connection.silent_s:.0f} s: it hangs"
        if connection.stuck_s > step_timeout:
            return f"has computed one step for {connection.stuck_s:.0f} s: it hangs"
        return None

    # Figures

    async def ask(self) -> EngineStats:
        """Return the current stats; the last stats if the process is replaced meanwhile."""
        connection = self.connection
        if self.is_up:
            try:
                stats = await connection.ask()
            except EngineDeadError:
                self.check()
            else:
                # Totals of a process that has ended since are among the earlier ones.
                if self.is_up and connection is self.connection:
                    return self._counted(stats)
        return self.stats

    async def picture(self) -> EnginePicture:
        """Return a picture of the next step. Raises EngineDeadError, also while the process is replaced."""
        self.check()
        if not self.is_up:
            raise EngineDeadError(f"{self.connection.name} is being replaced")
        return await self.connection.look()

    @property
    def stats(self) -> EngineStats:
        """The stats as of the last heartbeat. Totals continue across processes."""
        return self._counted(self.connection.stats if self.is_up else None)

    def _counted(self, stats: EngineStats | None) -> EngineStats:
        """Return the stats of the process, where one serves, with the totals of those before."""
        earlier = self._earlier
        if stats is not None and earlier is not None:
            stats = stats.after(earlier)
        whole = stats or earlier
        assert whole is not None
        return replace(whole, num_restarts=self._num_restarts, num_resumed=self.num_resumed)
