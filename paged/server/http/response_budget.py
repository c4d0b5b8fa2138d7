"""ResponseBudget: bounds the memory of whole responses that are being sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_RESPONSE_BYTES_IN_PROGRESS = 512 * 2**20


class ResponseBudget:
    """The memory of whole responses that their clients have not read to the end, and its limit.

    A client may read as slowly as it likes while there is memory for all.

    max_bytes: the limit.
    num_bytes: how many are in use.
    """

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES_IN_PROGRESS) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        # Their bytes, and what cuts their connections; the one that began first comes first.
        self._responses: dict[object, tuple[int, Callable[[], None]]] = {}

    @contextmanager
    def sending(self, num_bytes: int, cut: Callable[[], None]) -> Iterator[None]:
        """Count a response while it is sent. Cut the slowest responses if all together exceed the limit.

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
