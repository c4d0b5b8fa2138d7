"""Writing to the cache of machine code; see `code_cache`."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from ..target import TARGET, writable_directory, write_cached
from .code_cache import file_name

# Of a kernel, how many files from other sources are kept: copies of the project may share a directory.
_MOST_OTHERS = 3


def keep(name: str, code: tuple[str, bytes]) -> None:
    """Write a kernel to the cache, and delete old files from other sources. Raises ImportError."""
    data = code[0].encode() + b"\0" + code[1]
    place = writable_directory()
    try:
        write_cached(place, file_name(name), sha256(data).digest() + data)
        files = sorted(place.glob(file_name(name, "*")), key=_age)
        for old in files[1 + _MOST_OTHERS :]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise ImportError(f"compiled kernels cannot be kept in {place}: {error.strerror}") from error


def _age(file: Path) -> float:
    """Return a number that is larger for older files."""
    try:
        return -file.stat().st_mtime
    except OSError:  # another process has deleted it
        return 0.0


@contextmanager
def claimed(name: str) -> Iterator[bool]:
    """Try to claim a kernel for compilation. Yield whether this process got the claim.

    The system releases the claim when the process ends in any way.
    """
    file = writable_directory() / f"{name}-{TARGET.setting}.lock"
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
