"""Lines about engine processes that an actor of Ray writes only if it goes on."""

from __future__ import annotations

import logging
import threading

LATE_S = 1.0  # in which an actor that ends is gone


class LateLines(logging.Filter):
    """Delays the lines of a logger by LATE_S.

    Ray kills the children of an actor's process before the process itself. Without the delay, an actor that
    ends normally would log that its engine process was killed.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._late = set[int]()  # the records whose time has come
        logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line may be written now."""
        if id(record) in self._late:
            return True
        timer = threading.Timer(LATE_S, self._write, [record])
        timer.daemon = True
        timer.start()
        return False

    def _write(self, record: logging.LogRecord) -> None:
        self._late.add(id(record))
        self._logger.handle(record)
        self._late.remove(id(record))
