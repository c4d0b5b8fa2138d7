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
    """A process of this machine that holds a part of the model. It ends when the process that started it
    ends.

    name: the name of the rank in messages, with its stage and shard.
    failure: the class and the message of the exception that ended the process, if it reported one.
    state: its last answer to `ask_state`; None until it answers.
    answered_at: the time of its last answer, or of its start, by time.monotonic.
    on_end: called, from another thread, when the process closes its socket.
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
        """Return how the process ended. Call this once the process has ended or is about to."""
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
        """Ask the process for its state. The answer soon appears in `state`."""
        self._channel.send({"order": "report"})

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def close(self) -> None:
        """Make the process end."""
        self._channel.send({"order": "end"})
        self._channel.close()

    def wait(self, until: float) -> None:
        """Wait until the process has ended. If it has not ended at the given time, kill it.

        until: the time on the clock time.monotonic.
        """
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
