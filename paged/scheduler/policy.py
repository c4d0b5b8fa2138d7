"""Policy: the order in which requests wait, and the rank by which running ones are preempted.

A policy is the queue of waiting requests. `rank` orders the running ones: the highest rank is preempted
first. A request takes blocks from higher ranks only, unless it is protected.

Holdings: what each tenant holds of an engine's seats and blocks. Shares: what it may while others wait.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from ..requests.request import Request

Rank = tuple[float, int]  # priority (0 unless the policy has one), then arrival


class Policy(Protocol):
    """A scheduling policy: the order of waiting requests, and the ranks of running ones.

    preempts: whether a waiting request may preempt a running request with a higher priority number.
    """

    preempts: bool = False
    divides_seats: bool = False  # among tenants, as `policies.Fair` does

    def rank(self, request: Request) -> Rank:
        """Return the rank of a request among running requests. A request's rank must never change."""
        return (0.0, request.arrival)

    def push(self, request: Request) -> None:
        """Queue a request, for the first time or again."""

    def peek(self) -> Request | None:
        """Return the request that should run next; None if the queue is empty."""

    def pop(self, request: Request) -> None:
        """Remove the request that `peek` returned, because it runs now."""

    def remove(self, request: Request) -> None:
        """Remove a request that was aborted or is held. A held request is pushed again when released."""

    def generated(self, requests: Iterable[Request]) -> None:
        """Account for one new token of each of these requests."""

    def __len__(self) -> int:
        """Return how many requests wait."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests."""


class FirstComeFirstServed(Policy):
    """The order of arrival. A preempted request keeps its place in the order."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        # Dropped from the heap as they come up: searching for them would take as long as the queue.
        self._removed: set[Request] = set()

    def push(self, request: Request) -> None:
        if request in self._removed:  # it is still in its place
            self._removed.remove(request)
        else:
            heapq.heappush(self._heap, (request.rank, request))

    def peek(self) -> Request | None:
        """Return the request with the lowest rank."""
        while self._heap and self._heap[0][1] in self._removed:
            self._removed.remove(heapq.heappop(self._heap)[1])
        return self._heap[0][1] if self._heap else None

    def pop(self, request: Request) -> None:
        _, head = heapq.heappop(self._heap)
        assert head is request, "another request was at the head of the queue"

    def remove(self, request: Request) -> None:
        self._removed.add(request)
        # Behind a head that waits for long, removed requests would pile up.
        if len(self._removed) > len(self._heap) // 2:
            self._heap = [(r.rank, r) for r in self]
            self._removed.clear()

    def generated(self, requests: Iterable[Request]) -> None:
        """Ignore tokens, since they do not change the order."""

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def __iter__(self) -> Iterator[Request]:
        return iter([r for _, r in sorted(self._heap) if r not in self._removed])


class Holdings:
    """The running requests of each tenant, with their seats and KV blocks.

    A request also holds the seats of its siblings. A block shared by several requests counts for each of
    them.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = Counter[str]()
        self.seats = Counter[str]()
        self.blocks = Counter[str]()
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Count a request that starts to run."""
        tenant = request.inputs.tenant
        self.requests[tenant] += 1
        self.seats[tenant] += 1 + len(request.siblings)
        self.blocks[tenant] += request.blocks.num_blocks

    def remove(self, request: Request) -> None:
        """Stop counting a request that is about to be preempted."""
        tenant = request.inputs.tenant
        self.requests[tenant] -= 1
        self.seats[tenant] -= 1 + len(request.siblings)
        self.blocks[tenant] -= request.blocks.num_blocks


class Shares:
    """The shares of seats and blocks that tenants have by their weights.

    Each tenant has one seat, and the other seats are divided by weight, as are the blocks. The shares of all
    tenants together never exceed the seats and blocks, as long as there are no more tenants than seats. A
    single request may hold more blocks than its tenant's share.

    num_tenants: the number of tenants with a waiting or running request. weight: the total weight of these
        tenants.
    """

    def __init__(self, num_seats: int, num_blocks: int, num_tenants: int, weight: float) -> None:
        self._num_spare = max(0, num_seats - num_tenants)
        self._num_blocks = num_blocks
        self._weight = weight

    def seats_of(self, weight: float) -> int:
        """Return how many seats a tenant of this weight may hold."""
        return 1 + int(self._num_spare * weight / self._weight)

    def blocks_of(self, weight: float) -> int:
        """Return how many blocks a tenant of this weight may hold, if it has more than one request."""
        return int(self._num_blocks * weight / self._weight)
