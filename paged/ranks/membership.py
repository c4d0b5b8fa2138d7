"""Membership: how one rank joins the others, once it has loaded."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed

from ..base.errors import PagedError, RankError, is_final
from .layout import RankLayout
from .meeting import COME_S, Meeting, Store, post_failure, require_equal
from .place import Torchrun

_STORES: Any = torch.distributed  # which does not say that it exports them
_STORE_TIMEOUT = timedelta(seconds=COME_S)
_LINGER_S = 20.0  # the process that has the store waits so long, at most, until the others know its error

logger = logging.getLogger(__name__)


class Connects(Protocol):
    """The method of a transport that this module uses."""

    def connect(self, store: Any) -> None:
        """Connect to the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """The figures that a rank reports after loading."""

    host: str
    pid: int
    weight_bytes: int
    kv_bytes: int
    cpu_features: Sequence[str]


class Membership:
    """One rank's view of all ranks of a model: the `Peers` of its runner."""

    def __init__(
        self,
        layout: RankLayout,
        rank: int,
        store: Store,
        transport: Connects,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout = layout
        self.weight_bytes = 0
        self._store = store
        self._transport = transport
        self.names = [name_of(layout, each) for each in range(layout.num_ranks)]
        self.meeting = Meeting(store, rank, self.names, check)

    def agree(self, facts: dict[str, Any]) -> None:
        """Wait until all ranks have arrived.

        Raises RankError if a rank does not arrive, or if its facts differ.
        """
        found = self.meeting.gather("facts", {"host": socket.gethostname(), **facts}, COME_S)
        self.names[:] = [name_of(self.layout, rank, own.pop("host")) for rank, own in enumerate(found)]
        require_equal(found, self.names)

    def loaded(self, weight_bytes: int) -> None:
        """Wait until all ranks have loaded their weights. Connect to them."""
        self.weight_bytes = weight_bytes
        self.meeting.gather("loaded", None)
        self._transport.connect(_STORES.PrefixStore("group", self._store))

    def least_seats(self, num_seats: int) -> int:
        """Exchange the number of sequences that fit on each rank. Return the smallest of all ranks."""
        found: list[int] = self.meeting.gather("seats", num_seats)
        return min(found)

    def least_snapshots(self, num_snapshots: int) -> int:
        """Exchange the number of snapshots that fit on each rank. Return the smallest of all ranks."""
        found: list[int] = self.meeting.gather("snapshots", num_snapshots)
        return min(found)

    def least(self, num_blocks: int, num_host_blocks: int) -> tuple[int, int]:
        """Return the smallest numbers of device blocks and host blocks that any rank can hold."""
        found = self.meeting.gather("blocks", [num_blocks, num_host_blocks])
        return min(own[0] for own in found), min(own[1] for own in found)

    def tell_figures(self, kv_bytes: int, cpu_features: Sequence[str]) -> list[RankFigures]:
        """Tell all ranks that this rank is ready. Return the figures of every rank."""
        own = RankFigures(
            host=socket.gethostname(),
            pid=os.getpid(),
            weight_bytes=self.weight_bytes,
            kv_bytes=kv_bytes,
            cpu_features=cpu_features,
        )
        return [RankFigures(**each) for each in self.meeting.gather("ready", asdict(own))]


def name_of(layout: RankLayout, rank: int, host: str | None = None) -> str:
    """Return the name of a rank for messages, with its stage, shard and host."""
    stage = f"stage {layout.stage_of(rank)} of {layout.num_stages}, {layout.describe(rank)}"
    return f"rank {rank} ({stage}{f', on {host}' if host else ''})"


def local_store(directory: Path, num_ranks: int) -> Store:
    """Return the store of ranks on one machine: a file in their private directory, which needs no port."""
    store: Store = _STORES.FileStore(str(directory / "store"), num_ranks)
    return store


def torchrun_store(torchrun: Torchrun) -> Store:
    """Return the store of ranks that torchrun started. Raises RankError if it cannot be reached."""
    try:
        tcp_store = _STORES.TCPStore(
            torchrun.address,
            torchrun.port,
            torchrun.num_ranks,
            is_master=torchrun.rank == 0 and not torchrun.hosts_store,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RankError(
            f"rank {torchrun.rank} has not met the others at {torchrun.address}:{torchrun.port} within "
            f"{COME_S:g} s: {reason}"
        ) from error
    # A process that torchrun starts anew finds the keys of the last attempt there.
    store: Store = _STORES.PrefixStore(f"paged/{torchrun.attempt}", tcp_store)
    return store


@contextmanager
def failing_together(store: Store, torchrun: Torchrun) -> Iterator[None]:
    """If this rank of torchrun raises an error, make all other ranks raise it too, with this rank's name.

    The error keeps its class if a restart would not help; otherwise it becomes a RankError. The exit codes of
    the two differ.
    """
    try:
        yield
    except Exception as error:
        try:
            posted = post_failure(store, torchrun.rank, error)
            store.set(_knows(torchrun.rank), "")
        except RuntimeError as lost:  # the store is gone with the process that had it
            if isinstance(error, PagedError):
                raise error from None
            reason = str(error).partition("\n")[0]
            raise RankError(
                f"rank {torchrun.rank} has lost the others at {torchrun.address}:{torchrun.port}: {reason}"
            ) from lost
        if not isinstance(error, PagedError):
            logger.exception("rank %d has failed", torchrun.rank)
        if torchrun.rank == 0 and not torchrun.hosts_store:
            _wait_for_others(store, torchrun.num_ranks)
        raise (posted if is_final(posted) else RankError(str(posted))) from error


def _knows(rank: int) -> str:
    """Return the key of a rank that has the error which ends all."""
    return f"knows/{rank}"


def _wait_for_others(store: Store, num_ranks: int) -> None:
    others = [_knows(rank) for rank in range(1, num_ranks)]
    until = time.monotonic() + _LINGER_S
    while not store.check(others) and time.monotonic() < until:
        time.sleep(0.01)
