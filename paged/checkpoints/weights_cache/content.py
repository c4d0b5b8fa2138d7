"""The digest of a checkpoint's files: computed once, then known by size, inode and times of each file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from ..open_file import last_change, stamp_of
from .folder import WeightsCache

_PART_BYTES = 2**22
_RACY_NS = 2 * 10**9  # times of files are as coarse as that on some file systems


def known_digest(cache: WeightsCache, stamps: Iterable[str]) -> str | None:
    """Return the digest of the files with these stamps; None unless every file's digest was noted."""
    digests = [cache.digest_at(stamp) for stamp in stamps]
    known = [each for each in digests if each is not None]
    return _digest_of_all(known) if len(known) == len(digests) else None


def compute_digest(
    cache: WeightsCache, files: Mapping[Path, str], is_over: Callable[[], bool] = lambda: False
) -> str | None:
    """Compute the digest of files and note it. Return None if a file has changed, or once `is_over` returns
    True.

    files: the stamp of each file when it was first opened.
    """
    digests = []
    for path, stamp in files.items():
        try:
            with path.open("rb", buffering=0) as stream:
                digest = _read(stream, stamp, is_over)
        except OSError:
            digest = None
        if digest is None:
            return None
        digests.append(digest)
    for stamp, digest in zip(files.values(), digests, strict=True):
        # A change within the time of its last one would not be seen in a stamp.
        if time.time_ns() - last_change(stamp) > _RACY_NS:
            with suppress(OSError):  # it is computed again
                cache.note_digest(stamp, digest)
    return _digest_of_all(digests)


def _read(stream: BinaryIO, stamp: str, is_over: Callable[[], bool]) -> str | None:
    """Return the digest of an open file; None if it is not that of the stamp, or changes."""
    digest = sha256()
    memory = memoryview(bytearray(_PART_BYTES))
    is_same = stamp_of(os.fstat(stream.fileno())) == stamp
    while is_same and (count := stream.readinto(memory)):  # type: ignore[attr-defined]
        if is_over():
            return None
        digest.update(memory[:count])
    return digest.hexdigest() if is_same and stamp_of(os.fstat(stream.fileno())) == stamp else None


def _digest_of_all(digests: Sequence[str]) -> str:
    return sha256(" ".join(digests).encode()).hexdigest()
