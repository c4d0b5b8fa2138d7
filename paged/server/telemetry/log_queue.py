"""LogQueue: a log that never waits for what reads it. Lines beyond its bound are dropped and counted."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque
from types import TracebackType

logger = logging.getLogger(__name__)

MAX_LINES = 4096
MAX_LINE_BYTES = 2**14  # of one line; a longer one is cut, unless its formatter makes it shorter
FLUSH_S = 1.0  # at the end of the process
STDERR = 2


class LogQueue(logging.Handler):
    """Writes lines to a file descriptor from a separate thread.

    A write to a pipe without a reader blocks for ever. This must not happen to an event loop or a step.

    num_dropped: the number of lines that were dropped because the queue was full or the reader was gone.
    """

    def __init__(self, descriptor: int = STDERR, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._max_lines = max_lines
        self._lines = deque[bytes]()
        self._num_unwritten = 0  # those in the queue, and those that are being written
        self.num_dropped = 0
        self._num_told = 0  # of these, in a line of the log
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="paged-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Add the line of a record, unless the queue is full."""
        try:
            line = self._line(record)
        except Exception:  # a wrong call of the logger must not fail what it tells of
            message = f"a line of the log could not be made: {ascii(record.msg)[:200]}"
            line = self._line(_record_of(message, record.levelno))
        with self._changed:
            if len(self._lines) >= self._max_lines:
                self.num_dropped += 1
                return
            self._lines.append(line)
            self._num_unwritten += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, at most FLUSH_S."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_unwritten, FLUSH_S)

    def _line(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode("utf-8", "backslashreplace")[:MAX_LINE_BYTES] + b"\n"

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines = [*self._lines]
                self._lines.clear()
            for line in lines:
                is_written = self._write(line)
                with self._changed:
                    self.num_dropped += not is_written
                    self._num_unwritten -= 1
                    self._changed.notify_all()
            self._tell_dropped()

    def _tell_dropped(self) -> None:
        num_new = self.num_dropped - self._num_told
        if num_new:
            message = f"{num_new} lines of the log were dropped, as they were not read fast enough"
            if self._write(self._line(_record_of(message, logging.WARNING))):
                self._num_told += num_new

    def _write(self, data: bytes) -> bool:
        """Write data, however long it takes. Return False if there is no reader any more."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process has made it non-blocking
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True


def _record_of(message: str, level: int) -> logging.LogRecord:
    return logging.LogRecord(__name__, level, __file__, 0, message, None, None)


def log_to_stderr(formatter: logging.Formatter | None = None) -> LogQueue:
    """Send all log lines to stderr through a queue. Return the queue."""
    handler = LogQueue()
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    return handler


def log_uncaught_errors() -> None:
    """Log uncaught exceptions of this process and its threads."""

    def log_uncaught(
        _kind: type[BaseException], error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        logger.critical("uncaught error", exc_info=error)

    sys.excepthook = log_uncaught
    threading.excepthook = lambda args: log_uncaught(*args[:3])


def num_dropped_lines() -> int:
    """Return the number of log lines that were dropped."""
    return sum(each.num_dropped for each in logging.getLogger().handlers if isinstance(each, LogQueue))
