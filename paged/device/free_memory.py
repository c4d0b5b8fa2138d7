"""Free memory of this machine. Free of torch."""

from __future__ import annotations

from pathlib import Path

import psutil


def free_on_cpu() -> float:
    """Return the bytes of RAM that are free now, within the container's limit."""
    available: int = psutil.virtual_memory().available
    return min(available, _cgroup_free_bytes())


def _cgroup_free_bytes() -> float:
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return float("inf")
    # Cached file pages count as used, but the kernel drops them when memory is needed.
    stat = dict(line.split() for line in used.with_name("memory.stat").read_text().splitlines())
    cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(0, int(limit.read_text()) - int(used.read_text()) + cached)
