"""Runs: ranges of units that are neighbours in memory, so that a thread reads its weights sequentially.

Runs shrink from half a thread's share to single units: guided self-scheduling (Polychronopoulos and Kuck,
1987). So no thread waits long for one that is slower, or was interrupted.
"""

from functools import lru_cache


@lru_cache(maxsize=4096)
def num_runs(num_units: int, num_threads: int) -> int:
    """Return how many runs so many units are divided into."""
    number = 0
    while first_unit(number, num_units, num_threads) < num_units:
        number += 1
    return number


def first_unit(run: int, num_units: int, num_threads: int) -> int:
    """Return the first unit of a run; num_units or more if there is no such run."""
    first = 0
    while True:
        size = max(1, (num_units - first) // (2 * num_threads))
        if size == 1 or run < num_threads:
            return first + size * run
        first += size * num_threads
        run -= num_threads
