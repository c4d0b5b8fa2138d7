"""Holdings: what each tenant holds of an engine's seats and blocks. Shares: what it may while others wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..requests.request import Request


class Holdings:
    """The running requests of each tenant, with their seats and KV blocks.

    A request holds the seats of its siblings, too. A block that several requests share counts for each.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = Counter[str]()
        self.seats = Counter[str]()
        self.blocks = Counter[str]()
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Count a request that runs now."""
        tenant = request.inputs.tenant
        self.requests[tenant] += 1
        self.seats[tenant] += 1 + len(request.siblings)
        self.blocks[tenant] += request.blocks.num_blocks

    def remove(self, request: Request) -> None:
        """Count a request no more that is to be preempted."""
        tenant = request.inputs.tenant
        self.requests[tenant] -= 1
        self.seats[tenant] -= 1 + len(request.siblings)
        self.blocks[tenant] -= request.blocks.num_blocks


class Shares:
    """The shares of seats and blocks that tenants have by their weights.

    Each has one seat, and the others are divided by weight; the blocks are divided by weight. So the shares
    of all are never more than there is, as long as there are no more tenants than seats. A single request may
    hold more blocks than its tenant's share.

    num_tenants: those that have a request, waiting or running; weight: of all of them.
    """

    def __init__(self, num_seats: int, num_blocks: int, num_tenants: int, weight: float) -> None:
        self._num_spare = max(0, num_seats - num_tenants)
        self._num_blocks = num_blocks
        self._weight = weight

    def seats_of(self, weight: float) -> int:
        """Return how many seats a tenant of a weight may hold."""
        return 1 + int(self._num_spare * weight / self._weight)

    def blocks_of(self, weight: float) -> int:
        """Return how many blocks a tenant of a weight may hold with more than one request."""
        return int(self._num_blocks * weight / self._weight)
