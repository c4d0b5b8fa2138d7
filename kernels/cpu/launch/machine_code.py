"""Machine code of kernels: compiled once by numba, and from then on loaded from the cache on disk.

Loading needs neither numba nor LLVM, which would cost every start time and memory: x86-64 ELF files, as LLVM
writes them for numba's large code model, are placed here. A kernel's file has code, constants, and a list of
places that hold addresses (System V ABI, AMD64 supplement, section 4.4). Nearly all are absolute addresses of
8 bytes, so that any part may lie anywhere.
"""

import ctypes
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from . import code_cache

_POLL_S = 0.02
_C_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class MachineCode(NamedTuple):
    """A kernel as a C function that takes an address.

    kinds: the kinds that a variant is compiled for; None for all kinds.
    owner: the owner of the code's memory. Each kernel has its own owner, because numba numbers functions of
        the same name, so that code from two processes may use one symbol for two functions.
    """

    address: int
    call: Callable[[Any], None]
    owner: Any
    kinds: frozenset[int] | None = None


def machine_code(name: str) -> MachineCode:
    """Load the code of a kernel: a function of its record's address. Compile it if it is not in the cache.

    name: the module below `compiled` that defines the kernel, and the kernel's own name. Code loaded for a
        variant may have more kinds; code compiled here has all kinds.

    Raises ImportError if the cache cannot be written.
    """
    found = _found(name)
    while found is None and name in code_cache.expected:
        time.sleep(_POLL_S)
        found = _found(name)
    if found is None:
        found = _load(*_compiled("kernels").compile_kernel(code_cache.parts(name)[0]))
    return found


def _found(name: str) -> MachineCode | None:
    """Load a kernel from the cache; None: it is not there, or damaged."""
    holder = code_cache.holder_of(name)
    code = None if holder is None else code_cache.find(holder)
    if holder is None or code is None:
        return None
    return _load(*code)._replace(kinds=code_cache.parts(holder)[1])


def _compiled(module: str) -> Any:
    """Import a module that imports numba and LLVM."""
    return import_module(f"..compiled.{module}", __package__)


def _load(symbol: str, code: bytes) -> MachineCode:
    try:
        address, owner = place(symbol, code)
    except UnknownRelocationError:  # of another kind of processor or system
        address, owner = _compiled("loading").place_by_llvm(symbol, code)
    return MachineCode(address, _C_FUNCTION(address), owner)


_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_MAGIC = b"\x7fELF\x02\x01\x01"  # of 64 bits, little-endian
_X86_64 = 62
_RELOCATABLE = 1
# kinds of sections
_SYMTAB = 2
_RELA = 4
_NOBITS = 8
_ALLOCATED = 2  # a flag of sections that belong into memory
_UNWIND = 0x70000001
_UNDEFINED = 0
_ABSOLUTE_64 = 1  # R_X86_64_64, the kind of relocation


class UnknownRelocationError(Exception):
    """The file is not an x86-64 ELF object, or has unsupported relocations."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def place(symbol: str, code: bytes) -> tuple[int, Any]:
    """Load an object file into memory and apply its relocations.

    Return the address of the symbol, and the owner of the memory. Raises UnknownRelocationError.
    """
    sections = _sections(code)
    starts, size = _lay_out(sections)
    memory = mmap.mmap(-1, size)
    view = ctypes.c_char.from_buffer(memory)
    base = ctypes.addressof(view)
    for number, start in starts.items():
        section = sections[number]
        if section.kind != _NOBITS:
            memory[start : start + section.size] = code[section.offset : section.offset + section.size]
    addresses = {}
    for section in sections:
        if section.kind == _SYMTAB:
            addresses = _addresses(code, sections, section, {n: base + at for n, at in starts.items()})
    for section in sections:
        if section.kind == _RELA and section.info in starts:
            _relocate(code, section, memory, starts[section.info], addresses)
    _make_executable(base, size)
    return next(address for name, address in addresses.values() if name == symbol and address), view


def _sections(code: bytes) -> list[_Section]:
    if not code.startswith(_MAGIC) or os.name != "posix":
        raise UnknownRelocationError
    _, kind, machine, _, _, _, table, _, _, _, _, entry, number, _ = _HEADER.unpack_from(code)
    if (kind, machine) != (_RELOCATABLE, _X86_64):
        raise UnknownRelocationError
    return [_Section(*_SECTION.unpack_from(code, table + i * entry)) for i in range(number)]


def _lay_out(sections: list[_Section]) -> tuple[dict[int, int], int]:
    """Return where each section starts that belongs into memory, and the size of all."""
    starts = {}
    at = 0
    for number, section in enumerate(sections):
        # Tables for unwinding are for exceptions of C++ and debuggers: kernels end or return.
        if section.flags & _ALLOCATED and section.kind != _UNWIND:
            at = -(-at // section.alignment) * section.alignment
            starts[number] = at
            at += section.size
    return starts, max(at, 1)


def _addresses(
    code: bytes, sections: list[_Section], table: _Section, starts: dict[int, int]
) -> dict[int, tuple[str, int | None]]:
    """Return the name and the address of each symbol; None: it is not in memory."""
    names = sections[table.link].offset
    addresses: dict[int, tuple[str, int | None]] = {}
    for number in range(table.size // _SYMBOL.size):
        name_at, _, _, section, value, _ = _SYMBOL.unpack_from(code, table.offset + number * _SYMBOL.size)
        name = code[names + name_at : code.index(b"\0", names + name_at)].decode()
        if section == _UNDEFINED:
            addresses[number] = name, _external(name) if name else None
        else:
            start = starts.get(section)
            addresses[number] = name, None if start is None else start + value
    return addresses


def _relocate(
    code: bytes, table: _Section, memory: mmap.mmap, start: int, addresses: dict[int, tuple[str, int | None]]
) -> None:
    """Write the addresses that a table of relocations lists into the section at `start`."""
    for number in range(table.size // _RELOCATION.size):
        offset, info, addend = _RELOCATION.unpack_from(code, table.offset + number * _RELOCATION.size)
        _, address = addresses[info >> 32]
        if info & 0xFFFFFFFF != _ABSOLUTE_64 or address is None:
            raise UnknownRelocationError
        struct.pack_into("<Q", memory, start + offset, address + addend & 2**64 - 1)


@cache
def _external(name: str) -> int:
    """Return the address of a function outside of the file: of Python, of C's libraries, or of numba."""
    if name.startswith(("numba_", "NRT_")):
        return ctypes.cast(_on_exception, ctypes.c_void_p).value or 0
    libraries: list[Any] = [ctypes.pythonapi, ctypes.CDLL(None), *_libm()]
    for library in libraries:
        if hasattr(library, name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise UnknownRelocationError


@cache
def _libm() -> list[Any]:
    try:
        return [ctypes.CDLL("libm.so.6")]
    except OSError:
        return []


@ctypes.CFUNCTYPE(None)
def _on_exception() -> None:
    """End the process: numba calls its helpers only where a kernel raises, and none does on purpose."""
    sys.stderr.write("paged: a CPU kernel raised an exception, which is a bug: its results would be wrong\n")
    sys.stderr.flush()
    os.abort()


def _make_executable(address: int, size: int) -> None:
    """Let the processor run this memory, and nothing write it any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
        number = ctypes.get_errno()
        raise OSError(number, f"machine code cannot be made executable: {os.strerror(number)}")
