"""How the interpreters of the server's processes switch between threads and collect garbage."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

MOST_S = 60.0  # between two full collections of a process that is never idle
MOST_HEAVY_S = 600.0  # the same while bodies with many objects are in memory, which all would be looked at
NO_FULL_COLLECTION = 2**31 - 1
SWITCH_S = 0.0005  # for which a thread runs Python while another one waits; Python's own 5 ms add up


def switch_often() -> None:
    """Shorten the interpreter's switch interval, so that event loop and steps wait less for other threads."""
    sys.setswitchinterval(SWITCH_S)


class Garbage:
    """Controls the garbage collector of this process: full collections wait until the process is idle.

    A full collection visits every object and stops all threads: for 0.5 s if a few answers with
    log-probabilities are in memory. Younger generations are collected as usual. Objects that exist at
    construction are never collected.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        gc.freeze()
        youngest, middle, _ = gc.get_threshold()
        gc.set_threshold(youngest, middle, NO_FULL_COLLECTION)
        gc.enable()
        self._collected_at = clock()

    def collect(self, *, is_idle: bool, is_heavy: bool = False) -> bool:
        """Run a full collection if the process is idle or the last one was long ago. Return whether it ran.

        is_heavy: whether a collection would take long now; it is then put off longer.
        """
        most_s = MOST_HEAVY_S if is_heavy else MOST_S
        if not (is_idle or self._clock() - self._collected_at > most_s):
            return False
        if gc.get_count()[2]:  # else nothing has grown old since the last one
            gc.collect()
        self._collected_at = self._clock()
        return True
