"""Responses: those that are stored and those in progress, each known to its owner alone."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..protocol.responses.call import ResponseCall
from .telemetry.records import RequestRecord


class ResponseKey(NamedTuple):
    """The key of a stored response.

    owner: the tenant or the key that made the response; "" without keys.
    """

    owner: str
    response_id: str


class StoredResponse(NamedTuple):
    """A response and the conversation that ends with it, as JSON."""

    body: bytes
    messages: bytes

    @property
    def size(self) -> int:
        """The size of the response in bytes."""
        return len(self.body) + len(self.messages)


@dataclass(frozen=True, slots=True)
class ResponseInProgress:
    """A response that an engine is generating.

    identity: the unique part of the response's id.
    created: seconds since 1970.
    """

    call: ResponseCall
    record: RequestRecord
    identity: str
    created: int


class Responses:
    """The stored responses and the responses in progress. Stored responses are dropped when memory is short,
    the least recently used first.

    max_bytes: maximum size of all stored responses together; 0 stores none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._stored: OrderedDict[ResponseKey, StoredResponse] = OrderedDict()
        self._in_progress: dict[ResponseKey, ResponseInProgress] = {}
        self._lock = threading.Lock()  # large answers are made, and so stored, in another thread

    def store(self, key: ResponseKey, body: dict[str, Any], messages: Sequence[dict[str, Any]]) -> bool:
        """Store a response, dropping others to make room. Return False if it is larger than the store."""
        made = StoredResponse(*(json.dumps(value).encode() for value in (body, [*messages])))
        with self._lock:
            self._remove(key)
            if made.size > self.max_bytes:
                return False
            self._stored[key] = made
            self.num_bytes += made.size
            while self.num_bytes > self.max_bytes:
                self._remove(next(iter(self._stored)))
        return True

    def find(self, key: ResponseKey) -> StoredResponse | None:
        """Return the stored response with this key; None if there is none."""
        with self._lock:
            found = self._stored.get(key)
            if found is not None:
                self._stored.move_to_end(key)
            return found

    def forget(self, key: ResponseKey) -> bool:
        """Remove the stored response with this key. Return whether there was one."""
        with self._lock:
            return self._remove(key)

    def _remove(self, key: ResponseKey) -> bool:
        gone = self._stored.pop(key, None)
        self.num_bytes -= 0 if gone is None else gone.size
        return gone is not None

    @contextmanager
    def in_progress(self, key: ResponseKey, response: ResponseInProgress) -> Iterator[None]:
        """Register a response as in progress inside this context, so that it can be cancelled."""
        self._in_progress[key] = response
        try:
            yield
        finally:
            if self._in_progress.get(key) is response:  # clients may give the same id twice
                del self._in_progress[key]

    def find_in_progress(self, key: ResponseKey) -> ResponseInProgress | None:
        """Return the response in progress with this key; None if there is none."""
        return self._in_progress.get(key)

    def check(self) -> None:
        """Check that every stored byte is counted, and that the total is within the limit."""
        assert self.num_bytes == sum(stored.size for stored in self._stored.values())
        assert 0 <= self.num_bytes <= self.max_bytes
