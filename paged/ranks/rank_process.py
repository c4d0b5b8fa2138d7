"""The process of a rank that follows: started by the driver with a socket, or one of torchrun's.

Its main thread loads its part of the model and computes steps. Another one reads the driver's orders, and
ends the process when the driver has ended, however that came about.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import PagedError, RankError
from ..base.interrupts import leave_signals_to_parent
from ..options.config import EngineConfig
from .channel import Channel, Message
from .heartbeat import DIRECTORY_PREFIX, HeartbeatFile, remove_private
from .layout import RankLayout
from .meeting import ENDED, post_failure
from .place import LOOPBACK, Torchrun, bind_to_share, share_of

if TYPE_CHECKING:
    from .follower import FollowerRunner
    from .membership import Membership
    from .transport import GlooTransport

logger = logging.getLogger(__name__)

_ORPHAN_S = 1.0  # from the end of the driver's socket to its own end


class RankProcess:
    """A rank other than the driver. It computes the steps that the driver plans.

    config: the driver's config, for the whole model.
    local_index, num_local: the number of this rank among this machine's ranks, and the number of this
        machine's ranks.
    directory: the directory of the checkpoint.
    private: the directory with the heartbeat file.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        rank: int,
        *,
        private: Path,
        local_index: int,
        num_local: int,
    ) -> None:
        self.config = config
        self.directory = directory
        self.rank = rank
        self.private = private
        self.local_index = local_index
        self.num_local = num_local
        self._state = "loads"
        self.heartbeat = HeartbeatFile(private, rank, config.rank_timeout_s)
        self.membership: Membership | None = None
        self._transport: GlooTransport | None = None

    @property
    def state(self) -> str:
        """The rank's state: it "loads", "computes", "waits" for others, "fails", or is "lost" to others."""
        is_waiting = self._transport is not None and self._transport.is_waiting
        return "waits" if is_waiting and self._state == "computes" else self._state

    def set_state(self, state: str) -> None:
        """Report a new state of the rank."""
        self._state = state

    def load(
        self,
        store: Any,
        *,
        host: str,
        message_timeout_s: float | None,
    ) -> FollowerRunner:
        """Load this rank's part of the model, and connect to the other ranks."""
        from ..images.reading import read_seeing
        from .facts import cpu_features, facts_of
        from .follower import FollowerRunner
        from .membership import Membership
        from .transport import GlooTransport

        model_config = read_seeing(self.config, self.directory)
        layout = RankLayout.of(self.config, model_config)
        transport = GlooTransport(
            layout.num_ranks,
            self.rank,
            timeout_s=self.config.rank_timeout_s,
            host=host,
            message_timeout_s=message_timeout_s,
        )
        self._transport = transport
        self.membership = membership = Membership(layout, self.rank, store, transport)
        membership.agree(facts_of(self.config, self.directory))
        runner = FollowerRunner(
            share_of(self.config, self.local_index, self.num_local),
            model_config,
            self.directory,
            layout=layout,
            rank=self.rank,
            transport=transport,
            peers=membership,
        )
        membership.tell_figures(runner.kv_cache.num_bytes, cpu_features())
        return runner

    def run(self, runner: FollowerRunner) -> None:
        """Compute steps until the driver ends them. Raises RankError if another rank is lost."""
        self.set_state("computes")
        self.heartbeat.loaded()
        try:
            runner.run(self.heartbeat.beat)
        finally:
            assert self._transport is not None
            self._transport.close()  # so that those that wait for this rank learn of it

    def end(self) -> None:
        """Tell the driver, which waits, that this rank has read all of its messages."""
        assert self.membership is not None
        self.membership.meeting.tell(ENDED, None)


# Started by the driver


def follow_parent(descriptor: int) -> int:
    """Compute for the driver at the other end of a socket, given its descriptor. Return the exit code."""
    leave_signals_to_parent()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel = Channel(connection)
    messages = channel.messages()
    start = next(messages, None)
    if start is None:
        return 0
    private = Path(start["private"])
    own = RankProcess(
        EngineConfig(**start["options"]),
        Path(start["directory"]),
        start["rank"],
        private=private,
        local_index=start["rank"],
        num_local=start["num_local"],
    )
    reading = (channel, messages, own, os.getppid())
    threading.Thread(target=_read_orders, args=reading, name="paged-orders", daemon=True).start()
    if own.config.num_threads is None:
        bind_to_share(own.local_index, own.num_local)
    return _end(_follow(own, channel))


