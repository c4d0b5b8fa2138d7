"""Policies: in which order requests wait, and who gives way to whom.

A policy is a queue of waiting requests with an opinion. `rank` orders the running ones: blocks are taken from
the highest rank first, and only from ranks above one's own.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from .config import POLICIES as POLICIES
from .config import check_policy
from .request import Request, RequestStatus

Rank = tuple[float, int]


class Policy(Protocol):
    """What the scheduler asks of a policy.

    preempts: whether a waiting request may take the place of a running one whose priority number is higher.
    """

    preempts: bool

    def rank(self, request: Request) -> Rank:
        """Where a request stands among those running; fixed while it lives."""

    def push(self, request: Request) -> None:
        """Let a request wait, for the first time or again."""

    def peek(self) -> Request | None:
        """Who is to run next; None if nobody waits."""

    def pop(self, request: Request) -> None:
        """That request runs now."""

    def remove(self, request: Request) -> None:
        """A waiting request was finished from outside."""

    def generated(self, requests: Iterable[Request]) -> None:
        """Each of these requests got a token."""

    def __len__(self) -> int:
        """How many wait."""

    def __iter__(self) -> Iterator[Request]:
        """Those who wait."""


class FirstComeFirstServed:
    """In the order of arrival, which the preempted keep."""

    preempts = False

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        self._num_removed = 0

    def rank(self, request: Request) -> Rank:
        """By arrival."""
        return (0.0, request.arrival)

    def push(self, request: Request) -> None:
        """Enter the queue."""
        heapq.heappush(self._heap, (request.rank, request))

    def peek(self) -> Request | None:
        """The lowest rank."""
        # Removed requests are dropped as they come up: searching for them would take as long as the queue.
        while self._heap and self._heap[0][1].status is RequestStatus.FINISHED:
            heapq.heappop(self._heap)
            self._num_removed -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self, request: Request) -> None:
        """Leave the queue from its head."""
        _, head = heapq.heappop(self._heap)
        assert head is request, "somebody else was at the head of the queue"

    def remove(self, request: Request) -> None:  # noqa: ARG002  (it is known by its status)
        """Leave the queue from anywhere."""
        self._num_removed += 1

    def generated(self, requests: Iterable[Request]) -> None:
        """Nothing to book."""

    def __len__(self) -> int:
        return len(self._heap) - self._num_removed

    def __iter__(self) -> Iterator[Request]:
        return (r for _, r in sorted(self._heap) if r.status is not RequestStatus.FINISHED)


class Priority(FirstComeFirstServed):
    """The lowest priority number first, as in vLLM; it takes the place of higher ones if it must."""

    preempts = True

    def rank(self, request: Request) -> Rank:
        """By priority, then arrival."""
        return (request.priority, request.arrival)


class LongestPrefixMatch:
    """Whoever has most of its prompt in the prefix cache first, as in SGLang; then by arrival.

    Looks at the WINDOW oldest only, so that the queue's length costs nothing. The oldest is overtaken
    at most MAX_OVERTAKES times.
    """

    preempts = False
    WINDOW = 64
    MAX_OVERTAKES = 256

    def __init__(self, num_cached: Callable[[Request], int]) -> None:
        self._num_cached = num_cached
        self._queue: OrderedDict[int, Request] = OrderedDict()  # by arrival
        self._num_overtakes = 0

    def rank(self, request: Request) -> Rank:
        """By arrival."""
        return (0.0, request.arrival)

    def push(self, request: Request) -> None:
        """Enter the queue; somebody who ran before goes to its front."""
        self._queue[request.arrival] = request
        if request.metrics.num_preemptions:
            self._queue.move_to_end(request.arrival, last=False)

    def peek(self) -> Request | None:
        """The best match among the oldest."""
        if not self._queue:
            return None
        if self._num_overtakes >= self.MAX_OVERTAKES:
            return next(iter(self._queue.values()))
        oldest = (request for request, _ in zip(self._queue.values(), range(self.WINDOW), strict=False))
        return max(oldest, key=self._num_cached)  # of equals, the first

    def pop(self, request: Request) -> None:
        """Leave the queue."""
        overtakes = next(iter(self._queue)) != request.arrival
        self._num_overtakes = self._num_overtakes + 1 if overtakes else 0
        del self._queue[request.arrival]

    def remove(self, request: Request) -> None:
        """Leave the queue."""
        if next(iter(self._queue)) == request.arrival:
            self._num_overtakes = 0
        del self._queue[request.arrival]

    def generated(self, requests: Iterable[Request]) -> None:
        """Nothing to book."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


