"""Weights get huge pages, the KV cache none."""

import os
import platform

import pytest
import torch
from torch import Tensor

from paged.kernels.cpu.launch.huge_pages import in_huge_pages
from paged.kernels.cpu.linear.linear import pack
from paged.kernels.cpu.linear.pack_bf12 import pack_bf12
from paged.kernels.cpu.linear.pack_codes import pack_codes
from paged.kernels.cpu.target import HAS_LOOKUP
from tests.support.checkpoints import new_engine

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or not os.path.isdir("/sys/kernel/mm/transparent_hugepage"),
    reason="this system has no transparent huge pages",
)


def is_asked_for(x: Tensor) -> bool:
    """Return whether the mapping with the middle of x is marked for huge pages."""
    middle, inside = x.data_ptr() + x.nbytes // 2, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first, *others = line.split()
            if "-" in first and not first.endswith(":"):
                start, end = (int(bound, 16) for bound in first.split("-"))
                inside = start <= middle < end
            elif inside and first == "VmFlags:":
                return "hg" in others
    raise AssertionError("a tensor is in no mapping")


def test_memory_with_room_for_huge_pages_asks_for_them():
    # Each is large enough for a mapping of its own.
    plain, asked = (torch.empty(2**26, dtype=torch.uint8) for _ in range(2))
    assert in_huge_pages(asked) is asked
    assert is_asked_for(asked)
    assert not is_asked_for(plain)
    for small in (torch.empty(0), torch.ones(1000), torch.empty(2**23, device="meta")):
        assert in_huge_pages(small) is small


def test_weights_get_huge_pages_and_the_cache_does_not():
    """A short request touches little of the cache, and would wait for whole pages to be cleared."""
    weight = torch.randn(2048, 2048)
    assert is_asked_for(pack(weight).weight)
    codes, factors = torch.zeros(4096, 2048, dtype=torch.uint8), torch.ones(4096, 64, dtype=torch.bfloat16)
    assert is_asked_for(pack_codes(codes, factors, table=(0.0,) * 16).weight)
    encoded = pack_bf12(pack(weight.bfloat16())).weight
    assert is_asked_for(encoded)
    assert (encoded.dtype == torch.int16) is HAS_LOOKUP
    engine = new_engine("demo", num_blocks=2**15)
    assert not is_asked_for(engine.runner.kv_cache.tensors["kv"])
