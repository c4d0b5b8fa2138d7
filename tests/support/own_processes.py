"""The processes that a test has started, perhaps through those of Ray."""

from __future__ import annotations

from contextlib import suppress

import psutil


def processes_of(module: str, pid: int | None = None) -> list[psutil.Process]:
    """Return the processes that run a module, of those that a process has started; None: this one."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if module in each.cmdline():
                found.append(each)
    return found
