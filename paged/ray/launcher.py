"""RayLauncher: engine processes on the nodes of a Ray cluster, reached by the frames of the server.

An actor starts an engine process on its node, hands it the bytes of the front end's socket, and yields those
that come back: one stream for all requests. Beyond the socket nothing knows of Ray. A model over several
ranks has an actor for each, in a placement group; they meet as torchrun's do.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..base.errors import ClusterError
from ..base.interrupts import signals_blocked
from ..server.frames import Start
from ..server.launcher import LocalProcess, socket_pair, start_process
from ..text.worker import ROOT
from .cluster import ROOM_S, Share, described, free_share, join, num_ranks_of, share_of

CARRIED_BYTES = 2**20  # at once: as a rule the frame of a step
PLACE_S = 60.0  # in which the cluster has to start an actor: what it needs was free
MOST_UNREAD = 64  # parts that the stream of an actor is ahead of its reader
LOSS_S = 2.0  # from the end of a rank until its engine is ended, which may tell more of it before

logger = logging.getLogger(__name__)


class RankActor:
    """Runs the process of a rank on the actor's node. The process ends with the actor."""

    @ray.method(concurrency_group="ends")
    def node(self) -> str:
        """Return the address of the actor's node."""
        return str(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="reports")
    def follow(self, options: Mapping[str, Any], environment: Mapping[str, str]) -> str:
        """Compute for rank 0 with these arguments of `LLMEngine`. Return how the process ended."""
        path = [ROOT, *filter(None, sys.path)]
        with signals_blocked():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paged.ranks", "join"],
                stdin=subprocess.PIPE,
                stdout=2,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)},
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # how it ended says more
            process.stdin.write(json.dumps({**options}).encode() + b"\n")
            process.stdin.flush()  # it stays open: the process ends with it
        process.wait()
        return LocalProcess(process).how_ended(0)


class EngineActor:
    """Runs an engine process on the actor's node, and carries bytes to and from it. The process ends with the
    actor.

    Each concurrency group has its own threads. The group for orders has only one thread, so orders stay in
    order.
    """

    def __init__(self) -> None:
        self._socket: socket.socket
        self._process: LocalProcess

    @ray.method(concurrency_group="ends")
    def node(self) -> str:
        """Return the address of the actor's node."""
        return str(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="ends")
    def free_port(self) -> int:
        """Return a free port of the actor's node."""
        with socket.create_server(("", 0)) as found:
            port: int = found.getsockname()[1]
            return port

    @ray.method(concurrency_group="ends")
    def begin(self, environment: Mapping[str, str]) -> int:
        """Start the engine process. Return its pid on the node."""
        self._socket, self._process = start_process(environment)
        return self._process.pid

    @ray.method(concurrency_group="orders")
    def take(self, data: bytes) -> None:
        """Pass bytes to the engine process."""
        with suppress(BrokenPipeError, ConnectionResetError):  # `reports` ends then
            self._socket.sendall(data)

    @ray.method(concurrency_group="reports")
    def reports(self) -> Iterator[bytes]:
        """Yield the bytes that the engine process sends, until it ends."""
        with suppress(ConnectionResetError):
            while data := self._socket.recv(CARRIED_BYTES):
                yield data

    @ray.method(concurrency_group="ends")
    def how_ended(self, timeout_s: float) -> str:
        """Return how the engine process ended; see `EngineProcess`."""
        return self._process.how_ended(timeout_s)


_GROUPS = {"orders": 1, "reports": 1, "ends": 2}
_Actor: Any = ray.remote(max_restarts=0, concurrency_groups=_GROUPS)(EngineActor)
_Rank: Any = ray.remote(max_restarts=0, concurrency_groups=_GROUPS)(RankActor)


