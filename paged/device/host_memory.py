"""glibc's memory while weights are read: what is freed goes back to the system at once.

By default glibc keeps tens of megabytes of what is freed, once a large piece was freed, and more where
weights that stay lie behind pieces that were read and converted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

# Of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAPPED_FROM = 2**20  # bytes
# The most that glibc chooses itself.
_MOST_MMAP_THRESHOLD = 32 * 2**20
_MOST_TRIM_THRESHOLD = 64 * 2**20

# Bytes of files that this process has mapped and needs. The system counts their pages as free.
held_in_files = 0


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Return freed memory to the system at once: in this context, tensors of a megabyte or more are mapped
    separately.

    The heap is trimmed at the end. Without glibc this does nothing.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _MAPPED_FROM)
    try:
        yield
    finally:
        # A step's tensors come from the heap again, which maps no pages anew in each step.
        libc.mallopt(_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        libc.mallopt(_TRIM_THRESHOLD, _MOST_TRIM_THRESHOLD)
        libc.malloc_trim(0)


def free_on_cpu() -> float:
    """Return the bytes of RAM that are free, within the container's limit."""
    available: int = psutil.virtual_memory().available
    return max(0, min(available, _cgroup_free_bytes()) - held_in_files)


def _cgroup_free_bytes() -> float:
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return float("inf")
    # Cached file pages count as used, but the kernel drops them when memory is needed.
    stat = dict(line.split() for line in used.with_name("memory.stat").read_text().splitlines())
    cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(0, int(limit.read_text()) - int(used.read_text()) + cached)
