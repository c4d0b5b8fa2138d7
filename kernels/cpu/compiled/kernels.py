"""The kernels by their names, and how one is compiled.

A kernel is a function of the address of a record, its arguments. All threads run it at once; each claims
units of work until none is left, so that none waits for a slow one.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from numba import carray, cfunc

from ..launch.compiled_files import keep
from ..launch.tasks import NEXT_THREAD, NEXT_UNIT, Task
from ..target import writable_directory
from ..variants import compiled_name
from .simd.inner_code import KernelCompiler
from .simd.memory import address_of, claim
from .simd.vectors import function

# Importing a module adds its kernels.
KERNELS: dict[str, Callable[[int], None]] = {}


def kernel(name: str) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    """Decorate a kernel: the function that every thread runs, given the address of a record."""

    def decorate(function: Callable[[int], None]) -> Callable[[int], None]:
        KERNELS[name] = function
        return function

    return decorate


def each_unit(task: Task) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Decorate do(args, unit) or do(args, unit, scratch), which computes one work unit of a task.

    Every thread claims one unit after the other until none is left. scratch is the thread's own scratch
    memory.
    """

    def decorate(do: Callable[..., None]) -> Callable[[int], None]:
        record_type = task.record
        has_scratch = do.__code__.co_argcount == 3
        work = function(do)

        def each_unit(record: Any) -> None:
            args = carray(record, 1, record_type)[0]
            counters = address_of(record)
            if has_scratch:
                scratch = thread_scratch(args, counters)
            unit = claim(counters + NEXT_UNIT)
            while unit < args.num_units:
                if has_scratch:
                    work(args, unit, scratch)
                else:
                    work(args, unit)
                unit = claim(counters + NEXT_UNIT)

        each_unit.__module__ = do.__module__
        each_unit.__name__ = do.__name__
        return kernel(task.name)(each_unit)

    return decorate


@function
def thread_scratch(args, counters):
    """Claim the scratch memory of one thread. Return its address."""
    return args.scratch + claim(counters + NEXT_THREAD) * args.scratch_size


def compile_kernel(name: str) -> tuple[str, bytes]:
    """Compile a kernel into the cache. Return its symbol and object code. Raises ImportError.

    If this process has chosen a variant of the kernel (`variants.compile_only`), the variant is compiled.
    """
    writable_directory()  # raises before it takes time
    if name not in KERNELS:
        import_module(f"{__package__}.{name.rpartition('.')[0]}")
    compiled = cfunc("void(voidptr)", pipeline_class=KernelCompiler)(KERNELS[name])
    code = compiled.native_name, compiled._library._get_compiled_object()
    keep(compiled_name(name), code)
    return code