def _follow(own: RankProcess, channel: Channel) -> int:
    """Load and compute until the plans end. Return the exit code."""
    from .membership import local_store

    store = local_store(own.private, own.config.num_ranks)
    try:
        runner = own.load(store, host=LOOPBACK, message_timeout_s=None)
        try:
            own.run(runner)
        except RankError:
            own.set_state("lost")
            threading.Event().wait()  # the driver asks which rank is to blame, and then ends this process
        return 0
    except Exception as error:
        is_starting = own.state == "loads"
        own.set_state("fails")
        if is_starting:  # the driver does not wait for messages yet, but in the store
            post_failure(store, own.rank, error)
        if not isinstance(error, PagedError):
            logger.exception("rank %d has failed", own.rank)
        channel.send({"failed": [type(error).__name__, str(error)]})
        return 1


def _read_orders(channel: Channel, messages: Iterator[Message], own: RankProcess, driver: int) -> None:
    for message in messages:
        match message["order"]:
            case "report":
                channel.send({"state": own.state, "step": own.heartbeat.step})
            case "end":
                os._exit(0)
    # The driver has ended, and cannot remove the files any more: perhaps it was killed.
    until = time.monotonic() + _ORPHAN_S
    while os.getppid() == driver and time.monotonic() < until:
        time.sleep(0.01)
    if os.getppid() != driver:
        remove_private(own.private)
    os._exit(0)


def _end(code: int) -> int:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # without waiting for threads of libraries


# Started by torchrun


def follow_torchrun(options: Mapping[str, Any]) -> int:
    """Compute for rank 0, in a process that torchrun started, until rank 0 ends. Return 0.

    options: the arguments of `LLMEngine`, the same as on rank 0.

    Raises RankError if another rank is lost; any other error is raised on all ranks.
    """
    config = EngineConfig(**options)
    torchrun = Torchrun.of(config)
    assert torchrun is not None, "torchrun has not started this process"
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # By this, torchrun ends the others of its machine when one has ended. No thread but one gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if config.num_threads is None:
        bind_to_share(torchrun.local_rank, torchrun.num_local)
    with tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX, ignore_cleanup_errors=True) as private:
        computes = threading.Event()
        arguments = (Path(private), computes)
        threading.Thread(target=_end_by_signal, args=arguments, name="paged-end", daemon=True).start()
        return _follow_torchrun(config, torchrun, Path(private), computes)


def join() -> int:
    """Compute for rank 0 as `follow_torchrun` does, with options read from the first line of stdin.

    The process also ends when stdin is closed. Return the exit code.
    """
    options = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, name="paged-parent", daemon=True).start()
    try:
        return _end(follow_torchrun(options))
    except PagedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _end(1)


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _end_by_signal(private: Path, computes: threading.Event) -> None:
    """Wait for SIGTERM, and end the process then. Its main thread may wait for another rank.

    A rank that computes goes on: what ends torchrun here may end the driver, too, which has requests to
    finish, and tells this rank when it has.
    """
    number = signal.sigwait({signal.SIGTERM})
    while computes.is_set():
        number = signal.sigwait({signal.SIGTERM})
    remove_private(private)
    os._exit(128 + number)


def _follow_torchrun(
    config: EngineConfig, torchrun: Torchrun, private: Path, computes: threading.Event
) -> int:
    from ..checkpoints.model_directory import resolve
    from .membership import failing_together, torchrun_store

    store = torchrun_store(torchrun)
    with failing_together(store, torchrun):
        own = RankProcess(
            config,
            resolve(config.model, config.revision),
            torchrun.rank,
            private=private,
            local_index=torchrun.local_rank,
            num_local=torchrun.num_local,
        )
        runner = own.load(store, host=torchrun.own_address(), message_timeout_s=config.rank_timeout_s)
        computes.set()
        own.run(runner)
        own.end()
    return 0
