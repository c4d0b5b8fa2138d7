"""Choose the number of CPU threads: one for each core that this process may use.

Engines of one process share these threads: while one has them, another one's step runs on its caller alone.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from ..base.errors import ConfigError, ResourceError

# torch takes its number of threads from these when it is imported.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CGROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")
_threads_of = weakref.WeakKeyDictionary[Any, int]()  # of engines that are alive and compute on the CPU


def set_threads(engine: Any, wanted: int | None) -> int:
    """Set and return the number of CPU threads for an engine.

    The number holds for the whole process, even after the engine is gone. None means `usable_cores`, unless
    another engine, `torch.set_num_threads` or one of VARIABLES has set a number.

    Raises ResourceError for more threads than CPUs. Raises ConfigError for another number than that of a live
    engine, because a change would alter that engine's speed and the last bits of its sums.
    """
    now = torch.get_num_threads()
    most = os.cpu_count() or 1
    others = next(iter(_threads_of.values()), None)
    if wanted is None:
        wanted = others or (now if _is_chosen(now) else usable_cores())
    elif wanted > most:
        raise ResourceError(f"num_threads must be at most {most}, the CPUs of this machine, got {wanted}")
    elif others not in (None, wanted):
        raise ConfigError(
            f"num_threads {wanted}: another engine of this process has {others}, and engines of one process "
            "share their threads; give both the same number, or run them in two processes"
        )
    if wanted != now:
        torch.set_num_threads(wanted)
    _threads_of[engine] = wanted
    return wanted


def share_threads(num_sharing: int) -> None:
    """Compute with an equal share of this process's threads, as so many processes are busy on its cores.

    It holds for the thread that calls this. The number of threads changes no bit of a result.
    """
    own = next(iter(_threads_of.values()), None)
    if own is not None:  # on a GPU there are none to share
        torch.set_num_threads(max(1, own // num_sharing))


def threads_of_each(num_processes: int) -> int:
    """Return how many threads each of several processes on this machine gets by default.

    Raises ResourceError for more processes than cores.
    """
    now = torch.get_num_threads()
    if _is_chosen(now):
        return now
    num_cores = usable_cores()
    if num_cores < num_processes:
        raise ResourceError(
            f"{num_processes} processes of a model need as many CPU cores; there are {num_cores}; "
            "num_threads=1 lets them share cores"
        )
    return num_cores // num_processes


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and its container's limit; at least 1.

    Hardware threads are not counted, since the threads of one core share its multipliers. A virtual machine
    may present two cores as two threads of one core. This cannot be detected; set num_threads there.
    """
    cpus = _affinity()
    memberships = Path("/proc/self/cgroup")
    quota = cpu_quota(CGROUPS, memberships.read_text() if memberships.exists() else "")
    return max(1, min(_num_cores(cpus), math.ceil(min(quota, len(cpus)))))


def num_cores(cpus: set[int], topology: Path) -> int | None:
    """Return how many cores these CPUs (hardware threads) belong to; None if the system does not say."""
    cores = set()
    for cpu in cpus:
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text())
        except OSError:
            return None
    return len(cores)


def cpu_quota(root: Path, memberships: str) -> float:
    """Return the CPU limit of a process's control groups, version 1 or 2, in CPUs; inf without a limit.

    root: where control groups are mounted.
    memberships: the text of /proc/self/cgroup. If the folders that it names are not visible, as in some
        containers, the limit is the root group's.
    """
    return min(map(_quota_of, _folders(root, memberships)), default=math.inf)


def _folders(root: Path, memberships: str) -> Iterator[Path]:
    """Yield the process's control groups and their parents, each of which may have a limit."""
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        for mount in {"", "unified"} if not controllers else {controllers, "cpu"}:
            folder = Path(path.lstrip("/"))
            yield from (root / mount / part for part in (folder, *folder.parents))


def _quota_of(folder: Path) -> float:
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        share = math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no limit, or in an unknown format
        return math.inf
    return share if share > 0 else math.inf  # version 1 writes -1 for no limit


def _is_chosen(now: int) -> bool:
    """Return whether the user has set this number of threads: torch chooses other numbers by itself."""
    if any(os.environ.get(name) for name in VARIABLES):
        return True
    cpus = _affinity()
    return now not in (os.cpu_count(), len(cpus), _num_cores(cpus), psutil.cpu_count(logical=False))


def _num_cores(cpus: set[int]) -> int:
    return num_cores(cpus, TOPOLOGY) or min(psutil.cpu_count(logical=False) or len(cpus), len(cpus))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
