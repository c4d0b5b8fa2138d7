"""Units that are neighbours in memory, shared out in runs: what one thread reads lies one behind the other.

Each thread takes a run of half its share, then of half of what it would have of the rest, and so on to single
units: guided self-scheduling (Polychronopoulos and Kuck, 1987). So nobody waits long for a thread that is
slower than the others, or was away.
"""

from functools import lru_cache

from ..simd.memory import claim
from ..simd.vectors import function
from .tasks import NEXT_UNIT


@lru_cache(maxsize=4096)
def num_runs(num_units: int, num_threads: int) -> int:
    """Of so many units."""
    number = 0
    while first_unit.py_func(number, num_units, num_threads) < num_units:
        number += 1
    return number


@function
def first_unit(run, num_units, num_threads):
    """The first unit of a run, or where it is behind the last one num_units or more."""
    first = 0
    while True:
        size = max(1, (num_units - first) // (2 * num_threads))
        if size == 1 or run < num_threads:
            return first + size * run
        first += size * num_threads
        run -= num_threads


@function
def take_run(counters, num_units, num_threads):
    """The first unit of a run that no other thread has, and its end; num_units or more where none is left."""
    run = claim(counters + NEXT_UNIT)
    return first_unit(run, num_units, num_threads), first_unit(run + 1, num_units, num_threads)
