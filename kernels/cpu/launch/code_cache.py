"""The cache of machine code: a file for each kernel, which processes that start at once write together.

A file's name is a hash of all that its code depends on, and of no path: a copy of the project finds the code
in its copy of the cache. A file that other users may have written is not used, as its code would run.

A process claims a kernel before it compiles it. The others go on to kernels that are not claimed, and find
the file of this one later.
"""

import fcntl
import logging
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_ROOT = Path(__file__).parents[1]  # kernels/cpu
# Of a kernel, how many files from other sources are kept: copies of the project may share a directory.
_MOST_OTHERS = 3


def _setting() -> str:
    """Describe what the code is compiled for and by."""
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()
    # Of the host too: they decide how wide vectors are, whatever numba is set to compile for.
    features = f"{config.CPU_FEATURES} {llvm.get_host_cpu_features().flatten()}"
    target = f"{llvm.get_process_triple()} {cpu} {features} {config.ENABLE_AVX}"
    passes = f"{config.OPT} {config.LOOP_VECTORIZE} {config.SLP_VECTORIZE}"
    checks = f"{config.BOUNDSCHECK} {config.DEBUGINFO_DEFAULT}"
    versions = f"{numba.__version__} {llvmlite.__version__} {sys.implementation.cache_tag}"
    return f"{target} {passes} {checks} {versions}"


def _source() -> bytes:
    """Return the sources of all kernels, as a kernel is made of functions and constants of several files."""
    folder = _ROOT.parent
    named = ((str(file.relative_to(folder)), file) for file in folder.rglob("*.py"))
    files = sorted((name, file) for name, file in named if not name.startswith("gpu"))
    assert len(files) > 20, f"the sources of the kernels are not below {folder}"
    return b"".join(name.encode() + b"\0" + file.read_bytes() + b"\0" for name, file in files)


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
    for place in _directories():
        with suppress(OSError):
            if _is_trusted(place, (place / _file_name(name)).stat()):
                return place
    return None


def find(name: str) -> tuple[str, bytes] | None:
    """Return the symbol of a kernel and its object code, if they are in the cache."""
    for place in _directories():
        try:
            with (place / _file_name(name)).open("rb") as file:
                data = file.read() if _is_trusted(place, os.fstat(file.fileno())) else b""
        except OSError:
            continue
        digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if sha256(data).digest() == digest:
            symbol, _, code = data.partition(b"\0")
            return symbol.decode(), code
    return None


def _is_trusted(place: Path, status: os.stat_result) -> bool:
    """Return whether only those could have written a file who may write the sources of the kernels, too."""
    owners = (0, os.geteuid(), Path(__file__).stat().st_uid)
    is_trusted = status.st_uid in owners and not status.st_mode & stat.S_IWOTH
    if not is_trusted:
        _warn(place)
    return is_trusted


@cache
def _warn(place: Path) -> None:
    logger.warning("machine code in %s is not used, as other users may have written it", place)


def keep(name: str, code: tuple[str, bytes]) -> None:
    """Write a kernel to the cache, and delete old ones from other sources. Raises ImportError."""
    data = code[0].encode() + b"\0" + code[1]
    place = writable_directory()
    new = place / f"{name}-{os.getpid()}.new"  # renamed at the end: readers see a whole file or none
    try:
        new.unlink(missing_ok=True)
        with open(new, "xb", opener=_private) as file:
            file.write(sha256(data).digest() + data)
        new.replace(place / _file_name(name))
        files = sorted(place.glob(_file_name(name, "*")), key=_age)
        for old in files[1 + _MOST_OTHERS :]:
            old.unlink(missing_ok=True)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise ImportError(f"compiled kernels cannot be kept in {place}: {error.strerror}") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def _age(file: Path) -> float:
    """Return a number that is larger for older files."""
    try:
        return -file.stat().st_mtime
    except OSError:  # another process has deleted it
        return 0.0


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
