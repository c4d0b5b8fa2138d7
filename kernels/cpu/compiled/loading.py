"""Load object code by LLVM, where `launch.object_code` does not know how."""

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from numba import _helperlib
from numba.core import config
from numba.core.runtime import _nrt_python


@cache
def _initialize() -> None:
    """Prepare LLVM, and name the functions that numba's code calls when it raises."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for prefix, library in (("numba_", _helperlib), ("NRT_", _nrt_python)):
        for name, address in library.c_helpers.items():
            llvm.add_symbol(prefix + name, address)


def place_by_llvm(symbol: str, code: bytes) -> tuple[int, Any]:
    """Load an object file with LLVM. Return the address of the symbol, and the owner of its memory."""
    _initialize()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    use_lmm = config.USE_LLVMLITE_MEMORY_MANAGER
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=use_lmm)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(symbol), engine
