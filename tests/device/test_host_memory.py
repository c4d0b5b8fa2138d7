"""What is freed while weights are read goes back to the system, whatever lies behind it."""

import platform
import subprocess
import sys

import pytest

# In a process of its own: in this one, tests before have left any amount of free memory.
SCRIPT = """
import psutil, torch
from paged.device.host_memory import freed_at_once

def grown():
    return (psutil.Process().memory_info().rss - before) >> 20

large = torch.ones(6 * 2**20)
del large  # from here on, glibc takes 24 MiB and less from the heap
before = psutil.Process().memory_info().rss
with freed_at_once():
    read, kept = [], []
    for _ in range(40):
        read.append(torch.ones(2**19))  # 2 MiB
        kept.append(torch.ones(2**10))
    assert grown() > 60, grown()
    del read
    assert grown() < 20, grown()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_tensors_leave_the_process():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
