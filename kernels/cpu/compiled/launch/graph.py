"""Recorded steps: launches on a CPU, recorded once and replayed by one call, as a CUDA graph is on a GPU.

In a small step, Python and the start of the threads take as long as the kernels. A replay starts the threads
once. They go through a table of the records that the kernels were launched with: a thread that finds no unit
left waits until the others have finished theirs, and goes on to the next kernel. A thread that the system
delays holds up none of the others.

A call of Python within a step, such as an exchange with other processes, has a row of the table too, so that
what it reads and writes keeps its place until it is over. A replay goes through the rows before it, calls it,
and goes on behind it.
"""

from numba import carray

from ...launch.graph import GRAPH, ROW_ENTERED, ROW_KERNEL, ROW_LEFT, ROW_RECORD
from ..kernels import kernel
from ..simd.memory import call, claim, get_long, seen
from .threads import changed, wait_in_kernel

_GRAPH_RECORD = GRAPH.record


@kernel(GRAPH.name)
def _graph_kernel(record):
    """Run the kernels of the table one after the other, on every thread."""
    args = carray(record, 1, _GRAPH_RECORD)[0]
    for number in range(args.num_rows):
        row = args.table + number * args.row_bytes
        claim(row + ROW_ENTERED)
        call(get_long(row + ROW_KERNEL), row + ROW_RECORD)
        claim(row + ROW_LEFT)
        changed(args.threads, row + ROW_LEFT)
        # No unit is left. The threads that have one have entered; those that enter from now on get none.
        num_left = seen(row + ROW_LEFT)
        while seen(row + ROW_ENTERED) != num_left:
            wait_in_kernel(args.threads, row + ROW_LEFT, num_left)
            num_left = seen(row + ROW_LEFT)
