"""BodyBudget: bounds the memory of the bodies of requests in progress."""

from __future__ import annotations

# Of the bodies of all requests that are being read, parsed and answered. Parsed, a body takes up to fifteen
# times its size: token ids do, text takes about its size.
MAX_BODY_BYTES_IN_PROGRESS = 128 * 2**20
SMALL_BYTES = 2**16  # a body of at most this size is small
SMALL_BODIES_BYTES = 2**26  # more, for small bodies alone, so that large ones do not keep them out


class BodyBudget:
    """The memory that the bodies of requests in progress use, and its limit.

    max_bytes: the limit; small bodies may use SMALL_BODIES_BYTES more.
    num_bytes: how many are in use.
    """

    def __init__(self, max_bytes: int = MAX_BODY_BYTES_IN_PROGRESS) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def grow(self, num_before: int, num_after: int) -> bool:
        """Reserve bytes for a body that grows, or return False if too few are left."""
        most = self.max_bytes + (SMALL_BODIES_BYTES if num_after <= SMALL_BYTES else 0)
        if self.num_bytes + num_after - num_before > most:
            return False
        self.num_bytes += num_after - num_before
        return True

    def give_back(self, num_bytes: int) -> None:
        """Return the bytes of a body."""
        self.num_bytes -= num_bytes
