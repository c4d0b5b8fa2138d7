"""Preparation of requests in a few threads, while steps run: a grammar may take seconds to compile."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..base.errors import RequestTimeoutError
from ..requests.request import TIMEOUT_MESSAGE

T = TypeVar("T")

MOST_WAIT_S = 3600.0  # threads cannot wait for any length of time


@dataclass(slots=True, eq=False, kw_only=True)
class Preparation(Generic[T]):
    """A request to prepare. Exactly one of `add`, `fail` and `give_up` is called, exactly once.

    key: identifies the request.
    left_s: the seconds left of the request's timeout_s; None sets no limit.
    prepare: called on one of the threads.
    add: called with the result of `prepare`.
    fail: called with the error of `prepare`, or when timeout_s has passed, even if all threads are busy.
    give_up: called by `Preparations.drop`.
    """

    key: Hashable
    tenant: str
    left_s: float | None
    prepare: Callable[[], T]
    add: Callable[[T], None]
    fail: Callable[[BaseException], None]
    give_up: Callable[[], None]


class Preparations(Generic[T]):
    """The requests that are being prepared or wait for it. Thread-safe.

    Tenants take turns: no tenant gets a second thread while another waits for its first.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "paged-prepare")
        self._changed = threading.Condition()  # guards all of the following
        self._unanswered: dict[Hashable, Preparation[T]] = {}
        self._waiting: dict[str, dict[Hashable, Preparation[T]]] = {}  # by tenant, in turn
        self._num_running: Counter[str] = Counter()
        self._deadlines: list[tuple[float, int, Preparation[T]]] = []  # a heap
        self._numbers = itertools.count()
        threading.Thread(target=self._watch, name="paged-prepare-deadlines", daemon=True).start()

    def __len__(self) -> int:
        return len(self._unanswered)

    def submit(self, asked: Preparation[T]) -> None:
        """Prepare a request when its turn comes."""
        with self._changed:
            self._unanswered[asked.key] = asked
            self._waiting.setdefault(asked.tenant, {})[asked.key] = asked
            if asked.left_s is not None:
                entry = (time.monotonic() + asked.left_s, next(self._numbers), asked)
                heapq.heappush(self._deadlines, entry)
                self._changed.notify()
        self._pool.submit(self._run_next)

    def drop(self, key: Hashable) -> None:
        """Give up a request whose reader has left, unless it has been prepared."""
        asked = self._unanswered.get(key)
        if asked is not None and self._take(asked):
            asked.give_up()

    def _take(self, asked: Preparation[T]) -> bool:
        """Remove a request from the queue. Return whether the caller is the first to answer it."""
        with self._changed:
            if self._unanswered.pop(asked.key, None) is None:
                return False
            waiting = self._waiting.get(asked.tenant, {})
            waiting.pop(asked.key, None)
            if not waiting:
                self._waiting.pop(asked.tenant, None)
            return True

    def _next(self) -> Preparation[T] | None:
        with self._changed:
            if not self._waiting:
                return None  # it was dropped, or its time has passed
            tenant = min(self._waiting, key=self._num_running.__getitem__)
            waiting = self._waiting.pop(tenant)
            asked = waiting.pop(next(iter(waiting)))
            if waiting:
                self._waiting[tenant] = waiting  # behind the others
            self._num_running[tenant] += 1
            return asked

    def _run_next(self) -> None:
        asked = self._next()
        if asked is None:
            return
        try:
            spec = asked.prepare()
        except Exception as error:  # told to the front end, whose request it is
            if self._take(asked):
                asked.fail(error)
        else:
            if self._take(asked):
                asked.add(spec)
        finally:
            with self._changed:
                self._num_running[asked.tenant] -= 1
                self._num_running += Counter()  # keeps the positive ones

    def _watch(self) -> None:
        """Refuse requests as soon as their time has passed."""
        while True:
            with self._changed:
                while not self._deadlines or (left_s := self._deadlines[0][0] - time.monotonic()) > 0:
                    self._changed.wait(min(left_s, MOST_WAIT_S) if self._deadlines else None)
                _, _, asked = heapq.heappop(self._deadlines)
            if self._take(asked):
                asked.fail(RequestTimeoutError(TIMEOUT_MESSAGE))
