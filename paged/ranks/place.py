"""Where a rank runs: which of torchrun's processes it is, and its share of its machine. Free of torch."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ..base.errors import ConfigError, RankError, ResourceError
from ..options.config import EngineConfig
from .layout import split_evenly

LOOPBACK = "127.0.0.1"
_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Torchrun:
    """The environment that torchrun gives to the processes that it starts.

    local_rank, num_local: the number of this process among this machine's ranks, and the number of this
        machine's ranks.
    address, port: the address at which all ranks meet.
    attempt: how many times torchrun has restarted all ranks.
    hosts_store: whether torchrun itself hosts the store at this address; otherwise rank 0 hosts it.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    address: str
    port: int
    attempt: int
    hosts_store: bool

    @classmethod
    def of(cls, config: EngineConfig, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return torchrun's environment for an engine of several ranks; None without torchrun.

        Raises ConfigError if the environment is incomplete or has the wrong number of ranks.
        """
        if config.num_ranks == 1 or "RANK" not in environment:
            return None
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if absent := [name for name in names if not environment.get(name)]:
            raise ConfigError(
                f"RANK is set and {absent[0]} is not: ranks of several machines are started by torchrun, "
                "which sets both; unset RANK to have this process start its ranks itself"
            )
        optional = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        defaults = ("0", "1", "0")
        try:
            rank, num_ranks, port = (int(environment[name]) for name in (names[0], names[1], names[3]))
            local_rank, num_local, attempt = (
                int(environment.get(name, default)) for name, default in zip(optional, defaults, strict=True)
            )
        except ValueError as error:
            raise ConfigError(
                f"{', '.join((*names, *optional))} must be as torchrun sets them: {error}"
            ) from None
        if num_ranks != config.num_ranks:
            raise ConfigError(
                f"torchrun has started {num_ranks} processes, and pipeline_parallel_size "
                f"{config.pipeline_parallel_size} with tensor_parallel_size {config.tensor_parallel_size} "
                f"needs {config.num_ranks}"
            )
        if not 0 <= rank < num_ranks:
            raise ConfigError(
                f"RANK must be from 0 to {num_ranks - 1}, with WORLD_SIZE {num_ranks}, got {rank}"
            )
        hosts_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = environment["MASTER_ADDR"]
        return cls(rank, num_ranks, local_rank, num_local, address, port, attempt, hosts_store)

    def own_address(self) -> str:
        """Return the address of this machine from which it reaches the other ranks.

        Host names are not used, since they may not resolve, or resolve to loopback.
        """
        try:
            family, _, _, _, place = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise RankError(f"MASTER_ADDR {self.address} cannot be reached: {error}") from None


def follows(config: EngineConfig) -> bool:
    """Return whether torchrun started this process as a rank other than 0. Raises ConfigError."""
    torchrun = Torchrun.of(config)
    return torchrun is not None and torchrun.rank > 0


def bind_to_share(index: int, count: int) -> None:
    """Bind this process to its share of the usable cores, if there are at least as many cores as processes.

    Call this before torch is imported, so that torch's threads inherit the binding.
    """
    if sys.platform != "linux" or count == 1:
        return
    cores = [*_cores_of(os.sched_getaffinity(0))]
    if len(cores) >= count:
        os.sched_setaffinity(0, split_evenly(cores, index, count))


def _cores_of(cpus: set[int]) -> list[list[int]]:
    """Return the hardware threads of each core among these."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = _TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), []).append(cpu)
    return [*cores.values()]


def share_of(config: EngineConfig, index: int, count: int) -> EngineConfig:
    """Return the options for rank number `index` of `count` ranks on a machine, which share its memory and
    cores.

    Raises ResourceError if there are fewer GPUs or cores than ranks.
    """
    import torch

    from ..device.devices import resolve_device
    from ..device.threads import threads_of_each
    from ..runner.sizes import SWAP_SPACE

    device = resolve_device(config.device)
    swap_space = SWAP_SPACE[device.type] if config.swap_space is None else config.swap_space
    options: dict[str, Any] = {"cpu_memory_utilization": config.cpu_memory_utilization / count}
    if config.preemption_mode != "recompute":
        options["swap_space"] = swap_space / count
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if num_gpus < count:
            raise ResourceError(f"{count} processes of a model need as many GPUs; there are {num_gpus}")
    elif config.num_threads is None:
        # What a follower may use is its share, to which it is bound. The first rank checks that all have one.
        is_bound = index > 0 and sys.platform == "linux"
        options["num_threads"] = threads_of_each(1 if is_bound else count)
    share = replace(config, **options)
    if device.type == "cuda":  # checked as the option of a user, an index would be refused
        object.__setattr__(share, "device", f"cuda:{index}")
    return share
