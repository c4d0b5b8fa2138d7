"""RayLauncher: engine processes on the nodes of a Ray cluster, reached by the frames of the server.

An actor starts an engine process on its node, hands it the bytes of the front end's socket, and yields those
that come back: one stream for all requests. Beyond the socket nothing knows of Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ..server.launcher import LocalLauncher, LocalProcess, socket_pair
from ..text.worker import ROOT
from .cluster import Share, join, share_of

CARRIED_BYTES = 2**20  # at once: as a rule the frame of a step
PLACE_S = 60.0  # in which the cluster has to start an actor: what it needs was free
MOST_UNREAD = 64  # parts that the stream of an actor is ahead of its reader

logger = logging.getLogger(__name__)


class EngineActor:
    """Runs an engine process beside it, and carries bytes. The process ends with it.

    Each concurrency group has threads of its own; orders have one, which keeps them in order.
    """

    def __init__(self) -> None:
        self._socket: socket.socket
        self._process: LocalProcess
        self._socket, self._process = LocalLauncher().launch()

    @ray.method(concurrency_group="ends")
    def node(self) -> str:
        """Return the address of its node, once it runs."""
        return str(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="orders")
    def take(self, data: bytes) -> None:
        """Hand bytes to the engine process."""
        with suppress(BrokenPipeError, ConnectionResetError):  # `reports` ends then
            self._socket.sendall(data)

    @ray.method(concurrency_group="reports")
    def reports(self) -> Iterator[bytes]:
        """Yield the bytes that come from the engine process, until it ends."""
        with suppress(ConnectionResetError):
            while data := self._socket.recv(CARRIED_BYTES):
                yield data

    @ray.method(concurrency_group="ends")
    def how_ended(self, timeout_s: float) -> str:
        """Return how the engine process ended; see `EngineProcess`."""
        return self._process.how_ended(timeout_s)


_Actor: Any = ray.remote(max_restarts=0, concurrency_groups={"orders": 1, "reports": 1, "ends": 2})(
    EngineActor
)


class RayProcess:
    """An engine process with its actor, an `EngineProcess`.

    Two threads carry bytes between the actor and a socket.
    """

    def __init__(self, connection: socket.socket, share: Share, environment: Mapping[str, str]) -> None:
        self._socket = connection
        self._share = share
        self._how: str | None = None
        self._is_over = threading.Event()
        self._actor = _Actor.options(
            num_cpus=share.num_cpus, num_gpus=share.num_gpus, runtime_env={"env_vars": {**environment}}
        ).remote()
        threading.Thread(target=self._carry_reports, name="paged-ray-reports", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is gone, at most so long. Return whether it is."""
        return self._is_over.wait(timeout_s)

    def kill(self) -> None:
        """End it at once, with its actor."""
        with suppress(RayError):
            ray.kill(self._actor)

    def how_ended(self, timeout_s: float) -> str:
        """Return how it ended, in a few words; a process that has not ended in time is ended."""
        if not self._is_over.wait(timeout_s):
            self.kill()
            return "its socket was closed"
        assert self._how is not None
        return self._how

    def _carry_reports(self) -> None:
        """Write to the socket what the actor yields, until that ends."""
        try:
            self._how = self._carry()
        except (RayError, OSError) as error:
            self._how = _first_line(error)
        finally:
            self.kill()
            self._is_over.set()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _carry(self) -> str:
        """Carry bytes both ways. Return how the engine process has ended."""
        try:
            node = ray.get(self._actor.node.remote(), timeout=PLACE_S)
        except GetTimeoutError:
            return f"the cluster has not started its actor within {PLACE_S:.0f} s; it needs {self._share}"
        logger.info("an engine process starts on %s", node)
        threading.Thread(target=self._carry_orders, name="paged-ray-orders", daemon=True).start()
        stream = self._actor.reports.options(
            num_returns="streaming", _generator_backpressure_num_objects=MOST_UNREAD
        ).remote()
        for part in stream:
            self._socket.sendall(ray.get(part))
        return f"on {node} {ray.get(self._actor.how_ended.remote(PLACE_S))}"

    def _carry_orders(self) -> None:
        """Send the actor what comes from the socket. It ends with the socket."""
        with suppress(RayError, OSError):
            while data := self._socket.recv(CARRIED_BYTES):
                self._actor.take.remote(data)
        self.kill()


class RayLauncher:
    """Starts engine processes in actors, each with its share of the cluster. A `Launcher`.

    share: what each process gets.
    is_local: whether the cluster is one of this process, which finds modules where this process does.
    """

    divides_machine = False
    engine_options: Mapping[str, Any]

    def __init__(self, share: Share, *, is_local: bool) -> None:
        self._share = share
        self.engine_options = {"device": "cuda"} if share.num_gpus else {"num_threads": share.num_cpus}
        path = os.pathsep.join([ROOT, *filter(None, sys.path)])
        self._environment = {"PYTHONPATH": path} if is_local else {}

    def launch(self) -> tuple[socket.socket, RayProcess]:
        """Start a process. Return a socket to it, and the process."""
        ours, theirs = socket_pair()
        return ours, RayProcess(theirs, self._share, self._environment)


def connect(address: str | None, options: Mapping[str, Any], replicas: int) -> RayLauncher:
    """Return a launcher for engines with these options on a cluster. Raises ConfigError."""
    is_local = join(address)
    return RayLauncher(share_of(options, replicas), is_local=is_local)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
