"""The kernels' side of the runs of `launch.tasks`."""

from ...launch import tasks
from ...launch.tasks import NEXT_UNIT
from ..simd.memory import claim
from ..simd.vectors import function

first_unit = function(tasks.first_unit)


@function
def take_run(counters, num_units, num_threads):
    """Claim a run of units. Return its first unit and its end; without a run left, first >= num_units."""
    run = claim(counters + NEXT_UNIT)
    return first_unit(run, num_units, num_threads), first_unit(run + 1, num_units, num_threads)
