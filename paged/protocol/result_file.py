"""ResultFile: JSON lines that survive a kill, written by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..base.errors import FileError
from .jobs import Job, check_writable


class ResultFile:
    """A locked file of results, one JSON object per line. A context manager that closes the file.

    Each result is written by one system call as soon as it exists. A killed run leaves whole lines and
    perhaps a partial one; the next run removes the partial line.

    Raises FileError naming the file if it cannot be written, is one of the inputs, a pipe or a device, or is
    being written by another process.
    """

    def __init__(self, path: Path, *inputs: Path) -> None:
        check_writable(path, *inputs)
        if path.exists() and not path.is_file():
            raise FileError(f"{path}: not a regular file; results must be readable again")
        self.path = path
        # Unbuffered: each line reaches the operating system before the next one is begun.
        self._file = path.open("ab", buffering=0)
        try:
            _lock(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, so that another process may write it."""
        self._file.close()

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of earlier runs. The last line may be partial."""
        with self.path.open("rb") as lines:
            yield from lines

    def truncate(self, size: int) -> None:
        """Truncate the file to this many bytes."""
        os.ftruncate(self._file.fileno(), size)

    def write(self, result: Mapping[str, Any]) -> None:
        """Append a result."""
        text = json.dumps(result, allow_nan=False).encode() + b"\n"
        while text:  # a full disk may take a part of it; the next write raises
            text = text[self._file.write(text) :]

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the content atomically: a kill leaves either the old content or the new content."""
        target = self.path.resolve()
        partial = target.with_name(f".{target.name}.partial")
        file = partial.open("wb", buffering=0)
        try:
            _lock(file, partial)
            shutil.copymode(target, partial)
            with os.fdopen(os.dup(file.fileno()), "wb") as buffered:
                buffered.writelines(lines)
            os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            file.close()
            partial.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = file


def _lock(file: FileIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have replaced the file since it was opened.
        is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except BlockingIOError:
        is_current = False
    if not is_current:
        raise FileError(f"{path}: another process is writing this file")


class Earlier(NamedTuple):
    """The results that an interrupted run left for the first prompts."""

    num_done: int
    num_failed: int
    size: int  # of the whole lines, in bytes


NO_RESULTS = Earlier(0, 0, 0)


def earlier_results(file: ResultFile, jobs: Sequence[Job]) -> Earlier:
    """Return the results in the file that belong to the first prompts.

    Raises FileError naming the first line that is not the result of its prompt.
    """
    num_done = num_failed = size = 0
    for line in file.lines():
        is_whole = line.endswith(b"\n")
        head = _head(num_done, jobs[num_done]) if num_done < len(jobs) else None
        if head is None or not (line.startswith(head) or (not is_whole and head.startswith(line))):
            raise FileError(
                f"{file.path}:{num_done + 1}: not the result of prompt {num_done} of this file of prompts; "
                "name another output, or replace this one with --overwrite"
            )
        if is_whole:
            num_done = num_done + 1
            size = size + len(line)
            num_failed += line.startswith(head + b', "error": ')
    return Earlier(num_done, num_failed, size)


def _head(index: int, job: Job) -> bytes:
    """Return the beginning of a result, which repeats the prompt."""
    return json.dumps(job.result(index, {}))[:-1].encode()
