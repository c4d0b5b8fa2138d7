"""WaitingQueue: who waits, in order. Need and Room: what one of them takes to run, and what there is."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterator
from typing import NamedTuple

from .block_pool import BlockId
from .policies import Policy, Rank
from .request import Request


class WaitingQueue:
    """The protected by rank, and then the others as the policy says.

    num_changes: grows whenever somebody comes or goes.
    """

    def __init__(self, policy: Policy) -> None:
        self.num_changes = 0
        self._policy = policy
        self._protected: list[tuple[Rank, Request]] = []

    def push(self, request: Request) -> None:
        """Let a request wait, for the first time or again."""
        self.num_changes += 1
        if request.protected:
            heapq.heappush(self._protected, (request.rank, request))
        else:
            self._policy.push(request)

    def peek(self) -> Request | None:
        """The head: who is to run next; None if nobody waits."""
        return self._protected[0][1] if self._protected else self._policy.peek()

    def pop(self, request: Request) -> None:
        """The head runs now."""
        self.num_changes += 1
        if request.protected:
            heapq.heappop(self._protected)
        else:
            self._policy.pop(request)

    def remove(self, request: Request) -> None:
        """Somebody was finished from outside."""
        self.num_changes += 1
        if request.protected:
            self._protected = sorted(entry for entry in self._protected if entry[1] is not request)
        else:
            self._policy.remove(request)

    def __len__(self) -> int:
        return len(self._protected) + len(self._policy)

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain([request for _, request in sorted(self._protected)], self._policy)


class Need(NamedTuple):
    """What a waiting request takes to run.

    hits: the cached blocks that it begins with, for each group; None where it is swapped in.
    num_computed_tokens: what it begins with; num_missing_tokens: what it then lacks.
    """

    hits: list[list[BlockId]] | None
    num_computed_tokens: int
    num_missing_tokens: int
    num_seats: int
    num_blocks: int


class Room(NamedTuple):
    """What a step has for those who wait, or what one who runs takes of it.

    num_seats: how many may run. num_partial: how many prompts may stay in part.
    num_blocks: infinite for somebody who is alone with the pool, where everybody fits.
    """

    num_tokens: int
    num_seats: int
    num_partial: int
    num_blocks: float

    def plus(self, other: Room) -> Room:
        """Both together."""
        return Room(*map(operator.add, self, other))

    def minus(self, other: Room) -> Room:
        """What is left without the other."""
        return Room(*map(operator.sub, self, other))

    def first_chunk(self, need: Need, max_chunk: int) -> int:
        """How many tokens a request would begin with; 0 if it cannot."""
        num_new = min(need.num_missing_tokens, max_chunk, self.num_tokens)
        in_part = num_new < need.num_missing_tokens
        if need.num_seats > self.num_seats or need.num_blocks > self.num_blocks:
            return 0
        return 0 if in_part and self.num_partial <= 0 else max(0, num_new)
