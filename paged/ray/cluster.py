"""The Ray cluster: joining it or starting one here, and what an engine gets of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..base.errors import ClusterError, ConfigError
from .missing import explained

try:
    import ray
except ImportError as error:
    raise explained(error) from None

LOCAL_CLUSTER = "local"  # the address of a cluster that is started here
OLDEST = (2, 49)
CONNECTS_S = 10.0  # in which a cluster has to take a connection, and to answer
ROOM_S = 5.0  # in which the cluster has to tell that what an actor or a task had is free
# Of HTTP/2, on which gRPC is built: both sides begin with settings, here with a frame of none.
FRAME_HEAD_BYTES = 9
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


class Share(NamedTuple):
    """The resources of a Ray cluster that one process of an engine gets."""

    num_cpus: int
    num_gpus: int

    def __str__(self) -> str:
        return f"{self.num_gpus} GPU" if self.num_gpus else f"{self.num_cpus} CPU cores"

    @property
    def bundle(self) -> dict[str, float]:
        """The bundle that a placement group reserves for this share."""
        return {"GPU": self.num_gpus} if self.num_gpus else {"CPU": self.num_cpus}

    @property
    def listed(self) -> str:
        """The resources in words."""
        return f"{self.num_cpus} CPU cores and {self.num_gpus} GPUs"

    def times(self, num: int) -> Share:
        """Return the resources of `num` processes with this share each."""
        return Share(num * self.num_cpus, num * self.num_gpus)

    def holds(self, other: Share) -> bool:
        """Return whether these resources include the resources of another share."""
        return self.num_cpus >= other.num_cpus and self.num_gpus >= other.num_gpus


def join(address: str | None) -> bool:
    """Join a Ray cluster, or start one on this machine. Return whether this process started it.

    address: the address of the cluster, or "local" to start one. None takes RAY_ADDRESS, or else starts a
        cluster.

    Raises ClusterError if no cluster answers, or if the cluster has another version of Ray or Python.
    """
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise ClusterError(f"ray must be {least} or newer, and {ray.__version__} is installed")
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL_CLUSTER
    if address == LOCAL_CLUSTER:
        ray.init(address=LOCAL_CLUSTER, include_dashboard=False, log_to_driver=True, logging_level="warning")
        return True
    _require_answer(address)
    try:
        ray.init(address=address, log_to_driver=True, logging_level="warning")
    except (RuntimeError, ConnectionError, ValueError) as error:
        hint = ""
        if isinstance(error, ConnectionError):
            hint = (
                "; a cluster that asks for a token is joined with RAY_AUTH_MODE=token and its token in "
                "RAY_AUTH_TOKEN or ~/.ray/auth_token"
            )
        raise ClusterError(f"the Ray cluster at {address} cannot be joined: {error}{hint}") from error
    return False


def _require_answer(address: str) -> None:
    """Raise ClusterError unless a server of gRPC listens at host:port. Ray would wait, and then exit."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address} is one of Ray Client, which carries no streams; run the command on a node of the "
            "cluster, and give HOST:PORT or auto"
        )
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 2**16
    if not (host and is_port):
        raise ConfigError(f"the address of a Ray cluster must be HOST:PORT, auto or local; got {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECTS_S) as link:
            if os.environ.get("RAY_USE_TLS", "0") in ("0", "false"):
                link.sendall(GREETING)
                answer = link.recv(FRAME_HEAD_BYTES)
                if answer[3:4] != GREETING[-FRAME_HEAD_BYTES:][3:4]:
                    raise OSError("what listens there is no cluster of Ray")
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} within {CONNECTS_S:.0f} s: {error}; "
            "`ray start --head` starts one"
        ) from error


def share_of(options: Mapping[str, Any], replicas: int, *, num_reserved: int = 0) -> Share:
    """Return the resources for each process: a GPU, or CPU threads (by default an equal part of the free
    cores).

    replicas: the number of engines, each with one process for every rank of the model.
    num_reserved: the number of cores that the engines must leave free.

    Raises ClusterError if the cluster lacks the resources for all processes.
    """
    free = free_share()
    num_cpus = max(0, free.num_cpus - num_reserved)
    num_gpus = free.num_gpus
    num_ranks = num_ranks_of(options)
    num_processes = replicas * num_ranks
    device = options.get("device", "auto")
    on_gpu = device.startswith("cuda") or (device == "auto" and num_gpus > 0)
    share = (
        Share(0, 1) if on_gpu else Share(options.get("num_threads") or max(1, num_cpus // num_processes), 0)
    )
    has = num_gpus if on_gpu else num_cpus
    need = num_processes * (share.num_gpus or share.num_cpus)
    if need > has:
        raise ClusterError(
            f"{described(f'{replicas} replicas', num_ranks, share)} need more than the cluster has free: "
            f"{num_cpus} CPU cores{_besides(num_reserved)} and {num_gpus} GPUs"
        )
    return share


def free_share() -> Share:
    """Return the resources of the cluster that are free now."""
    free = ray.available_resources()
    return Share(int(free.get("CPU", 0)), int(free.get("GPU", 0)))


def num_ranks_of(options: Mapping[str, Any]) -> int:
    """Return the number of processes that one engine with these options has."""
    num: int = options.get("pipeline_parallel_size", 1) * options.get("tensor_parallel_size", 1)
    return num


def described(replicas: str, num_ranks: int, share: Share) -> str:
    """Describe the resources of all engines in words."""
    each = f"{num_ranks} ranks of " if num_ranks > 1 else ""
    return f"{replicas} of {each}{share}"


def _besides(num_reserved: int) -> str:
    return f" besides the {num_reserved} that Ray Data needs" if num_reserved else ""
