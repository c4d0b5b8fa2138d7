"""What is freed while weights are read goes back to the system, whatever lies behind it."""

import platform

import psutil
import pytest
import torch

from paged.device.host_memory import freed_at_once


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_tensors_leave_the_process():
    def rss():
        return psutil.Process().memory_info().rss

    large = torch.ones(6 * 2**20)
    del large  # from here on, glibc takes 24 MiB and less from the heap
    with freed_at_once():
        before = rss()
        read, kept = [], []
        for _ in range(40):
            read.append(torch.ones(2**19))  # 2 MiB
            kept.append(torch.ones(2**10))
        assert rss() - before > 60 * 2**20
        del read
        assert rss() - before < 20 * 2**20
    assert len(kept) == 40
