"""Common parts of kernels over rows: units of several rows, and code for each kind of number."""

from collections.abc import Callable
from typing import Any

from ...formats import BFLOAT16, FLOAT16, FLOAT32
from ...launch.tasks import Task
from ...variants import among
from ..kernels import each_unit
from ..simd.vectors import function, missing


def each_row(task: Task) -> Callable[[Callable[[int], Any]], Callable[[int], None]]:
    """Decorate make(kind), which makes f(args, row) for one kind (dtype): the kernel of a task over rows."""

    def decorate(make: Callable[[int], Any]) -> Callable[[int], None]:
        operate = by_kind(make)

        def do(args, unit):
            for row in rows_of_unit(args, unit):
                operate(args, row)

        do.__module__ = make.__module__
        do.__name__ = make.__name__
        return each_unit(task)(do)

    return decorate


def by_kind(make: Callable[[int], Any], kernel: str = "") -> Any:
    """Turn make(kind), which makes f(args, row) for one kind, into f(args, row) for any args.kind.

    Each function is compiled for one kind (dtype), so that inner loops do not branch on it.

    kernel: the name of a kernel with variants; only the kinds with which it is compiled here are made.
    """
    kinds = FLOAT32, FLOAT16, BFLOAT16
    made = {kind: make(kind) for kind in among(kernel, dict.fromkeys(kinds))}
    of_floats, of_halves, of_bfloats = (made.get(kind, missing) for kind in kinds)

    @function
    def operate(args, row):
        if args.kind == FLOAT32:
            of_floats(args, row)
        elif args.kind == FLOAT16:
            of_halves(args, row)
        else:
            of_bfloats(args, row)

    return operate


def by_kind_with(make: Callable[[int], Any]) -> Any:
    """Turn make(kind), which makes f(args, unit, scratch) for one kind, into an f for any args.kind."""
    of_floats, of_halves, of_bfloats = map(make, (FLOAT32, FLOAT16, BFLOAT16))

    @function
    def operate(args, unit, scratch):
        if args.kind == FLOAT32:
            of_floats(args, unit, scratch)
        elif args.kind == FLOAT16:
            of_halves(args, unit, scratch)
        else:
            of_bfloats(args, unit, scratch)

    return operate


@function
def rows_of_unit(args, unit):
    """Return the range of rows in a unit."""
    first = unit * args.rows_per_unit
    return range(first, min(first + args.rows_per_unit, args.num_rows))
