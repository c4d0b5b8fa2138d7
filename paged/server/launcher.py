"""Launchers: how an engine process is started, and how it is reached."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ..base.interrupts import signals_blocked
from ..text.worker import ROOT
from .frames import Start

ENGINE_PROCESS = "paged.server.engine_process"  # the module that it runs
EXIT_CODE = "exit code"  # how a process ended begins with it if nothing has killed it
BUFFER_BYTES = 4 * 2**20  # of the socket, as far as the system allows: a step waits while it is full


class EngineProcess(Protocol):
    """A process that runs an engine, as its connection sees it."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most timeout_s for the end of the process. Return whether it has ended."""

    def kill(self) -> None:
        """Kill the process."""

    def how_ended(self, timeout_s: float) -> str:
        """Return in a few words how the process ended. If it has not ended within timeout_s, kill it."""


class Launcher(Protocol):
    """Starts engine processes."""

    divides_machine: bool  # whether the processes run on one machine, and take shares of it
    engine_options: Mapping[str, Any]  # that each engine gets besides its own

    def launch(self, start: Start) -> tuple[socket.socket, EngineProcess]:
        """Start a process. Return the process and a socket to it, over which `start` is sent first."""

    def check_room(self, num: int) -> None:
        """Raise ConfigError unless there is room for `num` more processes. This may block."""


class LocalProcess:
    """A child process of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def wait(self, timeout_s: float) -> bool:
        """Wait at most timeout_s for the end of the process. Return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def how_ended(self, timeout_s: float) -> str:
        """Return in a few words how the process ended. If it has not ended within timeout_s, kill it."""
        if not self.wait(timeout_s):
            self.kill()  # it cannot be used any more
            return "its socket was closed"
        code = self._process.returncode
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"{EXIT_CODE} {code}"


class LocalLauncher:
    """Starts engine processes on this machine. They end when this process does."""

    divides_machine = True
    engine_options: Mapping[str, Any] = MappingProxyType({})

    def launch(self, start: Start) -> tuple[socket.socket, LocalProcess]:  # noqa: ARG002
        """Start a process. Return a socket to it, and the process."""
        return start_process()

    def check_room(self, num: int) -> None:
        """Do nothing: a process that finds no GPU or core for itself reports it."""


def start_process(
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[socket.socket, LocalProcess]:
    """Start a process on this machine that ends when this one does. Return a socket to it, and the process.

    environment: variables in addition to this process's own.
    """
    ours, theirs = socket_pair()
    path = [ROOT, *filter(None, sys.path)]  # so that it finds what this process finds
    with theirs, signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", ENGINE_PROCESS, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints is no output of a command
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)},
        )
    return ours, LocalProcess(process)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a socket with buffers large enough for a step's outputs."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return ends
