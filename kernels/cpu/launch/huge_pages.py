"""Huge pages for weights, which are read from end to end.

A core's TLB has some thousand entries. With pages of 4 KiB they cover little more than its caches, and a miss
may take as long as reading the page. The KV cache gets no huge pages: a short request touches a few KiB of it
in each layer, and would wait for megabytes to be cleared.
"""

import ctypes
import platform
from functools import lru_cache
from typing import Any

from torch import Tensor

_HUGE_PAGE = 2**21
_ADVICE = 14  # MADV_HUGEPAGE


def in_huge_pages(x: Tensor) -> Tensor:
    """Ask the system for huge pages for the memory of x, which must be untouched so far. Return x.

    Does nothing on systems other than Linux, on devices other than CPUs, or if x contains no whole huge page.
    """
    advise = _advise()
    if advise is None or not x.is_cpu:
        return x
    first = -(-x.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    size = (x.data_ptr() + x.nbytes - first) // _HUGE_PAGE * _HUGE_PAGE
    if size > 0:
        advise(first, size, _ADVICE)  # a hint: a system without huge pages refuses
    return x


@lru_cache(maxsize=1)
def _advise() -> Any:
    if platform.system() != "Linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise
