"""The other policies: by priority, by the longest cached prefix, and fair to tenants."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..options.config import POLICIES as POLICIES
from ..options.config import check_policy
from ..requests.request import Request
from .policy import FirstComeFirstServed, Holdings, Policy, Rank, Shares


class Priority(FirstComeFirstServed):
    """The policy "priority", as in vLLM: the lowest number runs first and may preempt higher ones."""

    preempts = True

    def rank(self, request: Request) -> Rank:
        """Rank by priority, then arrival."""
        return (request.inputs.priority, request.arrival)


class LongestPrefixMatch(Policy):
    """The request with the most cached prompt tokens first, as in SGLang; then by arrival.

    Only the WINDOW oldest requests are compared, so that a long queue costs nothing. The oldest is overtaken
    at most MAX_OVERTAKES times. Requests that ran before come first.
    """

    WINDOW = 64
    MAX_OVERTAKES = 256

    def __init__(self, num_cached: Callable[[Request], int]) -> None:
        self._num_cached = num_cached
        self._queue: OrderedDict[int, Request] = OrderedDict()  # by arrival
        self._num_overtakes = 0

    def push(self, request: Request) -> None:
        """Add a request to the queue: at its front if the request ran before, otherwise at its end."""
        self._queue[request.arrival] = request
        if request.ran_before:
            self._queue.move_to_end(request.arrival, last=False)

    def peek(self) -> Request | None:
        """Return the best match among the oldest requests."""
        if not self._queue:
            return None
        if self._num_overtakes >= self.MAX_OVERTAKES:
            return next(iter(self._queue.values()))
        oldest = (request for request, _ in zip(self._queue.values(), range(self.WINDOW), strict=False))
        return max(oldest, key=self._num_cached)  # of equals, the first

    def pop(self, request: Request) -> None:
        self._num_overtakes += not request.ran_before
        self.remove(request)

    def remove(self, request: Request) -> None:
        # Behind a request that ran before, the oldest is still the same.
        if next(iter(self._queue)) == request.arrival and not request.ran_before:
            self._num_overtakes = 0
        del self._queue[request.arrival]

    def generated(self, requests: Iterable[Request]) -> None:
        """Ignore tokens, since they do not change the order."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


