"""LocalRank: a rank that the driver has started on its own machine, as a process at the end of a socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from ..base.interrupts import signals_blocked
from ..text.worker import ROOT
from .channel import Channel, Message

RANK_PROCESS = "paged.ranks"  # the module that it runs
RANK_END_S = 5.0  # after which a process that was told to end is killed
RANK_EXIT_S = 0.5  # from the end of a process's socket to its own end


class LocalRank:
    """A process that holds a part of the model. It ends when this object's process does.

    name: of the rank in messages: what it holds, and where.
    failure: the kind and message of the exception that ended it, if it has told one.
    state: what it does, as it has answered since it was asked; None if it has not.
    answered_at: when it last did, or was started, on the clock time.monotonic.
    on_end: called, from another thread, when it closes its socket.
    """

    def __init__(self, rank: int, name: str, start: Message, on_end: Callable[[], object]) -> None:
        ours, theirs = socket.socketpair()
        path = [ROOT, *filter(None, sys.path)]  # so that it finds what this process finds
        with theirs, signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", RANK_PROCESS, "follow", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is no output of a command
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
        self.pid = self._process.pid
        self.name = f"{name}, process {self.pid}"
        self.failure: tuple[str, str] | None = None
        self._channel = Channel(ours)
        self.state: str | None = None
        self.answered_at = time.monotonic()
        self._on_end = on_end
        self._channel.send(start)
        self._reader = threading.Thread(target=self._read, name=f"paged-rank-{rank}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for message in self._channel.messages():
            if "failed" in message:
                self.failure = tuple(message["failed"])
            else:
                self.state = message["state"]
                self.answered_at = time.monotonic()
        self._on_end()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        """Return how the process ended, which it has, or is about to."""
        try:
            code = self._process.wait(RANK_EXIT_S)
        except subprocess.TimeoutExpired:
            return "has closed its socket"
        self._reader.join(RANK_EXIT_S)  # it may have told why
        if code < 0:
            name = signal.Signals(-code).name
            memory = ", as the system does when memory is short" if name == "SIGKILL" else ""
            return f"was ended by {name}{memory}"
        if self.failure is not None:
            kind, message = self.failure
            return f"ended: {kind}: {message}"
        return f"ended with exit code {code}"

    def ask_state(self) -> None:
        """Have the process say what it does, which `state` is soon."""
        self._channel.send({"order": "report"})

    def kill(self) -> None:
        """End the process at once, and wait for that."""
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def close(self) -> None:
        """End the process."""
        self._channel.send({"order": "end"})
        self._channel.close()

    def wait(self, until: float) -> None:
        """Wait until the process has ended. Kill it at this time of time.monotonic."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
