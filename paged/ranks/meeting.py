"""Meeting: what ranks tell each other before they have a group, through a store that all can reach."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..base import errors
from ..base.errors import PagedError, RankError

COME_S = 120.0  # in which each rank must come
_FIRST_PAUSE_S = 0.002  # between two looks into the store; it doubles
_MOST_PAUSE_S = 0.05
_FAILED = "failed"
ENDED = "ended"  # what a rank tells at its end


class Store(Protocol):
    """The methods of torch.distributed's Store that this module uses."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value that exists."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if there is none, or if it equals `expected`. Return the value that is now stored."""


class Meeting:
    """Exchanges values among ranks before they compute.

    names: the names of the ranks in messages.
    check: called while this rank waits; it raises if another rank has ended.
    """

    def __init__(
        self, store: Store, rank: int, names: Sequence[str], check: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._check = check

    def gather(self, topic: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Send a value to all ranks and wait for theirs. Return the value of each rank.

        Raises RankError naming the ranks that sent no value within timeout_s, or the error that a rank passed
        to `post_failure`.
        """
        self.tell(topic, value)
        return self.collect(topic, timeout_s)

    def tell(self, topic: str, value: Any) -> None:
        """Send a value to all ranks, without waiting for theirs."""
        self._store.set(f"{topic}/{self._rank}", json.dumps(value))

    def collect(self, topic: str, timeout_s: float | None = None) -> list[Any]:
        """Wait for and return the value of each rank; see `gather`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        keys = [f"{topic}/{rank}" for rank in range(len(self._names))]
        pause_s = _FIRST_PAUSE_S
        while not self._store.check(keys):
            self._raise_failure()
            self._check()
            if until is not None and time.monotonic() > until:
                absent = [
                    name for name, key in zip(self._names, keys, strict=True) if not self._store.check([key])
                ]
                raise RankError(f"{'; '.join(absent)}: has not come within {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(_MOST_PAUSE_S, 2 * pause_s)
        return [json.loads(self._store.get(key)) for key in keys]

    def failure(self) -> PagedError | None:
        """Return the error that a rank has posted; None if there is none."""
        return _error_of(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None

    def _raise_failure(self) -> None:
        if (error := self.failure()) is not None:
            raise error


def post_failure(store: Store, rank: int, error: BaseException) -> PagedError:
    """Make all ranks that wait, now or later, raise an error of this rank. Only the first posted error
    counts.

    Returns the error that the ranks raise.
    """
    kind = type(error).__name__ if isinstance(error, PagedError) else "RankError"
    text = str(error) if isinstance(error, PagedError) else f"{type(error).__name__}: {error}"
    if not isinstance(error, RankError):
        text = f"rank {rank} on {socket.gethostname()}: {text}"
    return _error_of(store.compare_set(_FAILED, "", json.dumps([kind, text])))


def _error_of(posted: bytes) -> PagedError:
    kind, message = json.loads(posted)
    found: PagedError = getattr(errors, kind, RankError)(message)
    return found


def require_equal(facts: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Raise RankError if a rank has another version, option or checkpoint than rank 0, the driver."""
    for rank, own in enumerate(facts):
        for key, value in facts[0].items():
            if own.get(key) != value:
                raise RankError(
                    f"{names[rank]} has {key} {own.get(key)}, and the driver has {value}; "
                    "all ranks need the same"
                )
