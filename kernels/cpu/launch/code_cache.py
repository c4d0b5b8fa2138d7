"""The cache of machine code: a file for each kernel, which processes that start at once write together.

A process claims a kernel before it compiles it. The others go on to kernels that are not claimed, and find
the file of this one later.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config

_DIGEST_BYTES = 32
_ROOT = Path(__file__).parents[1]  # kernels/cpu: the sources of every kernel


def _setting() -> str:
    """Describe what the code is compiled for and by, and where its sources are."""
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()
    # Of the host too: they decide how wide vectors are, whatever numba is set to compile for.
    features = f"{config.CPU_FEATURES} {llvm.get_host_cpu_features().flatten()}"
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


def writable_directory() -> Path:
    """Return the first directory of the cache that can be written. Raises ImportError if none can."""
    for candidate in _directories():
        with suppress(OSError):
            candidate.mkdir(parents=True, exist_ok=True)
            if os.access(candidate, os.W_OK | os.X_OK):
                return candidate
    raise ImportError(
        "the CPU's compiled kernels are kept beside their source or in the home directory, where nothing can "
        "be written; set NUMBA_CACHE_DIR to a directory where it can"
    )


def _file_name(name: str, source: str = _SOURCE) -> str:
    return f"{name}-{_SETTING}-{source}.o"


def directory_of(name: str) -> Path | None:
    """Return the directory that has a file for this kernel, or None. `find` tells whether it is intact."""
    return next((place for place in _directories() if (place / _file_name(name)).exists()), None)


def find(name: str) -> tuple[str, bytes] | None:
    """Return the symbol of a kernel and its object code, if they are in the cache."""
    for place in _directories():
        try:
            data = (place / _file_name(name)).read_bytes()
        except OSError:
            continue
        digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if sha256(data).digest() == digest:
            symbol, _, code = data.partition(b"\0")
            return symbol.decode(), code
    return None


def keep(name: str, code: tuple[str, bytes]) -> None:
    """Write a kernel to the cache, and delete what was compiled from other sources. Raises ImportError."""
    data, place = code[0].encode() + b"\0" + code[1], writable_directory()
    new = place / f"{name}-{os.getpid()}.new"  # renamed at the end: readers see a whole file or none
    try:
        new.write_bytes(sha256(data).digest() + data)
        for old in place.glob(_file_name(name, "*")):
            old.unlink(missing_ok=True)
        new.replace(place / _file_name(name))
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise ImportError(f"compiled kernels cannot be kept in {place}: {error.strerror}") from error


@contextmanager
def claimed(name: str) -> Iterator[bool]:
    """Claim a kernel for compiling it, and yield whether it is claimed: not if another process has it.

    The system ends a claim with its process, however that ends.
    """
    file = writable_directory() / f"{name}-{_SETTING}.lock"
    with file.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks: at worst some kernels are compiled twice
            yield True
            return
        if not _is_at(file, lock.fileno()):  # deleted between opening and locking it, so others cannot see it
            yield False
            return
        try:
            yield True
        finally:
            file.unlink(missing_ok=True)


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except OSError:
        return False
