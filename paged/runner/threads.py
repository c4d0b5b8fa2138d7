"""How many threads the operations of a CPU run on: one for each core that this process may really use.

Engines of one process that step in threads of their own share these cores: two at once take about as long as
one after the other. What costs far more is cores that other processes want too, as threads wait for each
other by spinning: there OMP_WAIT_POLICY=passive, set before Python starts, or num_threads=1 is quicker.
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

from ..errors import ConfigError

# What users of torch say it with; torch reads them when it is imported.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CGROUPS, TOPOLOGY = Path("/sys/fs/cgroup"), Path("/sys/devices/system/cpu")
_threads_of = weakref.WeakKeyDictionary[Any, int]()  # the engines that are alive and compute on the CPU


def set_threads(engine: Any, wanted: int | None) -> int:
    """Set the threads of torch's operations for an engine on the CPU. Returns how many there are.

    They are the whole process's, and stay when the engine is gone. None takes `usable_cores`, unless somebody
    has said otherwise: by one of VARIABLES, by `torch.set_num_threads`, or for another engine.

    Raises ConfigError if more are wanted than the machine has CPUs, or others than an engine runs on that is
    alive: its steps would take another time, and its sums end in other bits.
    """
    now, most = torch.get_num_threads(), os.cpu_count() or 1
    others = next(iter(_threads_of.values()), None)
    if wanted is None:
        wanted = others or (now if _is_chosen(now) else usable_cores())
    elif wanted > most:
        raise ConfigError(f"num_threads must be at most {most}, the CPUs of this machine, got {wanted}")
    elif others not in (None, wanted):
        raise ConfigError(
            f"num_threads {wanted}: another engine of this process has {others}, and threads are the whole "
            "process's; give both the same number, or run them in two processes"
        )
    if wanted != now:
        torch.set_num_threads(wanted)
    _threads_of[engine] = wanted
    return wanted


def usable_cores() -> int:
    """The cores that this process may use, within its affinity and its container's limit; at least 1.

    Two hardware threads of a core share what multiplies: more threads than cores only wait for each other.
    Where a virtual machine calls two cores one with two threads, only who owns it knows: num_threads tells.
    """
    cpus = _affinity()
    return max(1, min(_num_cores(cpus), math.ceil(min(cpu_quota(CGROUPS, _memberships()), len(cpus)))))


def num_cores(cpus: set[int], topology: Path) -> int | None:
    """How many cores these CPUs are, two hardware threads being one; None if the system does not say."""
    cores = set()
    for cpu in cpus:
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text())
        except OSError:
            return None
    return len(cores)


def cpu_quota(root: Path, memberships: str) -> float:
    """How many CPUs' time a process gets of its control groups, version 1 or 2; inf where nothing limits it.

    root: where they are mounted.
    memberships: /proc/self/cgroup; where a container sees none of the folders that it names, root itself.
    """
    return min(map(_quota_of, _folders(root, memberships)), default=math.inf)


def _folders(root: Path, memberships: str) -> Iterator[Path]:
    """Those of the process and all above them, each of which may have a limit."""
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
    except (OSError, ValueError, ZeroDivisionError):  # there is none, or it is none that we know
        return math.inf
    return share if share > 0 else math.inf  # version 1 has -1 for no limit


def _is_chosen(now: int) -> bool:
    """Whether somebody has chosen this number, rather than torch by itself: one of what counts as CPUs."""
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


def _memberships() -> str:
    file = Path("/proc/self/cgroup")
    return file.read_text() if file.exists() else ""
