"""WeightsCache: a folder of packed weights, bounded by the free space; the least recently used go first.

What lies here is computed with as it is, so the folder and its files must be the user's own, and no other
user may write to them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

logger = logging.getLogger(__name__)

KEPT_SHARE = 0.2  # of the free space, counting what is kept as free
OFF = "PAGED_NO_WEIGHTS_CACHE"  # a variable of the environment that leaves the default folder out
NAME_DIGITS = 24  # of the digest of a checkpoint's files, at the end of a name
_SUFFIX = ".weights"
_UNFINISHED = ".unfinished"
_STAMP = ".digest"
_MOST_STAMPS = 1000
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO is refused, not waited for


def content_of(path: Path) -> str:
    """Return the end of a file's name: the beginning of the digest of what its weights were packed from."""
    return path.stem.rpartition("-")[2]


class CacheError(Exception):
    """The reason why a cache folder, or a file in it, cannot be used. The message is a clause."""


class Kept(NamedTuple):
    """A file of the cache.

    last_use: when the file was last used, in seconds since 1970.
    """

    path: Path
    num_bytes: int
    last_use: float


@cache
def warn_once(message: str) -> None:
    """Log a warning unless this process has logged it before."""
    logger.warning(message)


def default_place() -> Path | None:
    """Return the default folder, in the user's cache; None if there is no home directory."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):
        # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest
        return (given if given.is_absolute() else Path("~/.cache").expanduser()) / "paged" / "weights"
    return None


class WeightsCache:
    """The files of a cache folder. Raises CacheError for a folder that must not or cannot be used."""

    def __init__(self, place: Path, *, create: bool = True) -> None:
        self.place = place
        try:
            if create:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.mkdir(mode=0o700, exist_ok=True)
            status = place.stat()
        except FileExistsError:
            raise CacheError(f"{place} is a file") from None
        except NotADirectoryError as error:
            raise CacheError(f"a part of the path {place} is a file") from error
        except OSError as error:
            raise CacheError(f"{place} cannot be opened: {error.strerror}") from error
        except ValueError as error:  # a null byte
            raise CacheError(f"{place!r} is no path: {error}") from error
        if not stat.S_ISDIR(status.st_mode):
            raise CacheError(f"{place} is a file")
        _check_owner(str(place), status)

    @classmethod
    def chosen(cls, option: str | bool | None, *, create: bool = True) -> Self | None:
        """Return the cache for an option; None if it is turned off or unusable. Log why it is unusable, once.

        option: the path of a folder; None takes the default folder; False turns the cache off.
        create: whether to make the folder if it does not exist.
        """
        if option is False or (option is None and os.environ.get(OFF)):
            return None
        place = default_place() if option is None or option is True else Path(str(option)).expanduser()
        if place is None:
            warn_once("packed weights are not kept: there is no home directory; weights_cache names a folder")
            return None
        if not create and not place.exists():
            return None
        try:
            return cls(place, create=create)
        except CacheError as error:
            warn_once(f"packed weights are not kept: {error}")
            return None

    @property
    def is_writable(self) -> bool:
        """Whether files can be made in the folder."""
        return os.access(self.place, os.W_OK | os.X_OK)

    def path(self, name: str) -> Path:
        """Return the path of the file with this name."""
        return self.place / f"{name}{_SUFFIX}"

    def has_any(self, prefix: str) -> bool:
        """Return whether the cache has a file whose name begins with `prefix`."""
        return any(True for _ in self.place.glob(f"{prefix}*{_SUFFIX}"))

    def open(self, name: str, *, is_use: bool = True) -> BinaryIO | None:
        """Open a file for reading, and record its use; None if it does not exist.

        Raises CacheError if the file does not belong to the user.
        """
        path = self.path(name)
        try:
            file = os.fdopen(os.open(path, _OPEN), "rb", buffering=0)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CacheError(f"{path} is no file")
            _check_owner(str(path), status)
        except BaseException:
            file.close()
            raise
        if is_use:
            with suppress(OSError):  # a disk that is read only
                os.utime(path)
        return file

    def kept(self) -> list[Kept]:
        """Return the files of the cache, the most recently used first."""
        found = []
        for path in self.place.glob(f"*{_SUFFIX}"):
            with suppress(OSError):  # another process removes it
                status = path.lstat()
                found.append(Kept(path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda each: each.last_use, reverse=True)

    def remove(self, path: Path) -> None:
        """Remove a file. Processes that have mapped it can still use it."""
        with suppress(OSError):
            path.unlink()

    def describe_room(self, num_bytes: int) -> str:
        """Say why a file of num_bytes bytes may not be added."""
        return (
            f"{num_bytes / 1e9:,.3g} GB would be more than {KEPT_SHARE:.0%} of the "
            f"{self._most_bytes() / KEPT_SHARE / 1e9:,.3g} GB that are free"
        )

    def make_room(
        self, num_bytes: int, named_digests: Callable[[], Mapping[str, str]] = dict[str, str]
    ) -> bool:
        """Remove the least recently used files until num_bytes more fit. Return whether they fit.

        named_digests: returns the digests of the models that models.toml names. Their files go last.
        """
        most = self._most_bytes()
        if num_bytes > most:
            return False
        kept = self.kept()
        total = sum(each.num_bytes for each in kept)
        if total + num_bytes <= most:
            return True
        names = {digest[:NAME_DIGITS]: name for name, digest in named_digests().items()}
        kept.sort(key=lambda each: (content_of(each.path) not in names, -each.last_use))
        while kept and total + num_bytes > most:
            oldest = kept.pop()
            self.remove(oldest.path)
            total -= oldest.num_bytes
            name = names.get(content_of(oldest.path))
            level, of = (logging.INFO, "") if name is None else (logging.WARNING, f", those of {name}")
            logger.log(
                level, "removed %s from the cache of packed weights to make room%s", oldest.path.name, of
            )
        return True

    def _most_bytes(self) -> float:
        """Return the maximum size of the cache: a share of the free space, with the cache counted as free."""
        return (shutil.disk_usage(self.place).free + sum(k.num_bytes for k in self.kept())) * KEPT_SHARE

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO | None]:
        """Open a new file, which gets this name when the context ends without an error.

        Yields None if another process is writing this file or has just written it. A process that ends loses
        its lock, and the next writer overwrites its unfinished file. Raises OSError, also on a file system
        without locks.
        """
        self._remove_unfinished()
        unfinished = self.place / f"{name}{_UNFINISHED}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(unfinished, flags, 0o600), "r+b", buffering=0) as file:
            if not _is_locked(file) or not _is_at(unfinished, file):
                yield None
                return
            file.truncate(0)
            try:
                yield file
                os.fchmod(file.fileno(), 0o400)
                unfinished.rename(self.path(name))
            except BaseException:
                self.remove(unfinished)
                raise

    def _remove_unfinished(self) -> None:
        """Remove what processes have left that were killed."""
        for path in self.place.glob(f"*{_UNFINISHED}"):
            with suppress(OSError), path.open("r+b") as file:
                if _is_locked(file) and _is_at(path, file):
                    path.unlink()

    def digest_at(self, stamp: str) -> str | None:
        """Return the digest that was noted for a file with this stamp; None if there is none."""
        with suppress(OSError, ValueError):
            path = self._stamp_path(stamp)
            with os.fdopen(os.open(path, _OPEN), "rb") as file:
                _check_owner(str(path), os.fstat(file.fileno()))
                digest = file.read(65).decode("ascii")
            if len(digest) == 64 and set(digest) <= set("0123456789abcdef"):
                return digest
        return None

    def note_digest(self, stamp: str, digest: str) -> None:
        """Note the digest of a file with this stamp, atomically. Raises OSError."""
        path = self._stamp_path(stamp)
        new = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}{_UNFINISHED}")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(digest.encode("ascii"))
            new.rename(path)
        except OSError:
            self.remove(new)
            raise
        stamps = sorted(self.place.glob(f"*{_STAMP}"), key=_age)
        for old in stamps[_MOST_STAMPS:]:
            self.remove(old)

    def _stamp_path(self, stamp: str) -> Path:
        return self.place / f"{sha256(stamp.encode()).hexdigest()[:32]}{_STAMP}"


def _check_owner(name: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise CacheError(f"{name} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"other users may write to {name}; chmod go-w would do")


def _age(path: Path) -> float:
    """Return a number that is larger for older files."""
    try:
        return -path.stat().st_mtime
    except OSError:  # another process has removed it
        return float("inf")


def _is_locked(file: BinaryIO) -> bool:
    """Lock a file for this process, unless another one has. Raises OSError where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Return whether an open file is still at its path: another process may have renamed or removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False
