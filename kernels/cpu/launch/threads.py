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

from ..target import LINE
from .machine_code import MachineCode, machine_code

# How long a thread looks before it sleeps: within a launch, where another is about to end its unit of work,
# and between launches, where Python prepares the next one.
SPIN_WITHIN_S = 50e-6
SPIN_BETWEEN_S = 150e-6
_FUTEX = {"x86_64": 202, "aarch64": 98}  # Linux's system call that sleeps until a number changes
# its operations, among the threads of one process
WAIT = 128
WAKE = 129
EVERY = 2**31 - 1  # sleepers to wake
MEASURED_LOOKS = 1000

# Byte offsets in the memory of the threads. What one writes and others watch has a cache line of its own.
WITHIN = 0
BETWEEN = 8
SYSCALL = 16
NUMBER = 24
YIELD = 32
# The number of the launch, odd while it is open; its kernel, record and most helpers; whether it is the last.
JOB = LINE
KERNEL = LINE + 8
RECORD = LINE + 16
MOST = LINE + 24
IS_LAST = LINE + 32
JOINED = 2 * LINE  # the threads that wanted to join this launch
ACTIVE = 3 * LINE  # those that may be running its kernel
IDLE = 4 * LINE  # those that sleep between launches
WAITING = 5 * LINE  # those that sleep within one
CALLERS = 6 * LINE
_NUM_BYTES = 7 * LINE
# Byte offsets in the record of a launch.
OF_POOL = 0
OF_KERNEL = 8
OF_RECORD = 16
OF_MOST = 24
_LAUNCH = struct.Struct("=4q")


class Threads:
    """Helper threads for kernels. They start when a launch first needs them.

    address: the address of their shared memory, which kernels pass to `wait_in_kernel` and `changed`.
    """

    def __init__(self) -> None:
        room = np.zeros((_NUM_BYTES + LINE) // 8, np.int64)
        self._memory = room[-room.ctypes.data % LINE // 8 :]
        self.address: int = self._memory.ctypes.data
        self._record = (ctypes.c_int64 * (_NUM_BYTES // 8)).from_address(self.address)
        libc = ctypes.CDLL(None)
        for offset, name in ((SYSCALL, "syscall"), (YIELD, "sched_yield")):
            self._set(offset, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0)
        futex = _FUTEX.get(platform.machine(), 0) if platform.system() == "Linux" else 0
        self._set(NUMBER, futex)
        self._can_sleep = futex != 0
        self._launch = machine_code("launch.threads.launch")
        self._help = machine_code("launch.threads.help")
        self._look = machine_code("launch.threads.look")
        look_s = self._seconds_of_a_look()
        self._set(WITHIN, round(SPIN_WITHIN_S / look_s))
        self._set(BETWEEN, round(SPIN_BETWEEN_S / look_s))
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
        return min(times) / MEASURED_LOOKS

    def run(self, kernel: MachineCode, record: ctypes.Array[Any], num_threads: int) -> None:
        """Run a kernel on a record, on this thread and at most num_threads - 1 helpers."""
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
        """End the helpers. Later launches run on the calling thread alone."""
        self._set(IS_LAST, 1)
        # They notice at the next launch.
        self.run(self._look, self._record, 1 + len(self._helpers))
        for helper in self._helpers:
            helper.join(timeout=1)


@lru_cache(maxsize=1)
def threads() -> Threads:
    """Return the helper threads of this process."""
    return Threads()


os.register_at_fork(after_in_child=threads.cache_clear)  # a child has none of its parent's threads