class Fair:
    """The tenant that got least, for its weight, first: the Virtual Token Counter of "Fairness in Serving
    Large Language Models" (Sheng et al., OSDI 2024, algorithm 2).

    Of two tenants that both have requests waiting all the while, neither gets more than
    2 max(INPUT_COST longest prompt, OUTPUT_COST tokens in the KV cache) / weight more service than the other
    (theorem 4.4), where a prompt token is worth INPUT_COST and a generated one OUTPUT_COST.
    """

    preempts = False
    INPUT_COST, OUTPUT_COST = 1.0, 2.0

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self.service: dict[str, float] = {}  # the counters: service received, by weight
        self._queues: dict[str, deque[Request]] = {}  # tenants with requests waiting
        # Their counters, as they were some time ago; some of these tenants have left since.
        self._heap: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()
        self._last_to_leave: str | None = None
        self._num_waiting = 0

    def rank(self, request: Request) -> Rank:
        """By arrival."""
        return (0.0, request.arrival)

    def push(self, request: Request) -> None:
        """Wait in the tenant's own queue; a tenant that had none gets no credit for the time without."""
        tenant = request.tenant
        if tenant not in self._queues:
            if self._queues:
                floor = min(self.service[other] for other in self._queues)
            else:
                floor = self.service.get(self._last_to_leave or "", 0.0)
            self.service[tenant] = max(self.service.get(tenant, 0.0), floor)
            self._queues[tenant] = deque()
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heapq.heappush(self._heap, (self.service[tenant], tenant))
        if request.metrics.num_preemptions:
            self._queues[tenant].appendleft(request)
        else:
            self._queues[tenant].append(request)
        self._num_waiting += 1

    def peek(self) -> Request | None:
        """The first request of the tenant with the lowest counter."""
        while self._heap:
            counter, tenant = self._heap[0]
            queue = self._queues.get(tenant)
            if queue is None:
                heapq.heappop(self._heap)
                self._in_heap.remove(tenant)
            elif counter != self.service[tenant]:  # counters only grow: put it where it belongs now
                heapq.heapreplace(self._heap, (self.service[tenant], tenant))
            elif queue[0].status is RequestStatus.FINISHED:
                queue.popleft()
                self._leave(tenant)
            else:
                return queue[0]
        return None

    def pop(self, request: Request) -> None:
        """Leave the queue, charged for the prompt the first time."""
        head = self._queues[request.tenant].popleft()
        assert head is request, "somebody else was at the head of the queue"
        self._num_waiting -= 1
        if not request.metrics.num_preemptions:
            self._charge(request, self.INPUT_COST * request.num_prompt_tokens)
        self._leave(request.tenant)

    def remove(self, request: Request) -> None:  # noqa: ARG002  (it is known by its status)
        """Leave the queue from anywhere."""
        self._num_waiting -= 1

    def generated(self, requests: Iterable[Request]) -> None:
        """Charge a token each."""
        for request in requests:
            self._charge(request, self.OUTPUT_COST)

    def _charge(self, request: Request, cost: float) -> None:
        tenant = request.tenant
        # A fork's tenant may never have waited.
        self.service[tenant] = self.service.get(tenant, 0.0) + cost / self._weights.get(tenant, 1.0)

    def _leave(self, tenant: str) -> None:
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last_to_leave = tenant

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        waiting = (request for queue in self._queues.values() for request in queue)
        return (r for r in waiting if r.status is not RequestStatus.FINISHED)


def new_policy(
    name: str, num_cached: Callable[[Request], int], weights: Mapping[str, float] | None = None
) -> Policy:
    """A policy by name.

    num_cached: how many tokens of a waiting request the prefix cache holds.
    weights: of tenants, for "fair".

    Raises ConfigError for an unknown name or weights that are not positive.
    """
    check_policy(name, weights)
    if name == "fcfs":
        return FirstComeFirstServed()
    if name == "priority":
        return Priority()
    if name == "longest-prefix-match":
        return LongestPrefixMatch(num_cached)
    return Fair(weights)
