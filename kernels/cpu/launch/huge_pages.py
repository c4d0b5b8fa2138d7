"""Pages of megabytes for weights, which are read from end to end.

A core remembers where some thousand pages are. Of 4 KiB each that is little more than its caches have, and
to look up another may take as long as to read what is there. Not for the KV cache: of that a short request
touches some KiB in each layer, and would wait for megabytes to be cleared.
"""

import ctypes
import platform
from functools import lru_cache
from typing import Any

from torch import Tensor

_HUGE_PAGE = 2**21
_ADVICE = 14  # MADV_HUGEPAGE


def in_huge_pages(x: Tensor) -> Tensor:
    """x, whose memory nobody has touched yet, with the system asked for huge pages where they fit in.

    As it is where there are none: off Linux, not on a CPU, or with less memory than one has.
    """
    advise = _advise()
    if advise is None or not x.is_cpu:
        return x
    first = -(-x.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    size = (x.data_ptr() + x.nbytes - first) // _HUGE_PAGE * _HUGE_PAGE
    if size > 0:
        advise(first, size, _ADVICE)  # a hint: a system that has none says no
    return x


@lru_cache(maxsize=1)
def _advise() -> Any:
    if platform.system() != "Linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise
