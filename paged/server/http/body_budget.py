"""BodyBudget: bounds the memory of request bodies that are being read and parsed."""

from __future__ import annotations

MAX_BODY_BYTES_AT_ONCE = 64 * 2**20  # of bodies at once; parsed, a body takes up to fifteen times its size
FREE_BYTES = 2**16  # of each body are not counted, so that large bodies keep no small ones out


class BodyBudget:
    """Bytes of bodies that may be read and parsed at the same time.

    num_bytes: in use.
    """

    def __init__(self, max_bytes: int = MAX_BODY_BYTES_AT_ONCE) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0

    def take(self, num_bytes: int) -> bool:
        """Use bytes of the budget, or return False if there are not as many."""
        if self.num_bytes + num_bytes > self.max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that `take` used."""
        self.num_bytes -= num_bytes
