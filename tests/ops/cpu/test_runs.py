"""Units shared out in runs: each is one thread's, and none is left out."""

from itertools import pairwise

import pytest

from paged.kernels.cpu.launch.runs import first_unit, num_runs


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 61])
def test_runs_are_the_units_one_after_the_other(num_threads: int) -> None:
    for num_units in (0, 1, 2, 7, 8, 9, 64, 352, 1000):
        number = num_runs(num_units, num_threads)
        firsts = [first_unit.py_func(run, num_units, num_threads) for run in range(number + 1)]
        sizes = [end - first for first, end in pairwise(firsts)]
        assert firsts[0] == 0
        assert firsts[-1] == num_units
        assert min(sizes, default=1) > 0
        assert sizes == sorted(sizes, reverse=True)
        # Who is nothing but slow has half a share at first, and single units at last.
        assert max(sizes, default=1) <= max(1, num_units // (2 * num_threads))
        assert sizes[-num_threads:] == [1] * len(sizes[-num_threads:])
        # Those who claim runs that are none find no unit.
        assert first_unit.py_func(number + num_threads, num_units, num_threads) >= num_units
