"""Kernels as machine code, compiled once by numba and kept on disk.

numba keeps code too, but loads it with all that it compiles with, which takes time and memory at every
start. Here LLVM alone makes it run.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import _helperlib, cfunc
from numba.core import config
from numba.core.runtime import _nrt_python

_C_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DIGEST_BYTES = 32
_ROOT = Path(__file__).parents[1]  # kernels/cpu: what a kernel is made of


class MachineCode(NamedTuple):
    """A C function of an address.

    engine: what its memory belongs to. Each kernel has one of its own: numba counts functions of one name, so
    that in code of two processes a name may stand for either.
    """

    address: int
    call: Callable[[Any], None]
    engine: Any


def machine_code(function: Callable[[int], None]) -> MachineCode:
    """Load a kernel, a function of its record's address, or compile it where nobody has yet.

    Raises ImportError where what is compiled cannot be kept.
    """
    name = f"{function.__module__.partition('.cpu.')[2]}.{function.__name__.strip('_')}"
    code = _find(name)
    if code is None:
        code = _compile(function)
        _keep(name, code)
    return _load(*code)


def _setting() -> str:
    """What code is compiled for and by, and whose it is."""
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()
    features = config.CPU_FEATURES
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    target = f"{llvm.get_process_triple()} {cpu} {features} {config.ENABLE_AVX}"
    passes = f"{config.OPT} {config.LOOP_VECTORIZE} {config.SLP_VECTORIZE}"
    checks = f"{config.BOUNDSCHECK} {config.DEBUGINFO_DEFAULT}"
    return f"{target} {passes} {checks} {numba.__version__} {llvmlite.__version__} {_ROOT}"


def _source() -> bytes:
    """What it is compiled from: a kernel is made of functions of several files."""
    files = sorted(_ROOT.rglob("*.py"))
    assert len(files) > 20, f"the sources of the kernels are not below {_ROOT}"
    return b"".join(file.read_bytes() for file in files)


_SETTING, _SOURCE = (sha256(data).hexdigest()[:16] for data in (_setting().encode(), _source()))


def _directories() -> Iterator[Path]:
    """Where code may be: where numba would keep it."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen)
        return
    yield _ROOT / "__pycache__"
    with suppress(RuntimeError):  # nobody's home
        yield Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paged"


def _find(name: str) -> tuple[str, bytes] | None:
    """The symbol of a kernel and its object code."""
    for directory in _directories():
        try:
            data = (directory / f"{name}-{_SETTING}-{_SOURCE}.o").read_bytes()
        except OSError:
            continue
        digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if sha256(data).digest() == digest:
            symbol, _, code = data.partition(b"\0")
            return symbol.decode(), code
    return None


def _keep(name: str, code: tuple[str, bytes]) -> None:
    """For the next process; what came of other sources is done with."""
    data = code[0].encode() + b"\0" + code[1]
    for directory in _directories():
        new = directory / f"{name}-{os.getpid()}.new"  # others see all of it or nothing
        try:
            directory.mkdir(parents=True, exist_ok=True)
            new.write_bytes(sha256(data).digest() + data)
            for old in directory.glob(f"{name}-{_SETTING}-*.o"):
                old.unlink(missing_ok=True)
            new.replace(directory / f"{name}-{_SETTING}-{_SOURCE}.o")
            return
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
    raise ImportError(
        "the CPU's compiled kernels are kept beside their source or in the home directory, where nothing can "
        "be written; set NUMBA_CACHE_DIR to a directory where it can"
    )


def _compile(function: Callable[[int], None]) -> tuple[str, bytes]:
    compiled = cfunc("void(voidptr)")(function)
    return compiled.native_name, compiled._library._get_compiled_object()


def _load(symbol: str, code: bytes) -> MachineCode:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # What numba's code calls where a function raises.
    for prefix, library in (("numba_", _helperlib), ("NRT_", _nrt_python)):
        for name, address in library.c_helpers.items():
            llvm.add_symbol(prefix + name, address)
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    use_lmm = config.USE_LLVMLITE_MEMORY_MANAGER
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=use_lmm)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    return MachineCode(address, _C_FUNCTION(address), engine)
