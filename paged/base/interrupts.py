"""Signals that are left to the parent process, and Ctrl-C that waits until a step's records are complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The functions behind those of `signal`, whose conversions to enums would take 10 microseconds of every step.
_get_handler: Any = getattr(signal, "_signal").getsignal  # noqa: B009
_set_handler: Any = getattr(signal, "_signal").signal  # noqa: B009
_SIGINT = int(signal.SIGINT)


# The signals that a terminal or a supervisor sends to a whole process group.
_OF_GROUPS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Start processes with the signals of the process group blocked, until they call
    `leave_signals_to_parent`.

    Without it, a Ctrl-C while such a process imports its modules would end it with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Ignore the signals that a terminal or a supervisor sends to a whole process group.

    For a process that works until its parent ends it. The parent starts it within `signals_blocked`.
    """
    for number in _OF_GROUPS:
        signal.signal(number, signal.SIG_IGN)  # which discards one that is pending
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end this process at once, without a traceback, if it has nothing to clean up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class HeldInterrupts:
    """A context that delays the first Ctrl-C to the end of the context, so that the work inside is not
    interrupted.

    It does nothing inside another such context, nor outside the main thread, where Python handles no signals.
    """

    __slots__ = ("_frame", "_is_pending", "_previous")

    def __enter__(self) -> None:
        self._is_pending = False
        self._previous: Any = None  # the handler of before
        if threading.current_thread() is threading.main_thread():
            handler = _get_handler(_SIGINT)
            # Not callable: the signal ends the process, or is ignored.
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), HeldInterrupts):
                self._previous = handler
                _set_handler(_SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            self._previous(number, frame)
        self._is_pending, self._frame = True, frame

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            _set_handler(_SIGINT, self._previous)
            if self._is_pending:
                self._previous(_SIGINT, self._frame)
