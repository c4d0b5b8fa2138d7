"""The threads that run kernels, and how they wait for each other.

A launch offers its kernel to all threads. Those that have a core join it, and the caller waits for these
alone: a thread that the system runs later finds the launch over. So a core that another process takes costs
no more than that core. A thread that waits looks for some tens of microseconds, as going to sleep and waking
up takes longer, and then sleeps: its core goes to whatever the system has to run, often the very thread that
it waits for.
"""

import atexit
import ctypes
import os
import platform
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..simd.memory import (
    LINE,
    address_of,
    call,
    claim,
    get_long,
    pause,
    release,
    seen,
    set_long,
    system_call,
)
from ..simd.vectors import function
from .machine_code import MachineCode, kernel, machine_code

# How long a thread looks before it sleeps: within a launch, where another is about to end its unit of work,
# and between launches, where Python prepares the next one.
SPIN_WITHIN_S = 50e-6
SPIN_BETWEEN_S = 150e-6
_FUTEX = {"x86_64": 202, "aarch64": 98}  # Linux's system call that sleeps until a number changes
# its operations, among the threads of one process
_WAIT = 128
_WAKE = 129
_EVERY = 2**31 - 1  # sleepers to wake
_MEASURED_LOOKS = 1000

# Byte offsets in the memory of the threads. What one writes and others watch has a cache line of its own.
_WITHIN = 0
_BETWEEN = 8
_SYSCALL = 16
_NUMBER = 24
_YIELD = 32
# The number of the launch, odd while it is open; its kernel, record and most helpers; whether it is the last.
_JOB = LINE
_KERNEL = LINE + 8
_RECORD = LINE + 16
_MOST = LINE + 24
_STOPPED = LINE + 32
_JOINED = 2 * LINE  # the threads that wanted to join this launch
_ACTIVE = 3 * LINE  # those that may be running its kernel
_IDLE = 4 * LINE  # those that sleep between launches
_WAITING = 5 * LINE  # those that sleep within one
_CALLERS = 6 * LINE
_NUM_BYTES = 7 * LINE
# Byte offsets in the record of a launch.
_OF_POOL = 0
_OF_KERNEL = 8
_OF_RECORD = 16
_OF_MOST = 24
_LAUNCH = struct.Struct("=4q")


@function
def _wait_while(pool, address, old, looks, sleepers):
    """Return when the number there is no longer `old`, or earlier: look so many times, then sleep."""
    for _ in range(looks):
        if seen(address) != old:
            return
        pause()
    if get_long(pool + _NUMBER) == 0:
        call(get_long(pool + _YIELD), 0)
        return
    claim(sleepers)
    system_call(get_long(pool + _SYSCALL), get_long(pool + _NUMBER), address, _WAIT, old)
    release(sleepers)


@function
def _wake(pool, address, sleepers, most):
    """Wake at most so many threads that sleep until the number there changes."""
    if seen(sleepers) != 0:
        system_call(get_long(pool + _SYSCALL), get_long(pool + _NUMBER), address, _WAKE, most)


@function
def wait_in_kernel(pool, address, old):
    """Return when the number at this address is no longer `old`, or earlier. `changed` follows a change."""
    _wait_while(pool, address, old, get_long(pool + _WITHIN), pool + _WAITING)


@function
def changed(pool, address):
    """Wake the threads that `wait_in_kernel` for the number at this address."""
    _wake(pool, address, pool + _WAITING, _EVERY)


@kernel
def _help(memory):
    """Join one launch after the other, until the end."""
    pool = address_of(memory)
    job = 0
    while seen(pool + _STOPPED) == 0:
        if job % 2 == 1:
            # The caller closes a launch first and reads this number second, so it misses none that runs.
            claim(pool + _ACTIVE)
            if seen(pool + _JOB) == job and claim(pool + _JOINED) < get_long(pool + _MOST):
                call(get_long(pool + _KERNEL), get_long(pool + _RECORD))
            release(pool + _ACTIVE)
            changed(pool, pool + _ACTIVE)
        _wait_while(pool, pool + _JOB, job, get_long(pool + _BETWEEN), pool + _IDLE)
        job = seen(pool + _JOB)