class Fair(Policy):
    """The tenant with the least service for its weight first, among tenants below their share of seats and
    blocks.

    The order is the Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI
    2024, algorithm 2). A prompt token costs INPUT_COST and a generated token OUTPUT_COST. `divide` also
    divides a scheduler's seats and blocks. While others wait, a tenant gets no more than its share; what it
    holds beyond its share is taken back for the first request of a tenant below its share. A tenant that is
    alone may have everything.

    Let M = max(INPUT_COST longest prompt, OUTPUT_COST tokens in the KV cache) / weight.

    Service: if two tenants always have requests waiting, neither gets more than 3 M more service than the
    other. Proof: when the leading tenant was last admitted, it was ahead by at most `lead`, which is at most
    M; otherwise the tenant with the lowest counter would have been admitted. Since then the leader was
    charged for one prompt, and for tokens that fit into the cache at the same time: at most 2 M (theorem
    4.4).

    Seats: a tenant that is below its share, and ahead of others by at most `lead`, never waits while a tenant
    above its share holds seats. Proof: the shares of all tenants together do not exceed the seats. If one
    tenant is below its share and no seat is free, another tenant is above its share and has a request besides
    its oldest.
    """

    divides_seats = True

    INPUT_COST = 1.0
    OUTPUT_COST = 2.0

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self.service: dict[str, float] = {}  # the counters: service received, by weight
        # The waiting requests of each tenant, by arrival.
        self._queues: dict[str, OrderedDict[int, Request]] = {}
        # Counters of waiting tenants and the arrivals since which they wait. Entries may be outdated: `peek`
        # drops or corrects them.
        self._heap: list[tuple[float, int, str]] = []
        self._in_heap: set[str] = set()
        self._last_to_leave = ""
        self._num_waiting = 0
        self._forget_at = 64
        self._weight_of_waiting: float | None = None  # of all tenants that wait, once it is added up
        self._holdings: Callable[[], Holdings] | None = None
        self._blocks_for: Callable[[int], int] = lambda _: 1
        self._num_seats = self._num_blocks = 0
        self.lead = math.inf

    def divide(
        self,
        holdings: Callable[[], Holdings],
        blocks_for: Callable[[int], int],
        num_seats: int,
        num_blocks: int,
        lead: float,
    ) -> None:
        """Divide the seats and blocks of an engine among tenants, too.

        holdings: returns the seats and blocks that running requests hold now.
        blocks_for: returns the number of blocks that a number of tokens takes.
        lead: how much more service for its weight a tenant below its share may have had and still be
            preferred to tenants at their shares.
        """
        self._holdings = holdings
        self._blocks_for = blocks_for
        self._num_seats = num_seats
        self._num_blocks = num_blocks
        self.lead = lead

    def any_is_above(self, holdings: Holdings) -> bool:
        """Return whether any tenant holds more than its share of seats or blocks."""
        return any(
            self.is_above(tenant, holdings, of_seats=of_seats)
            for tenant in holdings.seats
            for of_seats in (True, False)
        )

    def is_above(self, tenant: str, holdings: Holdings, *, of_seats: bool) -> bool:
        """Return whether a tenant with several requests holds more than its share of seats, or of blocks."""
        if holdings.requests[tenant] <= 1:
            return False
        seats = holdings.seats[tenant]
        weight = self._weight_of(tenant)
        if of_seats:
            return seats > self._shares(holdings).seats_of(weight)
        return holdings.blocks[tenant] > self._shares(holdings).blocks_of(weight)

    def exceeds_share(self, request: Request, holdings: Holdings) -> bool:
        """Return whether all samples of a request together take more seats than its tenant may hold."""
        tenant = request.inputs.tenant
        # A protected request waits in another queue, and its tenant may have no other one.
        shares = self._shares(holdings, tenant)
        return 1 + len(request.siblings) > shares.seats_of(self._weight_of(tenant))

    def is_within(self, tenant: str, holdings: Holdings, num_seats: int, num_blocks: int) -> bool:
        """Return whether a tenant may hold this many more seats and blocks. It may always run one request."""
        if not holdings.requests[tenant]:
            return True
        seats = holdings.seats[tenant]
        shares = self._shares(holdings)
        weight = self._weight_of(tenant)
        if seats + num_seats > shares.seats_of(weight):
            return False
        return holdings.blocks[tenant] + num_blocks <= shares.blocks_of(weight)

    def heads_below_share(self, holdings: Holdings) -> list[Request]:
        """Return the first waiting request of each tenant below its share, in the order to run them."""
        found = []
        entries = sorted((self.service[t], next(iter(queue)), t) for t, queue in self._queues.items())
        for counter, arrival, tenant in entries:
            if counter > entries[0][0] + self.lead:
                break
            if self._may_begin(head := self._queues[tenant][arrival], holdings):
                found.append(head)
        return found

    def _may_begin(self, request: Request, holdings: Holdings) -> bool:
        """Return whether a waiting request leaves its tenant within its share, without cached blocks."""
        num_blocks = self._blocks_for(request.num_tokens)
        return self.is_within(request.inputs.tenant, holdings, 1 + len(request.siblings), num_blocks)

    def _shares(self, holdings: Holdings, *asking: str) -> Shares:
        """Return the shares of all tenants that wait or run, and of those that ask."""
        if self._weight_of_waiting is None:
            self._weight_of_waiting = sum(map(self._weight_of, self._queues))
        held = [tenant for tenant, num in holdings.seats.items() if num]
        others = [tenant for tenant in dict.fromkeys([*held, *asking]) if tenant not in self._queues]
        weight = self._weight_of_waiting + sum(map(self._weight_of, others))
        return Shares(self._num_seats, self._num_blocks, len(self._queues) + len(others), weight)

    def _weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights by which tenants are charged from now on. Other tenants have weight 1."""
        self._weights = dict(weights)
        self._weight_of_waiting = None

    def push(self, request: Request) -> None:
        """Add a request to its tenant's queue. A tenant gets no credit for time without requests."""
        tenant = request.inputs.tenant
        if tenant not in self._queues:
            floor = self._floor()
            self.service[tenant] = max(self.service.get(tenant, 0.0), floor)
            self._queues[tenant] = OrderedDict()
            self._weight_of_waiting = None
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heapq.heappush(self._heap, (self.service[tenant], request.arrival, tenant))
            if len(self.service) > self._forget_at:
                self._forget(floor)
        self._queues[tenant][request.arrival] = request
        if request.ran_before:
            self._queues[tenant].move_to_end(request.arrival, last=False)
        self._num_waiting += 1

    def peek(self) -> Request | None:
        """Return the first request of the tenant with the lowest counter, preferably one below its share."""
        lowest = self._lowest()
        if lowest is None:
            return None
        tenant = lowest[-1]
        if self._holdings is not None and len(self._queues) > 1:
            tenant = self._preferred(lowest, self._holdings())
        return next(iter(self._queues[tenant].values()))

    def _preferred(self, lowest: tuple[float, int, str], holdings: Holdings) -> str:
        """Return the tenant below its share with the lowest counter, unless that is too far ahead."""
        passed = []
        entry: tuple[float, int, str] | None = lowest
        while entry is not None and entry[0] <= lowest[0] + self.lead:
            if self._may_begin(next(iter(self._queues[entry[-1]].values())), holdings):
                break
            passed.append(heapq.heappop(self._heap))  # few: they hold seats
            self._in_heap.remove(entry[-1])
            entry = self._lowest()
        else:
            entry = lowest
        for each in passed:
            heapq.heappush(self._heap, each)
            self._in_heap.add(each[-1])
        return entry[-1]

    def _lowest(self) -> tuple[float, int, str] | None:
        """Return the lowest counter of waiting tenants, since when its tenant waits, and which that is."""
        while self._heap:
            counter, arrival, tenant = self._heap[0]
            queue = self._queues.get(tenant)
            if queue is None:
                heapq.heappop(self._heap)
                self._in_heap.remove(tenant)
            elif counter != self.service[tenant]:  # counters only grow: put it where it belongs now
                heapq.heapreplace(self._heap, (self.service[tenant], arrival, tenant))
            else:
                return counter, arrival, tenant
        return None

    def pop(self, request: Request) -> None:
        """Remove the head of the queue. If no engine has run it before, charge its tenant for the prompt."""
        head = next(iter(self._queues[request.inputs.tenant].values()))
        assert head is request, "another request was at the head of the queue"
        if not (request.ran_before or request.inputs.is_resumed):
            self._charge(request, self.INPUT_COST * request.num_prompt_tokens)
        self.remove(request)

    def remove(self, request: Request) -> None:
        tenant = request.inputs.tenant
        del self._queues[tenant][request.arrival]
        self._num_waiting -= 1
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._weight_of_waiting = None
            self._last_to_leave = tenant

    def generated(self, requests: Iterable[Request]) -> None:
        """Charge the tenant of each request for one generated token."""
        for request in requests:
            self._charge(request, self.OUTPUT_COST)

    def _charge(self, request: Request, cost: float) -> None:
        tenant = request.inputs.tenant
        if tenant not in self.service:  # forgotten, or its fork never waited
            self.service[tenant] = self._floor()
        self.service[tenant] += cost / self._weight_of(tenant)

    def _floor(self) -> float:
        """Return the counter of a new tenant: the lowest of waiting tenants, or of the last that waited."""
        lowest = self._lowest()
        return self.service.get(self._last_to_leave, 0.0) if lowest is None else lowest[0]

    def _forget(self, floor: float) -> None:
        """Drop tenants that do not wait and would come back at the floor, to bound memory."""
        self.service = {t: c for t, c in self.service.items() if t in self._queues or c > floor}
        self._heap = sorted(entry for entry in self._heap if entry[-1] in self._queues)
        self._in_heap = set(self._queues)
        self._forget_at = 2 * len(self.service) + 64

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for request in queue.values())


def new_policy(
    name: str | Policy, num_cached: Callable[[Request], int], weights: Mapping[str, float] | None = None
) -> Policy:
    """Return a new policy by name; return a policy object unchanged.

    num_cached: returns how many tokens of a waiting request the prefix cache holds.
    weights: the weights of tenants, for "fair".

    Raises ConfigError for an unknown name or weights that are not positive.
    """
    check_policy(name, weights)
    if not isinstance(name, str):
        return name
    if name == "fcfs":
        return FirstComeFirstServed()
    if name == "priority":
        return Priority()
    if name == "longest-prefix-match":
        return LongestPrefixMatch(num_cached)
    return Fair(weights)
