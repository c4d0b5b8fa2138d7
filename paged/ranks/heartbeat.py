"""Heartbeat files: what a rank computes and when it last said so, for probes. Free of torch.

Each rank has a file in the private directory of its machine's ranks. `python -m paged.ranks alive` reads all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY_PREFIX = "paged-ranks-"
LEAST_S = 1.0  # between two writes of steps that follow each other
GRACE_S = 2.0  # beyond rank_timeout_s


class HeartbeatFile:
    """The heartbeat file of one rank.

    timeout_s: seconds without a write after which a loaded rank counts as hung.
    """

    def __init__(
        self, directory: Path, rank: int, timeout_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = directory / f"rank-{rank}.json"
        self._rank = rank
        self._timeout_s = timeout_s
        self._clock = clock
        self._written_at = -LEAST_S
        self.step = 0
        self.has_loaded = False
        self._write()

    def loaded(self) -> None:
        """Record that the rank has loaded its weights."""
        self.has_loaded = True
        self._write()

    def beat(self, step: int | None = None) -> None:
        """Record that the rank begins step number `step`, or, if `step` is None, waits for the next step."""
        if step is not None:
            self.step = step
        if step is None or self._clock() - self._written_at >= LEAST_S:
            self._write()

    def _write(self) -> None:
        self._written_at = self._clock()
        state = {
            "rank": self._rank,
            "pid": os.getpid(),
            "started": _start_of(os.getpid()),
            "step": self.step,
            "time": self._written_at,
            "timeout_s": self._timeout_s if self.has_loaded else None,
        }
        partial = self.path.with_suffix(".partial")
        with suppress(OSError):  # the directory is gone with the driver, or the disk is full
            partial.write_text(json.dumps(state))
            os.replace(partial, self.path)


def remove_private(directory: Path) -> None:
    """Remove a private directory, even while other threads and processes write into it."""
    # What they write then fails, and would otherwise keep the directory from being removed.
    gone = directory.with_name(f"gone-{directory.name}")
    with suppress(OSError):  # another process was first
        os.rename(directory, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _start_of(pid: int) -> str | None:
    """Return when a process began, as Linux writes it. None if it has ended, or on another system."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]


@dataclass(frozen=True)
class RankState:
    """The content of a rank's heartbeat file."""

    rank: int
    pid: int
    started: str | None  # None on systems that do not tell
    step: int
    time: float
    timeout_s: float | None  # None while the rank loads

    @property
    def exists(self) -> bool:
        """Whether this process is alive. A later process with the same pid does not count."""
        if self.started is not None:
            return _start_of(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def trouble(self, now: float) -> str | None:
        """Return what is wrong with the rank; None if nothing is."""
        name = f"rank {self.rank} (process {self.pid})"
        if not self.exists:
            return f"{name} has ended"
        if self.timeout_s is not None and (silent_s := now - self.time) > self.timeout_s + GRACE_S:
            return f"{name} has written nothing for {silent_s:.0f} s, since step {self.step}"
        return None


def find_troubles(root: Path | None = None, now: float | None = None) -> tuple[int, list[str]]:
    """Return the number of ranks on this machine, and what is wrong with some of them.

    root: the directory with the ranks' private directories; None takes the directory for temporary files.
    """
    now = time.time() if now is None else now
    num_ranks = 0
    troubles = []
    for directory in sorted((root or Path(tempfile.gettempdir())).glob(f"{DIRECTORY_PREFIX}*")):
        states = [*_states_in(directory)]
        if not any(state.exists for state in states):
            continue  # left by ranks that were all killed at once
        num_ranks += len(states)
        troubles += [trouble for state in states if (trouble := state.trouble(now)) is not None]
    return num_ranks, troubles


def _states_in(directory: Path) -> Iterator[RankState]:
    for file in sorted(directory.glob("rank-*.json")):
        # A file may be removed meanwhile; what else is there is none of a rank.
        with suppress(OSError, ValueError, TypeError):
            found: dict[str, Any] = json.loads(file.read_text())
            yield RankState(**found)
