"""The memory of bodies that arrive and of responses that are not read yet, and its limits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Of the bodies of all requests that are being read, parsed and answered. Parsed, a body takes up to 24
# times its size: docs/security.md has what was measured.
MAX_BODY_BYTES_IN_PROGRESS = 128 * 2**20
BODY_BYTES = 16 * 2**20  # of one body
SEEING_BODY_BYTES = 64 * 2**20  # of one body to a model that sees images
SMALL_BYTES = 2**16  # a body of at most this size is small
SMALL_BODIES_BYTES = 2**26  # more, for small bodies alone, so that large ones do not keep them out
# A client may hold so many times the room that it leaves free: there is always some for the next one.
SHARE_OF_FREE = 3
# A body that grows by less than PROGRESS_BYTES in STALL_S has stalled: it loses its room if another needs it.
STALL_S = 1.0
PROGRESS_BYTES = 2**16
BYTES_OF_CONTAINER = 16  # that an object or array counts at least
HEAVY_CONTAINERS = 2**16  # objects and arrays that a garbage collection looks at in no time


class BodyBudget:
    """The memory used by the bodies of requests in progress, and its limit.

    A client is a tenant, or an address.

    max_bytes: the limit in bytes; small bodies may use SMALL_BODIES_BYTES more.
    num_bytes: the number of bytes in use.
    num_containers: the number of JSON objects and arrays in the bodies.
    clock: returns the time in seconds, as time.monotonic does.
    """

    def __init__(
        self, max_bytes: int = MAX_BODY_BYTES_IN_PROGRESS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self.clock = clock
        self.num_bytes = 0
        self.num_containers = 0
        self._of_client = Counter[str]()
        self._being_read: dict[BodyRoom, None] = {}  # the one without progress for longest first

    def open(self, client: str, on_lost: Callable[[], None]) -> BodyRoom:
        """Open an account, without any bytes yet, for a body that is about to be read.

        on_lost: called if another body takes over the bytes.
        """
        room = BodyRoom(self, client, on_lost)
        self._being_read[room] = None
        return room

    def grow(self, room: BodyRoom, num_bytes: int) -> bool:
        """Give a body more bytes, if necessary from stalled bodies. Return whether that was possible."""
        while not self._fits(room, num_bytes):
            first = next((other for other in self._being_read if other is not room), None)
            if first is None or first.progressed_at > self.clock() - STALL_S:
                return False
            first.lose()
        self._add(room, num_bytes)
        return True

    def on_progress(self, room: BodyRoom) -> None:
        """Record that a body has made progress."""
        room.progressed_at = self.clock()
        if room in self._being_read:  # or it has arrived, and what it names is fetched
            self._being_read[room] = self._being_read.pop(room)

    def _fits(self, room: BodyRoom, num_bytes: int) -> bool:
        most = self.max_bytes + (SMALL_BODIES_BYTES if room.num_bytes + num_bytes <= SMALL_BYTES else 0)
        free = most - self.num_bytes - num_bytes
        return self._of_client[room.client] + num_bytes <= SHARE_OF_FREE * free

    def finish_reading(self, room: BodyRoom) -> None:
        """Keep the bytes of a body that has arrived until it is closed."""
        self._being_read.pop(room, None)

    def hold(self, room: BodyRoom, num_containers: int) -> None:
        """Count the JSON objects and arrays of a body. Many of them take a little more memory."""
        room.num_containers = num_containers
        self.num_containers += num_containers
        self._add(room, max(0, BYTES_OF_CONTAINER * num_containers - room.num_bytes))

    def close(self, room: BodyRoom) -> None:
        """Give back the bytes of a body."""
        self._being_read.pop(room, None)
        self._add(room, -room.num_bytes)
        self.num_containers -= room.num_containers
        room.num_containers = 0
        room.is_closed = True

    @property
    def is_heavy(self) -> bool:
        """Return whether bodies have so many objects and arrays that garbage collection would take long."""
        return self.num_containers > HEAVY_CONTAINERS

    def _add(self, room: BodyRoom, num_bytes: int) -> None:
        room.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._of_client[room.client] += num_bytes
        if not self._of_client[room.client]:
            del self._of_client[room.client]

    def check(self) -> None:
        """Check that every byte in use belongs to a client, and that clients without bytes are forgotten."""
        assert self.num_bytes == self._of_client.total()
        assert all(num > 0 for num in self._of_client.values())


class BodyRoom:
    """The account of one body in a BodyBudget.

    num_bytes: the number of bytes that the body has.
    num_containers: the number of JSON objects and arrays in the parsed body.
    is_lost: whether another body took over the bytes.
    progressed_at: when the body last got PROGRESS_BYTES, or when it began.
    """

    def __init__(self, budget: BodyBudget, client: str, on_lost: Callable[[], None]) -> None:
        self._budget = budget
        self.client = client
        self._on_lost = on_lost
        self.num_bytes = 0
        self.num_containers = 0
        self.is_closed = False
        self.is_lost = False
        self.progressed_at = budget.clock()
        self._num_at_progress = 0

    def grow(self, num_bytes: int) -> bool:
        """Take more bytes. Return False if too few are left."""
        if not self._budget.grow(self, num_bytes):
            return False
        if self.num_bytes >= self._num_at_progress + PROGRESS_BYTES:
            self._num_at_progress = self.num_bytes
            self._budget.on_progress(self)
        return True

    def finish_reading(self) -> None:
        """Keep the bytes until the account is closed: the whole body has arrived."""
        self._budget.finish_reading(self)

    def hold(self, num_containers: int) -> None:
        """Count the objects and arrays of the body, unless its request has ended meanwhile."""
        if not self.is_closed:
            self._budget.hold(self, num_containers)

    def close(self) -> None:
        """Give back the bytes."""
        self._budget.close(self)

    def lose(self) -> None:
        """Lose the bytes to another body."""
        self.is_lost = True
        self.close()
        self._on_lost()


MAX_RESPONSE_BYTES_IN_PROGRESS = 512 * 2**20


class ResponseBudget:
    """The memory used by whole responses that clients have not read completely, and its limit.

    A client may read as slowly as it likes while memory suffices for all.

    max_bytes: the limit in bytes.
    num_bytes: the number of bytes in use.
    """

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES_IN_PROGRESS) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        # Their bytes, and what cuts their connections; the one that began first comes first.
        self._responses: dict[object, tuple[int, Callable[[], None]]] = {}

    @contextmanager
    def sending(self, num_bytes: int, cut: Callable[[], None]) -> Iterator[None]:
        """Count a response while it is sent. If all responses together exceed the limit, cut off the slowest.

        cut: closes the connection of this response.
        """
        key = object()
        self._responses[key] = num_bytes, cut
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes and len(self._responses) > 1:
            first = next(iter(self._responses))
            cut_first = self._responses[first][1]
            self._forget(first)
            cut_first()
        try:
            yield
        finally:
            self._forget(key)

    def _forget(self, key: object) -> None:
        num_bytes, _ = self._responses.pop(key, (0, None))
        self.num_bytes -= num_bytes