class RayProcess:
    """The `EngineProcess` of an engine in an actor, with the actors of its other ranks.

    Two threads carry bytes between the actor and a socket.

    pid: the process's pid on its node; None until it has started.
    """

    def __init__(
        self, connection: socket.socket, start: Start, share: Share, environment: Mapping[str, str]
    ) -> None:
        self._socket = connection
        self._options = start.options
        self._share = share
        self._num_ranks = num_ranks_of(start.options)
        self.pid: int | None = None
        self._how: str | None = None
        self._loss: str | None = None  # of a rank, which ended the engine
        self._is_over = threading.Event()
        self._orders: threading.Thread | None = None
        terms: dict[str, Any] = {"runtime_env": {"env_vars": {**environment}}}
        self._group: Any = None
        if self._num_ranks > 1:
            self._group = placement_group([share.bundle] * self._num_ranks, strategy="PACK")
        self._actor = _Actor.options(**terms, **self._place(0)).remote()
        self._ranks = [
            _Rank.options(**terms, **self._place(rank)).remote() for rank in range(1, self._num_ranks)
        ]
        threading.Thread(target=self._carry_reports, name="paged-ray-reports", daemon=True).start()

    def _place(self, rank: int) -> dict[str, Any]:
        place: dict[str, Any] = {"num_cpus": self._share.num_cpus, "num_gpus": self._share.num_gpus}
        if self._group is not None:
            place["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            )
        return place

    def wait(self, timeout_s: float) -> bool:
        """Wait at most timeout_s for the end of the process. Return whether it has ended."""
        return self._is_over.wait(timeout_s)

    def kill(self) -> None:
        """End the process and its actors at once."""
        with suppress(RayError):
            for actor in (self._actor, *self._ranks):
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)

    def how_ended(self, timeout_s: float) -> str:
        """Return in a few words how the process ended. If it has not ended within timeout_s, kill it."""
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
            self._how = self._loss or _first_line(error)
        finally:
            self.kill()
            self._is_over.set()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._orders is not None:
                self._orders.join()  # which reads the socket
            self._socket.close()

    def _carry(self) -> str:
        """Carry bytes both ways. Return how the engine process has ended."""
        actors = (self._actor, *self._ranks)
        try:
            nodes = ray.get([actor.node.remote() for actor in actors], timeout=PLACE_S)
        except GetTimeoutError:
            return (
                f"the cluster has not started its actors within {PLACE_S:.0f} s; "
                f"{described('a replica', self._num_ranks, self._share)} needs more on its nodes than "
                f"the cluster has free: {free_share().listed}"
            )
        self._begin(nodes)
        logger.info("the engine process %d starts on %s", self.pid, ", ".join(nodes))
        self._orders = threading.Thread(target=self._carry_orders, name="paged-ray-orders", daemon=True)
        self._orders.start()
        stream = self._actor.reports.options(
            num_returns="streaming", _generator_backpressure_num_objects=MOST_UNREAD
        ).remote()
        for part in stream:
            self._socket.sendall(ray.get(part))
        return self._loss or f"on {nodes[0]} {ray.get(self._actor.how_ended.remote(PLACE_S))}"

    def _begin(self, nodes: Sequence[str]) -> None:
        """Start the engine process, and the processes of the other ranks."""
        if not self._ranks:
            self.pid = ray.get(self._actor.begin.remote({}))
            return
        port = ray.get(self._actor.free_port.remote())
        environments = _environments(nodes, port, has_own_gpu=self._share.num_gpus > 0)
        self.pid = ray.get(self._actor.begin.remote(environments[0]))
        ends = [
            actor.follow.remote(self._options, environment)
            for actor, environment in zip(self._ranks, environments[1:], strict=True)
        ]
        watch = threading.Thread(target=self._watch, args=(ends, nodes), name="paged-ray-ranks", daemon=True)
        watch.start()

    def _watch(self, ends: Sequence[Any], nodes: Sequence[str]) -> None:
        """End the engine soon after the first of its other ranks."""
        with suppress(RayError):
            (first,), _ = ray.wait([*ends], num_returns=1)
            if self._is_over.wait(LOSS_S):
                return
            rank = 1 + ends.index(first)
            try:
                how = ray.get(first)
            except RayError as error:
                how = _first_line(error)
            self._loss = f"its rank {rank} on {nodes[rank]} has ended, {how}"
            self.kill()

    def _carry_orders(self) -> None:
        """Send the actor what comes from the socket. It ends with the socket."""
        with suppress(RayError, OSError):
            while data := self._socket.recv(CARRIED_BYTES):
                self._actor.take.remote(data)
        self.kill()


def _environments(nodes: Sequence[str], port: int, *, has_own_gpu: bool) -> list[dict[str, str]]:
    """Return what torchrun would tell each rank.

    has_own_gpu: whether each rank sees one GPU, and so is alone on what it takes for its machine.
    """
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": nodes[0],
            "MASTER_PORT": str(port),
            "LOCAL_RANK": "0" if has_own_gpu else str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": "1" if has_own_gpu else str(nodes.count(node)),
        }
        for rank, node in enumerate(nodes)
    ]


class RayLauncher:
    """The `Launcher` that starts engine processes in actors, each with a share of the cluster.

    share: the resources of each process.
    num_ranks: the number of processes of an engine.
    is_local: whether this process started the cluster. Actors then import modules from the same paths.
    """

    divides_machine = False
    engine_options: Mapping[str, Any]

    def __init__(self, share: Share, num_ranks: int, *, is_local: bool) -> None:
        self._share = share
        self._num_ranks = num_ranks
        self.engine_options = {"device": "cuda"} if share.num_gpus else {"num_threads": share.num_cpus}
        path = os.pathsep.join([ROOT, *filter(None, sys.path)])
        self._environment = {"PYTHONPATH": path} if is_local else {}

    def launch(self, start: Start) -> tuple[socket.socket, RayProcess]:
        """Start an engine process. Return a socket to it, and the process."""
        ours, theirs = socket_pair()
        return ours, RayProcess(theirs, start, self._share, self._environment)

    def check_room(self, num: int) -> None:
        """Raise ClusterError unless the cluster has room for `num` more replicas."""
        need = self._share.times(num * self._num_ranks)
        until = time.monotonic() + ROOM_S
        while not (free := free_share()).holds(need):
            if time.monotonic() > until:
                raise ClusterError(
                    f"{described(f'{num} more replicas', self._num_ranks, self._share)} need more than "
                    f"the cluster has free: {free.listed}"
                )
            time.sleep(ROOM_S / 20)


def connect(address: str | None, options: Mapping[str, Any], replicas: int) -> RayLauncher:
    """Return a launcher for engines with these options on a Ray cluster. Raises ConfigError."""
    is_local = join(address)
    return RayLauncher(share_of(options, replicas), num_ranks_of(options), is_local=is_local)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
