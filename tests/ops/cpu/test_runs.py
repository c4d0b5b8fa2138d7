"""Runs of units: each belongs to one thread, and none is left out."""

from itertools import pairwise

import pytest

from paged.kernels.cpu.launch.tasks import first_unit, num_runs


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 61], ids="num_threads={}".format)
def test_runs_cover_the_units_in_order(num_threads: int) -> None:
    for num_units in (0, 1, 2, 7, 8, 9, 64, 352, 1000):
        number = num_runs(num_units, num_threads)
        firsts = [first_unit(run, num_units, num_threads) for run in range(number + 1)]
        sizes = [end - first for first, end in pairwise(firsts)]
        assert firsts[0] == 0
        assert firsts[-1] == num_units
        assert min(sizes, default=1) > 0
        assert sizes == sorted(sizes, reverse=True)
        # A run is at most half a thread's share at first, and a single unit at last.
        assert max(sizes, default=1) <= max(1, num_units // (2 * num_threads))
        assert sizes[-num_threads:] == [1] * len(sizes[-num_threads:])
        # A claim behind the last run gets no unit.
        assert first_unit(number + num_threads, num_units, num_threads) >= num_units
