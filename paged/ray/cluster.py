"""The Ray cluster: joining it or starting one here, and what an engine gets of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray

from ..errors import ConfigError

LOCAL_CLUSTER = "local"  # the address of a cluster that is started here
OLDEST = (2, 49)
CONNECTS_S = 10.0  # in which a cluster has to take a connection


class Share(NamedTuple):
    """What one engine gets of a cluster."""

    num_cpus: int
    num_gpus: int

    def __str__(self) -> str:
        return f"{self.num_gpus} GPU" if self.num_gpus else f"{self.num_cpus} CPU cores"


def join(address: str | None) -> bool:
    """Join a cluster, or start one here. Return whether it is one of this process.

    address: of the cluster; None: RAY_ADDRESS, or else one that is started here, as for "local".

    Raises ConfigError if none answers, or if it has another version of Ray or Python.
    """
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise ConfigError(f"ray must be {least} or newer, and {ray.__version__} is installed")
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
        raise ConfigError(f"the Ray cluster at {address} cannot be joined: {error}") from error
    return False


def _require_answer(address: str) -> None:
    """Raise ConfigError unless something listens at host:port. Ray itself would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        if address == "auto":
            return
        raise ConfigError(f"the address of a Ray cluster must be HOST:PORT, auto or local; got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECTS_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} within {CONNECTS_S:.0f} s: {error}; "
            "`ray start --head` starts one"
        ) from error


def share_of(options: Mapping[str, Any], replicas: int, *, num_reserved: int = 0) -> Share:
    """Return what each engine gets: a GPU, or its threads, by default an equal part of the free cores.

    num_reserved: cores that the engines leave to others.

    Raises ConfigError if the cluster has less than all of them need.
    """
    free = ray.available_resources()
    num_cpus = max(0, int(free.get("CPU", 0)) - num_reserved)
    num_gpus = int(free.get("GPU", 0))
    device = options.get("device", "auto")
    on_gpu = device.startswith("cuda") or (device == "auto" and num_gpus > 0)
    share = Share(0, 1) if on_gpu else Share(options.get("num_threads") or max(1, num_cpus // replicas), 0)
    has = num_gpus if on_gpu else num_cpus
    need = replicas * (share.num_gpus or share.num_cpus)
    if need > has:
        raise ConfigError(
            f"{replicas} replicas of {share} need more than the cluster has free: "
            f"{num_cpus} CPU cores{_besides(num_reserved)} and {num_gpus} GPUs"
        )
    return share


def _besides(num_reserved: int) -> str:
    return f" besides the {num_reserved} that Ray Data needs" if num_reserved else ""
