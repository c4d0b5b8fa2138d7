"""The threads that run kernels, and how they wait for each other.

A launch offers its kernel to all threads. Those that have a core join it, and the caller waits for these
alone: a thread that the system runs later finds the launch over. So a core that another process takes costs
no more than that core. A thread that waits looks for some tens of microseconds, as going to sleep and waking
up takes longer, and then sleeps: its core goes to whatever the system has to run, often the very thread that
it waits for.
"""

from ...launch.threads import (
    ACTIVE,
    BETWEEN,
    CALLERS,
    EVERY,
    IDLE,
    IS_LAST,
    JOB,
    JOINED,
    KERNEL,
    MEASURED_LOOKS,
    MOST,
    NUMBER,
    OF_KERNEL,
    OF_MOST,
    OF_POOL,
    OF_RECORD,
    RECORD,
    SYSCALL,
    WAIT,
    WAITING,
    WAKE,
    WITHIN,
    YIELD,
)
from ..kernels import kernel
from ..simd.memory import address_of, call, claim, get_long, pause, release, seen, set_long, system_call
from ..simd.vectors import function


@function
def _wait_while(pool, address, old, looks, sleepers):
    """Return when the number there is no longer `old`, or earlier: look so many times, then sleep."""
    for _ in range(looks):
        if seen(address) != old:
            return
        pause()
    if get_long(pool + NUMBER) == 0:
        call(get_long(pool + YIELD), 0)
        return
    claim(sleepers)
    system_call(get_long(pool + SYSCALL), get_long(pool + NUMBER), address, WAIT, old)
    release(sleepers)


@function
def _wake(pool, address, sleepers, most):
    """Wake at most so many threads that sleep until the number there changes."""
    if seen(sleepers) != 0:
        system_call(get_long(pool + SYSCALL), get_long(pool + NUMBER), address, WAKE, most)


@function
def wait_in_kernel(pool, address, old):
    """Wait until the number at this address differs from `old`. May return earlier.

    A thread that changes the number must then call `changed`.
    """
    _wait_while(pool, address, old, get_long(pool + WITHIN), pool + WAITING)


@function
def changed(pool, address):
    """Wake the threads that are in `wait_in_kernel` for this address."""
    _wake(pool, address, pool + WAITING, EVERY)


@kernel("launch.threads.help")
def _help(memory):
    """Join one launch after the other, until the end."""
    pool = address_of(memory)
    job = 0
    while seen(pool + IS_LAST) == 0:
        if job % 2 == 1:
            # The caller closes a launch first and reads this number second, so it misses none that runs.
            claim(pool + ACTIVE)
            if seen(pool + JOB) == job and claim(pool + JOINED) < get_long(pool + MOST):
                call(get_long(pool + KERNEL), get_long(pool + RECORD))
            release(pool + ACTIVE)
            changed(pool, pool + ACTIVE)
        _wait_while(pool, pool + JOB, job, get_long(pool + BETWEEN), pool + IDLE)
        job = seen(pool + JOB)


@kernel("launch.threads.launch")
def _launch(record):
    """Run a kernel on this thread and on those that join it."""
    args = address_of(record)
    pool = get_long(args + OF_POOL)
    if claim(pool + CALLERS) == 0:
        set_long(pool + KERNEL, get_long(args + OF_KERNEL))
        set_long(pool + RECORD, get_long(args + OF_RECORD))
        set_long(pool + MOST, get_long(args + OF_MOST))
        set_long(pool + JOINED, 0)
        claim(pool + JOB)
        _wake(pool, pool + JOB, pool + IDLE, get_long(args + OF_MOST))
        call(get_long(args + OF_KERNEL), get_long(args + OF_RECORD))
        claim(pool + JOB)
        active = seen(pool + ACTIVE)
        while active != 0:
            wait_in_kernel(pool, pool + ACTIVE, active)
            active = seen(pool + ACTIVE)
    else:  # another thread has the helpers: this one computes alone
        call(get_long(args + OF_KERNEL), get_long(args + OF_RECORD))
    release(pool + CALLERS)


@kernel("launch.threads.look")
def _look(memory):
    """Look at a number MEASURED_LOOKS times, as a thread that waits does."""
    pool = address_of(memory)
    for _ in range(MEASURED_LOOKS):
        if seen(pool + JOB) != 0:
            return
        pause()
