"""Machine code of kernels: numba compiles it once, and it is cached on disk.

numba has a cache too, but imports its whole compiler to load from it, which costs every start time and
memory. Here LLVM alone loads the code.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from numba import _helperlib, cfunc
from numba.core import config
from numba.core.runtime import _nrt_python

from ..simd.inner_code import KernelCompiler
from . import code_cache

# All kernels by their names in the cache.
KERNELS: dict[str, Callable[[int], None]] = {}
_C_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class MachineCode(NamedTuple):
    """A kernel as a C function of an address.

    engine: the owner of its memory. Each kernel has its own, as numba numbers functions of the same name:
    code compiled by two processes may use one symbol for two functions.
    """

    address: int
    call: Callable[[Any], None]
    engine: Any


def kernel(function: Callable[[int], None]) -> Callable[[int], None]:
    """Decorate a kernel, a function of a record's address."""
    KERNELS[name_of(function)] = function
    return function


def name_of(function: Callable[[int], None]) -> str:
    """Return the name of a kernel in the cache."""
    return f"{function.__module__.partition('.cpu.')[2]}.{function.__name__.strip('_')}"


def machine_code(function: Callable[[int], None]) -> MachineCode:
    """Load the code of a kernel, a function of its record's address; compile it if it is not in the cache.

    Raises ImportError if the cache cannot be written.
    """
    code = code_cache.find(name_of(function))
    return _load(*(code or compile_kernel(function)))


def compile_kernel(function: Callable[[int], None]) -> tuple[str, bytes]:
    """Compile a kernel into the cache. Return its symbol and object code. Raises ImportError."""
    code_cache.writable_directory()  # raises before it takes time
    compiled = cfunc("void(voidptr)", pipeline_class=KernelCompiler)(function)
    code = compiled.native_name, compiled._library._get_compiled_object()
    code_cache.keep(name_of(function), code)
    return code


@cache
def _initialize() -> None:
    """Prepare LLVM, and name the functions that numba's code calls when it raises."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for prefix, library in (("numba_", _helperlib), ("NRT_", _nrt_python)):
        for name, address in library.c_helpers.items():
            llvm.add_symbol(prefix + name, address)


def _load(symbol: str, code: bytes) -> MachineCode:
    _initialize()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    use_lmm = config.USE_LLVMLITE_MEMORY_MANAGER
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=use_lmm)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    return MachineCode(address, _C_FUNCTION(address), engine)
