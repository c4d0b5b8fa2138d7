"""Machine code of kernels: compiled once by numba, and from then on loaded from the cache on disk.

Loading needs neither numba nor LLVM, which would cost every start time and memory.
"""

import ctypes
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from . import code_cache
from .object_code import UnknownRelocationError, place

_C_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class MachineCode(NamedTuple):
    """A kernel as a C function of an address.

    owner: of its memory. Each kernel has its own, as numba numbers functions of the same name: code compiled
    by two processes may use one symbol for two functions.
    """

    address: int
    call: Callable[[Any], None]
    owner: Any


def machine_code(name: str) -> MachineCode:
    """Load the code of a kernel, a function of its record's address; compile it if it is not in the cache.

    name: the module below `compiled` that has the kernel, and the kernel's own name.

    Raises ImportError if the cache cannot be written.
    """
    code = code_cache.find(name)
    if code is None:
        code = _compiled("kernels").compile_kernel(name)
    return _load(*code)


def _compiled(module: str) -> Any:
    """Import a module that imports numba and LLVM."""
    return import_module(f"..compiled.{module}", __package__)


def _load(symbol: str, code: bytes) -> MachineCode:
    try:
        address, owner = place(symbol, code)
    except UnknownRelocationError:  # of another kind of processor or system
        address, owner = _compiled("loading").place_by_llvm(symbol, code)
    return MachineCode(address, _C_FUNCTION(address), owner)