@kernel
def _launch(record):
    """Run a kernel on this thread and on those that join it."""
    args = address_of(record)
    pool = get_long(args + _OF_POOL)
    if claim(pool + _CALLERS) == 0:
        set_long(pool + _KERNEL, get_long(args + _OF_KERNEL))
        set_long(pool + _RECORD, get_long(args + _OF_RECORD))
        set_long(pool + _MOST, get_long(args + _OF_MOST))
        set_long(pool + _JOINED, 0)
        claim(pool + _JOB)
        _wake(pool, pool + _JOB, pool + _IDLE, get_long(args + _OF_MOST))
        call(get_long(args + _OF_KERNEL), get_long(args + _OF_RECORD))
        claim(pool + _JOB)
        active = seen(pool + _ACTIVE)
        while active != 0:
            wait_in_kernel(pool, pool + _ACTIVE, active)
            active = seen(pool + _ACTIVE)
    else:  # another thread has the helpers: this one computes alone
        call(get_long(args + _OF_KERNEL), get_long(args + _OF_RECORD))
    release(pool + _CALLERS)


@kernel
def _look(memory):
    """Look at a number _MEASURED_LOOKS times, as a thread that waits does."""
    pool = address_of(memory)
    for _ in range(_MEASURED_LOOKS):
        if seen(pool + _JOB) != 0:
            return
        pause()


class Threads:
    """Threads that help to run kernels. They start when a launch first wants them.

    address: their memory, with which kernels call `wait_in_kernel` and `changed`.
    """

    def __init__(self) -> None:
        room = np.zeros((_NUM_BYTES + LINE) // 8, np.int64)
        self._memory = room[-room.ctypes.data % LINE // 8 :]
        self.address: int = self._memory.ctypes.data
        self._record = (ctypes.c_int64 * (_NUM_BYTES // 8)).from_address(self.address)
        libc = ctypes.CDLL(None)
        for offset, name in ((_SYSCALL, "syscall"), (_YIELD, "sched_yield")):
            self._set(offset, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0)
        futex = _FUTEX.get(platform.machine(), 0) if platform.system() == "Linux" else 0
        self._set(_NUMBER, futex)
        self._can_sleep = futex != 0
        self._launch, self._help, self._look = map(machine_code, (_launch, _help, _look))
        look_s = self._seconds_of_a_look()
        self._set(_WITHIN, round(SPIN_WITHIN_S / look_s))
        self._set(_BETWEEN, round(SPIN_BETWEEN_S / look_s))
        self._local = threading.local()
        self._lock = threading.Lock()
        self._helpers: list[threading.Thread] = []

    def _set(self, offset: int, value: int) -> None:
        self._memory[offset // 8] = value

    def _seconds_of_a_look(self) -> float:
        """Measure how long one look takes, which depends on the CPU's instruction to pause."""
        times = []
        for _ in range(3):
            started = time.perf_counter()
            self._look.call(self._record)
            times.append(time.perf_counter() - started)
        return min(times) / _MEASURED_LOOKS

    def run(self, kernel: MachineCode, record: ctypes.Array[Any], num_threads: int) -> None:
        """Run a kernel for a record, on this thread and at most num_threads - 1 others."""
        if not self._can_sleep:
            self._run_on_executor(kernel, record, num_threads)
            return
        if num_threads - 1 > len(self._helpers):
            self._start(num_threads - 1)
        launch = getattr(self._local, "launch", None)
        if launch is None:
            launch = self._local.launch = ctypes.create_string_buffer(_LAUNCH.size)
        _LAUNCH.pack_into(launch, 0, self.address, kernel.address, ctypes.addressof(record), num_threads - 1)
        self._launch.call(launch)

    def _run_on_executor(self, kernel: MachineCode, record: Any, num_threads: int) -> None:
        """Do the same where the system has no futex: wait for all threads."""
        others = [self._executor.submit(kernel.call, record) for _ in range(num_threads - 1)]
        kernel.call(record)
        for other in others:
            other.result()

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(thread_name_prefix="paged-kernels")

    def _start(self, number: int) -> None:
        """Start helpers until there are so many."""
        with self._lock:
            if not self._helpers:
                atexit.register(self.stop)  # before Python frees the code that they run
            while len(self._helpers) < number:
                name = f"paged-kernels-{len(self._helpers)}"
                self._helpers.append(
                    threading.Thread(target=self._help.call, args=(self._record,), name=name, daemon=True)
                )
                self._helpers[-1].start()

    def stop(self) -> None:
        """End the helpers; from then on, each caller runs its kernels alone."""
        self._set(_STOPPED, 1)
        # They notice at the next launch.
        self.run(self._look, self._record, 1 + len(self._helpers))
        for helper in self._helpers:
            helper.join(timeout=1)


@lru_cache(maxsize=1)
def threads() -> Threads:
    """Return the threads of this process."""
    return Threads()


os.register_at_fork(after_in_child=threads.cache_clear)  # a child has none of its parent's threads
