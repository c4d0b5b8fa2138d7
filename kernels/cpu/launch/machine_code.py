"""Machine code of kernels: numba compiles it once, and it is cached on disk.

numba has a cache too, but imports its whole compiler to load from it, which costs every start time and
memory. Here LLVM alone loads the code.
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
_ROOT = Path(__file__).parents[1]  # kernels/cpu: the sources of every kernel


class MachineCode(NamedTuple):
    """A kernel as a C function of an address.

    engine: the owner of its memory. Each kernel has its own, as numba numbers functions of the same name:
    code compiled by two processes may use one symbol for two functions.
    """

    address: int
    call: Callable[[Any], None]
    engine: Any


def machine_code(function: Callable[[int], None]) -> MachineCode:
    """Load the code of a kernel, a function of its record's address; compile it if it is not in the cache.

    Raises ImportError if the cache cannot be written.
    """
    name = f"{function.__module__.partition('.cpu.')[2]}.{function.__name__.strip('_')}"
    code = _find(name)
    if code is None:
        code = _compile(function)
        _keep(name, code)
    return _load(*code)


def _setting() -> str:
    """Describe what the code is compiled for and by, and where its sources are."""
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()
    features = config.CPU_FEATURES
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    target = f"{llvm.get_process_triple()} {cpu} {features} {config.ENABLE_AVX}"
    passes = f"{config.OPT} {config.LOOP_VECTORIZE} {config.SLP_VECTORIZE}"
    checks = f"{config.BOUNDSCHECK} {config.DEBUGINFO_DEFAULT}"
    return f"{target} {passes} {checks} {numba.__version__} {llvmlite.__version__} {_ROOT}"


def _source() -> bytes:
    """Return the sources of all kernels, as a kernel is made of functions of several files."""
    files = sorted(_ROOT.rglob("*.py"))
    assert len(files) > 20, f"the sources of the kernels are not below {_ROOT}"
    return b"".join(file.read_bytes() for file in files)


_SETTING, _SOURCE = (sha256(data).hexdigest()[:16] for data in (_setting().encode(), _source()))


def _directories() -> Iterator[Path]:
    """Yield the directories of the cache, which are numba's."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen)
        return
    yield _ROOT / "__pycache__"
    with suppress(RuntimeError):  # no home directory
        yield Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paged"


def _find(name: str) -> tuple[str, bytes] | None:
    """Return the symbol of a kernel and its object code, if they are in the cache."""
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
    """Write a kernel to the cache, and delete what was compiled from other sources."""
    data = code[0].encode() + b"\0" + code[1]
    for directory in _directories():
        new = directory / f"{name}-{os.getpid()}.new"  # renamed at the end: readers see a whole file or none
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
    # Functions that numba's code calls when it raises.
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
