"""Ranks: the other processes of a model, as the driver sees them; how the driver notices that one is lost."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base.errors import RankError
from ..options.config import EngineConfig
from .facts import plain_options
from .heartbeat import DIRECTORY_PREFIX, HeartbeatFile, remove_private
from .layout import RankLayout
from .local_rank import RANK_END_S, LocalRank
from .meeting import ENDED
from .membership import Membership, RankFigures, failing_together, local_store, name_of, torchrun_store
from .place import LOOPBACK, Torchrun
from .transport import GlooTransport

ANSWER_S = 1.0  # in which a rank that does not hang says what it does
LOADING_S = 30.0  # in which a rank that loads answers: an import may hold the interpreter for seconds
_WELL = {"loads", "waits", "lost"}  # the states in which a rank is not to blame for one that waits
_LOOK_S = 0.01  # between two looks at processes that may be about to end
IDLE_SHARE = 3  # idle messages come so often within rank_timeout_s


class Ranks:
    """The other ranks of a model, as rank 0 sees them.

    Without torchrun, this process starts one process for each other rank. If one is lost, all are ended.

    directory: the directory of the checkpoint. transport, membership: this process's own connection to the
        other ranks.
    """

    def __init__(self, config: EngineConfig, layout: RankLayout, directory: Path) -> None:
        self._config = config
        self._layout = layout
        self._directory = directory
        self._torchrun = torchrun = Torchrun.of(config)
        if torchrun is not None and torchrun.rank:
            raise RankError(
                f"this is torchrun's process {torchrun.rank}, and process 0 alone makes an engine; have "
                "torchrun start a command, in which the others follow: -m paged serve, generate, run-batch, "
                "chat or bench"
            )
        self._local: dict[int, LocalRank] = {}
        self._changed = threading.Event()
        self._lost: RankError | None = None  # why one of torchrun's ranks cannot be reached
        self._is_closed = False
        self._on_loss: Callable[[], Callable[[], object] | None] = lambda: None
        self.figures: Sequence[RankFigures] = ()
        host = LOOPBACK if torchrun is None else torchrun.own_address()
        tcp_store = None if torchrun is None else torchrun_store(torchrun)
        self._private = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        self._store = tcp_store or local_store(self._private, layout.num_ranks)
        self.transport = GlooTransport(layout.num_ranks, 0, timeout_s=config.rank_timeout_s, host=host)
        self.membership = Membership(layout, 0, self._store, self.transport, check=self._check_answers)
        self.heartbeat = HeartbeatFile(self._private, 0, config.rank_timeout_s)
        self._sent_at = self._asked_at = time.monotonic()
        if torchrun is None:
            for rank in range(1, layout.num_ranks):
                self._start(rank)
        self._watcher = threading.Thread(target=self._watch, name="paged-ranks", daemon=True)

    @property
    def local_index(self) -> int:
        """This process's number among the ranks of this machine."""
        return 0 if self._torchrun is None else self._torchrun.local_rank

    @property
    def num_local(self) -> int:
        """The number of ranks on this machine."""
        return self._layout.num_ranks if self._torchrun is None else self._torchrun.num_local

    def _start(self, rank: int) -> None:
        start = {
            "rank": rank,
            "options": plain_options(self._config),
            "directory": str(self._directory),
            "private": str(self._private),
            "num_local": self.num_local,
        }
        name = name_of(self._layout, rank, socket.gethostname())
        self._local[rank] = LocalRank(rank, name, start, on_end=self._changed.set)

    def begin(self, figures: Sequence[RankFigures]) -> None:
        """Watch the ranks from now on. Call this once all have loaded."""
        self.figures = figures
        self.heartbeat.loaded()
        self._watcher.start()

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Call a method, from another thread, when a process ends, unless its object no longer exists."""
        self._on_loss = weakref.WeakMethod(on_loss)

    # While steps run

    def on_step(self, number: int) -> None:
        """Record that a step was planned and that its message is now sent to all ranks."""
        self._sent_at = time.monotonic()
        self.heartbeat.beat(number)

    def check(self) -> None:
        """Raise RankError if a process started here has ended, or if a rank of torchrun is lost."""
        if self._lost is not None:
            raise self._lost
        for local in self._local.values():
            if local.has_ended:
                raise RankError(f"{local.name}, {local.how_it_ended()}")

    def _check_answers(self) -> None:
        """Raise RankError if a process that was started here has ended or hangs, while this one waits."""
        self.check()
        now = time.monotonic()
        if now - self._asked_at < ANSWER_S:
            return
        is_first = now - self._asked_at > 2 * ANSWER_S  # of a wait: no answer was asked for
        self._asked_at = now
        for local in self._local.values():
            if is_first:
                local.answered_at = now
            elif now - local.answered_at > max(LOADING_S, self._config.rank_timeout_s):
                raise RankError(
                    f"{local.name}, has not answered for {now - local.answered_at:.0f} s: it hangs"
                )
            local.ask_state()

    def end_after(self, error: BaseException) -> RankError:
        """End all ranks after a step has raised. Return which rank ended or hangs, or else the error."""
        self.transport.close()  # ranks that wait for this one learn of it
        if not isinstance(error, Exception):
            self.close()
            return RankError("the ranks were ended, as their step was interrupted")
        if self._torchrun is not None:
            loss = self._loss(error)
            remove_private(self._private)  # a server ends this process as soon as it knows
            return loss
        troubles = self._find_troubles()
        for rank in troubles:
            self._local[rank].kill()  # one that hangs would not end when it is told to
        self.close()
        return RankError("; ".join(troubles.values())) if troubles else _as_rank_error(error)

    def _loss(self, error: Exception) -> RankError:
        """Return what torchrun's ranks say of the one that is lost, or else the error."""
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until:
            if (failure := self.membership.meeting.failure()) is not None:
                return RankError(str(failure))
            time.sleep(_LOOK_S)
        return _as_rank_error(error)

    def _find_troubles(self) -> dict[int, str]:
        """Return which local ranks have ended or hang, and how, by their numbers.

        One that waits for another has lost it, since this process has left the group, and says so.
        """
        until = time.monotonic() + ANSWER_S
        for local in self._local.values():
            local.state = None
        while True:
            for local in self._local.values():
                local.ask_state()
            time.sleep(_LOOK_S)
            ended = {rank for rank, local in self._local.items() if local.has_ended}
            states = {rank: local.state for rank, local in self._local.items() if rank not in ended}
            is_settled = "fails" not in states.values() and (ended or {*states.values()} <= _WELL)
            if is_settled or time.monotonic() > until:
                break
        if ended:
            return {rank: f"{self._local[rank].name}, {self._local[rank].how_it_ended()}" for rank in ended}
        stuck = f"has not answered within {self._config.rank_timeout_s:g} s: it hangs"
        return {
            rank: f"{self._local[rank].name}, {stuck}" for rank, state in states.items() if state not in _WELL
        }

    # While no step runs

    def _watch(self) -> None:
        """Send an idle message where no plan was sent for long, and tell of processes that end."""
        pause_s = self._config.rank_timeout_s / IDLE_SHARE
        while not self._is_closed:
            self._changed.wait(max(0.0, self._sent_at + pause_s - time.monotonic()))
            if self._is_closed:
                return
            if self._changed.is_set():
                self._changed.clear()
                if (on_loss := self._on_loss()) is not None:
                    on_loss()
            elif time.monotonic() - self._sent_at >= pause_s:
                self._sent_at = time.monotonic()
                self.heartbeat.beat()
                try:
                    self.transport.send_message(b"")
                except RankError as error:  # the next step would raise it, too
                    self._on_silence(error)

    def _on_silence(self, error: RankError) -> None:
        """Record that a rank of torchrun cannot be reached. The ends of other ranks are noticed directly."""
        if self._torchrun is not None and not self._is_closed:
            self._lost = error
            self._changed.set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """End all ranks if this rank cannot load or meet them. Ranks of torchrun raise the same error."""
        try:
            if self._torchrun is None:
                yield
            else:
                with failing_together(self._store, self._torchrun):
                    yield
        except BaseException:
            self.close()
            raise

    def close(self, end: Callable[[], None] = lambda: None) -> None:
        """End the processes that were started here, and remove their files.

        end: sends the message that ends torchrun's ranks.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._changed.set()
        if self._torchrun is not None:
            with suppress(RankError, RuntimeError):  # some have ended, or the store is gone
                end()
                self.membership.meeting.gather(ENDED, None, RANK_END_S)
        self.transport.close()
        for local in self._local.values():
            local.close()
        until = time.monotonic() + RANK_END_S
        for local in self._local.values():
            local.wait(until)
        remove_private(self._private)

    def describe(self) -> str:
        """Describe what each rank holds, the driver first."""
        parts = [
            f"{name_of(self._layout, rank, each.host if self._torchrun else None)}"
            f"{', the driver, which computes the last stage,' if not rank else ''} has "
            f"{each.weight_bytes / 2**20:,.0f} MiB of weights and {each.kv_bytes / 2**20:,.0f} MiB of KV"
            for rank, each in enumerate(self.figures)
        ]
        if len({tuple(each.cpu_features) for each in self.figures}) > 1:
            parts.append("their CPUs differ, and with them the last bits of results")
        return "; ".join(parts)


def _as_rank_error(error: Exception) -> RankError:
    return error if isinstance(error, RankError) else RankError(f"{type(error).__name__}: {error}")
